"""Sends the lines of the journal to the agent of another node that keeps a replica."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pytest_gpucluster.protocol.channel import ChannelLostError, journal_key
from pytest_gpucluster.protocol.messages import JournalText

if TYPE_CHECKING:
    from pytest_gpucluster.protocol.channel import Channel

CHUNK_CHARACTERS = 1024 * 1024


class JournalSender:
    """Keeps the lines until it is known whether there is a replica, then sends each line at once."""

    def __init__(self) -> None:
        """Whether there is a replica is not known yet."""
        self._waiting: list[str] = []
        self._num_sent = 0
        self._is_closed = False
        self._channel: Channel | None = None

    def add(self, line: str) -> None:
        """One more line. A lost store is left to those who wait for replies."""
        if not self._is_closed:
            self._waiting.append(line)
            self._send()

    def open(self, channel: Channel) -> None:
        """There is a replica: send the lines that waited, and from now on each line at once."""
        self._channel = channel
        self._send()

    def close(self) -> None:
        """There will be no replica."""
        self._waiting.clear()
        self._is_closed = True

    def _send(self) -> None:
        if self._channel is None:
            return
        text, self._waiting = "".join(self._waiting), []
        with contextlib.suppress(ChannelLostError):
            for start in range(0, len(text), CHUNK_CHARACTERS):
                self._channel.put(journal_key(self._num_sent), JournalText(text=text[start : start + CHUNK_CHARACTERS]))
                self._num_sent += 1
