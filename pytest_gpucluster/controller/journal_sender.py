"""Sends the lines of the journal to the agent of another node that keeps a replica."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from pytest_gpucluster.protocol.channel import ChannelLostError, journal_key
from pytest_gpucluster.protocol.messages import JournalText

if TYPE_CHECKING:
    from pytest_gpucluster.protocol.channel import Channel

CHUNK_CHARACTERS = 1024 * 1024
SEND_EVERY_S = 0.25
"""By so much the replica may be behind while tests end; a message for each line is most of a line's cost."""


class JournalSender:
    """Keeps the lines until it is known whether there is a replica; then sends them a few at a time, and all before a call."""

    def __init__(self) -> None:
        """Whether there is a replica is not known yet."""
        self._waiting: list[str] = []
        self._num_sent = 0
        self._is_closed = False
        self._channel: Channel | None = None
        self._next_s = 0.0

    def add(self, line: str) -> None:
        """One more line. A lost store is left to those who wait for replies."""
        if not self._is_closed:
            self._waiting.append(line)
            if time.monotonic() >= self._next_s:
                self.flush()

    def open(self, channel: Channel) -> None:
        """There is a replica: send the lines that waited, and from now on those that come."""
        self._channel = channel
        self.flush()

    def close(self) -> None:
        """There will be no replica."""
        self._waiting.clear()
        self._is_closed = True

    def flush(self) -> None:
        """Send what waits: before a call, which may take long or be the last, and before the run ends."""
        if self._channel is None or not self._waiting:
            return
        self._next_s = time.monotonic() + SEND_EVERY_S
        text, self._waiting = "".join(self._waiting), []
        with contextlib.suppress(ChannelLostError):
            for start in range(0, len(text), CHUNK_CHARACTERS):
                self._channel.put(journal_key(self._num_sent), JournalText(text=text[start : start + CHUNK_CHARACTERS]))
                self._num_sent += 1
