"""Occupancy of a GPU before this run: memory in use, processes with a CUDA context, utilization."""

from __future__ import annotations

import time
from dataclasses import dataclass

GIB = 2**30
IDLE_GIB = 0.25
"""Memory in use on an idle GPU at most. Idle takes a few MiB; a bare CUDA context on Hopper takes about 0.5 GiB."""
RESERVED_GIB = 1.0
"""What a driver reserves for itself (on an H200 about 0.6 GiB), where NVML counts that as used (before driver 510)."""
IDLE_PERCENT = 10
"""Utilization that a monitor may cause."""
SHOWN_PROCESSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process with a CUDA context; in a container the pid is the host's. None: NVML does not give the value."""

    pid: int
    name: str | None
    memory_gib: float | None

    @property
    def text(self) -> str:
        """``23.4 GiB held by pid 4711 (python3)``."""
        holder = f"pid {self.pid} ({self.name or 'its program cannot be seen from here'})"
        return f"memory held by {holder}" if self.memory_gib is None else f"{self.memory_gib:.1f} GiB held by {holder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What was on a GPU before anything of this run was. None: NVML does not give the value.

    ``memory_used_gib`` may be up to ``memory_limit_gib`` on an idle GPU. ``processes`` may be incomplete: NVML hides those
    of other containers.
    """

    uuid: str
    memory_used_gib: float | None
    memory_limit_gib: float
    processes: list[GpuProcess] | None
    utilization_percent: int | None

    @property
    def holders(self) -> int:
        """Number of foreign processes. An invisible process that shows by memory or utilization counts as one."""
        return len(self.processes or ()) or int(self._holds_memory or self._is_busy)

    @property
    def text(self) -> str:
        """Each process and what it holds, in one line; empty for an idle GPU."""
        parts = [process.text for process in (self.processes or ())[:SHOWN_PROCESSES]]
        more = len(self.processes or ()) - SHOWN_PROCESSES
        if more > 0:
            parts.append(f"{more} more processes")
        if self._holds_memory and self._unseen_gib > self.memory_limit_gib:
            parts.append(f"{self._unseen_gib:.1f} GiB held by nobody who can be seen from here (another container?)")
        if self._is_busy:
            parts.append(f"{self.utilization_percent} % busy")
        return ", ".join(parts)

    @property
    def _holds_memory(self) -> bool:
        return self.memory_used_gib is not None and self.memory_used_gib > self.memory_limit_gib

    @property
    def _is_busy(self) -> bool:
        return self.utilization_percent is not None and self.utilization_percent > IDLE_PERCENT

    @property
    def _unseen_gib(self) -> float:
        """Memory in use that no visible process accounts for; 0 if one of them does not give its memory."""
        shares = [process.memory_gib for process in self.processes or ()]
        given = [share for share in shares if share is not None]
        return 0.0 if len(given) < len(shares) else (self.memory_used_gib or 0.0) - sum(given)


def read_occupancy(*, looks: int = 3, pause_s: float = 1.0) -> Occupancy:
    """Read NVML for this worker's GPU; call it before anything of this run has touched a GPU.

    A process that has just ended holds its memory for another moment, and utilization is of the last second. So a busy
    GPU is read up to ``looks`` times, with ``pause_s`` between.

    Raises:
        NvmlError: NVML does not answer, or gives neither memory nor processes nor utilization.
    """
    from pytest_gpucluster.inventory import gpu_index, nvml_calls  # noqa: PLC0415 -- loads pynvml, which the controller does without

    with nvml_calls.session():
        index = gpu_index.own_index(None)
        for look in range(looks):
            if look:
                time.sleep(pause_s)
            found = _read_once(index)
            if not found.holders:
                break
    return found


def describe_process(pid: int, held_bytes: int | None) -> GpuProcess:
    """A process that NVML lists, with its name; inside a session of NVML."""
    from pytest_gpucluster.inventory import nvml_processes  # noqa: PLC0415 -- loads pynvml, which the controller does without

    return GpuProcess(
        pid=pid, name=nvml_processes.read_process_name(pid), memory_gib=None if held_bytes is None else held_bytes / GIB
    )


def _read_once(index: int) -> Occupancy:
    # These load pynvml, which the controller does without.
    from pytest_gpucluster.inventory import gpu_index, nvml_calls, nvml_processes  # noqa: PLC0415

    uuid = gpu_index.read_uuids()[index]
    handle = gpu_index.handle_of(uuid)
    used = nvml_processes.read_used_bytes(handle)
    processes = nvml_processes.read_compute_processes(handle)
    percent = nvml_processes.read_utilization_percent(handle)
    if used is None and processes is None and percent is None:
        raise nvml_calls.NvmlError(f"GPU {uuid}: NVML tells neither memory in use nor processes nor utilization")
    return Occupancy(
        uuid=uuid,
        memory_used_gib=None if used is None else used[0] / GIB,
        memory_limit_gib=IDLE_GIB + (RESERVED_GIB if used is not None and used[1] else 0.0),
        processes=None if processes is None else [describe_process(pid, held) for pid, held in processes],
        utilization_percent=percent,
    )
