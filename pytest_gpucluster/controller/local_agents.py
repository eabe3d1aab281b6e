"""The agents that the controller starts itself: of its own rank under torchrun, of every GPU under plain pytest."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

LEAVE_S = 2.0
POLL_S = 0.02


class LocalAgents:
    """One child process, which forks into an agent for each rank. They notice the controller's end by a pipe that closes."""

    def __init__(self, command: Callable[[int], list[str]], *, secret_fd: int | None, log: Path, own_group: bool) -> None:
        """Start them; returns at once. They get the environment of this process, and the pipe of the secret.

        ``command`` makes their command line from the descriptor that closes when this process ends. ``own_group``: without
        torchrun. Then the agents are a process group of their own, so that none can be left behind.
        """
        self._own_group = own_group
        alive_read, self._alive_write = os.pipe()
        passed = [fd for fd in (alive_read, secret_fd) if fd is not None]
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 -- this very interpreter
                command(alive_read),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=passed,
                start_new_session=own_group,
            )
        for fd in passed:
            os.close(fd)

    @property
    def have_ended(self) -> bool:
        """Whether the first agent has ended."""
        return self._process.poll() is not None

    def end(self, *, have_met: bool) -> None:
        """Wait for the agents to leave, and end those that do not.

        ``have_met`` False: the agents still wait for the controller's store, which will not come.
        """
        os.close(self._alive_write)
        with contextlib.suppress(ProcessLookupError):  # what is stopped could not leave
            os.killpg(self._process.pid if self._own_group else os.getpgrp(), signal.SIGCONT)
        if not have_met and self._own_group:
            self._terminate()
            self._kill_remaining()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it: nothing here can end it
                self._process.wait(LEAVE_S)
        self._terminate()

    def _kill_remaining(self) -> None:
        """SIGKILL to agents that ignore SIGTERM: a TCPStore that waits for its server holds Python's lock, so no handler runs.

        They have no workers yet.
        """
        deadline_s = time.monotonic() + LEAVE_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline_s:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(POLL_S)
            os.killpg(self._process.pid, signal.SIGKILL)

    def _terminate(self) -> None:
        """SIGTERM to all agents; their spawners notice it, kill their workers, and end."""
        if self._own_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
