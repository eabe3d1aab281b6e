"""The line between an agent and its worker, and between pytest-xdist's processes: one JSON object a line over a socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.protocol.codec import MalformedMessageError

if TYPE_CHECKING:
    import socket

    from pytest_gpucluster.protocol.codec import TypedMessage

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
"""More than any message has. What stands before the end of a line is kept in memory."""


class Wire:
    """Sends and receives messages, as long as the socket's own timeout allows."""

    def __init__(self, link: socket.socket) -> None:
        """Take over a connected stream socket."""
        self._link = link
        self._unfinished: list[bytes] = []

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._link.fileno()

    def send(self, message: TypedMessage) -> None:
        """Write one message.

        Raises:
            OSError: the other end is gone, or does not read.
        """
        self._link.sendall(message.to_json() + b"\n")

    def receive(self) -> list[bytes] | None:
        """The messages that one read completes, perhaps none, as JSON. None when the other end is closed.

        Raises:
            MalformedMessageError: a line is longer than :data:`MAX_LINE_BYTES`.
        """
        try:
            data = self._link.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._unfinished, lines[0]))
            self._unfinished = []
        self._unfinished.append(rest)
        if sum(map(len, self._unfinished)) > MAX_LINE_BYTES:
            self._unfinished = []
            raise MalformedMessageError(f"a line of more than {MAX_LINE_BYTES >> 20} MiB")
        return lines

    def close(self) -> None:
        """Close this end."""
        self._link.close()
