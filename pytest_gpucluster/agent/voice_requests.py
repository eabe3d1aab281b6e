"""What the agents of a node ask of its voice, from the frame that arrives to the answer."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpucluster.agent.voice_link import BadFrameError, FrameReader, Kind, frame

if TYPE_CHECKING:
    from pytest_gpucluster.protocol.channel import Channel

TICK_S = 1.0
HOLD_S = 0.003
"""How long the first reply waits for those of the other ranks."""
BEAT_HOLD_S = 0.5
"""How long a heartbeat waits for those of the other ranks."""
KEPT_COMMANDS = 64
ANY = 0
NUM_PARTS = {Kind.SET: 2, Kind.REPLY: 3, Kind.BEAT: 2, Kind.CHECK: ANY, Kind.GET: ANY, Kind.COMPARE_SET: 3, Kind.COMMAND: 1}


@dataclass(slots=True, eq=False)
class Line:
    """The voice's end of one line of an agent, whose ``pid`` is 0 in another pid namespace."""

    link: socket.socket
    pid: int
    frames: FrameReader = field(default_factory=FrameReader)
    waits: bool = False
    """Whether a request is not answered yet."""
    reads_commands: bool = False
    last_command: int = -1
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, *parts: bytes) -> None:
        """Answer the request."""
        self.waits = False
        self._send(frame(Kind.ANSWER, *parts))

    def say_wait(self) -> None:
        """Say that the voice lives, if the agent waits."""
        if self.waits:
            self._send(frame(Kind.WAIT))

    def _send(self, data: bytes) -> None:
        """Send; an agent that does not read any more loses its line."""
        with self._sending:
            try:
                self.link.sendall(data)
            except OSError:
                with contextlib.suppress(OSError):
                    self.link.shutdown(socket.SHUT_RDWR)  # the thread that reads sees the end, and closes


@dataclass(frozen=True, slots=True)
class Request:
    """What an agent asks of the store: ``words`` are keys and numbers, ``data`` is what a set or a reply writes."""

    line: Line
    kind: Kind
    words: list[str]
    data: bytes = b""

    @classmethod
    def read(cls, line: Line, kind: Kind, parts: list[bytes]) -> Request:
        """The request in a frame.

        Raises:
            BadFrameError: this is no request.
            ValueError: it has no right words.
        """
        if NUM_PARTS.get(kind, -1) not in (len(parts), ANY):
            raise BadFrameError(f"a request of kind {kind} and {len(parts)} parts")
        if kind not in (Kind.SET, Kind.REPLY):
            return cls(line, kind, [part.decode() for part in parts])
        if kind is Kind.REPLY:
            parts[-1].decode("ascii")
        return cls(line, kind, [part.decode() for part in parts[:-1]], parts[-1])


@dataclass(frozen=True, slots=True)
class Batch:
    """What the store is asked at one time, and the newest heartbeat of each rank if they are due."""

    requests: list[Request]
    beats: dict[int, int]


class Gathering:
    """What agents ask, until it is handed to the thread that uses the store. Replies and heartbeats wait for their like."""

    def __init__(self) -> None:
        """Nothing was asked."""
        self._requests: list[Request] = []
        self._beats: dict[int, int] = {}
        self._only_replies = True
        self._held_until_s = self._beats_due_s = math.inf

    def add(self, request: Request) -> None:
        """One more request."""
        if not self._requests:
            self._held_until_s = time.monotonic() + HOLD_S
        self._only_replies = self._only_replies and request.kind is Kind.REPLY
        self._requests.append(request)

    def add_beat(self, rank: int, count: int) -> None:
        """The newest heartbeat of a rank."""
        self._beats[rank] = count
        if self._beats_due_s == math.inf:
            self._beats_due_s = time.monotonic() + BEAT_HOLD_S

    def due_s(self, num_writers: int) -> float:
        """When to hand over, by the monotonic clock. ``num_writers``: how many agents may reply."""
        if self._requests and not (self._only_replies and len(self._requests) < num_writers):
            return 0.0
        return min(self._held_until_s, self._beats_due_s)

    def take(self) -> Batch:
        """What was gathered, and the heartbeats if they are due."""
        beats = {}
        if self._beats_due_s <= time.monotonic():
            beats, self._beats_due_s = dict(self._beats), math.inf
        batch = Batch(self._requests, beats)
        self._requests, self._only_replies, self._held_until_s = [], True, math.inf
        return batch


class Commands:
    """The commands in their order, each read once, and the agents that wait for the next one."""

    def __init__(self) -> None:
        """None was read."""
        self._next = 0
        self._kept: deque[bytes] = deque(maxlen=KEPT_COMMANDS)
        self._waiting: dict[Line, int] = {}
        self._lock = threading.Lock()

    def ask(self, line: Line, number: int, *, again: bool) -> bool:
        """Answer with the command of this number as soon as it is there.

        False: the store must be asked, because the command was read too long ago, or because the agent refused it and asks
        ``again``.

        Raises:
            ValueError: there is no such number.
        """
        if number < 0:
            raise ValueError(number)
        with self._lock:
            if number >= self._next:
                self._waiting[line] = number
                return True
            age = self._next - number
            kept = self._kept[-age] if age <= len(self._kept) and not again else None
        if kept is not None:
            line.answer(kept)
        return kept is not None

    def forget(self, line: Line) -> None:
        """Called when a line has ended."""
        with self._lock:
            self._waiting.pop(line, None)

    def read(self, reader: Channel) -> None:
        """Read every command, and hand it to those that wait for it."""
        while True:
            data = reader.store.command(self._next)
            with self._lock:
                self._kept.append(data)
                served = [line for line, number in self._waiting.items() if number == self._next]
                self._next += 1
                for line in served:
                    del self._waiting[line]
            for line in served:
                line.answer(data)
