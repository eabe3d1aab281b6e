"""The agents that the controller starts itself: of its own rank under torchrun, of every GPU under plain pytest."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from pytest_gpucluster.agent import main

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpucluster.agent.fallback_report import Estate
    from pytest_gpucluster.protocol.channel import Address
    from pytest_gpucluster.protocol.rank import Rank

LEAVE_S = 2.0


class OwnAgents:
    """One child process, which forks into an agent for each rank; they see the controller's end by a pipe that closes."""

    def __init__(  # noqa: PLR0913 -- what all processes of a run have to know
        self, ranks: list[Rank], address: Address, *, log: Path, roots: list[Path], estate: Estate | None, alone: bool
    ) -> None:
        """Start them; returns at once.

        ``alone``: without torchrun. Then they are a process group of their own, so that none can be left behind.
        """
        self._alone = alone
        alive_read, self._alive_write = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 -- this very interpreter
                main.command(ranks, address, roots=roots, controller_fd=alive_read, estate=estate),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(alive_read,),
                env={**as_torchrun(len(ranks)), **os.environ},
                start_new_session=alone,
            )
        os.close(alive_read)

    @property
    def have_ended(self) -> bool:
        """Whether the first of them is no more."""
        return self._process.poll() is not None

    def end(self, *, have_met: bool) -> None:
        """See them off; those that never met the controller wait for a store that will not come, and are told to go."""
        os.close(self._alive_write)
        if not have_met:
            self._terminate()
            self._kill_who_stays()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._terminate()

    def _kill_who_stays(self) -> None:
        """SIGKILL to those that hear nothing: a TCPStore that waits for its server keeps Python's lock and its handlers out.

        They have no workers yet, which would outlive their spawners' end by a moment.
        """
        deadline_s = time.monotonic() + LEAVE_S
        with contextlib.suppress(ProcessLookupError):
            while self._alone and time.monotonic() < deadline_s:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(0.02)
            if self._alone:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _terminate(self) -> None:
        """SIGTERM to all; their spawners end by themselves, and take their workers with them."""
        if self._alone:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)


def as_torchrun(num_local: int) -> dict[str, str]:
    """What torchrun adds to the environment of several ranks: one OpenMP thread each, unless told otherwise."""
    return {"OMP_NUM_THREADS": "1"} if num_local > 1 else {}
