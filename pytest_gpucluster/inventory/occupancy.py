"""Who is on a GPU: memory in use, processes and utilization before this run, and which processes belong to this run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_gpucluster.text import counted

GIB = 2**30
PROC = Path("/proc")
IDLE_GIB = 0.25
"""Memory in use on an idle GPU at most. Idle takes a few MiB; a bare CUDA context on Hopper takes about 0.5 GiB."""
RESERVED_GIB = 1.0
"""What a driver reserves for itself (on an H200 about 0.6 GiB), where NVML counts that as used (before driver 510)."""
OWN_GIB = 1.0
"""What the CUDA context of one process takes at most, with the libraries that it has loaded (0.5 to 0.8 GiB on Hopper)."""
IDLE_PERCENT = 10
"""Utilization that a monitor may cause."""
SHOWN_PROCESSES = 3
SHOWN_GIB = 0.05
"""Less than this would be shown as 0.0 GiB, which no process with a CUDA context holds."""


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
        if self.memory_gib is None:
            return f"memory held by {holder}"
        held = f"{self.memory_gib:.1f}" if self.memory_gib >= SHOWN_GIB else f"less than {2 * SHOWN_GIB:.1f}"
        return f"{held} GiB held by {holder}"


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
            parts.append(counted(more, "more process", "more processes"))
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
        while (found := _read_once(index)).holders and looks > 1:
            looks -= 1
            time.sleep(pause_s)
    return found


def read_occupancy_again() -> Occupancy:
    """Read NVML for this worker's GPU during a run: what the run itself has there is no part of it.

    Its processes are left out. What they hold is known where NVML says it; else this process's context and its tensors may
    be there too.

    Raises:
        NvmlError: NVML does not answer, or gives neither memory nor processes nor utilization.
    """
    from pytest_gpucluster.inventory import gpu_index, nvml_calls  # noqa: PLC0415 -- loads pynvml, which the controller does without

    with nvml_calls.session():
        found = _read_once(gpu_index.own_index(None))
    others = None if found.processes is None else [one for one in found.processes if not belongs_to_run(one.pid)]
    ours = [one.memory_gib for one in found.processes or () if others is not None and one not in others]
    given = [share for share in ours if share is not None]
    held_gib = sum(given) if given and len(given) == len(ours) else OWN_GIB + _own_tensors_gib()
    return replace(found, processes=others, memory_limit_gib=found.memory_limit_gib + held_gib)


def _own_tensors_gib() -> float:
    """What torch has taken on this process's GPU, in GiB; 0 where it has not used one."""
    import torch  # noqa: PLC0415 -- the controller does without

    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.memory_reserved() / GIB if is_used else 0.0


def describe_process(pid: int, held_bytes: int | None) -> GpuProcess:
    """A process that NVML lists, with its name; inside a session of NVML. Where NVML says 0 bytes, it does not know them."""
    from pytest_gpucluster.inventory import gpu_index  # noqa: PLC0415 -- loads pynvml, which the controller does without

    return GpuProcess(pid=pid, name=gpu_index.read_process_name(pid), memory_gib=held_bytes / GIB if held_bytes else None)


def _read_once(index: int) -> Occupancy:
    # These load pynvml, which the controller does without.
    from pytest_gpucluster.inventory import gpu_index, nvml_calls  # noqa: PLC0415

    uuid = gpu_index.read_uuids()[index]
    handle = gpu_index.handle_of(uuid)
    used = gpu_index.read_used_bytes(handle)
    processes = gpu_index.read_compute_processes(handle)
    percent = gpu_index.read_utilization_percent(handle)
    if used is None and processes is None and percent is None:
        raise nvml_calls.NvmlError(f"GPU {uuid}: NVML gives neither memory in use nor processes nor utilization")
    return Occupancy(
        uuid=uuid,
        memory_used_gib=None if used is None else used[0] / GIB,
        memory_limit_gib=IDLE_GIB + (RESERVED_GIB if used is not None and used[1] else 0.0),
        processes=None if processes is None else [describe_process(pid, held) for pid, held in processes],
        utilization_percent=percent,
    )


# --- Processes of this run ---


class OwnProcesses:
    """Tells this run's processes on one GPU from foreign ones, reading by reading.

    NVML may list the pids of another namespace (those of the host, in a container), or may not list this process at all.
    Where it does not list the own pid, the pid that appears with this process's CUDA context is taken for the own one. If
    several appear with it, all are foreign until one is left: which of them is the own one cannot be known earlier.
    """

    def __init__(self, own_pid: int, belongs_to_run: Callable[[int], bool | None]) -> None:
        """``belongs_to_run``: as the function below; None for a pid that means no process here."""
        self._belongs_to_run = belongs_to_run
        self._own_pid = own_pid
        self._ours = {own_pid}
        self._others: set[int] = set()
        self._candidates: set[int] | None = None
        self._knows_own = False

    def foreign_among(self, listed: Collection[int], *, has_context: bool) -> set[int]:
        """The foreign pids of one reading. ``has_context``: this process had a CUDA context on the GPU before the reading."""
        known = {pid: self._belongs_to_run(pid) for pid in listed if pid not in self._ours}
        self._ours.update(pid for pid, belongs in known.items() if belongs)
        foreign = {pid for pid, belongs in known.items() if not belongs}
        self._knows_own = self._knows_own or self._own_pid in listed
        if not has_context:
            self._others |= foreign
        elif not self._knows_own:
            self._seek_own({pid for pid in foreign if known[pid] is None and pid not in self._others})
        return foreign - self._ours

    def _seek_own(self, unknown: set[int]) -> None:
        if self._candidates is None:
            self._candidates = unknown or None
        else:
            self._candidates &= unknown
        if self._candidates is not None and len(self._candidates) == 1:
            self._ours |= self._candidates
            self._knows_own = True


def belongs_to_run(pid: int) -> bool | None:
    """Whether a process was started by an agent of this run; None: there is no process of this pid here.

    A worker leads a session, and what it starts is in that session. A worker was forked, so its command line is still that of
    its agent, which names the store of the run.
    """
    try:
        session = os.getsid(pid)
    except PermissionError:
        return False
    except ProcessLookupError:
        return None
    store = store_of("self")
    return session == os.getsid(0) or (store is not None and store == store_of(str(session)))


def store_of(process: str, proc: Path = PROC) -> Any:
    """The address of the store on the command line of an agent or its worker; None for any other process."""
    try:
        words = (proc / process / "cmdline").read_text(encoding="utf-8").split("\0")
        return json.loads(words[3])["address"] if words[1:3] == ["-m", "pytest_gpucluster.agent.main"] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
