"""Liveness, seen from an agent: it writes its own heartbeat and watches the controller's."""

from __future__ import annotations

import contextlib
import time

from pytest_gpucluster.protocol.channel import CONTROLLER, ChannelLostError, StoreChannel
from pytest_gpucluster.protocol.rank import Rank

BEAT_S = 1.0
BEATS_PER_LOOK = 5
AFTER_TERM_S = 25.0
CONTROLLER_SILENT_S = 60.0
PAUSE_S = 15.0
"""After so long without a look the silence counts anew: this process was stopped, or the store answered nobody."""
TERMINATED_SILENT_S = 3.0
NEVER_BEAT_S = 0.5


class Heartbeat:
    """One agent's heartbeat, and what the agent knows of the controller's."""

    def __init__(self, channel: StoreChannel, rank: Rank) -> None:
        """Beat through ``channel`` at each :meth:`beat`, at most once in :data:`BEAT_S`."""
        self._channel = channel
        self._rank = rank.rank
        self._count = 0
        self._next_s = 0.0
        self._controller_beat = b""
        self._controller_seen_s = self._looked_s = time.monotonic()
        self._terminated_s: float | None = None

    def note_termination(self) -> None:
        """Called in the signal handler of SIGTERM: look at the controller's heartbeat at once, and more often from now on."""
        if self._terminated_s is None:
            self._terminated_s = time.monotonic()
            self._next_s = 0.0

    def beat(self) -> None:
        """Called in each round of the agent's loop: write the heartbeat if it is due, and read the controller's at times.

        Raises:
            ChannelLostError: the store is gone.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + BEAT_S
        self._count += 1
        self._channel.beat(self._rank, self._count)
        if self._count % BEATS_PER_LOOK == 0 or not self._controller_beat or self._terminated_s is not None:
            beat = self._channel.beats([CONTROLLER]).get(CONTROLLER, b"")
            before_s, self._looked_s = self._looked_s, time.monotonic()
            if beat != self._controller_beat or self._looked_s - before_s > PAUSE_S:
                self._controller_beat, self._controller_seen_s = beat, self._looked_s

    def beat_if_connected(self) -> None:
        """Called during waits that end by themselves: as :meth:`beat`, and a lost store is left to the loop."""
        with contextlib.suppress(ChannelLostError):
            self.beat()

    def is_controller_lost(self) -> bool:
        """Whether the agent has to leave without the controller's quit.

        After SIGTERM that is soon: torchrun ends this node. Otherwise it is after a minute without the controller's heartbeat,
        up to the last look at it.
        """
        now_s = time.monotonic()
        if self._terminated_s is not None:
            silent_s = self._looked_s - max(self._controller_seen_s, self._terminated_s)
            patience_s = TERMINATED_SILENT_S if self._controller_beat else NEVER_BEAT_S
            if silent_s > patience_s or now_s - self._terminated_s > AFTER_TERM_S:
                return True
        return bool(self._controller_beat) and self._looked_s - self._controller_seen_s > CONTROLLER_SILENT_S
