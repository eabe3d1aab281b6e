"""Which of the processes on a GPU belong to this run. All others are foreign."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


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


def _store_of(process: str) -> Any:
    """The address of the store on the command line of an agent or its worker; None for any other process."""
    try:
        words = Path("/proc", process, "cmdline").read_text(encoding="utf-8").split("\0")
        return json.loads(words[3])["address"] if words[1:3] == ["-m", "pytest_gpucluster.agent.main"] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
