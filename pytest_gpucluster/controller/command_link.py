"""The controller's connection to the store: commands, heartbeat, and the journal for the agent that keeps a replica.

The ranks as the controller knows them: which said hello, which live, and which can run nothing any more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pytest_gpucluster.controller.call import Call, lost_reply
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.protocol import channel
from pytest_gpucluster.protocol.channel import Address, ChannelLostError, ForgedMessageError, StoreChannel
from pytest_gpucluster.protocol.codec import SECRET_VARIABLE, MalformedMessageError, Secret
from pytest_gpucluster.protocol.messages import AgentHello, Command, Failure, JournalText, Quit, Reply
from pytest_gpucluster.protocol.rank import STOPPED, is_gone, machine, state_of
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    import socket


BEAT_S = 1.0
BYE_S = 5.0
STORE_SILENT_S, STORE_STOPPED_S = 60.0, 20.0
"""A store that does not answer for so long is gone; the second where the torchrun that started this process is stopped.

An agent gives a store up after 60 s too. One that waits for a name server may answer nobody for long, and goes on.
"""
LOOK_S = 0.5


class CommandLink:
    """The one ordered sequence of commands to all agents."""

    def __init__(self, address: Address | None, secret: Secret | None, *, hosts_store: bool) -> None:
        """Prepare for the store at ``address``, or for one on the loopback if that is None (see :meth:`listen`).

        ``secret`` signs what is written. ``hosts_store``: this process hosts the store; otherwise torchrun does.
        """
        self._address = address
        self._secret = secret
        self._hosts_store = hosts_store
        self._listener: socket.socket | None = None
        self._channel: StoreChannel | None = None
        self._num_commands = 0
        self._stop_beating = threading.Event()
        self._num_answers = 0
        self._finished: deque[str] = deque()
        self._beating = threading.Thread(target=self._beat_forever, daemon=True)
        self._watching = threading.Thread(target=self._hang_up_if_silent, daemon=True)
        self.silence: str | None = None

    def listen(self) -> Address:
        """Take a port of the loopback for a store of this run's own, so that agents can be given its address."""
        self._listener = channel.listen_on_loopback()
        host, port = self._listener.getsockname()[:2]
        self._address = Address(host=host, port=port, run_id=secrets.token_hex(8))
        return self._address

    @property
    def address(self) -> Address:
        """Where the store is."""
        assert self._address is not None, "listen() was not called"
        return self._address

    @property
    def is_open(self) -> bool:
        """Whether the store was used already."""
        return self._channel is not None

    @property
    def channel(self) -> StoreChannel:
        """The connection, opened at first use.

        Raises:
            MeasurementError: the store has the messages of an earlier run.
            ChannelLostError: the store cannot be reached, does not answer any more, or its port is taken.
        """
        if self.silence is not None:
            raise ChannelLostError(self.silence)
        if self._channel is None:
            if not self._watching.is_alive():
                self._watching.start()
            if self._hosts_store:
                opened = channel.host_store(self.address, self._secret, listener=self._listener)
            else:
                opened = channel.connect(self.address, self._secret)
            if opened.has(channel.command_key(0)):
                raise MeasurementError(
                    f"not run: the store at {self.address} has the messages of an earlier run; "
                    "start this one with another --master-port",
                    kind="missing",
                )
            self._channel = opened
            self._beating.start()
        return self._channel

    def send(self, command: Command) -> None:
        """Write the next command; one that is for no rank is left out."""
        if not isinstance(command, Quit) and not command.ranks:
            return
        self.channel.put(channel.command_key(self._num_commands), command)
        self._num_commands += 1

    def stop_beating(self) -> None:
        """End the heartbeat and its thread: a thread inside the store while Python shuts down aborts the process."""
        self._stop_beating.set()
        if self._beating.is_alive():
            self._beating.join(BYE_S)

    def _beat_forever(self) -> None:
        with contextlib.suppress(ChannelLostError):
            own = channel.connect(self.address, self._secret)
            own.beat(channel.CONTROLLER, 0)  # at once: an agent that gets SIGTERM looks whether there is a controller
            while not self._stop_beating.wait(BEAT_S):
                own.beat(channel.CONTROLLER, self._num_answers + 1)
                own.beats([channel.CONTROLLER])
                self._num_answers += 1
                self._delete_finished(own, within_s=BEAT_S / 2)

    def forget(self, keys: Iterable[str]) -> None:
        """Have the store delete these keys soon, from the thread of the heartbeat: no call waits for it."""
        self._finished.extend(keys)

    def _delete_finished(self, own: StoreChannel, *, within_s: float) -> None:
        """Delete keys one by one, as the store does it; what is left has to wait for the next beat."""
        deadline_s = time.monotonic() + within_s
        while self._finished and time.monotonic() < deadline_s:
            own.store.delete(self._finished.popleft())

    def _hang_up_if_silent(self) -> None:
        """Runs in a thread: take a store that does not answer for one that is gone.

        Looks are counted, not timed: this process may have been stopped for a while, and not the store.
        """
        answers, quiet_s = self._num_answers, 0.0
        while not self._stop_beating.wait(LOOK_S) and (self._beating.ident is None or self._beating.is_alive()):
            answers, quiet_s = self._num_answers, quiet_s + LOOK_S if answers == self._num_answers else 0.0
            if quiet_s >= (STORE_STOPPED_S if state_of(os.getppid()) == STOPPED else STORE_SILENT_S):
                silence = f"the store at {self.address} has not answered for {quiet_s:g} s and is taken for gone"
                self.silence = self.silence or silence
                channel.hang_up(self.address)


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
        self._channel: StoreChannel | None = None
        self._next_s = 0.0

    def add(self, line: str) -> None:
        """One more line. A lost store is left to those who wait for replies."""
        if not self._is_closed:
            self._waiting.append(line)
            if time.monotonic() >= self._next_s:
                self.flush()

    def open(self, store: StoreChannel) -> None:
        """There is a replica: send the lines that waited, and from now on those that come."""
        self._channel = store
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
                part = JournalText(text=text[start : start + CHUNK_CHARACTERS])
                self._channel.put(channel.journal_key(self._num_sent), part)
                self._num_sent += 1


MEMBERS_LOOK_S = 1.0
SILENT_S = 10.0


class Members:
    """The hello, the heartbeat and the lasting failure of each rank."""

    def __init__(self) -> None:
        """No rank has said hello."""
        self.hellos: dict[int, AgentHello] = {}
        self._lost: dict[int, Failure] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._last_look_s = -MEMBERS_LOOK_S

    def read_hello(self, rank: int, store: StoreChannel, *, within_s: float) -> None:
        """Read the rank's hello; without a valid one, within the time that is over now, the rank is lost or refused."""
        key = channel.hello_key(rank)
        if not store.has(key):
            self._lost[rank] = lost_reply(f"rank {rank} never joined within {within_s:g} s", blames="node")
            return
        try:
            hello = store.take(key, AgentHello.read)
            requested = {one_line(name): one_line(text) for name, text in (hello.requested or {}).items()}
            self.hellos[rank] = replace(hello, hostname=one_line(hello.hostname), requested=requested or None)
        except ForgedMessageError:
            self.refuse(rank, f"rank {rank} signs with another secret: set the same {SECRET_VARIABLE} on every node")
        except MalformedMessageError as wrong:
            self.refuse(rank, f"rank {rank} says hello in another way ({wrong}): bring every node to the same version")

    def refuse(self, rank: int, why: str) -> None:
        """Answer every later call for this rank with a refusal."""
        self._lost[rank] = Failure(kind="refused", error=why, blames="software")

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
                error = f"rank {lost[0]} cannot take part: {self._lost[lost[0]].error}"
                replies.setdefault(rank, Failure(kind="released", error=error, blames="host"))
        return replies

    def alive(self, world_size: int) -> list[int]:
        """The ranks that are not lost, and whose agents have not ended as far as this machine knows."""
        return [rank for rank in range(world_size) if rank not in self._lost and not self.has_died_here(rank)]

    def has_died_here(self, rank: int) -> bool:
        """Whether the rank's agent ran on this machine and has ended."""
        hello = self.hellos.get(rank)
        return hello is not None and hello.machine == machine() and is_gone(hello.pid)

    def silent(self, ranks: Collection[int], channel: StoreChannel) -> dict[int, Failure]:
        """The replies for ranks whose agents have died: no process here, or no heartbeat for :data:`SILENT_S`.

        Heartbeats are read at most once in :data:`MEMBERS_LOOK_S`. After a longer pause between two looks the time starts anew.
        """
        now_s = time.monotonic()
        found = {rank: lost_reply("its agent process has ended") for rank in ranks if self.has_died_here(rank)}
        if now_s < self._last_look_s + MEMBERS_LOOK_S:
            return found
        beats = channel.beats(ranks)
        for rank in ranks:
            beat = beats.get(rank, b"")
            if rank not in self._beats or self._beats[rank][0] != beat or now_s - self._last_look_s > 2 * MEMBERS_LOOK_S:
                self._beats[rank] = (beat, now_s)
            elif now_s - self._beats[rank][1] > SILENT_S:
                hostname = self.hellos[rank].hostname if rank in self.hellos else None
                found[rank] = lost_reply(f"its agent on {hostname} has been silent for {SILENT_S:g} s", blames="node")
        self._last_look_s = now_s
        return found
