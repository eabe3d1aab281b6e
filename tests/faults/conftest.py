"""Rows of the fault list, planted in real launches: what a run survives, sees and places."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.append(str(Path(__file__).parents[1] / "launch"))
sys.path.append(str(Path(__file__).parents[1]))  # nvml_simulator

from starting import Starter, installed

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Under which the plugin counts as installed."""
    return installed(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def starter(tmp_path: Path, python_path: str) -> Iterator[Starter]:
    """Starts runs in a folder of its own; a process left behind fails the test and is ended."""
    made = Starter(tmp_path, python_path)
    yield made
    left = made.end_all()
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="module")
def shared_starter(tmp_path_factory: pytest.TempPathFactory, python_path: str) -> Iterator[Starter]:
    """The same for a launch that several tests of a module look at."""
    made = Starter(tmp_path_factory.mktemp("shared"), python_path)
    yield made
    left = made.end_all()
    assert not left, f"left behind: {left}"
