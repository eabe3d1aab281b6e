"""An agent's line to the voice of its node, and the frames on it.

A frame is one byte that says what it is, the length of the rest, and the rest: byte strings, each after its length. The
messages inside are those of the store, signed by the agent. So a voice can neither read nor change what a rank says.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from enum import IntEnum
from typing import TYPE_CHECKING

from pytest_gpucluster.protocol.channel import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpucluster.protocol.stores import Reply, Store

SILENT_S = 4.0
"""A voice says at least every second that it lives while somebody waits for it. After this time it is given up."""
RECEIVE_BYTES = 1 << 16
MOST_BYTES = MAX_MESSAGE_BYTES + (1 << 16)
HEADER = struct.Struct("!BI")
LENGTH = struct.Struct("!I")
CREDENTIALS = struct.Struct("3i")
TIMEVAL = struct.Struct("@ll")


class Kind(IntEnum):
    """What a frame is: a request of an agent, or an answer of the voice."""

    SET = 1
    REPLY = 2
    BEAT = 3
    CHECK = 4
    GET = 5
    COMPARE_SET = 6
    COMMAND = 7
    ANSWER = 8
    WAIT = 9


def frame(kind: Kind, *parts: bytes) -> bytes:
    """One frame as bytes."""
    rest = b"".join(LENGTH.pack(len(part)) + part for part in parts)
    return HEADER.pack(kind, len(rest)) + rest


class BadFrameError(Exception):
    """The other end does not speak in frames."""


class FrameReader:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        """Nothing has arrived."""
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, list[bytes]]]:
        """The frames that ``data`` completes.

        Raises:
            BadFrameError: this is no frame, or one that is too long.
        """
        self._data += data
        while len(self._data) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._data)
            if length > MOST_BYTES or kind not in Kind._value2member_map_:
                raise BadFrameError(f"a frame of kind {kind} and {length} bytes")
            end = HEADER.size + length
            if len(self._data) < end:
                return
            rest = bytes(self._data[HEADER.size : end])
            del self._data[:end]
            yield Kind(kind), _parts(rest)


def _parts(rest: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(rest):
        if at + LENGTH.size > len(rest):
            raise BadFrameError("half a length")
        (length,) = LENGTH.unpack_from(rest, at)
        at += LENGTH.size + length
        if at > len(rest):
            raise BadFrameError("a part longer than its frame")
        parts.append(rest[at - length : at])
    return parts


def peer_of(link: socket.socket) -> tuple[int, int]:
    """(pid, user id) of the process at the other end."""
    pid, user, _ = CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, user


def limit_waits(link: socket.socket, option: int, seconds: float) -> None:
    """Let sends or receives fail after so long. Python's own timeouts cost a system call more, each time."""
    link.setsockopt(socket.SOL_SOCKET, option, TIMEVAL.pack(int(seconds), round(seconds % 1 * 1e6)))


class OtherUserError(Exception):
    """The address of the voice belongs to another user of this node."""


def call_voice(address: str) -> socket.socket:
    """A line to the voice at ``address``.

    Raises:
        OSError: nobody listens there.
        OtherUserError: another user does.
    """
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(SILENT_S)
    try:
        link.connect(address)
        link.settimeout(None)
        limit_waits(link, socket.SO_SNDTIMEO, SILENT_S)
        limit_waits(link, socket.SO_RCVTIMEO, SILENT_S)
        user = peer_of(link)[1]
    except OSError:
        link.close()
        raise
    if user != os.getuid():
        link.close()
        raise OtherUserError
    return link


class VoicedStore:
    """The store, read and written through the node's voice; after the loss of the voice, by a connection of its own.

    What the voice had not confirmed is then written again: to write the same bytes twice changes nothing.
    """

    def __init__(self, link: socket.socket, connect: Callable[[], Store]) -> None:
        """Speak on ``link`` to the voice, which says its name first; ``connect`` makes the connection of its own."""
        self._link: socket.socket | None = link
        self._connect = connect
        self._frames = FrameReader()
        self._own: Store | None = None
        self._voice = b"".join(self._exchange(b"") or ()).decode("ascii", "replace")

    @property
    def voice(self) -> str | None:
        """The voice, None after its loss."""
        return self._voice if self._link is not None else None

    def set(self, key: str, data: bytes) -> None:
        """Write one key."""
        if self._ask(Kind.SET, key.encode(), data) is None:
            self._direct().set(key, data)

    def put_reply(self, reply: Reply) -> None:
        """Hand over a reply for the next parcel. Without a voice, have the controller look at the reply's own key."""
        if self._ask(Kind.REPLY, str(reply.rank).encode(), reply.key.encode(), reply.data) is None:
            self._direct().put_reply(reply)
            self._direct().set(reply.look_key, b"")

    def beat(self, rank: int, count: int) -> None:
        """Have a heartbeat written within the next second."""
        if self._ask(Kind.BEAT, str(rank).encode(), str(count).encode()) is None:
            self._direct().beat(rank, count)

    def get(self, key: str) -> bytes:
        """Read one key that is written."""
        return self.multi_get([key])[0]

    def command(self, number: int) -> bytes:
        """Read a command; waits until it is written."""
        found = self._ask(Kind.COMMAND, str(number).encode())
        return found[0] if found else self._direct().command(number)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read keys that are written."""
        found = self._ask(Kind.GET, *(key.encode() for key in keys))
        return found if found is not None and len(found) == len(keys) else self._direct().multi_get(keys)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are written."""
        found = self._ask(Kind.CHECK, *(key.encode() for key in keys))
        return json.loads(found[0]) is True if found else self._direct().check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the key has the value ``expected``; the value afterwards."""
        found = self._ask(Kind.COMPARE_SET, key.encode(), expected.encode(), desired.encode())
        return found[0] if found else self._direct().compare_set(key, expected, desired)

    def _ask(self, kind: Kind, *parts: bytes) -> list[bytes] | None:
        """The voice's answer; None if there is no voice any more."""
        return self._exchange(frame(kind, *parts))

    def _exchange(self, request: bytes) -> list[bytes] | None:
        if self._link is None:
            return None
        with contextlib.suppress(OSError, BadFrameError):
            self._link.sendall(request)
            while data := self._link.recv(RECEIVE_BYTES):
                for answer, answered in self._frames.feed(data):
                    if answer is Kind.ANSWER:
                        return answered
        self._link.close()
        self._link = None
        return None

    def _direct(self) -> Store:
        if self._own is None:
            self._own = self._connect()
        return self._own
