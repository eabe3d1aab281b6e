"""The replies of one call as they come in, and when to stop waiting for ranks that cannot finish by themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpucluster.controller.diagnosis import is_consequence

if TYPE_CHECKING:
    from pytest_gpucluster.protocol.channel import Message

GRACE_S = {"raised": 0.4}  # a rank that raised may not be the only one; one that died will not get company
ECHO_GRACE_S = 3.0
"""Where only others' connections have closed so far: their cause may need a moment to tell what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Peers that wait for somebody who will never come.

    ``grace_s``: how long each must have been in the call; ``entered``: whether the failed one came into it, so that its peers
    may still be on their way. Both moments, here and there, are for those that are about to raise as well.
    """

    ranks: list[int]
    why: str
    grace_s: float
    entered: bool


@dataclass(slots=True, kw_only=True)
class Gathering:
    """The replies of one call as they come in."""

    waiting: set[int]
    groups: list[tuple[int, ...]]
    give_up_s: float
    replies: dict[int, Message] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    release_s: float | None = None

    def add(self, rank: int, reply: Message) -> None:
        """One rank has answered, or will not."""
        self.replies[rank] = reply
        self.waiting.discard(rank)
        if not reply["ok"]:
            release_s = time.monotonic() + _grace_s(reply)
            self.release_s = min(release_s, self.release_s or release_s)

    def to_release(self) -> Release | None:
        """Whom to release now; None: nobody, or not yet."""
        if self.release_s is None or time.monotonic() < self.release_s:
            return None
        for group in self.groups:
            failed = [rank for rank in group if rank in self.replies and not self.replies[rank]["ok"]]
            stuck = [rank for rank in group if rank in self.waiting and rank not in self.released]
            if failed and stuck:
                self.released.update(stuck)
                kind = self.replies[failed[0]]["kind"]
                entered = any(self.replies[rank].get("entered", False) for rank in failed)
                why = f"released, because rank {failed[0]} {kind}"
                return Release(ranks=stuck, why=why, grace_s=GRACE_S.get(kind, 0.0), entered=entered)
        return None


def _grace_s(reply: Message) -> float:
    return ECHO_GRACE_S if is_consequence(reply) else GRACE_S.get(reply["kind"], 0.0)


def lost_reply(why: str) -> Message:
    """In the place of an answer from a rank that nobody can reach."""
    return {"ok": False, "kind": "lost", "error": why, "output": "", "collectives": 0, "collective": ""}


def forged_reply(error: Exception) -> Message:
    """In the place of an answer that this run did not sign."""
    return {"ok": False, "kind": "refused", "error": str(error)}


def released_reply(why: str) -> Message:
    """In the place of an answer from a rank that was not even asked, because another of its group cannot take part."""
    return {**lost_reply(why), "kind": "released"}
