"""The line between an agent and its worker, and between pytest-xdist's processes: one JSON object a line over a socket."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.protocol.codec import MalformedMessageError

if TYPE_CHECKING:
    import socket

    from pytest_gpucluster.protocol.codec import TypedMessage

CHUNK_BYTES = 1 << 20


class Wire:
    """Sends and receives messages, as long as the socket's own timeout allows."""

    def __init__(self, link: socket.socket) -> None:
        """Take over a connected stream socket."""
        self._link = link
        self._buffer = b""

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._link.fileno()

    def send(self, message: TypedMessage) -> None:
        """Write one message.

        Raises:
            OSError: the other end is gone, or does not read.
        """
        self._link.sendall(json.dumps(message.to_json()).encode() + b"\n")

    def receive(self) -> list[Any] | None:
        """The JSON values that one read completes, perhaps none. None when the other end is closed.

        Raises:
            MalformedMessageError: a line is not JSON.
        """
        try:
            data = self._link.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError as wrong:
            raise MalformedMessageError(f"not JSON: {wrong}") from None

    def close(self) -> None:
        """Close this end."""
        self._link.close()
