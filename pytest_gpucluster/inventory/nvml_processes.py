"""Who uses a GPU, as NVML sees it: memory in use, processes, utilization."""

from __future__ import annotations

from typing import Any

import pynvml

from pytest_gpucluster.inventory.nvml_calls import optional, text, value_or_none
from pytest_gpucluster.inventory.reading import or_none


def read_used_bytes(handle: Any) -> tuple[int, bool] | None:
    """Bytes in use, and whether they include the driver's own (before driver 510); None if NVML gives neither."""
    memory = or_none(optional("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2))
    if memory is not None:
        return int(memory.used), False
    memory = or_none(optional("nvmlDeviceGetMemoryInfo", handle))
    return None if memory is None else (int(memory.used), True)


def read_compute_processes(handle: Any) -> list[tuple[int, int | None]] | None:
    """(pid, bytes) of each process with a CUDA context on the GPU; None instead of what NVML does not give.

    Clients of an MPS daemon are in a list of their own. In a container the lists may be empty, and the pids are the host's.
    """
    found = or_none(optional("nvmlDeviceGetComputeRunningProcesses_v3", handle))
    clients = or_none(optional("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle))
    if found is None and not clients:
        return None
    return [*{int(one.pid): (int(one.pid), one.usedGpuMemory) for one in (*(clients or ()), *(found or ()))}.values()]


def read_process_name(pid: int) -> str | None:
    """The file name of the program that a process runs; None if NVML cannot see the program."""
    name = value_or_none(pynvml.nvmlSystemGetProcessName, pid)
    words = text(name).split() if name else []
    return words[0].rpartition("/")[2] if words else None


def read_utilization_percent(handle: Any) -> int | None:
    """Share of the last 1/6 s to 1 s in which a kernel ran; None if NVML does not give it."""
    rates = or_none(optional("nvmlDeviceGetUtilizationRates", handle))
    return None if rates is None else int(rates.gpu)
