"""The line between an agent and its worker: one JSON object a line over a socket pair."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

CHUNK_BYTES = 1 << 20


class Wire:
    """Sends and receives messages; reading never blocks longer than asked."""

    def __init__(self, link: socket.socket) -> None:
        """Take over a connected stream socket."""
        self._link = link
        self._buffer = b""

    def fileno(self) -> int:
        """For a selector."""
        return self._link.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Write one message; raises OSError when the other end is gone."""
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """All messages that one read completes (perhaps none); None when the other end is closed."""
        try:
            data = self._link.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self._link.close()
