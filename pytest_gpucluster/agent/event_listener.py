"""The listener of a node: a process that hears Xids, SXids and lost GPUs for the whole run, by NVML and the kernel log.

The agent of the first rank of a node forks it before anything else, so an agent itself never calls NVML, and a driver that
hangs holds up no agent. The listener ends with that agent. It reads nothing from whoever connects: nobody can tell it anything.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pytest_gpucluster.inventory.driver_events import KernelLog, Logged, XidEvents
from pytest_gpucluster.inventory.error_codes import NVLINK_XIDS
from pytest_gpucluster.inventory.program import die_with_parent
from pytest_gpucluster.protocol.node_events import NodeEvents, NodeLoss, NodeSxid, NodeXid
from pytest_gpucluster.protocol.rank import bound_to, is_own_user

if TYPE_CHECKING:
    import socket

HOST_PIDS = "pid:[4026531836]"
"""The first pid namespace of every Linux (PROC_PID_INIT_INO)."""
POLL_S = 0.5
ANSWER_S = 1.0
"""For the whole of an answer: whoever takes it more slowly gets none, and does not hold up the next one."""
BACKLOG = 256
MOST_APART = 1000
"""So many Xids are told one by one: 130 bytes each, and an answer has 4 MiB."""


def start_listener(name: str) -> int | None:
    """Fork the listener and return its pid; None where its name cannot be taken."""
    taking = bound_to(f"\0{name}")
    if taking is None:
        return None
    taking.listen(BACKLOG)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_listener(taking, parent)
    taking.close()
    return pid


def _become_listener(taking: socket.socket, parent: int) -> NoReturn:
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        die_with_parent()
        if os.getppid() == parent:
            events = XidEvents()
            events.start()
            Listener(taking, events, KernelLog()).serve()
    finally:
        os._exit(0)


def _sees_host_pids() -> bool:
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == HOST_PIDS
    except OSError:
        return False


def _merged(xids: Iterable[NodeXid]) -> tuple[NodeXid, ...]:
    """Xids of NVLink that differ in their time only as one: a bad lane brings thousands an hour.

    Others stay apart, because their time tells who caused them. In a flood, those of one second are one.
    """
    found: dict[object, NodeXid] = {}
    for number, one in enumerate(xids):
        is_apart = number < MOST_APART and one.code not in NVLINK_XIDS
        age_s = None if one.age_s is None else 0.0 if one.code in NVLINK_XIDS else float(round(one.age_s))
        key = number if is_apart else replace(one, age_s=age_s)
        first = found.setdefault(key, one)
        found[key] = first if first is one else replace(first, count=first.count + 1)
    return tuple(found.values())


class Listener:
    """Answers what was heard so far to each process of this user that connects."""

    def __init__(self, taking: socket.socket, events: XidEvents, log: KernelLog) -> None:
        """Read what the kernel logged before the run."""
        self._taking = taking
        self._events = events
        self._log = log
        self._counts: Counter[tuple[NodeSxid | NodeLoss, bool]] = Counter()
        self._logged: list[tuple[float, NodeXid]] = []
        self._before = self._xids_of(log.read(), is_before=True)

    def _xids_of(self, logged: Iterable[Logged], *, is_before: bool = False) -> list[NodeXid]:
        """Count what is of a switch or of a lost GPU, of which there may be very many lines; the rest is returned."""
        xids: list[NodeXid] = []
        for one in logged:
            if isinstance(one, NodeXid):
                xids.append(one)
            else:
                self._counts[one, is_before] += 1
        return xids

    def serve(self) -> NoReturn:
        """Serve until this process is killed."""
        while True:
            self.step()

    def step(self) -> None:
        """Take in what is new, and answer who asks."""
        has_request = bool(select.select([self._taking], [], [], POLL_S)[0])
        now_s = time.monotonic()
        self._logged += [(now_s, xid) for xid in self._xids_of(self._log.read())]
        if has_request:
            line, _ = self._taking.accept()
            with line, contextlib.suppress(OSError):
                if is_own_user(line):
                    line.settimeout(ANSWER_S)
                    line.sendall(self.heard().to_json())

    def heard(self) -> NodeEvents:
        """All that was heard so far."""
        now_s = time.monotonic()
        counted = [replace(one, count=count, is_before=old) for (one, old), count in self._counts.items()]
        timed = (*self._events.heard, *self._logged)
        return NodeEvents(
            nvml_why=self._events.why,
            log_why=None if self._log.why is None else self._log.why.why,
            sees_host_pids=_sees_host_pids(),
            is_ready=self._events.is_ready,
            gpus=tuple(self._events.gpus),
            xids=_merged((*(replace(one, age_s=now_s - at_s) for at_s, one in timed), *self._before)),
            sxids=tuple(one for one in counted if isinstance(one, NodeSxid)),
            losses=tuple(one for one in counted if isinstance(one, NodeLoss)),
        )
