"""The controller's commands, read by a thread of their own: a read blocks until the next one is written."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING

from pytest_gpucluster.agent.shared_commands import BrokenLineError, CommandSharer, SharedCommands, call_sharer, take_address
from pytest_gpucluster.protocol.channel import Channel, ChannelLostError, command_key
from pytest_gpucluster.protocol.codec import RefusedMessageError
from pytest_gpucluster.protocol.messages import Command, Quit, read_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpucluster.protocol.rank import Rank

REFUSED_PAUSE_S = 0.05


class CommandReader:
    """Commands as they arrive, for a main thread that waits in a selector."""

    def __init__(self, channel: Channel, rank: Rank, *, shared_at: str | None = None) -> None:
        """Prepare to read from the store of ``channel``.

        ``shared_at``: the address at which the agents of this node share one reader; None: this agent reads for itself.
        """
        self._channel = channel
        self._rank = rank.rank
        self._shared_at = shared_at
        self._shared: SharedCommands | CommandSharer | None = None
        self._reader: Channel | None = None
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        self._shown: set[str] = set()
        self.num_read = 0
        self.has_read_quit = False

    def start(self) -> None:
        """Connect if this agent reads from the store, and start the thread.

        Raises:
            ChannelLostError: the store is gone.
        """
        taken = take_address(self._shared_at) if self._shared_at is not None else None
        if self._shared_at is None or taken is not None:
            self._reader = self._channel.reconnect()  # a blocked read locks its connection
        if taken is not None:
            self._shared = CommandSharer(taken)
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
        if self._shared_at is not None and self._shared is None:
            self._shared = call_sharer(self._shared_at, self._channel)
        while True:
            try:
                command: Command | None = self._take()
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
            if command is None or self.has_read_quit:
                break
        if self._shared is not None:
            self._shared.close()

    def _take(self) -> Command:
        """Wait for the next command, from the agent that reads for this node or from the store."""
        key = command_key(self.num_read)
        if isinstance(self._shared, SharedCommands):
            try:
                return read_command(self._channel.verified(key, self._shared.take(self.num_read)))
            except (BrokenLineError, RefusedMessageError):
                self._shared.close()
                self._shared = None
        if self._reader is None:
            self._reader = self._channel.reconnect()
        data = self._reader.store.get(key)
        command = read_command(self._reader.verified(key, data))
        if isinstance(self._shared, CommandSharer):
            self._shared.hand_on(data)
        return command

    def _show_once(self, text: str) -> None:
        if text not in self._shown:
            self._shown.add(text)
            sys.stderr.write(text + "\n")
