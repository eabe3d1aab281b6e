"""What others do on a host before, while and after something is measured: by /proc, and by resctrl where it is mounted."""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpucluster.inventory.occupancy import SHOWN_PROCESSES, store_of
from pytest_gpucluster.inventory.reading import all_or_why, apply, matching, or_none, split
from pytest_gpucluster.inventory.sysfs import PROC, read_number, read_text

RESCTRL = Path("/sys/fs/resctrl")
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
_running = matching(r"(?:\S+ ){3}(\d+)/", "load average", int)
_waited_us = matching(r"some .*\btotal=(\d+)", "pressure", int)


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


@dataclass(slots=True, kw_only=True)
class HostWatch:
    """Reads the load of this host round a measurement: ``with HostWatch() as watch: ...``, then ``watch.load``.

    ``load`` is None where the kernel gives no counts of its CPUs. This process's run is left out: its agents, workers, the
    process that started them, and what all these have started.

    Attributes:
        reads: False reads nothing: in a rehearsal, where the ranks are the load and nothing is accepted.
        proc: the kernel's files of processes.
        resctrl: its files of memory traffic.
        own_pid: this process.
    """

    reads: bool = True
    proc: Path = PROC
    resctrl: Path = RESCTRL
    own_pid: int = field(default_factory=os.getpid)
    load: HostLoad | None = field(default=None, init=False)
    _taken: list[_HostCounts] = field(default_factory=list, init=False)

    def __enter__(self) -> HostWatch:  # noqa: PYI034 - typing.Self needs Python 3.11
        """Read before the measurement."""
        self._read_twice()
        return self

    def __exit__(self, *_: object) -> None:
        """Read after it."""
        self._read_twice()
        if len(self._taken) == 4:
            self.load = _load_between(self._taken, self.proc, self.own_pid)

    def _read_twice(self) -> None:
        if self.reads:
            with contextlib.suppress(OSError, ValueError, LookupError):
                self._taken.append(_read_counts(self.proc, self.resctrl))
                time.sleep(WINDOW_S)
                self._taken.append(_read_counts(self.proc, self.resctrl))


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
    traffic = [one.memory_gb_s for one in (before, after) if one.memory_gb_s is not None]
    own_running = sum(task.runs for pid, task in last.tasks.items() if pid in ours)
    return HostLoad(
        total_cpus=last.total_cpus,
        while_cpus=round(meanwhile.others_cpus, 3),
        idle_cpus=round(min(before.others_cpus, after.others_cpus), 3),
        stolen_cpus=round(whole.stolen_cpus, 3),
        own_cpus=round(meanwhile.own_cpus, 3),
        running=None if last.running is None else max(0, last.running - max(1, own_running)),
        cpu_pressure_percent=whole.pressure_percent("cpu"),
        memory_pressure_percent=whole.pressure_percent("memory"),
        memory_gb_s=round(min(traffic), 3) if traffic else None,
        users=users[:10],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The difference of two readings; ``by_pid``: CPUs that each process of others kept busy."""

    first: _HostCounts
    last: _HostCounts
    seconds: float
    by_pid: Mapping[int, float]
    own_cpus: float

    @classmethod
    def between(cls, first: _HostCounts, last: _HostCounts, ours: Collection[int]) -> _Span:
        """Of two readings of one host; ``ours`` are the pids of this run."""
        seconds = max(last.at_s - first.at_s, 1e-9)
        known_s = {(pid, task.begun): task.seconds for pid, task in first.tasks.items()}
        used_s = {pid: max(0.0, task.seconds - known_s.get((pid, task.begun), 0.0)) for pid, task in last.tasks.items()}
        others = {pid: of_pid_s / seconds for pid, of_pid_s in used_s.items() if pid not in ours}
        own_cpus = sum(of_pid_s for pid, of_pid_s in used_s.items() if pid in ours) / seconds
        return cls(first=first, last=last, seconds=seconds, by_pid=others, own_cpus=own_cpus)

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

    def pressure_percent(self, name: str) -> float | None:
        """The share of the time in which some task waited."""
        before_us, now_us = self.first.pressure_us.get(name), self.last.pressure_us.get(name)
        if before_us is None or now_us is None:
            return None
        return round(100 * max(0, now_us - before_us) / 1e6 / self.seconds, 1)


def _own_pids(tasks: Mapping[int, _HostTask], proc: Path, own_pid: int) -> set[int]:
    """The processes of this run, the one that started its agents (pytest, torchrun), and what all these have started."""
    store = store_of("self" if own_pid == os.getpid() else str(own_pid), proc)
    session = tasks[own_pid].session if own_pid in tasks else own_pid
    own = {own_pid, *(pid for pid, task in tasks.items() if task.session == session)}
    if store is not None:
        stores = {pid: store_of(str(pid), proc) for pid in tasks}
        own |= {pid for pid, task in tasks.items() if store in (stores[pid], stores.get(task.session))}
        starter = own_pid
        while starter in own and starter in tasks:
            starter = tasks[starter].parent
        own |= {starter} if starter > 1 else set()
    while started := {pid for pid, task in tasks.items() if task.parent in own and pid not in own}:
        own |= started
    return own


def _user_of(folder: Path) -> str:
    """The owner of a process by name, else by number."""
    try:
        uid = folder.stat().st_uid
    except OSError:
        return "ended"
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


# --- What the kernel counts ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostTask:
    """A process by ``/proc/PID/stat``; ``seconds`` of CPU time so far. ``begun`` tells it from a later one of its pid."""

    name: str
    parent: int
    session: int
    seconds: float
    begun: int
    runs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostCounts:
    """What the kernel has counted up to one moment, in seconds: CPUs busy, CPUs stolen, waiting of tasks (us); bytes of memory.

    ``running``: how many tasks can run at this moment. ``memory_bytes``: between the CPUs and memory, by resctrl (MBM). None or
    no entry: the kernel does not say it.
    """

    at_s: float
    total_cpus: int
    busy_s: float
    stolen_s: float
    pressure_us: dict[str, int]
    memory_bytes: int | None
    running: int | None
    tasks: dict[int, _HostTask]


def _read_counts(proc: Path, resctrl: Path) -> _HostCounts:
    """Read everything once.

    Raises:
        OSError, ValueError, LookupError: there are no counts of CPUs.
    """
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    lines = (proc / "stat").read_text(encoding="utf-8").splitlines()
    total = [int(word) * tick_s for word in lines[0].split()[1:9]]
    waited, _ = split({name: apply(_waited_us, read_text(proc / "pressure" / name)) for name in ("cpu", "memory")})
    traffic = or_none(all_or_why(map(read_number, resctrl.glob("mon_data/mon_L3_*/mbm_total_bytes"))))
    return _HostCounts(
        at_s=time.monotonic(),
        total_cpus=sum(line.startswith("cpu") for line in lines) - 1,
        busy_s=sum(total[:3]),  # user, nice, system; interrupts may be those of our copies
        stolen_s=total[7] if len(total) > 7 else 0.0,
        pressure_us=waited,
        memory_bytes=sum(traffic) if traffic else None,
        running=or_none(apply(_running, read_text(proc / "loadavg"))),
        tasks=_tasks(proc, tick_s),
    )


def _tasks(proc: Path, tick_s: float) -> dict[int, _HostTask]:
    """Every process that can be seen, by its pid. One that ends meanwhile is left out."""
    found: dict[int, _HostTask] = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, LookupError):
            head, _, tail = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
            words = tail.split()
            found[int(folder.name)] = _HostTask(
                name=head.partition("(")[2],
                parent=int(words[1]),
                session=int(words[3]),
                seconds=(int(words[11]) + int(words[12])) * tick_s,
                begun=int(words[19]),
                runs=words[0] == "R",
            )
    return found
