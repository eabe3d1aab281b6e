"""The ranks as the controller knows them: which said hello, which live, and which can run nothing any more."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpucluster.controller.replies import lost_reply, released_reply
from pytest_gpucluster.protocol.channel import ForgedMessageError, hello_key
from pytest_gpucluster.protocol.codec import MalformedMessageError
from pytest_gpucluster.protocol.messages import AgentHello, Failure
from pytest_gpucluster.protocol.rank import is_gone, machine
from pytest_gpucluster.protocol.secret import SECRET_VARIABLE
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from pytest_gpucluster.controller.call import Call
    from pytest_gpucluster.protocol.channel import StoreChannel
    from pytest_gpucluster.protocol.messages import Reply

LOOK_S = 1.0
SILENT_S = 10.0


class Members:
    """The hello, the heartbeat and the lasting failure of each rank."""

    def __init__(self) -> None:
        """No rank has said hello."""
        self.hellos: dict[int, AgentHello] = {}
        self._lost: dict[int, Failure] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._next_look_s = self._last_look_s = 0.0

    def read_hello(self, rank: int, channel: StoreChannel, *, within_s: float) -> None:
        """Read the rank's hello; without a valid one, within the time that is over now, the rank is lost or refused."""
        if not channel.has(hello_key(rank)):
            self._lost[rank] = lost_reply(f"rank {rank} never joined within {within_s:g} s", blames="node")
            return
        try:
            hello = channel.take(hello_key(rank), AgentHello.read)
            requested = {one_line(name): one_line(text) for name, text in (hello.requested or {}).items()}
            self.hellos[rank] = replace(hello, hostname=one_line(hello.hostname), requested=requested or None)
        except ForgedMessageError:
            self.refuse(rank, f"rank {rank} signs with another secret: set the same {SECRET_VARIABLE} on every node")
        except MalformedMessageError as wrong:
            self.refuse(rank, f"rank {rank} says hello in another way ({wrong}): bring every node to the same version")

    def refuse(self, rank: int, why: str) -> None:
        """Answer every later call for this rank with a refusal."""
        self._lost[rank] = replace(lost_reply(why, blames="software"), kind="refused")

    def note_lost(self, replies: Mapping[int, Reply]) -> None:
        """Answer every later call for the ranks that were lost in this one with the same failure."""
        for rank, reply in replies.items():
            if isinstance(reply, Failure) and reply.kind == "lost":
                self._lost.setdefault(rank, reply)

    def failures_before(self, call: Call) -> dict[int, Reply]:
        """The replies of ranks that the call cannot reach, and of all ranks that share a group with one of those."""
        replies: dict[int, Reply] = {rank: self._lost[rank] for rank in call.ranks if rank in self._lost}
        for group in call.groups or ():
            lost = [rank for rank in group if rank in self._lost]
            for rank in group if lost else ():
                replies.setdefault(rank, released_reply(f"rank {lost[0]} cannot take part: {self._lost[lost[0]].error}"))
        return replies

    def expected_to_leave(self, world_size: int, *, said_hello: Callable[[int], bool]) -> list[int]:
        """The ranks whose agents will say goodbye."""
        alive = [rank for rank in range(world_size) if rank not in self._lost and not self.has_died_here(rank)]
        return [rank for rank in alive if rank in self.hellos or said_hello(rank)]

    def dead_here(self) -> list[int]:
        """The ranks of this machine whose agent processes have ended."""
        return [rank for rank in self.hellos if self.has_died_here(rank)]

    def has_died_here(self, rank: int) -> bool:
        """Whether the rank's agent ran on this machine and has ended."""
        hello = self.hellos.get(rank)
        return hello is not None and hello.machine == machine() and is_gone(hello.pid)

    def silent(self, ranks: Collection[int], channel: StoreChannel) -> dict[int, Failure]:
        """The replies for ranks whose agents have died: no process here, or no heartbeat for :data:`SILENT_S`.

        Heartbeats are read at most once in :data:`LOOK_S`. After a longer pause between two looks the time starts anew.
        """
        now_s = time.monotonic()
        found = {rank: lost_reply("its agent process has ended") for rank in ranks if self.has_died_here(rank)}
        if now_s < self._next_look_s:
            return found
        self._next_look_s = now_s + LOOK_S
        beats = channel.beats(ranks)
        for rank in ranks:
            beat = beats.get(rank, b"")
            if rank not in self._beats or self._beats[rank][0] != beat or now_s - self._last_look_s > 2 * LOOK_S:
                self._beats[rank] = (beat, now_s)
            elif now_s - self._beats[rank][1] > SILENT_S:
                hostname = self.hellos[rank].hostname if rank in self.hellos else None
                found[rank] = lost_reply(f"its agent on {hostname} has been silent for {SILENT_S:g} s", blames="node")
        self._last_look_s = now_s
        return found
