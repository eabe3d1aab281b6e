"""What the agents of a process group do together once the worker of one of them is found to hang.

Their deadlines are over at about the same time. Each marks the call as hung, looks at its worker, and holds it where it is
(SIGSTOP) before any worker ends: the end of one would wake its peers out of what they are in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pytest_gpucluster.protocol.channel import StoreChannel, hung_key, reply_key
from pytest_gpucluster.protocol.messages import Failure, HangFound, RankGroup, StartCall
from pytest_gpucluster.protocol.rank import STOPPED

if TYPE_CHECKING:
    from pytest_gpucluster.agent.heartbeat import Heartbeat
    from pytest_gpucluster.agent.worker_process import WorkerProcess

PAUSE_S = 0.05
LOOK_S = 0.5
SETTLE_S = 1.5
"""After a hang is found: when the worker is held where it is, and when its stacks are read, by which it ends.

The deadlines of one call may differ by the time between both: no worker's end finds that of a peer not held.
"""
STOPPED_SETTLE_S = 8.0
"""So long at most a stopped worker is kept for its peers' agents to show what waits for it: less than controller.MARGIN_S."""


class GroupHang:
    """The hang of one call, as the agent of one rank sees it."""

    def __init__(self, channel: StoreChannel, heartbeat: Heartbeat, call: StartCall, rank: int) -> None:
        """``rank``: of this agent; it beats while it waits."""
        self._channel = channel
        self._heartbeat = heartbeat
        self._call = call
        self._rank = rank
        group = group_of(call, rank)
        ranks = (rank,) if group is None else group.ranks
        self._peers = [one for one in ranks if one != rank]
        self._key = hung_key(call.id, ranks[0])

    def is_found(self) -> bool:
        """Whether the agent of another rank in the same group has found that its worker hangs."""
        return bool(self._peers) and self._channel.has(self._key)

    def look_at(self, worker: WorkerProcess, failure: Failure) -> Failure:
        """The failure with what the worker, which hangs, does, and its Python stacks; it ends by this, unless it is stopped.

        A worker that is stopped ends after the others have replied: it has no stacks to show, and its end would wake those
        that have.
        """
        since_s = time.monotonic()
        if self._peers:
            self._channel.put(self._key, HangFound(rank=self._rank))
        failure = worker.look(failure)
        if failure.state == STOPPED:
            replies = [reply_key(self._call.id, rank) for rank in self._peers]
            self._pause(since_s + STOPPED_SETTLE_S, is_over=lambda: all(map(self._channel.has, replies)))
            return failure
        if self._peers:
            self._pause(since_s + LOOK_S)
            worker.hold()
            self._pause(since_s + SETTLE_S)
        return replace(failure, stacks=worker.stacks())

    def _pause(self, until_s: float, *, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until then, by the monotonic clock, and beat meanwhile."""
        while (left_s := until_s - time.monotonic()) > 0 and not is_over():
            self._heartbeat.beat_if_connected()
            time.sleep(min(left_s, PAUSE_S))


def group_of(call: StartCall, rank: int) -> RankGroup | None:
    """The process group of this rank in the call; None without a group."""
    return next((group for group in call.groups or () if rank in group.ranks), None)
