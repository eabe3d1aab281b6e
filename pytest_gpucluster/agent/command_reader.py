"""The controller's commands, read by a thread of their own: a read from the store blocks until the next one is written."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING

from pytest_gpucluster.protocol.channel import Channel, ChannelLostError
from pytest_gpucluster.protocol.codec import RefusedMessageError
from pytest_gpucluster.protocol.messages import Command, Quit, read_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpucluster.protocol.rank import Rank

REFUSED_PAUSE_S = 0.05


class CommandReader:
    """Commands as they arrive, for a main thread that waits in a selector."""

    def __init__(self, reader: Channel, rank: Rank) -> None:
        """Prepare to read with ``reader``, which nothing else may use."""
        self._reader = reader
        self._rank = rank.rank
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        self._shown: set[str] = set()
        self.num_read = 0
        self.has_read_quit = False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._read_forever, daemon=True).start()

    def fileno(self) -> int:
        """The descriptor for a selector: readable after each :meth:`wake`."""
        return self._wake_read

    def wake(self) -> None:
        """Make the selector return. Safe in a signal handler."""
        os.write(self._wake_write, b"w")

    def on_wake(self) -> None:
        """Called when :meth:`fileno` is readable."""
        os.read(self._wake_read, 4096)

    def put(self, command: Command | None) -> None:
        """Add a command to those that were read. None: no more commands will come."""
        self._commands.put(command)
        self.wake()

    def pending(self) -> Iterator[Command]:
        """The commands that have arrived and were not taken yet.

        Raises:
            ChannelLostError: no more commands will come.
        """
        while not self._commands.empty():
            command = self._commands.get()
            if command is None:
                raise ChannelLostError("the store that carries the commands is gone")
            yield command

    def _read_forever(self) -> None:
        while True:
            try:
                command: Command | None = self._reader.take_command(self.num_read, read_command)
            except RefusedMessageError as refused:
                if self.num_read > 0:  # the secret is right: another program wrote this, and the controller overwrites it
                    self._show_once(f"gpucluster: rank {self._rank} does not obey: {refused}")
                    time.sleep(REFUSED_PAUSE_S)
                    continue
                command = None
                self._show_once(f"gpucluster: rank {self._rank} reads no more commands: {refused}")
            except Exception as error:  # noqa: BLE001 -- whatever it is, no command can be trusted from here on
                command = None
                self._show_once(f"gpucluster: rank {self._rank} reads no more commands: {error}")
            self.num_read += 1
            self.has_read_quit = isinstance(command, Quit)
            self.put(command)
            if command is None:
                return

    def _show_once(self, text: str) -> None:
        if text not in self._shown:
            self._shown.add(text)
            sys.stderr.write(text + "\n")
