"""A worker as its agent sees it: a pid, a line, some output, and the means to end it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.agent.spawner import Spawner, kill_and_reap
from pytest_gpucluster.protocol.rank import state_of
from pytest_gpucluster.protocol.wire import Wire
from pytest_gpucluster.worker import flight_recorder, last_collective, python_stacks

if TYPE_CHECKING:
    from collections.abc import Callable

KILL_S = 10.0
SEND_S = 8.0  # the agent does not beat meanwhile: less than the controller waits for a beat
TAIL_BYTES = 64 * 1024


class WorkerProcess:
    """One live worker."""

    def __init__(self, spawner: Spawner, folder: Path, *, cwd: str, environment: dict[str, str]) -> None:
        """Start it.

        Raises:
            OSError: it could not be started.
        """
        self._spawner = spawner
        self._stacks_file = folder / "stacks"
        self._beacon_file = folder / "beacon"
        self._flight_file = folder / "flight.json"
        self._flight_file.unlink(missing_ok=True)
        python_stacks.forget(self._stacks_file)
        self._dead = False
        self._survived_kill = False
        self.tail = bytearray()
        last_collective.create(self._beacon_file)
        mine, theirs = socket.socketpair()
        self.output_fd, output_write = os.pipe()
        os.set_blocking(self.output_fd, False)
        request = {
            "environment": environment,
            "cwd": cwd if Path(cwd).is_dir() else str(Path.cwd()),
            "beacon": str(self._beacon_file),
            "stacks": str(self._stacks_file),
            "flight": str(self._flight_file),
        }
        try:
            self.pid = spawner.spawn(request, link=theirs, output_fd=output_write)
        except OSError:
            mine.close()
            os.close(self.output_fd)
            raise
        finally:
            theirs.close()
            os.close(output_write)
        mine.settimeout(SEND_S)  # a worker that is stopped before it reads must not stop its agent
        self.wire = Wire(mine)

    def collective(self) -> tuple[int, str]:
        """(number of collectives entered in this call, name of the last)."""
        return last_collective.read(self._beacon_file)

    def drain(self) -> bool:
        """Take what it printed into the bounded tail; False when nothing more can come."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output_fd, 65536):
                self.tail += data
                del self.tail[:-TAIL_BYTES]
            return False
        return True

    def last_result(self) -> dict[str, Any] | None:
        """The result it may have sent just before it ended."""
        with selectors.DefaultSelector() as ready:
            ready.register(self.wire, selectors.EVENT_READ)
            while ready.select(0):
                messages = self.wire.receive()
                if messages is None:
                    return None
                for message in messages:
                    if message["t"] == "result":
                        return message
        return None

    def state(self) -> str:
        """The process state letter (``T`` stopped, ``D`` uninterruptible wait), or ``?``."""
        return state_of(self.pid) or "?"

    def evidence(self) -> dict[str, str]:
        """What can be seen of it from outside while it hangs: process state, Python stacks, flight recorder."""
        state = self.state()
        found = self.stacks()  # first: faulthandler may crash over a thread that runs, as the recorder's does when it is asked
        if state != "T":
            flight_recorder.ask(self.pid, self._flight_file)
        return {"state": state, "stacks": found, "flight": flight_recorder.summarize(self._flight_file)}

    def stacks(self) -> str:
        """Its Python stacks; empty if it cannot answer, as one that is stopped cannot."""
        return "" if self.state() == "T" else python_stacks.ask(self.pid, self._stacks_file)

    def crash(self) -> str:
        """The Python stacks of the crash that ended it; empty if it ended otherwise."""
        return python_stacks.of_crash(self._stacks_file)

    def kill(self, *, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Kill it and all it started; False when it did not end within :data:`KILL_S` (state D), which is waited for once.

        ``meanwhile`` is called several times a second.
        """
        if self._dead or self._survived_kill:
            return self._dead
        with contextlib.suppress(OSError):
            self._dead = kill_and_reap(self._spawner, self.pid, within_s=KILL_S, meanwhile=meanwhile) is not None
        self._survived_kill = not self._dead
        return self._dead

    def ended(self) -> None:
        """The spawner said so."""
        self._dead = True

    def close(self) -> None:
        """Close both lines."""
        self.wire.close()
        os.close(self.output_fd)
