"""The environment of a worker: torchrun's variables for its place, and what CUDA and NCCL read when they start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pytest_gpucluster.agent import nccl_ras
from pytest_gpucluster.inventory.nccl_log import FILE, PATH, SUBSYSTEMS, log_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pytest_gpucluster.protocol.rank import Rank

WORKER_DEFAULTS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that local rank k is the k-th GPU in PCI order, as place ids count
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # repeatable cuBLAS for the audits; must be there before CUDA starts
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the agent's deadline decides; a watchdog would destroy the evidence
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


NCCL_LOGGING = {"NCCL_DEBUG": "INFO", SUBSYSTEMS: "INIT,NET,ENV"}
"""What makes NCCL write its channels into its log. Other values of the site would hide them, or write at each collective."""
LOG_NAME = "nccl.log"
SITE_LOG_BYTES = 16384


def worker_environment(rank: Rank, folder: Path, *, nodes: Mapping[str, int]) -> dict[str, str]:
    """The variables of a worker. ``nodes``: the node number of each torchrun group rank, as far as known.

    Variables that the agent inherited win over the defaults. Those of NCCL's log do not: the worker measures by that log.
    NCCL's RAS service gets a port of this worker's own.

    Raises:
        OSError: no port is free.
    """
    log = str(folder / LOG_NAME)
    ras = {} if nccl_ras.VARIABLE in os.environ else {nccl_ras.VARIABLE: nccl_ras.free_address()}
    return {
        **ras,
        **{name: value for name, value in WORKER_DEFAULTS.items() if name not in os.environ},
        **NCCL_LOGGING,
        FILE: log,
        PATH: log,
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "GROUP_RANK": str(rank.group_rank),
        "GPUCLUSTER_NODE": str(nodes.get(str(rank.group_rank), rank.group_rank)),
    }


def overridden_variables() -> dict[str, dict[str, str]]:
    """What this process inherited and workers have otherwise: by name, the site's value and the workers'."""
    workers = {**NCCL_LOGGING, FILE: "a file of each worker"}
    inherited = {name: os.environ[name] for name in workers if name in os.environ}
    return {name: {"site": value, "workers": workers[name]} for name, value in inherited.items() if value != workers[name]}


def site_log(folder: Path) -> str:
    """The end of a worker's NCCL log, as far as the site's own ``NCCL_DEBUG`` asks for it; empty where it asks for none."""
    level = os.environ.get("NCCL_DEBUG", "").upper()
    if level not in ("WARN", "INFO", "TRACE"):
        return ""
    end = log_text(folder / LOG_NAME).encode()[-SITE_LOG_BYTES:]
    lines = end.decode("utf-8", "replace").splitlines(keepends=True)
    return "".join(line for line in lines if level != "WARN" or "NCCL WARN" in line)
