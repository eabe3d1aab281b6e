"""A call as its caller describes it, and what ends it early.

The replies of one call as they arrive, and when to release ranks that cannot finish by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeAlias

import msgspec

from pytest_gpucluster.controller.diagnosis import is_consequence
from pytest_gpucluster.errors import ConfigurationError, MeasurementError, Part
from pytest_gpucluster.protocol.channel import StoreChannel, reply_key
from pytest_gpucluster.protocol.codec import RefusedMessageError, TypedMessage
from pytest_gpucluster.protocol.messages import AbortCall, Failure, FunctionName, Reply, Success, read_reply
from pytest_gpucluster.protocol.plain_data import shareable
from pytest_gpucluster.protocol.rank import spans

SETUP_S = 120.0
OnProgress: TypeAlias = Callable[[int, str, "float | None"], None]
OnOutput: TypeAlias = Callable[[int, str], None]
LAST_CALL_S = 15.0
"""When torchrun ends this node because an agent here died, a call that runs may finish within this time."""


class Call(TypedMessage, frozen=True, kw_only=True):
    """One function on some ranks. Each of ``groups`` shares a process group; None: there is no process group."""

    function: FunctionName
    ranks: Sequence[int]
    deadline_s: float
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    groups: Sequence[Sequence[int]] | None = None
    setup_s: float = SETUP_S
    any_device: bool = False
    test_arguments: tuple[str, ...] | None = None
    once: bool = False
    """Later calls of the function get the first one's replies: this run itself changes what the function reads."""
    is_startup: bool = False
    """The call belongs to the start-up, so its time does not count as measuring."""
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    """What new workers get in their environment, for this call alone (:data:`protocol.messages.CALL_VARIABLES`)."""

    def __post_init__(self) -> None:
        """Refuse a deadline that never comes.

        Raises:
            ConfigurationError: ``deadline_s`` is no finite number above zero.
        """
        is_number = isinstance(self.deadline_s, Real) and not isinstance(self.deadline_s, bool)
        if not is_number or not 0 < self.deadline_s < float("inf"):
            raise ConfigurationError(f"deadline_s={self.deadline_s!r} is not a time above zero, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """What a controller calls while it works, in the thread that makes the call.

    ``on_work(worked_s)`` once the ranks have a call, and several times a second until they have answered; ``worked_s``: since
    they have it. ``on_wait()`` several times a second while ranks are waited for; ``on_progress(rank, step, fraction)`` while
    ranks work; ``on_output(rank, text)`` with what a rank printed, after the call.
    """

    on_work: Callable[[float], None] | None = None
    on_wait: Callable[[], None] | None = None
    on_progress: OnProgress | None = None
    on_output: OnOutput | None = None


class CallClock:
    """How long calls took, and for how long all ranks waited for the controller."""

    def __init__(self) -> None:
        """No call was made yet."""
        self.measuring_s = 0.0
        self._began_s: float | None = None
        self._worked_s = 0.0

    def add(self, call: Call, *, began_s: float, ended_s: float) -> None:
        """One call was made. Both ends are of ``time.monotonic()``."""
        if not call.is_startup:
            self.measuring_s += ended_s - began_s

    def add_work(self, *, began_s: float, ended_s: float) -> None:
        """The ranks worked from the command to the last reply, as far as the controller saw it."""
        self._began_s = began_s if self._began_s is None else self._began_s
        self._worked_s += ended_s - began_s

    @property
    def waited_s(self) -> float:
        """The seconds since the first command in which no rank had anything to do; 0 before it."""
        return 0.0 if self._began_s is None else max(0.0, time.monotonic() - self._began_s - self._worked_s)


class TerminatedError(MeasurementError):
    """A signal (SIGTERM) ends the run: what is left cannot be measured."""


class EarlyEnd:
    """Whether a signal ends this run early, and how soon."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.terminated: str | None = None
        """By what the run ends at once: no call starts, and a running call ends now."""
        self.ending: str | None = None
        """Why no call starts any more, although a running call may finish; None: calls may start."""
        self._ending_s = 0.0

    def after_last_call(self, why: str) -> None:
        """End the run: no call starts, and a running call may finish within :data:`LAST_CALL_S`."""
        self._ending_s = time.monotonic()
        self.ending = why

    def check_before_call(self) -> None:
        """Called before each call.

        Raises:
            TerminatedError: no call may start.
        """
        if self.ending is not None:
            raise TerminatedError(f"not run: {self.ending}", kind="missing")

    def check(self) -> None:
        """Called while ranks are waited for.

        Raises:
            TerminatedError: the wait ends now.
        """
        if self.ending is not None and time.monotonic() > self._ending_s + LAST_CALL_S:
            raise TerminatedError(f"not run: {self.ending}", kind="missing")
        if self.terminated is not None:
            raise TerminatedError(f"not run: terminated by {self.terminated}", kind="missing")


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
    release_s: dict[int, float] = field(default_factory=dict)
    """When the peers of each rank that failed are released, by ``time.monotonic()``."""
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
        self._take(keys, channel)

    def lose(self, lost: Mapping[int, Failure], channel: StoreChannel) -> None:
        """These ranks say no more. What one has said counts, unless a rank of its group works on, which may need it."""
        if not lost:
            return
        counts = lost.keys() - {rank for group in self.groups for rank in group}
        for group in self.groups:
            keys = [reply_key(self.call_id, rank) for rank in group if rank in self.waiting]
            if not lost.keys().isdisjoint(group) and channel.arrived(keys, within_s=0.0):
                counts |= lost.keys() & {*group}
        self._take_written(counts, channel)
        for rank in self.waiting & lost.keys():
            self.add(rank, lost[rank])

    def give_up(self, channel: StoreChannel) -> None:
        """The deadline is over: read the replies that are there. A rank without one is lost."""
        self._take_written(self.waiting, channel)
        for rank in list(self.waiting):
            self.add(rank, lost_reply("its agent did not answer within the deadline"))

    def _take_written(self, ranks: Collection[int], channel: StoreChannel) -> None:
        keys = {reply_key(self.call_id, rank): rank for rank in ranks}
        self._take({key: keys[key] for key in channel.written(list(keys))}, channel)

    def _take(self, keys: Mapping[str, int], channel: StoreChannel) -> None:
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
            self.release_s[rank] = time.monotonic() + (CONSEQUENCE_GRACE_S if is_consequence(reply) else _grace_s(reply))

    def to_release(self) -> AbortCall | None:
        """The command that releases the ranks that wait for one that failed; None if there are none, or not yet."""
        now_s = time.monotonic()
        for group in self.groups if self.release_s else ():
            failed = {rank: reply for rank in group if isinstance(reply := self.replies.get(rank), Failure)}
            stuck = [rank for rank in group if rank in self.waiting and rank not in self.released]
            if stuck and any(self.release_s[rank] <= now_s for rank in failed):
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
