"""A worker as its agent sees it: a process, a line for messages, its output, and what it leaves in files."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.agent import nccl_ras
from pytest_gpucluster.agent.spawner import Spawner, kill_and_reap
from pytest_gpucluster.agent.worker_exit import read_oom_kills
from pytest_gpucluster.protocol.codec import MalformedMessageError
from pytest_gpucluster.protocol.messages import Failure, FromWorker, StartWorker, Success, read_from_worker
from pytest_gpucluster.protocol.rank import state_of
from pytest_gpucluster.protocol.wire import Wire
from pytest_gpucluster.worker import flight_recorder, last_collective, python_stacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.worker.last_collective import LastCollective

KILL_S = 10.0
SEND_S = 8.0  # the agent does not beat meanwhile: less than the controller waits for a beat
STOPPED = "T"  # the state letter of a process after SIGSTOP
TAIL_BYTES = 64 * 1024
READS = 64
"""Reads in a row from a worker's line or output. More waits there only if something writes without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What can be seen of a worker that hangs without an end to it: process state letter, last collectives, NCCL's RAS."""

    state: str
    flight: str
    ras: str


class WorkerProcess:
    """One live worker."""

    def __init__(self, spawner: Spawner, *, cwd: str, environment: dict[str, str]) -> None:
        """Start it.

        Raises:
            OSError: it could not be started.
        """
        self._spawner = spawner
        self._stacks_file = spawner.folder / "stacks"
        self._collective_file = spawner.folder / "collective"
        self._flight_file = spawner.folder / "flight.json"
        self._ras_address = environment.get(nccl_ras.VARIABLE)
        self._flight_file.unlink(missing_ok=True)
        self._stacks_file.unlink(missing_ok=True)
        self.oom_kills_before = read_oom_kills()
        self._has_ended = False
        self._survived_kill = False
        self.tail = bytearray()
        last_collective.create(self._collective_file)
        mine, theirs = socket.socketpair()
        self.output_fd, output_write = os.pipe()
        os.set_blocking(self.output_fd, False)
        request = StartWorker(
            environment=environment,
            cwd=cwd if Path(cwd).is_dir() else str(Path.cwd()),
            stacks_file=str(self._stacks_file),
            flight_file=str(self._flight_file),
            collective_file=str(self._collective_file),
        )
        try:
            self.pid = spawner.spawn(request, link=theirs, output_fd=output_write)
        except OSError:
            mine.close()
            os.close(self.output_fd)
            raise
        finally:
            theirs.close()
            os.close(output_write)
        mine.settimeout(SEND_S)  # a worker that does not read must not block its agent for longer
        self.wire = Wire(mine)

    def collective(self) -> LastCollective:
        """The number of collectives entered in this call, and the last one."""
        return last_collective.read(self._collective_file)

    def drain(self) -> bool:
        """Append what the worker printed to the bounded tail. False if its output is closed.

        The number of reads is bounded: another process that the worker started may print for ever.
        """
        with contextlib.suppress(BlockingIOError):
            for _ in range(READS):
                data = os.read(self.output_fd, TAIL_BYTES)
                if not data:
                    return False
                self.tail += data
                del self.tail[:-TAIL_BYTES]
        return True

    def printed(self) -> str:
        r"""The tail as text, from a whole character on; a byte that is not UTF-8 is shown as ``\xe9``."""
        start = next((index for index, byte in enumerate(self.tail[:4]) if byte & 0xC0 != 0x80), 0)
        return self.tail[start:].decode("utf-8", "backslashreplace")

    def receive(self) -> list[FromWorker] | None:
        """The messages that one read completes. None when the worker has closed its line.

        Raises:
            MalformedMessageError: something else is among them.
        """
        received = self.wire.receive()
        return None if received is None else [read_from_worker(data) for data in received]

    def last_messages(self) -> list[FromWorker]:
        """What the worker may have sent just before it ended."""
        messages: list[FromWorker] = []
        with selectors.DefaultSelector() as ready, contextlib.suppress(MalformedMessageError):
            ready.register(self.wire, selectors.EVENT_READ)
            for _ in range(READS):
                received = self.receive() if ready.select(0) else None
                if received is None:
                    break
                messages += received
        return messages

    def state(self) -> str:
        """The process state letter (``T`` stopped, ``D`` uninterruptible wait), or ``?``."""
        return state_of(self.pid) or "?"

    def look(self) -> Evidence:
        """What the worker, which hangs, does; it goes on hanging. A stopped one tells nothing but its state."""
        state = self.state()
        ras = ""
        if state != STOPPED:
            ras = nccl_ras.ask(self._ras_address)  # while its peers run, too
            flight_recorder.ask(self.pid, self._flight_file)
        return Evidence(state=state, flight=flight_recorder.summarize(self._flight_file), ras=ras)

    def hold(self) -> None:
        """Stop the worker (SIGSTOP), so that the end of a peer cannot wake it out of what it is in."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGSTOP)

    def _has_answered(self) -> bool:
        return any(isinstance(message, (Success, Failure)) for message in self.last_messages())

    def stacks(self) -> str:
        """The worker's Python stacks, by which it ends, held or not; empty if it does not answer.

        One that has answered meanwhile, since the end of a peer woke it, has no stacks: they would show its next wait.
        """
        stacks = "" if self._has_answered() else python_stacks.ask(self.pid, self._stacks_file)
        return "" if self._has_answered() else stacks

    def crash(self) -> str:
        """The Python stacks of the crash that ended the worker; empty if it ended otherwise."""
        return python_stacks.of_crash(self._stacks_file)

    def kill(self, *, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Kill the worker and all that it started. False if it does not end within :data:`KILL_S` (state D).

        ``meanwhile`` is called several times a second. A worker that survived is not waited for again.
        """
        if self._has_ended or self._survived_kill:
            return self._has_ended
        with contextlib.suppress(OSError):
            self._has_ended = kill_and_reap(self._spawner, self.pid, within_s=KILL_S, meanwhile=meanwhile) is not None
        self._survived_kill = not self._has_ended
        return self._has_ended

    def note_exit(self) -> None:
        """Called when the spawner reports that this worker has ended."""
        self._has_ended = True

    def close(self) -> None:
        """Close the line for messages and the output."""
        self.wire.close()
        os.close(self.output_fd)
