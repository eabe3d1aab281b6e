"""How the agents of a node share one reader of the controller's commands.

The agent that comes first takes the node's address, a Unix socket in the abstract namespace. It reads the commands from the
store, and hands each on to the others, as the controller signed it. So the store wakes and answers one reader a node. All else
an agent reads and writes by its own connection.

Where the other end is gone, or brings a command later than the store has it (killed, stopped), an agent hangs up and reads for
itself from then on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from pytest_gpucluster.protocol.channel import MOST_DIGITS, command_key
from pytest_gpucluster.protocol.wire import Wire

if TYPE_CHECKING:
    from pytest_gpucluster.protocol.channel import Address, Channel
    from pytest_gpucluster.protocol.rank import Rank
    from pytest_gpucluster.protocol.secret import Secret

LOOK_S = 3.0
"""How long a line is silent before its agent looks whether the command is in the store."""
BEHIND_S = 1.0
"""How much later than the store a line may bring a command."""
SEND_S = 1.0
"""An agent that takes nothing for so long loses its line."""
START_S, PAUSE_S = 10.0, 0.05
"""Whoever has taken the address listens as soon as it is connected to the store."""
BACKLOG = 256
CREDENTIALS = struct.Struct("3i")


def commands_address(address: Address, secret: Secret | None, rank: Rank) -> str:
    """The node's address in the abstract namespace. Other users can list it; both ends refuse them."""
    node = f"{address.host}:{address.port}/{address.run_id}/{rank.group_rank}".encode()
    digest = secret.sign("commands", node) if secret is not None else hashlib.sha256(b"commands/" + node).hexdigest()
    return f"\0gpucluster-commands-{digest}"


def _is_ours(link: socket.socket) -> bool:
    """Whether the process at the other end belongs to the same user."""
    _, user, _ = CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return bool(user == os.getuid())


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
                    if _is_ours(line) and _sent(line, b"%d\n" % self._next):
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

    def __init__(self, link: socket.socket, channel: Channel) -> None:
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


def take_address(name: str) -> socket.socket | None:
    """A socket at the node's address, which does not listen yet; None if another agent has it."""
    taken = socket.socket(socket.AF_UNIX)
    try:
        taken.bind(name)
    except OSError:
        taken.close()
        return None
    return taken


def call_sharer(name: str, channel: Channel) -> SharedCommands | None:
    """A line to the agent that has the node's address; None if it is no agent of this user, or does not serve."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        link = socket.socket(socket.AF_UNIX)
        link.settimeout(SEND_S)
        try:
            link.connect(name)
            if _is_ours(link):
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
