"""Forks workers quickly: a small process that imported torch once and starts each worker as a copy of itself.

The standard library's forkserver was tried first; what it lacks is written in docs/decisions/0003-spawner.md (workers
that survive a killed parent, a frozen environment, a second import of torch for each rank).

A spawner is forked by its agent before that starts a thread or opens a connection. It ends, and takes its workers with
it, when its agent ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.worker import flight_recorder

if TYPE_CHECKING:
    from pathlib import Path

PR_SET_PDEATHSIG = 1
REQUEST_BYTES = 256 * 1024
ANSWER_S = 8.0  # the agent does not beat meanwhile: less than the controller waits for a beat
LOOK_S = 0.5
Main = Callable[[dict[str, Any], int], None]


class Spawner:
    """The agent's handle on its spawner."""

    def __init__(self, main: Main, *, folder: Path | None = None) -> None:
        """Fork the spawner; ``main(request, link_fd)`` is what each worker runs.

        ``folder`` is the agent's own; the spawner removes it should the agent not live to do so.
        """
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._link.close()
            _Server(theirs, main, folder).serve()
        theirs.close()
        self._link.settimeout(ANSWER_S)
        self._exits: list[tuple[int, int]] = []
        self._requests = 0

    def fileno(self) -> int:
        """For a selector: readable when a worker has ended."""
        return self._link.fileno()

    def spawn(self, request: dict[str, Any], *, link: socket.socket, output_fd: int) -> int:
        """Start a worker with ``link`` as its line to the agent and ``output_fd`` as stdout and stderr; its pid.

        Raises:
            OSError: the spawner is gone, did not answer within :data:`ANSWER_S`, or could not fork.
        """
        self._requests += 1
        numbered = json.dumps({**request, "number": self._requests}).encode()
        try:
            socket.send_fds(self._link, [numbered], [link.fileno(), output_fd])
            while (answer := self._receive()).get("number") != self._requests:
                self._keep_exit(answer)
        except TimeoutError:
            raise OSError(f"the process that starts workers did not answer within {ANSWER_S:g} s") from None
        if "error" in answer:
            raise OSError(answer["error"])
        return int(answer["pid"])

    def exits(self, *, within_s: float = 0.0) -> list[tuple[int, int]]:
        """(pid, wait status) of the workers that ended since the last call, waiting at most ``within_s`` for one.

        Raises:
            OSError: the spawner is gone.
        """
        while select.select([self._link], [], [], 0.0 if self._exits else within_s)[0]:
            self._keep_exit(self._receive())
        found, self._exits = self._exits, []
        return found

    def _keep_exit(self, answer: dict[str, Any]) -> None:
        """Anything else is the late answer to a request that was given up: that worker finds its line closed and ends."""
        if "exit" in answer:
            self._exits.append((answer["exit"], answer["status"]))

    def _receive(self) -> dict[str, Any]:
        data = self._link.recv(REQUEST_BYTES)
        if not data:
            raise OSError("the spawner of workers has ended")
        return dict(json.loads(data))


class _Server:
    """The spawner itself: one thread, no torch call, nothing that can hang.

    It outlives a killed agent by the moment it needs to end the workers and all that they started; a worker ends by
    itself when the spawner is killed.
    """

    def __init__(self, link: socket.socket, main: Main, folder: Path | None) -> None:
        self._folder = folder
        self._link = link
        self._main = main
        self._workers: set[int] = set()
        self._wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(self._wake, False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Fork on request and report deaths until the agent is gone; never returns."""
        try:
            while self._step():
                pass
        finally:
            for pid in self._workers:
                kill_group(pid)
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(0)

    def _step(self) -> bool:
        ready, _, _ = select.select([self._link.fileno(), self._wake], [], [], 10.0)
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        self._reap()
        if self._link.fileno() not in ready:
            return True
        data, fds, _, _ = socket.recv_fds(self._link, REQUEST_BYTES, 4)
        if not data:
            return False
        self._fork(json.loads(data), fds)
        return True

    def _fork(self, request: dict[str, Any], fds: list[int]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._send({"error": f"could not start a worker: {error}", "number": request["number"]})
            return
        if pid == 0:
            self._become_worker(request, fds, parent=parent)
        for fd in fds:
            os.close(fd)
        self._workers.add(pid)
        self._send({"pid": pid, "number": request["number"]})

    def _become_worker(self, request: dict[str, Any], fds: list[int], *, parent: int) -> None:
        status = 1
        signal.pthread_sigmask(signal.SIG_BLOCK, {flight_recorder.ASK})  # waited for by a thread, which may not be there yet
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            die_with_parent()
            if os.getppid() != parent:
                return  # the spawner ended before it could be watched
            self._link.close()
            link_fd, output_fd = fds
            os.dup2(output_fd, 1)
            os.dup2(output_fd, 2)
            os.close(output_fd)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            self._main(request, link_fd)
            status = 0
        finally:
            os._exit(status)

    def _reap(self) -> None:
        while self._workers:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._workers:
                self._workers.discard(pid)
                kill_group(pid)
                self._send({"exit": pid, "status": status})

    def _send(self, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._link.send(json.dumps(answer).encode())


def die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent ends (prctl(2), PR_SET_PDEATHSIG); elsewhere do nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """SIGKILL to the process group that ``pid`` leads: a worker and all it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_and_reap(spawner: Spawner, pid: int, *, within_s: float, meanwhile: Callable[[], None]) -> int | None:
    """Kill a worker and wait for its end: the wait status, or None when it did not end (a process in state D).

    ``meanwhile`` is called every :data:`LOOK_S` or more often.
    """
    kill_group(pid)
    deadline = time.monotonic() + within_s
    while (left_s := deadline - time.monotonic()) > 0:
        meanwhile()
        for ended, status in spawner.exits(within_s=min(left_s, LOOK_S)):
            if ended == pid:
                return status
    return None


def describe_exit(status: int) -> str:
    """A wait status in words: ``died: SIGKILL`` or ``left with exit code 0``."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        known = {signal_.value: signal_.name for signal_ in signal.Signals}
        return f"died: {known.get(number, f'signal {number}')}"
    return f"left with exit code {os.WEXITSTATUS(status)}"
