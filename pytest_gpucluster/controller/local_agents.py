"""The agents that the controller starts itself: of its own rank under torchrun, of every GPU under plain pytest."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

BEGIN_S = 60.0
"""A fork that has not begun by then is killed: its ranks are lost, and the run says so."""
LEAVE_S = 2.0
POLL_S = 0.02


class LocalAgents:
    """One child process, which forks into an agent for each rank. They notice the controller's end by a pipe that closes."""

    def __init__(
        self,
        command: Callable[[int], list[str] | Callable[[], NoReturn]],
        *,
        secret_fd: int | None,
        log: Path,
        own_group: bool,
    ) -> None:
        """Start them; returns at once. They get the environment of this process, and the pipe of the secret.

        ``command`` makes the command line, or what a fork of this process is to do, from the descriptor that closes when this
        process ends. ``own_group``: without torchrun. Then the agents are a process group of their own, so that none can be
        left behind; a fork always is.
        """
        self._own_group = own_group
        alive_read, self._alive_write = os.pipe()
        passed = [fd for fd in (alive_read, secret_fd) if fd is not None]
        with log.open("ab") as output:
            to_do = command(alive_read)
            self._process = (
                Fork(to_do, output=output.fileno(), kept=passed)
                if callable(to_do)
                else subprocess.Popen(  # noqa: S603 -- this very interpreter
                    to_do,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=passed,
                    start_new_session=own_group,
                )
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
        if not have_met:
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
            while self._own_group and time.monotonic() < deadline_s:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(POLL_S)
            if self._own_group:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _terminate(self) -> None:
        """SIGTERM to all agents; their spawners notice it, kill their workers, and end."""
        if self._own_group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)


def may_fork() -> bool:
    """Whether a fork of this process can go on: it has no other thread, which might hold a lock."""
    is_alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
    return is_alone and sys.platform == "linux"


class Fork:
    """A fork of this process, in a session of its own, with what :class:`subprocess.Popen` says of a child."""

    def __init__(self, program: Callable[[], NoReturn], *, output: int, kept: Iterable[int]) -> None:
        """Fork; ``program`` ends the fork, which has the descriptors ``kept`` and prints to ``output``."""
        self.returncode: int | None = None
        ready, begun = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: NumPy's sleep, and no other is there
            self.pid = os.fork()
        if self.pid == 0:
            try:
                _begin_anew(output, kept={*kept, begun})
                os.close(begun)
                program()
            except BaseException:  # noqa: BLE001 -- shown, and never goes on as this process
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        os.close(begun)
        begins = select.poll()
        begins.register(ready, select.POLLIN)
        if not begins.poll(BEGIN_S * 1000):  # neither does it lead a session now, nor has it ended
            self.kill()
        os.close(ready)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None as long as it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs ``timeout`` seconds later.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        """SIGKILL, unless the end was seen."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _begin_anew(output: int, *, kept: Iterable[int]) -> None:
    """Keep nothing of what the parent had but its memory: neither signals, session, descriptors nor what pytest took over."""
    gc.freeze()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Taken by the null device and not closed: a file of the parent that is forgotten later would close a new one's number.
    for fd in {int(link.name) for link in Path("/proc/self/fd").iterdir()} - {1, 2, nothing, *kept}:
        with contextlib.suppress(OSError):
            os.dup2(nothing, fd)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    warnings.resetwarnings()
