"""The controller's connection to the store: commands, heartbeat, and the journal for the agent that keeps a replica."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.protocol import channel
from pytest_gpucluster.protocol.channel import CONTROLLER, Address, ChannelLostError, StoreChannel, command_key, journal_key
from pytest_gpucluster.protocol.messages import JournalText, Quit
from pytest_gpucluster.protocol.rank import STOPPED, state_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

    from pytest_gpucluster.protocol.messages import Command
    from pytest_gpucluster.protocol.secret import Secret

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
            if opened.has(command_key(0)):
                raise MeasurementError(
                    f"not run: the store at {self.address.host}:{self.address.port} has the messages of an earlier run; "
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
        self.channel.put(command_key(self._num_commands), command)
        self._num_commands += 1

    def stop_beating(self) -> None:
        """End the heartbeat and its thread: a thread inside the store while Python shuts down aborts the process."""
        self._stop_beating.set()
        if self._beating.is_alive():
            self._beating.join(BYE_S)

    def _beat_forever(self) -> None:
        with contextlib.suppress(ChannelLostError):
            own = channel.connect(self.address, self._secret)
            count = 1
            own.beat(CONTROLLER, count)  # at once: an agent that gets SIGTERM looks whether there is a controller
            while not self._stop_beating.wait(BEAT_S):
                count += 1
                own.beat(CONTROLLER, count)
                own.beats([CONTROLLER])
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
                where = f"{self.address.host}:{self.address.port}"
                self.silence = self.silence or f"the store at {where} has not answered for {quiet_s:g} s and is taken for gone"
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

    def open(self, channel: StoreChannel) -> None:
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
