"""What tests of commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.nvml_simulator import Readers, build, readers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def simulated(library: Path) -> Iterator[Readers]:
    """One process that reads NVML, in place of a child for each reading."""
    with readers(library) as started:
        yield started
