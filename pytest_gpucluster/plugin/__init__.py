"""The pytest plugin. pytest loads this package and finds here every hook and fixture of its modules."""

from __future__ import annotations

from pytest_gpucluster.plugin.fixtures import (
    budget,
    cluster,
    compared_places,
    criterion,
    device,
    entries,
    node,
    over_run,
    place,
    possible,
    process_group,
    pytest_generate_tests,
    rank,
    readings,
    recipe,
    soak,
    world_size,
)
from pytest_gpucluster.plugin.options import (
    pytest_addoption,
    pytest_collection,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_load_initial_conftests,
    pytest_xdist_auto_num_workers,
)

__all__ = [
    "budget",
    "cluster",
    "compared_places",
    "criterion",
    "device",
    "entries",
    "node",
    "over_run",
    "place",
    "possible",
    "process_group",
    "pytest_addoption",
    "pytest_collection",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_load_initial_conftests",
    "pytest_xdist_auto_num_workers",
    "rank",
    "readings",
    "recipe",
    "soak",
    "world_size",
]
