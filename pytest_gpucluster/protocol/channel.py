"""The store through which controller, agents and journal replica exchange messages.

The store is torchrun's own TCPStore, read by blocked readers (docs/decisions/0002-channel.md). Only JSON crosses. Every
message carries an HMAC when the run has a secret.

Each key lies below ``gpucluster/<run id>/`` and has one purpose. These keys are written once:

* ``cmd/<n>``: the commands, one ordered sequence. The controller writes them. If the controller dies, an agent of its node
  writes the last one (quit).
* ``who/<rank>``: the agent's hello; ``bye/<rank>``: its goodbye.
* ``res/<call>/<rank>``: the agent's reply to one call.
* ``jrn/<n>``: the lines of the journal, for the journal replica.

These keys are overwritten, and only their newest value counts:

* ``hb/<rank>``: the heartbeat, a count and not a time.
* ``prog/<rank>``: the step that the rank works on.
* ``fault/<call>``: exists as soon as any rank of the call has failed; each rank that fails writes it.

Process groups have a store prefix of their own (``worker/worker.py``); call and group ids are never
used again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import PrefixStore, TCPStore

SECRET_VARIABLE = "GPUCLUSTER_SECRET"  # noqa: S105 -- the name of a variable, not a secret
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
CONNECT_TIMEOUT_S = 60.0
FOREVER_S = 7 * 86400.0
FIRST_LOOK_S, LAST_LOOK_S = 0.0005, 0.02
BATCH_KEYS = 128

Message = dict[str, Any]


class ChannelLostError(Exception):
    """The store does not answer any more: node 0, or the process that hosts the store, is gone."""


class ForgedMessageError(Exception):
    """A message without the right HMAC, or no message at all: somebody else writes to this store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the store is, and below which prefix this run keeps its keys."""

    host: str
    port: int
    run_id: str


def encode(message: Message, *, key: str, secret: str | None) -> bytes:
    """One message as bytes: its JSON, after the HMAC-SHA256 of key and JSON (empty without a secret).

    The key is part of what is signed, so that an old message cannot be put in the place of a new one.

    Raises:
        ValueError: more than :data:`MAX_MESSAGE_BYTES`.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} cross the channel")
    return _mac(key, body, secret).encode() + b"\n" + body


def decode(data: bytes, *, key: str, secret: str | None) -> Message:
    """The message in ``data``.

    Raises:
        ForgedMessageError: the HMAC does not fit, or the rest is not a JSON object.
    """
    mac, _, body = data.partition(b"\n")
    if not hmac.compare_digest(mac, _mac(key, body, secret).encode()):
        raise ForgedMessageError("a message on the channel was not signed by this run")
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        raise ForgedMessageError("a message on the channel is not JSON") from None
    if not isinstance(message, dict):
        raise ForgedMessageError("a message on the channel is not a JSON object")
    return message


def _mac(key: str, body: bytes, secret: str | None) -> str:
    return hmac.new(secret.encode(), key.encode() + b"\n" + body, hashlib.sha256).hexdigest() if secret else ""


class Channel:
    """One connection to the store. A blocked read locks its connection, so readers and writers each have their own."""

    def __init__(self, address: Address, store: TCPStore) -> None:
        """Keep the keys of this run below its own prefix; the secret comes from the environment."""
        from torch.distributed import PrefixStore

        self.address = address
        self._tcp_store = store
        self._store: PrefixStore = PrefixStore(f"gpucluster/{address.run_id}", store)
        self._secret = os.environ.get(SECRET_VARIABLE) or None

    def put(self, key: str, message: Message) -> None:
        """Write one message under a key of its own."""
        self._guard(lambda: self._store.set(key, encode(message, key=key, secret=self._secret)))  # type: ignore[arg-type]

    def take(self, key: str) -> Message:
        """Read the message under ``key``, waiting for it as long as the connection's timeout allows."""
        return decode(self._guard(lambda: bytes(self._store.get(key))), key=key, secret=self._secret)

    def take_written(self, keys: Sequence[str]) -> list[Message | ForgedMessageError]:
        """Read the messages under keys that are written, one round trip for many; the error in place of a forged one."""
        found: list[Message | ForgedMessageError] = []
        for start in range(0, len(keys), BATCH_KEYS):
            batch = list(keys[start : start + BATCH_KEYS])
            for key, data in zip(batch, self._guard(partial(self._store.multi_get, batch)), strict=True):
                try:
                    found.append(decode(bytes(data), key=key, secret=self._secret))
                except ForgedMessageError as forged:
                    found.append(forged)
        return found

    def has(self, key: str) -> bool:
        """Whether the key was written."""
        return bool(self._guard(lambda: self._store.check([key])))

    def arrived(self, keys: Sequence[str], *, within_s: float) -> bool:
        """Look until all keys are written, at most ``within_s``; say whether they are.

        It looks rather than waits in the store, because torch 2.13 logs two warnings for every wait that runs out.
        """
        deadline_s, pause_s = time.monotonic() + within_s, FIRST_LOOK_S
        waiting = list(keys)
        while True:
            while waiting and self._all(waiting[:BATCH_KEYS]):  # what was there is not asked for again
                del waiting[:BATCH_KEYS]
            if not waiting:
                return True
            if time.monotonic() + pause_s > deadline_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_LOOK_S)

    def beat(self, rank: int, count: int) -> None:
        """Say that this rank lives; a count because clocks differ between nodes."""
        self._guard(lambda: self._store.set(f"hb/{rank}", str(count)))

    def beats(self, ranks: Sequence[int]) -> dict[int, bytes]:
        """The last count of each rank that ever beat."""
        keys = [f"hb/{rank}" for rank in ranks]
        there = [key for key in keys if self.has(key)] if not self._all(keys) else keys
        values = self._guard(lambda: self._store.multi_get(there)) if there else []
        return {int(key.partition("/")[2]): bytes(value) for key, value in zip(there, values, strict=True)}

    def _all(self, keys: list[str]) -> bool:
        return bool(self._guard(lambda: self._store.check(keys)))

    def _guard(self, operation: Any) -> Any:
        from torch.distributed import DistNetworkError

        try:
            return operation()
        except DistNetworkError as lost:
            raise ChannelLostError(f"the store at {self.address.host}:{self.address.port} is gone: {lost}") from lost


def listen_on_loopback() -> socket.socket:
    """A socket that listens on 127.0.0.1 alone; TCPStore by itself would listen on every interface."""
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


def host_store(address: Address, *, listener: socket.socket | None) -> Channel:
    """Host the store in this process, on ``listener`` or else on the address's port, and return a connection to it.

    Raises:
        ChannelLostError: the port is taken.
    """
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore

    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=CONNECT_TIMEOUT_S)}
    if listener is not None:
        options["master_listen_fd"] = listener.detach()
    try:
        return Channel(address, TCPStore(address.host, address.port, **options))
    except (DistNetworkError, DistStoreError) as taken:
        raise ChannelLostError(f"no store can be hosted at {address.host}:{address.port}: {taken}") from taken


def connect(address: Address, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Channel:
    """Connect to a store that another process hosts.

    Raises:
        ChannelLostError: nobody listens there within ``timeout_s``.
    """
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore

    try:
        store = TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (DistNetworkError, DistStoreError) as lost:
        raise ChannelLostError(f"no store answers at {address.host}:{address.port} within {timeout_s:g} s") from lost
    return Channel(address, store)


def connect_reader(address: Address) -> Channel:
    """A connection whose reads wait for ever; for a thread of its own."""
    channel = connect(address)
    channel._tcp_store.set_timeout(timedelta(seconds=FOREVER_S))  # noqa: SLF001 -- same module
    return channel
