"""Who finishes the report when the controller cannot: its own agent from the journal, else an heir from a copy of it.

The controller's journal lies on its node's disk. An agent of that node (the deputy) sees at once when the controller
ends, and writes the reports from there. When the whole node is gone, an agent of another node (the heir) has a copy of
every line of the journal, which came through the store, and writes them in the same place on its own node.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.protocol.channel import Channel, ChannelLostError, ForgedMessageError

if TYPE_CHECKING:
    from pathlib import Path

REBUILD_S = 20.0
CHUNK_CHARACTERS = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Estate:
    """What a controller leaves behind if it dies: the folder of its journal, and the JUnit file it would have written."""

    folder: str
    junit: str | None
    run: str = ""

    def settle(self, *, copy: Path | None = None) -> None:
        """Write the reports, at most :data:`REBUILD_S`; ``copy``: a copy of the journal, for where there is no better."""
        junit = ["--junitxml", self.junit] if self.junit else []
        journal = ["--journal", str(copy)] if copy is not None else []
        own = ["--run", self.run] if copy is None else []
        command = [sys.executable, "-m", "pytest_gpucluster.cli", "report", self.folder, *junit, *journal, *own]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(  # noqa: S603 -- our own command
                command,
                timeout=REBUILD_S,
                check=False,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # torchrun's SIGTERM goes to a rank's whole process group
            )


class Outbox:
    """The controller's side: the lines of the journal, for one agent on another node."""

    def __init__(self) -> None:
        """Keep lines until there is somebody to send them to."""
        self._waiting: list[str] = []
        self._sent = 0
        self._closed = False
        self._channel: Channel | None = None

    def add(self, line: str) -> None:
        """One more line; a store that is gone is noticed by others."""
        if not self._closed:
            self._waiting.append(line)
            self._send()

    def open(self, channel: Channel) -> None:
        """There is an heir: send what waited, and from now on each line at once."""
        self._channel = channel
        self._send()

    def close(self) -> None:
        """There will be none."""
        self._waiting.clear()
        self._closed = True

    def _send(self) -> None:
        if self._channel is None:
            return
        text, self._waiting = "".join(self._waiting), []
        with contextlib.suppress(ChannelLostError):
            for start in range(0, len(text), CHUNK_CHARACTERS):
                self._channel.put(f"jrn/{self._sent}", {"text": text[start : start + CHUNK_CHARACTERS]})
                self._sent += 1


class Heir:
    """An agent's side: keeps the copy, and settles the estate from it should the controller's node be lost."""

    def __init__(self, reader: Channel, estate: Estate, file: Path) -> None:
        """Start copying into ``file``; ``reader`` is a connection of its own."""
        self._estate = estate
        self._file = file
        threading.Thread(target=self._copy, args=(reader,), daemon=True).start()

    def _copy(self, reader: Channel) -> None:
        with self._file.open("w", encoding="utf-8") as copy, contextlib.suppress(ChannelLostError, ForgedMessageError):
            number = 0
            while True:
                copy.write(str(reader.take(f"jrn/{number}")["text"]))
                copy.flush()
                number += 1

    def settle(self) -> None:
        """Write the reports."""
        sys.stderr.write(f"gpucluster: the controller is lost; its report is finished here, in {self._estate.folder}\n")
        self._estate.settle(copy=self._file)
