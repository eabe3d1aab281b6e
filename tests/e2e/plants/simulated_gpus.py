"""Torch as if the GPUs of the NVML simulator were there, for functions that never touch one; processes come to them and leave.

``E2E_PROCESSES`` names the simulator's folder of processes. A worker that takes its GPU is listed there while it lives.
Importing this module in a worker changes torch there; groups then talk through gloo.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

STRANGER = 4_194_999
"""The pid of the competitor: above the kernel's highest, so that no process of this machine has it."""


def come(gpu: int, pid: int = STRANGER) -> None:
    """A process appears on a GPU."""
    _entry(gpu, str(pid)).touch()


def leave(gpu: int, pid: int = STRANGER) -> None:
    """A process vanishes from a GPU."""
    _entry(gpu, str(pid)).unlink()


def _entry(gpu: int, name: str) -> Path:
    return Path(os.environ["E2E_PROCESSES"]) / f"{gpu}.{name}"


def _take_gpu(index: int) -> None:
    _entry(index, f"{os.getpid()}.live").touch()


def _properties(index: int) -> Any:
    return SimpleNamespace(uuid=f"{index:08x}-0000-0000-0000-{index:012x}")


def _join(_backend: str, *, device_id: Any = None, **arguments: Any) -> None:
    del device_id
    _really_join("gloo", **arguments)


_really_join = dist.init_process_group
if "GPUCLUSTER_NODE" in os.environ:  # a worker, not the controller
    torch.cuda.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
    torch.cuda.set_device = _take_gpu
    torch.cuda.get_device_properties = _properties
    dist.init_process_group = _join
