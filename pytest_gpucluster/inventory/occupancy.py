"""Who is on a GPU, and on its host.

Of a GPU: memory in use, processes and utilization before this run, and which processes belong to this run. Of a host: what
others do there before, while and after something is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from pytest_gpucluster.inventory.sysfs import _HostCounts, _HostTask

GIB = 2**30
PROC, RESCTRL = Path("/proc"), Path("/sys/fs/resctrl")
IDLE_GIB = 0.25
"""Memory in use on an idle GPU at most. Idle takes a few MiB; a bare CUDA context on Hopper takes about 0.5 GiB."""
RESERVED_GIB = 1.0
"""What a driver reserves for itself (on an H200 about 0.6 GiB), where NVML counts that as used (before driver 510)."""
OWN_GIB = 1.0
"""What the CUDA context of one process takes at most, with the libraries that it has loaded (0.5 to 0.8 GiB on Hopper)."""
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
    """A process that NVML lists, with its name; inside a session of NVML."""
    from pytest_gpucluster.inventory import gpu_index  # noqa: PLC0415 -- loads pynvml, which the controller does without

    return GpuProcess(
        pid=pid, name=gpu_index.read_process_name(pid), memory_gib=None if held_bytes is None else held_bytes / GIB
    )


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
    store = _store_of("self")
    return session == os.getsid(0) or (store is not None and store == _store_of(str(session)))


def _store_of(process: str, proc: Path = PROC) -> Any:
    """The address of the store on the command line of an agent or its worker; None for any other process."""
    try:
        words = (proc / process / "cmdline").read_text(encoding="utf-8").split("\0")
        return json.loads(words[3])["address"] if words[1:3] == ["-m", "pytest_gpucluster.agent.main"] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


# --- The load of a host ---

WINDOW_S = 0.05
"""How long a host is read before and after a measurement: with nothing of this run at work, all that is seen is of others."""
BUSY_CPUS, BUSY_SHARE = 2.0, 0.25
"""A host is busy if others keep so many CPUs busy, or such a share of them where it has fewer than eight. Eight threads that
stream through memory take 10 % of a copy's rate (2026-11-25); monitors take less than one CPU."""
OWN_ERROR = 0.05
"""The kernel counts CPUs and processes in two ways, which differ by some per cent of what this run itself uses."""
BUSY_GB_S = 10.0
"""Memory traffic of others that makes a host busy: about what one core can stream."""
BUSY_PRESSURE = 10.0
"""Per cent of the time in which some task waited for memory that had been taken away."""
NAMED_SHARE = 0.1
"""A process is named from this share of one CPU on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    """A process of others: ``cpus`` 1.0 is one CPU wholly busy. ``user``: its owner's name or number."""

    pid: int
    name: str
    user: str
    cpus: float

    @property
    def named(self) -> str:
        """``stress-ng (pid 4711, alice)``."""
        return f"{self.name} (pid {self.pid}, {self.user})"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """What others did on a host: before, while and after something was measured. None: the kernel does not say it.

    ``total_cpus`` is how many CPUs the host has; the others are means of CPUs busy: with others ``while_cpus`` in the
    measurement and ``idle_cpus`` beside it (the lower one of before and after), ``stolen_cpus`` given to other virtual
    machines, ``own_cpus`` with this run. ``running`` is how many tasks of others could run, beside the measurement.
    ``cpu_pressure_percent`` and ``memory_pressure_percent`` are the time in which some task waited, this run's too.
    ``memory_gb_s`` is memory traffic of the CPUs beside the measurement, in 10^9 bytes a second. ``users``: busiest first.
    """

    total_cpus: int
    while_cpus: float
    idle_cpus: float
    stolen_cpus: float
    own_cpus: float
    running: int | None
    cpu_pressure_percent: float | None
    memory_pressure_percent: float | None
    memory_gb_s: float | None
    users: list[HostProcess]

    @property
    def busy_cpus(self) -> float:
        """CPUs that others keep busy, other virtual machines too."""
        return max(self.while_cpus, self.idle_cpus) + self.stolen_cpus

    @property
    def reasons(self) -> list[str]:
        """Why the host is busy, in words; empty where it is idle."""
        found = []
        if self.busy_cpus >= min(BUSY_CPUS, BUSY_SHARE * self.total_cpus):
            stolen = f", {self.stolen_cpus:.1f} of them with other virtual machines" if self.stolen_cpus >= NAMED_SHARE else ""
            found.append(f"{self.busy_cpus:.1f} of {self.total_cpus} CPUs busy with others{stolen}")
        if self.memory_gb_s is not None and self.memory_gb_s >= BUSY_GB_S:
            found.append(f"memory traffic of {self.memory_gb_s:.1f} GB/s")
        if self.memory_pressure_percent is not None and self.memory_pressure_percent >= BUSY_PRESSURE:
            found.append(f"tasks waited for memory {self.memory_pressure_percent:.0f} % of the time")
        return found

    @property
    def disturbed_by(self) -> str | None:
        """Who keeps the host busy, and how; None where it is idle."""
        reasons = self.reasons
        if not reasons:
            return None
        shares = ", ".join(f"{one.named} {100 * one.cpus:.0f} % CPU" for one in self.users[:SHOWN_PROCESSES])
        return f"{shares or 'somebody who cannot be seen from here'} ({'; '.join(reasons)})"

    @property
    def text(self) -> str:
        """For the evidence: who disturbs, or how little there is."""
        return self.disturbed_by or f"idle: {self.busy_cpus:.1f} of {self.total_cpus} CPUs busy with others"


class HostWatch:
    """Reads the load of this host round a measurement: ``with HostWatch() as watch: ...``, then ``watch.load``.

    ``load`` is None where the kernel gives no counts of its CPUs. This process's run is left out: its agents, workers, the
    process that started them, and what all these have started.
    """

    def __init__(
        self,
        *,
        reads: bool = True,
        proc: Path = PROC,
        resctrl: Path = RESCTRL,
        window_s: float = WINDOW_S,
        own_pid: int | None = None,
    ) -> None:
        """What to read, and where.

        Args:
            reads: False reads nothing: in a rehearsal, where the ranks are the load and nothing is accepted.
            proc: the kernel's files of processes.
            resctrl: its files of memory traffic.
            window_s: how long to read before and after, in seconds.
            own_pid: this process.
        """
        self.load: HostLoad | None = None
        self._reads = reads
        self._own_pid = own_pid or os.getpid()
        self._proc = proc
        self._resctrl = resctrl
        self._window_s = window_s
        self._taken: list[_HostCounts] = []

    def __enter__(self) -> HostWatch:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Read before the measurement."""
        if self._reads:
            self._read_twice()
        return self

    def __exit__(self, *_: object) -> None:
        """Read after it."""
        if self._reads:
            self._read_twice()
        if len(self._taken) == 4:
            self.load = _load_between(self._taken, self._proc, self._own_pid)

    def _read_twice(self) -> None:
        from pytest_gpucluster.inventory.sysfs import read_counts  # noqa: PLC0415 -- whose a process is needs this file alone

        with contextlib.suppress(OSError, ValueError, LookupError):
            self._taken.append(read_counts(self._proc, self._resctrl))
            time.sleep(self._window_s)
            self._taken.append(read_counts(self._proc, self._resctrl))


def _load_between(taken: list[_HostCounts], proc: Path, own_pid: int) -> HostLoad:
    """The load by four readings: begin and end of a moment before the measurement, and of one after it."""
    first, last = taken[0], taken[-1]
    ours = _own_pids(last.tasks, proc, own_pid)
    before, meanwhile, after = (_Span.between(taken[at], taken[at + 1], ours) for at in range(3))
    whole = _Span.between(first, last, ours)
    users = [
        HostProcess(pid=pid, name=last.tasks[pid].name, user=_user_of(proc / str(pid)), cpus=round(cpus, 3))
        for pid, cpus in sorted(whole.by_pid.items(), key=lambda one: -one[1])
        if cpus >= NAMED_SHARE
    ]
    pressures = {name: 100 * found for name in ("cpu", "memory") if (found := whole.pressure(name)) is not None}
    traffic = [one.memory_gb_s for one in (before, after) if one.memory_gb_s is not None]
    own_running = sum(task.runs for pid, task in last.tasks.items() if pid in ours)
    return HostLoad(
        total_cpus=last.total_cpus,
        while_cpus=round(meanwhile.others_cpus, 3),
        idle_cpus=round(min(before.others_cpus, after.others_cpus), 3),
        stolen_cpus=round(whole.stolen_cpus, 3),
        own_cpus=round(meanwhile.own_cpus, 3),
        running=None if last.running is None else max(0, last.running - max(1, own_running)),
        cpu_pressure_percent=None if "cpu" not in pressures else round(pressures["cpu"], 1),
        memory_pressure_percent=None if "memory" not in pressures else round(pressures["memory"], 1),
        memory_gb_s=round(min(traffic), 3) if traffic else None,
        users=users[:10],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The difference of two readings; ``by_pid``: CPUs that each process of others kept busy."""

    first: _HostCounts
    last: _HostCounts
    by_pid: Mapping[int, float]
    own_cpus: float

    @classmethod
    def between(cls, first: _HostCounts, last: _HostCounts, ours: Collection[int]) -> _Span:
        """Of two readings of one host; ``ours`` are the pids of this run."""
        seconds = max(last.at_s - first.at_s, 1e-9)
        used: dict[int, float] = {}
        for pid, task in last.tasks.items():
            earlier = first.tasks.get(pid)
            known_s = earlier.seconds if earlier is not None and earlier.begun == task.begun else 0.0
            used[pid] = max(0.0, task.seconds - known_s) / seconds
        others = {pid: cpus for pid, cpus in used.items() if pid not in ours}
        return cls(first=first, last=last, by_pid=others, own_cpus=sum(used.values()) - sum(others.values()))

    @property
    def seconds(self) -> float:
        return max(self.last.at_s - self.first.at_s, 1e-9)

    @property
    def others_cpus(self) -> float:
        """What others used: processes that can be seen, or all that is counted and not ours."""
        unseen = (self.last.busy_s - self.first.busy_s) / self.seconds - (1 + OWN_ERROR) * self.own_cpus
        return max(0.0, unseen, sum(self.by_pid.values()))

    @property
    def stolen_cpus(self) -> float:
        return max(0.0, self.last.stolen_s - self.first.stolen_s) / self.seconds

    @property
    def memory_gb_s(self) -> float | None:
        if self.first.memory_bytes is None or self.last.memory_bytes is None:
            return None
        return max(0, self.last.memory_bytes - self.first.memory_bytes) / self.seconds / 1e9

    def pressure(self, name: str) -> float | None:
        """The share of the time in which some task waited, 0 to 1."""
        if name not in self.first.pressure_s or name not in self.last.pressure_s:
            return None
        return max(0.0, self.last.pressure_s[name] - self.first.pressure_s[name]) / self.seconds


def _own_pids(tasks: Mapping[int, _HostTask], proc: Path, own_pid: int) -> set[int]:
    """The processes of this run, the one that started its agents (pytest, torchrun), and what all these have started."""
    store = _store_of("self" if own_pid == os.getpid() else str(own_pid), proc)
    session = tasks[own_pid].session if own_pid in tasks else own_pid
    own = {own_pid, *(pid for pid, task in tasks.items() if task.session == session)}
    if store is not None:
        stores = {pid: _store_of(str(pid), proc) for pid in tasks}
        own |= {pid for pid, task in tasks.items() if store in (stores[pid], stores.get(task.session))}
        starter = own_pid
        while starter in own and starter in tasks:
            starter = tasks[starter].parent
        own |= {starter} if starter > 1 else set()
    found = set(own)
    for pid in tasks:
        way = [pid]
        while way[-1] in tasks and way[-1] not in found and tasks[way[-1]].parent not in way:
            way.append(tasks[way[-1]].parent)
        if way[-1] in found:
            found.update(way)
    return found


def _user_of(folder: Path) -> str:
    """The owner of a process by name, else by number."""
    try:
        uid = folder.stat().st_uid
    except OSError:
        return "ended"
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"
