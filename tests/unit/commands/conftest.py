"""What tests of commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.nvml_simulator import build

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML."""
    return build(tmp_path_factory.mktemp("nvml"))
