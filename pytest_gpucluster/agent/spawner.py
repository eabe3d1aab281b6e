"""Forks workers quickly: the spawner has imported torch once, and starts each worker as a copy of itself.

Why this is not the standard library's forkserver: docs/decisions/0003-spawner.md.

An agent forks its spawner before it starts a thread or opens a connection. The spawner ends when its agent ends, and kills
its workers then.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from pytest_gpucluster.agent.neighbours import LOOK_S, Neighbours
from pytest_gpucluster.inventory.program import die_with_parent, kill_group
from pytest_gpucluster.protocol import messages
from pytest_gpucluster.worker import flight_recorder

REQUEST_BYTES = 256 * 1024
ANSWER_S = 8.0  # the agent does not beat meanwhile: less than the controller waits for a beat
POLL_S = 0.5
Main = Callable[[messages.StartWorker, int], None]


class Spawner:
    """The agent's handle on its spawner."""

    def __init__(self, main: Main, *, folder: Path, neighbours: Neighbours) -> None:
        """Fork the spawner. Each worker runs ``main(request, link_fd)``.

        ``folder`` belongs to the agent. The spawner removes it at the end, in case the agent was killed. It looks after the
        ``neighbours`` until then, and a moment longer.
        """
        self.folder = folder
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._link.close()
            _Server(theirs, main, folder, neighbours).serve()
        theirs.close()
        self._link.settimeout(ANSWER_S)
        self._exits: list[tuple[int, int]] = []
        self._requests = 0

    def fileno(self) -> int:
        """The descriptor for a selector: readable when a worker, or the spawner, has ended."""
        return self._link.fileno()

    def spawn(self, request: messages.StartWorker, *, link: socket.socket, output_fd: int) -> int:
        """Start a worker with ``link`` as its line to the agent and ``output_fd`` as stdout and stderr; return its pid.

        Raises:
            OSError: the spawner has ended, did not answer within :data:`ANSWER_S`, or could not fork.
        """
        self._requests += 1
        numbered = replace(request, number=self._requests)
        try:
            socket.send_fds(self._link, [numbered.to_json()], [link.fileno(), output_fd])
            while (answer := self._receive()) is None or answer.number != self._requests:
                pass
        except TimeoutError:
            raise OSError(f"the process that starts workers did not answer within {ANSWER_S:g} s") from None
        if isinstance(answer, messages.WorkerNotStarted):
            raise OSError(answer.error)
        return answer.pid

    def exits(self, *, within_s: float = 0.0) -> list[tuple[int, int]]:
        """Pid and wait status of the workers that ended since the last call; waits at most ``within_s`` for the first.

        Raises:
            OSError: the spawner has ended.
        """
        while select.select([self._link], [], [], 0.0 if self._exits else within_s)[0]:
            self._receive()  # an answer is late: its request was given up, so that worker finds its line closed and ends
        found, self._exits = self._exits, []
        return found

    def _receive(self) -> messages.WorkerStarted | messages.WorkerNotStarted | None:
        """The next answer to a request; None: a worker has ended, which is kept for :meth:`exits`."""
        data = self._link.recv(REQUEST_BYTES)
        if not data:
            raise OSError("the spawner of workers has ended")
        answer = messages.read_from_spawner(data)
        if not isinstance(answer, messages.WorkerExited):
            return answer
        self._exits.append((answer.pid, answer.status))
        return None


class _Server:
    """The spawner itself: one thread, no torch call, nothing that can hang.

    When its agent is killed, the spawner kills the workers and all that they started, then ends. When the spawner is killed,
    each worker ends by itself.
    """

    def __init__(self, link: socket.socket, main: Main, folder: Path, neighbours: Neighbours) -> None:
        self._folder = folder
        self._neighbours = neighbours
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
        """Fork on request and report each exit, until the agent has ended; never returns."""
        try:
            while self._step():
                pass
        finally:
            for pid in self._workers:
                kill_worker(pid)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._neighbours.linger()
            os._exit(0)

    def _step(self) -> bool:
        ready, _, _ = select.select([self._link.fileno(), self._wake], [], [], LOOK_S)
        self._neighbours.look()
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        self._reap()
        if self._link.fileno() not in ready:
            return True
        data, fds, _, _ = socket.recv_fds(self._link, REQUEST_BYTES, 4)
        if not data:
            return False
        self._fork(messages.StartWorker.read(data), fds)
        return True

    def _fork(self, request: messages.StartWorker, fds: list[int]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._send(messages.WorkerNotStarted(number=request.number, error=f"could not start a worker: {error}"))
            return
        if pid == 0:
            self._become_worker(request, fds, parent=parent)
        for fd in fds:
            os.close(fd)
        self._workers.add(pid)
        self._send(messages.WorkerStarted(number=request.number, pid=pid))

    def _become_worker(self, request: messages.StartWorker, fds: list[int], *, parent: int) -> None:
        status = 1
        signal.pthread_sigmask(signal.SIG_BLOCK, {flight_recorder.ASK})  # a thread waits for it, once it has started
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
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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
                self._send(messages.WorkerExited(pid=pid, status=status))

    def _send(self, answer: messages.FromSpawner) -> None:
        with contextlib.suppress(OSError):
            self._link.send(answer.to_json())


def kill_worker(pid: int) -> None:
    """SIGKILL to a worker whose end nobody has heard of, and to its group; it leads none before it begins."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    kill_group(pid)


def kill_and_reap(spawner: Spawner, pid: int, *, within_s: float, meanwhile: Callable[[], None]) -> int | None:
    """Kill a worker and wait for its end: the wait status, or None if it did not end (a process in state D).

    ``meanwhile`` is called every :data:`POLL_S` or more often. Looks are counted, not timed: this process may be stopped.
    """
    kill_worker(pid)
    for _ in range(math.ceil(within_s / POLL_S)):
        meanwhile()
        for ended, status in spawner.exits(within_s=POLL_S):
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
