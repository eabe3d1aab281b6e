"""The store through which controller, agents and journal replica exchange messages.

The store is torchrun's own TCPStore, read by blocked readers (docs/decisions/0002-channel.md). Only JSON crosses. Every
message carries an HMAC when the run has a secret (:mod:`~pytest_gpucluster.protocol.codec`). The HMAC covers the id of the
run, a nonce and the key, so that no message of another run, rank or direction verifies.

Each key lies below ``gpucluster/<run id>/`` and has one purpose. These keys are written once:

* ``cmd/<n>``: the commands, one ordered sequence. The controller writes them. If the controller dies, an agent of its node
  writes the last one (quit).
* ``who/<rank>``: the agent's hello; ``bye/<rank>``: its goodbye.
* ``res/<call>/<rank>``: the reply of a rank to one call.
* ``hung/<call>/<first rank>``: exists as soon as a rank of this group was found to hang in the call.
* ``jrn/<n>``: the lines of the journal, for the journal replica.
* ``lst/<group rank>``: the name of the node's listener, by the agent of its first rank, before its hello.
* ``nonce``: a random number. Whoever connects first writes it; torchrun gives the same id to many runs.

Those of a call (``res``, ``hung``, ``fault``) are deleted after the next call; otherwise a soak would fill the store.

These keys are overwritten, and only their newest value counts:

* ``hb/<rank>``: the heartbeat, a count and not a time.
* ``prog/<rank>``: the step that the rank works on.

One key grows: ``fault/<call>`` has the ranks that have failed in the call.

Process groups have a store prefix of their own (``worker/worker.py``); call and group ids are never
used again.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_gpucluster.protocol.codec import RefusedMessageError, Secret, TypedMessage

if TYPE_CHECKING:
    from torch.distributed import TCPStore


MAX_MESSAGE_BYTES = 4 * 1024 * 1024
CONNECT_TIMEOUT_S = 60.0
FOREVER_S = 7 * 86400.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.0005, 0.02
BATCH_KEYS = 128
MOST_DIGITS = 9
STILL_THERE_S = 4.0
"""How long a store that was there before may take to answer a new connection."""
CONTROLLER = -1
"""The controller's heartbeat is kept under this rank."""

T = TypeVar("T")


class ChannelLostError(Exception):
    """The store does not answer any more: node 0, or the process that hosts the store, is gone."""


class ForgedMessageError(RefusedMessageError):
    """A message without the right HMAC: another program writes to this store."""


class Address(TypedMessage, frozen=True, kw_only=True):
    """Host and port of the store, and the id of the run, below which its keys lie."""

    host: str
    port: int
    run_id: str

    def __str__(self) -> str:
        """Host and port, for messages."""
        return f"{self.host}:{self.port}"


def command_key(number: int) -> str:
    """The key of the controller's command of this number, from 0."""
    return f"cmd/{number}"


def beat_key(rank: int) -> str:
    """The key of a rank's heartbeat."""
    return f"hb/{rank}"


def hello_key(rank: int) -> str:
    """The key of an agent's hello."""
    return f"who/{rank}"


def bye_key(rank: int) -> str:
    """The key of an agent's goodbye."""
    return f"bye/{rank}"


def reply_key(call_id: str, rank: int) -> str:
    """The key of a rank's reply to one call."""
    return f"res/{call_id}/{rank}"


def fault_key(call_id: str) -> str:
    """The key that has the ranks that have failed in the call."""
    return f"fault/{call_id}"


def hung_key(call_id: str, first_rank: int) -> str:
    """The key that exists as soon as a rank of this group hangs in the call: no value of the group counts afterwards."""
    return f"hung/{call_id}/{first_rank}"


def keys_of_call(call_id: str, ranks: Iterable[int], groups: Iterable[Sequence[int]]) -> list[str]:
    """All keys of one call: of its ranks, and of its process groups, each known by its first rank."""
    replies, hangs = (reply_key(call_id, rank) for rank in ranks), (hung_key(call_id, group[0]) for group in groups)
    return [*replies, *hangs, fault_key(call_id)]


def progress_key(rank: int) -> str:
    """The key of the step that a rank is at."""
    return f"prog/{rank}"


def listener_key(group_rank: int) -> str:
    """The key of the name of a node's listener."""
    return f"lst/{group_rank}"


def journal_key(number: int) -> str:
    """The key of a part of the journal, from 0."""
    return f"jrn/{number}"


def sign(body: bytes, *, name: str, secret: Secret | None) -> bytes:
    """One message as bytes: the HMAC-SHA256 of its name and body (empty without a secret), a newline, the body.

    The name is the run's id and the key. So an old message, or one of another run, cannot replace a new one.

    Raises:
        ValueError: more than :data:`MAX_MESSAGE_BYTES`.
    """
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} cross the channel")
    return _mac(name, body, secret).encode() + b"\n" + body


def verify(data: bytes, *, name: str, secret: Secret | None) -> bytes:
    """The body of a message that :func:`sign` made.

    Raises:
        ForgedMessageError: the HMAC does not fit.
    """
    mac, _, body = data.partition(b"\n")
    if not hmac.compare_digest(mac, _mac(name, body, secret).encode()):
        raise ForgedMessageError("a message on the channel was not signed by this run")
    return body


def _mac(name: str, body: bytes, secret: Secret | None) -> str:
    return secret.sign(name, body) if secret is not None else ""


class KeyStore:
    """One connection to the store: the keys of one run, as bytes."""

    def __init__(self, address: Address, store: TCPStore) -> None:
        """Use ``store``, which is at ``address``."""
        from torch.distributed import PrefixStore

        self._store: Any = PrefixStore(f"gpucluster/{address.run_id}", store)
        self._address = address

    def set(self, key: str, data: bytes) -> None:
        """Write one key."""
        self._guard(lambda: self._store.set(key, data))

    def append(self, key: str, data: bytes) -> None:
        """Write at the end of one key."""
        self._guard(lambda: self._store.append(key, data))

    def get(self, key: str) -> bytes:
        """Read one key; waits as long as the connection's timeout allows."""
        return bytes(self._guard(lambda: self._store.get(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read keys that are written, in one round trip."""
        return [bytes(value) for value in self._guard(lambda: self._store.multi_get(list(keys)))]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are written."""
        return bool(self._guard(lambda: self._store.check(list(keys))))

    def delete(self, key: str) -> None:
        """Forget one key, if it was written."""
        self._guard(lambda: self._store.delete_key(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if the key has the value ``expected``; the value afterwards."""
        return bytes(self._guard(lambda: self._store.compare_set(key, expected, desired)))

    def _guard(self, operation: Callable[[], Any]) -> Any:
        from torch.distributed import DistNetworkError

        try:
            return operation()
        except DistNetworkError as lost:
            raise ChannelLostError(f"the store at {self._address} is gone: {lost}") from lost


class StoreChannel:
    """One connection to the store. A blocked read locks its connection, so readers and writers each have their own."""

    def __init__(self, address: Address, store: TCPStore, secret: Secret | None) -> None:
        """Use ``store`` at ``address``. ``secret`` signs, None: messages are not signed."""
        self.address = address
        self.store = KeyStore(address, store)
        self.is_signed = secret is not None
        """Whether messages carry an HMAC."""
        self._secret = secret
        self._signed_prefix = f"{address.run_id}/{self._read_nonce()}" if secret is not None else address.run_id

    def reconnect(self) -> StoreChannel:
        """Another connection to the same store whose reads wait for ever, for a thread that does nothing but read.

        Raises:
            ChannelLostError: the store is gone. This is found out first: a TCPStore that waits for its server holds Python's
                lock.
        """
        try:
            socket.create_connection((self.address.host, self.address.port), timeout=STILL_THERE_S).close()
        except OSError as gone:
            raise ChannelLostError(f"the store at {self.address} is gone: {gone}") from gone
        store = _open_store(self.address, CONNECT_TIMEOUT_S)
        channel = StoreChannel(self.address, store, self._secret)
        store.set_timeout(timedelta(seconds=FOREVER_S))
        return channel

    def put(self, key: str, message: TypedMessage) -> None:
        """Write one message.

        Raises:
            ValueError: more than :data:`MAX_MESSAGE_BYTES`.
        """
        self.store.set(key, sign(message.to_json(), name=self._name(key), secret=self._secret))

    def take(self, key: str, read: Callable[[bytes], T]) -> T:
        """Wait for the message under ``key``, as long as the connection's timeout allows, and read it with ``read``.

        Raises:
            ForgedMessageError: this run did not sign it.
            MalformedMessageError: ``read`` says so.
        """
        return read(self.verified(key, self.store.get(key)))

    def take_written(self, keys: Sequence[str], read: Callable[[bytes], T]) -> list[T | RefusedMessageError]:
        """Read the messages under keys that are written, one round trip for many. A refused message is its error."""
        found: list[T | RefusedMessageError] = []
        for start in range(0, len(keys), BATCH_KEYS):
            batch = list(keys[start : start + BATCH_KEYS])
            for key, data in zip(batch, self.store.multi_get(batch), strict=True):
                try:
                    found.append(read(self.verified(key, data)))
                except RefusedMessageError as refused:
                    found.append(refused)
        return found

    def has(self, key: str) -> bool:
        """Whether the key was written."""
        return self.store.check([key])

    def written(self, keys: Sequence[str]) -> list[str]:
        """Those of the keys that are written. Few questions where nearly all are: the store only says whether all are."""
        if not keys or self.store.check(keys):
            return list(keys)
        if len(keys) == 1:
            return []
        half = len(keys) // 2
        return [*self.written(keys[:half]), *self.written(keys[half:])]

    def arrived(self, keys: Iterable[str], *, within_s: float) -> bool:
        """Whether all keys are written within ``within_s``."""
        return not self.missing(keys, within_s=within_s)

    def missing(self, keys: Iterable[str], *, within_s: float) -> list[str]:
        """Wait at most ``within_s`` for all keys; those that may be missing still. A batch that is complete is left out.

        The store is polled: torch 2.13 logs two warnings for every wait that runs out.
        """
        deadline_s, pause_s = time.monotonic() + within_s, FIRST_PAUSE_S
        waiting = list(keys)
        while True:
            while waiting and self.store.check(waiting[:BATCH_KEYS]):
                del waiting[:BATCH_KEYS]
            if not waiting or time.monotonic() + pause_s > deadline_s:
                return waiting
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def note_fault(self, call_id: str, rank: int) -> None:
        """Have the controller read this rank's reply at once: it is a failure, which others may wait for."""
        self.store.append(fault_key(call_id), b"%d," % rank)

    def faults(self, call_id: str) -> set[int]:
        """The ranks that say that they have failed in the call. Nobody signs this: their replies are what counts."""
        key = fault_key(call_id)
        words = self.store.get(key).split(b",") if self.has(key) else []
        return {int(word) for word in words if word.isdigit() and len(word) <= MOST_DIGITS}

    def beat(self, rank: int, count: int) -> None:
        """Write this rank's heartbeat: a count, because clocks differ between nodes."""
        self.store.set(beat_key(rank), b"%d" % count)

    def beats(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """The newest heartbeat of each rank that has written one."""
        keys = {beat_key(rank): rank for rank in ranks}
        written = self.written(list(keys))
        values = self.store.multi_get(written) if written else []
        return {keys[key]: value for key, value in zip(written, values, strict=True)}

    def verified(self, key: str, data: bytes) -> bytes:
        """The JSON that was written under ``key`` as ``data``; see :func:`verify` for what is raised."""
        return verify(data, name=self._name(key), secret=self._secret)

    def _name(self, key: str) -> str:
        return f"{self._signed_prefix}/{key}"

    def _read_nonce(self) -> str:
        """The run's nonce, which the first connection writes."""
        return self.store.compare_set("nonce", "", secrets.token_hex(16)).hex()


def most_connections(*, world_size: int, num_nodes: int) -> int:
    """How many connections the store of a run has.

    Two for each rank: its agent's, and its worker's in a process group. Three for each node: torchrun's two, and that of the
    agent that reads commands. Besides there are those of the controller and of the journal replica.
    """
    return 2 * world_size + 3 * num_nodes + 3


def listen_on_loopback() -> socket.socket:
    """A socket that listens on 127.0.0.1 only. A TCPStore that opens its own socket listens on every interface."""
    return socket.create_server(("127.0.0.1", 0), backlog=1024)


def host_store(address: Address, secret: Secret | None, *, listener: socket.socket | None) -> StoreChannel:
    """Host the store in this process and connect to it. Without a ``listener`` it takes the address's port.

    Raises:
        ChannelLostError: the port is taken.
    """
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore

    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=CONNECT_TIMEOUT_S)}
    if listener is not None:
        options["master_listen_fd"] = listener.detach()
    try:
        return StoreChannel(address, TCPStore(address.host, address.port, **options), secret)
    except (DistNetworkError, DistStoreError) as taken:
        raise ChannelLostError(f"no store can be hosted at {address}: {taken}") from taken


def connect(address: Address, secret: Secret | None, *, timeout_s: float = CONNECT_TIMEOUT_S) -> StoreChannel:
    """Connect to a store that another process hosts.

    Raises:
        ChannelLostError: no store answers within ``timeout_s``.
    """
    return StoreChannel(address, _open_store(address, timeout_s), secret)


def hang_up(address: Address) -> None:
    """Shut every connection of this process to the store: whoever waits in one gets a :class:`ChannelLostError` (Linux).

    A TCPStore waits without end for the answer of a server that was stopped.
    """
    with contextlib.suppress(OSError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                link = socket.socket(fileno=int(descriptor.name))
                try:
                    if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername()[1] == address.port:
                        link.shutdown(socket.SHUT_RDWR)
                finally:
                    link.detach()


def _open_store(address: Address, timeout_s: float) -> TCPStore:
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore

    try:
        return TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (DistNetworkError, DistStoreError) as lost:
        raise ChannelLostError(f"no store answers at {address} within {timeout_s:g} s") from lost
