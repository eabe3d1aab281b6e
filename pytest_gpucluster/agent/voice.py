"""The voice of a node: one agent whose two connections to the store serve all agents of the node.

The agent that comes first takes the address of the voice, a Unix socket in the abstract namespace. The others find it taken
and speak through it. Replies that come together leave as one parcel, heartbeats as one message a second, and each command
is read once. A rank that loses the voice (killed, stopped, unreachable) goes on with a connection of its own.

Three threads of the agent do the work. One reads what the other agents send, and never waits for the store, so that it can
always say that the voice lives. One writes to the store, and one waits for the next command.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

from pytest_gpucluster.agent.voice_link import RECEIVE_BYTES, BadFrameError, Kind, limit_waits, peer_of
from pytest_gpucluster.agent.voice_requests import TICK_S, Batch, Commands, Gathering, Line, Request
from pytest_gpucluster.protocol.channel import ChannelLostError, beat_key, parcel_key
from pytest_gpucluster.protocol.stores import Parcel

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.protocol.channel import Channel

PARCEL_BYTES = 256 * 1024
"""A larger reply is written under its own key, and a larger parcel is divided."""
POLL_S = 0.01
SEND_S = 1.0
"""An agent that takes nothing for so long loses its line."""


class Voice:
    """Serves the agents of one node until its store is gone or its process ends."""

    def __init__(self, listener: socket.socket, connect: Callable[[], tuple[Channel, Channel]]) -> None:
        """Serve at ``listener``. ``connect`` opens the connections to the store: to write, and to wait for commands."""
        self.name = f"v{secrets.token_hex(8)}"
        self._listener = listener
        self._connect = connect
        self._lines: dict[int, Line] = {}
        self._selector = selectors.DefaultSelector()
        self._gathering = Gathering()
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._commands = Commands()
        self._num_parcels = 0
        self._is_closed = threading.Event()

    def start(self) -> None:
        """Start the threads."""
        self._listener.setblocking(False)  # noqa: FBT003 -- its only way
        self._selector.register(self._listener, selectors.EVENT_READ)
        for work in (self._serve, self._use_store):
            threading.Thread(target=self._until_closed, args=(work,), daemon=True).start()

    def close(self) -> None:
        """End all lines."""
        self._is_closed.set()
        self._batches.put(None)
        self._listener.close()
        for line in list(self._lines.values()):
            with contextlib.suppress(OSError):
                line.link.shutdown(socket.SHUT_RDWR)

    def wait_until_unused(self, within_s: float) -> None:
        """Wait until no other process has a line, so that this one may end."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s and not self._is_closed.is_set():
            if all(line.pid == os.getpid() for line in list(self._lines.values())):
                return
            time.sleep(POLL_S)

    def _until_closed(self, work: Callable[[], None]) -> None:
        """Work; when any thread ends, all lines end, and each agent goes on by itself."""
        try:
            with contextlib.suppress(ChannelLostError):
                work()
        finally:
            self.close()

    # The thread that reads what agents send.

    def _serve(self) -> None:
        next_s = time.monotonic() + TICK_S
        while not self._is_closed.is_set():
            num_writers = sum(not line.reads_commands for line in self._lines.values())
            due_s = min(next_s, self._gathering.due_s(num_writers))
            for key, _ in self._selector.select(max(0.0, due_s - time.monotonic())):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(self._lines[key.fd])
            if self._gathering.due_s(num_writers) <= time.monotonic():
                self._batches.put(self._gathering.take())
            if next_s <= time.monotonic():
                next_s = time.monotonic() + TICK_S
                for line in self._lines.values():
                    line.say_wait()
        for line in list(self._lines.values()):
            self._end(line)

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:
            return
        pid, user = peer_of(link)
        if user != os.getuid():
            link.close()
            return
        limit_waits(link, socket.SO_SNDTIMEO, SEND_S)
        line = Line(link, pid)
        self._lines[link.fileno()] = line
        self._selector.register(link, selectors.EVENT_READ)
        line.answer(self.name.encode())

    def _receive(self, line: Line) -> None:
        try:
            data = line.link.recv(RECEIVE_BYTES)
            for kind, parts in line.frames.feed(data):
                line.waits = True
                self._take(Request.read(line, kind, parts))
        except (OSError, BadFrameError, ValueError):
            data = b""
        if not data:
            self._end(line)

    def _end(self, line: Line) -> None:
        self._selector.unregister(line.link)
        del self._lines[line.link.fileno()]
        self._commands.forget(line)
        line.link.close()

    def _take(self, request: Request) -> None:
        line = request.line
        if request.kind is Kind.COMMAND:
            line.reads_commands, number = True, int(request.words[0])
            is_again, line.last_command = number <= line.last_command, number
            if not self._commands.ask(line, number, again=is_again):
                self._gathering.add(request)
        elif request.kind is Kind.BEAT:
            rank, count = map(int, request.words)
            self._gathering.add_beat(rank, count)
            line.answer()
        else:
            if request.kind is Kind.REPLY:
                int(request.words[0])
            self._gathering.add(request)

    # The threads that use the store.

    def _use_store(self) -> None:
        writer, reader = self._connect()
        threading.Thread(target=self._until_closed, args=(lambda: self._commands.read(reader),), daemon=True).start()
        while (batch := self._batches.get()) is not None:
            if batch.beats:
                writer.store.set(beat_key(self.name), json.dumps(batch.beats).encode())
            replies = [request for request in batch.requests if request.kind is Kind.REPLY]
            if replies:
                self._write_parcels(writer, replies)
            for request in batch.requests:
                if request.kind is not Kind.REPLY:
                    request.line.answer(*_obey(request, writer))

    def _write_parcels(self, writer: Channel, requests: list[Request]) -> None:
        parcel: list[tuple[int, str, str | None]] = []
        num_bytes = 0
        for request in requests:
            (rank, key), data = request.words, request.data
            is_large = len(data) > PARCEL_BYTES
            if is_large:
                writer.store.set(key, data)
            parcel.append((int(rank), key, None if is_large else data.decode()))
            num_bytes += 0 if is_large else len(data)
            if num_bytes > PARCEL_BYTES:
                self._write_parcel(writer, parcel)
                parcel, num_bytes = [], 0
        if parcel:
            self._write_parcel(writer, parcel)
        for request in requests:
            request.line.answer()

    def _write_parcel(self, writer: Channel, replies: list[tuple[int, str, str | None]]) -> None:
        writer.put(parcel_key(self.name, self._num_parcels), Parcel(replies=tuple(replies)))
        self._num_parcels += 1


def _obey(request: Request, writer: Channel) -> list[bytes]:
    """Do what the request asks of the store; its answer."""
    store, words = writer.store, request.words
    if request.kind is Kind.SET:
        store.set(words[0], request.data)
        return []
    if request.kind is Kind.COMPARE_SET:
        key, expected, desired = words
        return [store.compare_set(key, expected, desired)]
    if request.kind is Kind.COMMAND:
        return [store.command(int(words[0]))]  # one that was written
    is_written = store.check(words)
    if request.kind is Kind.GET:
        return store.multi_get(words) if words and is_written else []
    return [json.dumps(is_written).encode()]
