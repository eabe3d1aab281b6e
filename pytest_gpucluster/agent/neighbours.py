"""Keeps no process of a run on this node stopped for good (SIGSTOP): the others would wait for it for ever.

Every spawner looks after the processes of its node, as it never waits for the store and cannot hang with its agent. It looks
at the state that Linux shows (proc(5)), and counts looks and not seconds: it may have been stopped itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.protocol.rank import STOPPED, stat_of

LOOK_S = 2.5
STOPPED_LOOKS = 8
"""20 s: an agent that is silent for 10 s is lost, so nothing that a run still counts on is touched."""
LAST_LOOK_S = 0.5
LAST_STOPPED_LOOKS = 6
"""3 s, once the agent of this spawner has left."""
LEAVE_S = 20.0
"""How long what was continued may take to leave. torchrun itself gives its ranks 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of this machine. A pid is used again; pid and ``started`` (clock ticks since boot) are not."""

    pid: int
    started: int
    state: str
    parent: int
    group: int
    has_terminal: bool


def read_process(pid: int) -> Process | None:
    """The process with this pid; None if there is none, or if nothing is known of it."""
    fields = stat_of(pid)
    with contextlib.suppress(IndexError, ValueError):
        numbers = {"started": int(fields[19]), "parent": int(fields[1]), "group": int(fields[2])}
        return Process(pid=pid, state=fields[0], has_terminal=fields[4] != "0", **numbers)
    return None


def is_same(process: Process) -> bool:
    """Whether this very process still runs: another one may have its pid by now."""
    now = read_process(process.pid)
    return now is not None and now.started == process.started and now.state not in ("Z", "X")


def send(process: Process, number: signal.Signals, *, to_group: bool = False) -> None:
    """Send a signal, unless the process has ended."""
    if is_same(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if to_group else os.kill)(process.pid, number)


def children_of(process: Process) -> Iterator[Process]:
    """Its children, where Linux tells them (CONFIG_PROC_CHILDREN)."""
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            for pid in (thread / "children").read_text(encoding="ascii").split():
                child = read_process(int(pid))
                if child is not None and child.parent == process.pid:
                    yield child


def _rank_of(pid: int) -> str | None:
    """``RANK`` in the environment with which a process of this user was started."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(b"RANK="):
                return os.fsdecode(line.removeprefix(b"RANK="))
    return None


class Neighbours:
    """The agent of this spawner, the controller if it started that agent, torchrun, and all that torchrun started."""

    def __init__(self, *, rank: int, local_rank: int, controller: int | None) -> None:
        """Called in the agent, before it forks its spawner. ``controller``: the pid of the controller that started it."""
        self._rank = rank
        self._patience = local_rank  # one acts before the others
        self._agent = read_process(os.getpid())
        self._controller = read_process(controller) if controller is not None else None
        first = self._controller or self._agent
        under_torchrun = first is not None and "TORCHELASTIC_RUN_ID" in os.environ
        self._torchrun = read_process(first.parent) if first is not None and under_torchrun else None
        self._looks: dict[tuple[int, int], int] = {}
        self._next_s = 0.0

    def look(self) -> None:
        """Called often while the agent lives: every :data:`LOOK_S`, see who is stopped.

        A stopped controller is ended, so that an agent writes its reports; one with a terminal was suspended there by a user,
        and is left. A stopped agent is continued: it leaves with the others. A stopped torchrun is left until its ranks end.
        """
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + LOOK_S
        for process in self._stopped_for(STOPPED_LOOKS, self._ranks()):
            if not self._is_controller(process):
                self._continue(process, looks=STOPPED_LOOKS, look_s=LOOK_S)
            elif not process.has_terminal:
                self._say(process, f"was stopped for {STOPPED_LOOKS * LOOK_S:g} s: it is ended, and an agent reports")
                send(process, signal.SIGKILL)
                if self._leads_group(process):  # its agent may be stopped too
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGCONT)

    def linger(self) -> None:
        """Called when the agent has ended: as long as somebody is stopped here, continue it; end it if it does not leave."""
        self._looks.clear()
        continued: list[Process] = []
        deadline_s = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline_s:
            everyone = [*self._ranks(), *self._launcher()]
            for process in self._stopped_for(LAST_STOPPED_LOOKS, everyone):
                self._continue(process, looks=LAST_STOPPED_LOOKS, look_s=LAST_LOOK_S)
                continued.append(process)
            if not self._looks and not any(map(is_same, continued)):
                return
            time.sleep(LAST_LOOK_S)
        for process in filter(is_same, continued):
            now = read_process(process.pid)
            is_stopped = now is not None and now.state == STOPPED
            if is_stopped or not (self._is_controller(process) or self._is_torchrun(process)):  # those may be at work
                self._say(process, f"did not leave within {LEAVE_S:g} s: it is ended")
                send(process, signal.SIGKILL)

    def _ranks(self) -> list[Process]:
        """The processes that are agents or the controller, as they are now."""
        known = [process for process in (self._agent, self._controller) if process is not None and is_same(process)]
        found = {process.pid: read_process(process.pid) for process in known}
        for launcher in self._launcher():
            found |= {child.pid: child for child in children_of(launcher)}
        return [process for process in found.values() if process is not None]

    def _launcher(self) -> list[Process]:
        """Torchrun as it is now, if it started this rank and lives."""
        now = read_process(self._torchrun.pid) if self._torchrun is not None and is_same(self._torchrun) else None
        return [now] if now is not None else []

    def _stopped_for(self, looks: int, processes: list[Process]) -> list[Process]:
        """Those that were stopped at so many looks in a row, by now."""
        stopped = {(process.pid, process.started): process for process in processes if process.state == STOPPED}
        self._looks = {key: self._looks.get(key, 0) + 1 for key in stopped}
        return [process for key, process in stopped.items() if self._looks[key] >= looks + self._patience]

    def _continue(self, process: Process, *, looks: int, look_s: float) -> None:
        """Continue a process, and what it started in its group: a spawner may be stopped with its agent."""
        self._say(process, f"was stopped for {looks * look_s:g} s: it is continued")
        send(process, signal.SIGCONT, to_group=self._leads_group(process))

    def _leads_group(self, process: Process) -> bool:
        """Whether torchrun started it as the leader of a group of its own."""
        return self._torchrun is not None and process.parent == self._torchrun.pid and process.group == process.pid

    def _is_controller(self, process: Process) -> bool:
        is_ours = self._controller is not None and process.pid == self._controller.pid
        return is_ours or (self._leads_group(process) and _rank_of(process.pid) == "0")

    def _is_torchrun(self, process: Process) -> bool:
        return self._torchrun is not None and process.pid == self._torchrun.pid

    def _say(self, process: Process, what: str) -> None:
        rank = self._rank if self._agent is not None and process.pid == self._agent.pid else _rank_of(process.pid)
        name = "torchrun" if self._is_torchrun(process) else f"the agent of rank {rank}"
        name = "the controller" if self._is_controller(process) else name
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"gpucluster: {name} (pid {process.pid}) {what}\n")
            sys.stderr.flush()
