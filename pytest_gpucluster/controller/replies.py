"""The replies of one call as they arrive, and when to release ranks that cannot finish by themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_gpucluster.controller.diagnosis import is_consequence
from pytest_gpucluster.protocol.channel import reply_key
from pytest_gpucluster.protocol.codec import RefusedMessageError
from pytest_gpucluster.protocol.messages import AbortCall, Failure, Success, read_reply
from pytest_gpucluster.protocol.plain_data import shareable
from pytest_gpucluster.protocol.rank import spans

if TYPE_CHECKING:
    from pytest_gpucluster.errors import Part
    from pytest_gpucluster.protocol.channel import StoreChannel
    from pytest_gpucluster.protocol.messages import Reply

RAISED_GRACE_S = 0.4
"""After an exception wait this long: other ranks may raise too. After a crash there is no wait."""
CONSEQUENCE_GRACE_S = 3.0
"""If all exceptions so far only say that a connection closed, the rank with the cause may need this long to report it."""


@dataclass(slots=True, kw_only=True)
class PendingReplies:
    """The replies of one call as they arrive."""

    call_id: str
    waiting: set[int]
    groups: list[tuple[int, ...]]
    give_up_s: float
    replies: dict[int, Reply] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    release_s: float | None = None
    complete_s: float | None = None
    """When all replies that were waited for were there, by ``time.monotonic()``; they are read afterwards."""
    _known: dict[bytes, Reply] = field(default_factory=dict)
    _missing: dict[str, int] | None = None
    """The ranks that wait, by the keys of their replies, but for those whose replies are known to be there."""

    def receive(self, channel: StoreChannel, *, within_s: float) -> None:
        """Wait for all replies. Read those of all ranks once all are there, and before that those of ranks that have failed."""
        keys = {reply_key(self.call_id, rank): rank for rank in self.waiting}
        missing = keys if self._missing is None else {key: rank for key, rank in self._missing.items() if rank in self.waiting}
        self._missing = {key: keys[key] for key in channel.missing(missing, within_s=within_s)}
        self.complete_s = None if self._missing else time.monotonic()
        if self._missing:
            failed = channel.faults(self.call_id)
            keys = {key: keys[key] for key in channel.written([key for key, rank in keys.items() if rank in failed])}
        for rank, reply in zip(keys.values(), channel.take_written(list(keys), self._read), strict=True):
            self.add(rank, forged_reply(reply) if isinstance(reply, RefusedMessageError) else reply)

    def _read(self, data: bytes) -> Reply:
        """A rank's answer. Ranks that say the same share one, unless somebody could change its value, or a list in it.

        Every rank of a collective measurement returns the same: in a large group nearly all of what is kept.
        """
        reply = self._known.get(data) or read_reply(data)
        if data not in self._known and shareable(reply.value if isinstance(reply, Success) else None):
            self._known[data] = reply
        return reply

    def add(self, rank: int, reply: Reply) -> None:
        """Called when a rank has answered, or when it is known that it never will."""
        self.replies[rank] = reply
        self.waiting.discard(rank)
        if isinstance(reply, Failure):
            release_s = time.monotonic() + (CONSEQUENCE_GRACE_S if is_consequence(reply) else _grace_s(reply))
            self.release_s = min(release_s, self.release_s or release_s)

    def to_release(self) -> AbortCall | None:
        """The command that releases the ranks that wait for one that failed; None if there are none, or not yet."""
        if self.release_s is None or time.monotonic() < self.release_s:
            return None
        for group in self.groups:
            failed = {rank: reply for rank in group if isinstance(reply := self.replies.get(rank), Failure)}
            stuck = [rank for rank in group if rank in self.waiting and rank not in self.released]
            if failed and stuck:
                self.released.update(stuck)
                first, failure = next(iter(failed.items()))
                return AbortCall(
                    id=self.call_id,
                    ranks=spans(stuck),
                    why=f"released, because rank {first} {failure.kind}",
                    grace_s=_grace_s(failure),
                    entered=any(reply.entered for reply in failed.values()),
                )
        return None


def _grace_s(failure: Failure) -> float:
    return RAISED_GRACE_S if failure.kind == "raised" else 0.0


def lost_reply(why: str, *, blames: Part = "host") -> Failure:
    """The reply in place of one from a rank that cannot be reached."""
    return Failure(kind="lost", error=why, blames=blames)


def forged_reply(error: Exception) -> Failure:
    """The reply in place of one that this run did not sign, or that is no message."""
    return Failure(kind="refused", error=str(error), blames="software")


def released_reply(why: str) -> Failure:
    """The reply of a rank that was not asked, because another rank of its group cannot take part."""
    return replace(lost_reply(why), kind="released")
