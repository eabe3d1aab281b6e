"""A pytest plugin (``-p stale``): on the host that ``E2E_STALE`` names, the first look at a shared path never returns.

It waits in the kernel for a pipe that nobody opens, as a process waits for a server that is gone.
"""

from __future__ import annotations

import importlib
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster import measurement

MODULE = "pytest_gpucluster.measurements.shared_paths"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any conftest has imported the real one."""
    vars(importlib.import_module(MODULE))["leave_mark"] = leave_mark


@measurement
def leave_mark(**arguments: Any) -> Any:
    """The real one, but for the host of which the path is stale."""
    if socket.gethostname() == os.environ["E2E_STALE"]:
        pipe = Path(tempfile.mkdtemp()) / "pipe"
        os.mkfifo(pipe)
        pipe.read_bytes()
    return importlib.import_module(MODULE).leave_mark(**arguments)
