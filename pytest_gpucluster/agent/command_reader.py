"""The controller's commands, read by a thread of their own: a read blocks until the next one is written.

One agent of each node reads from the store: the one that takes the node's address first, a Unix socket in the abstract
namespace. It hands each command on to the others, as the controller signed it. So the store wakes and answers one reader a
node. All else an agent reads and writes by its own connection. Where the other end is gone, or brings a command later than the
store has it (killed, stopped), an agent hangs up and reads for itself from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

from pytest_gpucluster.protocol.channel import MOST_DIGITS, Address, ChannelLostError, StoreChannel, command_key
from pytest_gpucluster.protocol.codec import RefusedMessageError, Secret, Wire
from pytest_gpucluster.protocol.messages import Command, Quit, read_command
from pytest_gpucluster.protocol.rank import Rank, bound_to, is_own_user

LOOK_S = 3.0
"""How long a line is silent before its agent looks whether the command is in the store."""
BEHIND_S = 1.0
"""How much later than the store a line may bring a command."""
SEND_S = 1.0
"""An agent that takes nothing for so long loses its line."""
START_S, PAUSE_S = 10.0, 0.05
"""Whoever has taken the address listens as soon as it is connected to the store."""
BACKLOG = 256


def commands_address(address: Address, secret: Secret | None, rank: Rank) -> str:
    """The node's address in the abstract namespace. Other users can list it; both ends refuse them."""
    node = f"{address.host}:{address.port}/{address.run_id}/{rank.group_rank}".encode()
    digest = secret.sign("commands", node) if secret is not None else hashlib.sha256(b"commands/" + node).hexdigest()
    return f"\0gpucluster-commands-{digest}"


class CommandSharer:
    """The end of the agent that reads for its node."""

    def __init__(self, taken: socket.socket) -> None:
        """Serve agents that connect to the address that was taken."""
        taken.listen(BACKLOG)
        self._listener = taken
        self._lines: list[socket.socket] = []
        self._next = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept_forever, daemon=True).start()

    def hand_on(self, data: bytes) -> None:
        """Called with each command in order, before it is obeyed here."""
        with self._lock:
            self._next += 1
            self._lines = [line for line in self._lines if _sent(line, data + b"\n")]

    def close(self) -> None:
        """Hang up: no command comes any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for line in self._lines:
                line.close()

    def _accept_forever(self) -> None:
        with self._listener, contextlib.suppress(OSError):  # closed, or no open file is left: who comes now reads for itself
            while True:
                line, _ = self._listener.accept()
                line.settimeout(SEND_S)
                with self._lock:
                    if is_own_user(line) and _sent(line, b"%d\n" % self._next):
                        self._lines.append(line)
                    else:
                        line.close()


def _sent(line: socket.socket, data: bytes) -> bool:
    """Send. An agent that does not read loses its line, and reads for itself."""
    try:
        line.sendall(data)
    except OSError:
        line.close()
        return False
    return True


class BrokenLineError(Exception):
    """The other end is gone, or behind the store."""


class SharedCommands:
    """The end of an agent whose commands another one reads."""

    def __init__(self, link: socket.socket, channel: StoreChannel) -> None:
        """Wait for the number of the next command that will come. ``channel`` reads those before it.

        Raises:
            BrokenLineError: nothing comes.
        """
        self._wire = Wire(link)
        self._channel = channel
        self._readable = select.poll()
        self._readable.register(link, select.POLLIN)
        self._lines: deque[bytes] = deque()
        if not self._receive(LOOK_S) or not self._lines or not self._lines[0].isdigit():
            raise BrokenLineError
        self._next = int(self._lines.popleft()[:MOST_DIGITS])

    def take(self, number: int) -> bytes:
        """Wait for the command of this number. They are taken in order.

        Raises:
            BrokenLineError: it does not come.
            ChannelLostError: the store is gone.
        """
        key = command_key(number)
        if number < self._next:
            if not self._channel.has(key):
                raise BrokenLineError
            return self._channel.store.get(key)
        while len(self._lines) < 2:  # the HMAC, and the command
            if not self._receive(LOOK_S) and self._channel.has(key) and not self._receive(BEHIND_S):
                raise BrokenLineError
        return self._lines.popleft() + b"\n" + self._lines.popleft()

    def close(self) -> None:
        """Hang up."""
        self._wire.close()

    def _receive(self, within_s: float) -> bool:
        """Whether anything came in time."""
        if not self._readable.poll(1e3 * within_s):
            return False
        received = self._wire.receive()
        if received is None:
            raise BrokenLineError
        self._lines.extend(received)
        return True


def call_sharer(name: str, channel: StoreChannel) -> SharedCommands | None:
    """A line to the agent that has the node's address; None if it is no agent of this user, or does not serve."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(SEND_S)
        try:
            link.connect(name)
            if is_own_user(link):
                return SharedCommands(link, channel)
        except BrokenLineError:
            pass
        except OSError:
            link.close()
            time.sleep(PAUSE_S)
            continue
        link.close()
        return None
    return None


REFUSED_PAUSE_S = 0.05


class CommandReader:
    """Commands as they arrive, for a main thread that waits in a selector."""

    def __init__(self, channel: StoreChannel, rank: Rank, *, shared_at: str | None = None) -> None:
        """Prepare to read from the store of ``channel``.

        ``shared_at``: the address at which the agents of this node share one reader; None: this agent reads for itself.
        """
        self._channel = channel
        self._rank = rank.rank
        self._shared_at = shared_at
        self._shared: SharedCommands | CommandSharer | None = None
        self._reader: StoreChannel | None = None
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
        taken = bound_to(self._shared_at) if self._shared_at is not None else None
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
            except Exception as error:  # noqa: BLE001 -- whatever it is, no command can be trusted from here on
                if isinstance(error, RefusedMessageError) and self.num_read > 0:
                    # The secret is right: another program wrote this, and the controller overwrites it.
                    self._show_once(f"gpucluster: rank {self._rank} does not obey: {error}")
                    time.sleep(REFUSED_PAUSE_S)
                    continue
                command = None
                self._show_once(f"gpucluster: rank {self._rank} reads no more commands: {error}")
            self.put(command)  # first: who sees what follows may count on it
            self.has_read_quit = isinstance(command, Quit)
            self.num_read += 1
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
