"""A pytest plugin (``-p visited``): while the memory bandwidth is measured, a process comes to the GPUs of ``E2E_VISITED``.

The ranks are JSON. The rates are those of :mod:`siblings`, and torch is as in :mod:`simulated_gpus`.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import siblings
import simulated_gpus

from pytest_gpucluster.measurements import hbm


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any conftest has imported the real one."""
    hbm.hbm_bandwidth = hbm_bandwidth


def hbm_bandwidth(**recipe: Any) -> siblings.Watched:
    """Memory bandwidth."""
    rank = int(os.environ["RANK"])
    if rank in json.loads(os.environ["E2E_VISITED"]):
        simulated_gpus.come(rank)
    return siblings.hbm_bandwidth(**recipe)
