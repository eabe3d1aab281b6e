"""The environment of a worker: torchrun's variables for its place, and what CUDA and NCCL read when they start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

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


def worker_environment(rank: Rank, folder: Path, *, nodes: Mapping[str, int]) -> dict[str, str]:
    """The variables of a worker. ``nodes``: the node number of each torchrun group rank, as far as known.

    Variables that the agent inherited win over the defaults.
    """
    log = str(folder / "nccl.log")
    nccl = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": log, "GPUCLUSTER_NCCL_LOG": log}
    return {
        **{name: value for name, value in WORKER_DEFAULTS.items() if name not in os.environ},
        **(nccl if "NCCL_DEBUG" not in os.environ else {}),
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.local_world_size),
        "GROUP_RANK": str(rank.group_rank),
        "GPUCLUSTER_NODE": str(nodes.get(str(rank.group_rank), rank.group_rank)),
    }
