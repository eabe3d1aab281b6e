"""Finds out which nodes are there before torchrun starts: each node's launcher says hello to the launcher of node 0.

torchrun starts no Python before all nodes have joined, and waits for them without an end. This rendezvous has a deadline, and
names the nodes that did not come. It uses ``--master-port``, before torchrun takes the port over. So the rendezvous tries what
torchrun will need: that address, that port, no firewall between.

A TCPStore would not do here: it does not see that a node has left again, and it cannot tell a refused node why.

A message is two lines: the HMAC (empty without GPUCLUSTER_SECRET) and a JSON object
(:mod:`~pytest_gpucluster.protocol.channel` signs and checks them). Node 0 sends ``{"challenge", "left_s"}`` at once. The
other node sends ``{"hello": {...}, "nonce"}``. Node 0 answers ``{"t": "go"}``, with the ``secret`` of the run if nobody set
one, or ``{"t": "end", "why"}``. Anything else that arrives on the port is dropped, and nothing of it is executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, TypeVar

from msgspec import Meta
from msgspec.structs import asdict

from pytest_gpucluster.errors import ConfigurationError, GpuclusterError
from pytest_gpucluster.protocol.channel import ForgedMessageError, sign, verify
from pytest_gpucluster.protocol.codec import SECRET_VARIABLE, SHOWN_CHARACTERS, MalformedMessageError, Secret, TypedMessage
from pytest_gpucluster.text import one_line

MAX_MESSAGE_BYTES = 4096
MAX_STRANGERS = 64
LOOK_S = 0.5
HELLO_S = 10.0
CONNECT_S = 5.0
PAUSE_S = 0.5
MARGIN_S = 10.0
MAX_WAIT_S = 7 * 86400.0
GOODBYE_S = 2.0
WELCOME = "welcome"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEAD_AFTER = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""Seconds until the first probe and between two, and how many may stay without an answer."""

Notice = Callable[[str], None]
JsonObject: TypeAlias = "dict[str, Any]"
Message = TypeVar("Message", bound=TypedMessage)


class NotJoinedError(GpuclusterError):
    """This node cannot take part: node 0 was not reached, refused this node, or ended the wait."""


class _NoAnswerError(Exception):
    """The other side closed the connection, or sent more than a message may have."""


class Hello(TypedMessage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a launcher knows: its own node, the shape of the whole job, and which start of a Slurm job it belongs to."""

    node_rank: int
    hostname: Annotated[str, Meta(max_length=255)]
    num_nodes: int
    num_local: int
    start: Annotated[str, Meta(max_length=64)] = ""

    def complaint_about(self, other: Hello) -> str | None:
        """Why ``other`` cannot join this node 0; None if it can."""
        if self.start != other.start:
            starts = f"{other.start or 'no job'}, this is {self.start or 'no job'}"
            return f"the launcher on {other.hostname} belongs to another start of the job ({starts}): end it"
        for option, ours, theirs in (
            ("--nnodes", self.num_nodes, other.num_nodes),
            ("--nproc-per-node", self.num_local, other.num_local),
        ):
            if ours != theirs:
                return f"node {other.node_rank} says {option} {theirs}, node 0 says {ours}: give every node the same"
        if not 0 < other.node_rank < self.num_nodes:
            return f"--node-rank {other.node_rank} is not one of 1 to {self.num_nodes - 1}"
        return None


class Welcome(TypedMessage, frozen=True, kw_only=True):
    """What node 0 sends first. ``left_s``: how long it will wait at most."""

    challenge: str
    left_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)]


class Joining(TypedMessage, frozen=True, kw_only=True):
    """What another node sends then. Challenge and nonce are the key of the answer."""

    hello: Hello
    nonce: str

    def __post_init__(self) -> None:
        """Refuse names that act on a screen.

        Raises:
            ValueError: there is one.
        """
        if not (self.hello.hostname + self.hello.start).isprintable():
            raise ValueError("no name of a host, or of a start")


class Answer(TypedMessage, frozen=True, kw_only=True):
    """What node 0 sends last. ``t``: ``go``, or ``end`` with the reason."""

    t: str
    why: str | None = None
    secret: str | None = None


# Node 0.


@dataclass(slots=True, kw_only=True, eq=False)
class _Peer:
    """One connection to node 0; ``hello`` is None until a valid one has arrived."""

    connection: socket.socket
    address: str
    challenge: str
    since_s: float
    received: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None
    nonce: str = ""


class Meeting:
    """Node 0's side: listens until all nodes are there or the time is up."""

    def __init__(self, own: Hello, *, host: str, port: int, notice: Notice) -> None:
        """Listen on the port.

        Raises:
            ConfigurationError: the port is in use, or this user may not use it.
        """
        self._own = own
        self._notice = notice
        self._listener = _listen(host, port)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: set[_Peer] = set()
        self._joined: dict[int, _Peer] = {}
        self._reported: set[str] = set()

    @property
    def hostnames(self) -> dict[int, str]:
        """Hostname by node rank of the nodes that are here, this one included."""
        others = {rank: peer.hello.hostname for rank, peer in self._joined.items() if peer.hello is not None}
        return {0: self._own.hostname, **others}

    @property
    def is_complete(self) -> bool:
        """Whether all nodes are here."""
        return len(self._joined) == self._own.num_nodes - 1

    def gather(self, *, within_s: float) -> None:
        """Receive hellos until all nodes are here, at most ``within_s``."""
        deadline_s = time.monotonic() + within_s
        while True:
            left_s = deadline_s - time.monotonic()
            events = self._selector.select(0 if self.is_complete else max(0.0, min(left_s, LOOK_S)))
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept(max(0.0, left_s))
                else:
                    self._receive_from(key.data)
            self._drop_silent()
            if left_s <= 0 or (self.is_complete and not events):
                return

    def end(self, message: JsonObject) -> None:
        """Send ``message`` to all nodes that are here and close.

        The other side closes its connection first, so that no connection of ours keeps the port.
        """
        joined = list(self._joined.values())
        for peer in joined:
            self._send(peer, message)
        deadline_s = time.monotonic() + GOODBYE_S
        for peer in joined:
            peer.connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            with contextlib.suppress(OSError):
                peer.connection.recv(MAX_MESSAGE_BYTES)
        self.close()

    def close(self) -> None:
        """Give the port back; a node that still waits sees its connection closed."""
        for peer in list(self._peers):
            self._drop(peer)
        self._selector.close()
        self._listener.close()

    def _accept(self, left_s: float) -> None:
        """Called when the listener has a connection."""
        try:
            connection, address = self._listener.accept()
        except OSError:
            return  # the other side closed, or this process has no file descriptor left; a launcher tries again
        if len(self._peers) - len(self._joined) >= MAX_STRANGERS:
            connection.close()
            return
        connection.settimeout(0)  # never waits
        _notice_death(connection)
        peer = _Peer(connection=connection, address=str(address[0]), challenge=secrets.token_hex(16), since_s=time.monotonic())
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        with contextlib.suppress(OSError):
            connection.sendall(_frame({"challenge": peer.challenge, "left_s": round(left_s, 1)}, key=WELCOME))

    def _receive_from(self, peer: _Peer) -> None:
        """Called when a connection has bytes, or was closed."""
        try:
            data = peer.connection.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.received += data
        if not data or peer.hello is not None:  # after its hello a node sends nothing more
            self._leave(peer)
        elif len(peer.received) > MAX_MESSAGE_BYTES:
            self._drop(peer)
        elif peer.received.count(b"\n") >= 2:
            self._read_hello_from(peer)

    def _read_hello_from(self, peer: _Peer) -> None:
        """Called when a whole message has arrived."""
        try:
            joining = _read(bytes(peer.received), Joining, key=peer.challenge)
        except ForgedMessageError as error:
            self._notice_once(f"{peer.address} said no hello of this run ({error})")
            self._drop(peer)
            return
        hello, peer.nonce = joining.hello, joining.nonce
        complaint = self._own.complaint_about(hello)
        if complaint is None and hello.node_rank in self._joined:
            complaint = f"node rank {hello.node_rank} is here already, from {self.hostnames[hello.node_rank]}"
        if complaint is not None:
            self._notice_once(f"{hello.hostname} cannot join: {complaint}")
            self._send(peer, {"t": "end", "why": complaint})
            self._drop(peer)
            return
        peer.hello = hello
        self._joined[hello.node_rank] = peer
        self._notice(f"node {hello.node_rank} ({hello.hostname}) is here: {len(self._joined) + 1} of {self._own.num_nodes}")

    def _notice_once(self, text: str) -> None:
        """Report what a stranger caused once, and at most :data:`MAX_STRANGERS` such texts."""
        if text not in self._reported and len(self._reported) < MAX_STRANGERS:
            self._reported.add(text)
            self._notice(text)

    def _leave(self, peer: _Peer) -> None:
        if peer.hello is not None:
            self._notice(f"node {peer.hello.node_rank} ({peer.hello.hostname}) has left again")
        self._drop(peer)

    def _drop_silent(self) -> None:
        now_s = time.monotonic()
        for peer in [peer for peer in self._peers if peer.hello is None and now_s - peer.since_s > HELLO_S]:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        if peer.hello is not None:
            self._joined.pop(peer.hello.node_rank, None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def _send(self, peer: _Peer, message: JsonObject) -> None:
        with contextlib.suppress(OSError):
            peer.connection.sendall(_frame(message, key=_answer_key(peer.challenge, peer.nonce)))


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens on all interfaces, as torchrun's store does; on the loopback only if ``host`` is the loopback."""
    try:
        if host in LOOPBACK:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise ConfigurationError(
            f"port {port} cannot be used on this node: {os.strerror(error.errno or 0)}; say another --master-port, the same on "
            "every node"
        ) from None


# The other nodes.


def join(own: Hello, *, host: str, port: int, within_s: float, notice: Notice) -> str | None:
    """Say hello to node 0, again and again until it answers; return when node 0 says go.

    Returns the secret that node 0 made for this run, None if it made none.

    ``within_s`` is the time to reach node 0. How long node 0 then waits for others is its own deadline.

    Raises:
        NotJoinedError: not reached in time, or node 0 ended the wait.
    """
    deadline_s = time.monotonic() + within_s
    problem = ""
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(left_s, CONNECT_S)) as connection:
                key, left_s = _hello(connection, own)
                notice(f"node 0 is reached; it waits {left_s:g} s more for whoever is not there")
                return _await_go(connection, key, within_s=left_s + MARGIN_S)
        except (OSError, _NoAnswerError, ForgedMessageError) as error:
            known = (text for kind, text in PROBLEMS.items() if isinstance(error, kind))
            if problem != (problem := next(known, str(error))):
                notice(f"waiting for node 0 at {host}:{port}: {problem}")
            time.sleep(max(0.0, min(PAUSE_S, deadline_s - time.monotonic())))
    raise NotJoinedError(unreached(host, port, within_s=within_s, problem=problem))


def _hello(connection: socket.socket, own: Hello) -> tuple[str, float]:
    """Say hello; returns the key of node 0's answer, and how long node 0 will wait at most, in seconds."""
    welcome, nonce = _receive(connection, Welcome, key=WELCOME, within_s=CONNECT_S), secrets.token_hex(16)
    connection.sendall(_frame({"hello": asdict(own), "nonce": nonce}, key=welcome.challenge))
    return _answer_key(welcome.challenge, nonce), welcome.left_s


def _await_go(connection: socket.socket, key: str, *, within_s: float) -> str | None:
    _notice_death(connection)
    try:
        answer = _receive(connection, Answer, key=key, within_s=within_s)
    except (OSError, _NoAnswerError, ForgedMessageError) as error:
        raise NotJoinedError(f"node 0 was reached, and then its launcher went away ({error}); nothing was started") from None
    if answer.t != "go":
        raise NotJoinedError(f"nothing was started: {answer.why}")
    return answer.secret


def unreached(host: str, port: int, *, within_s: float, problem: str) -> str:
    """The message when node 0 did not answer, with what to check."""
    addresses: list[str] = []
    with contextlib.suppress(OSError):
        addresses = list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))
    return (
        f"node 0's launcher was not reached at {host}:{port} within {within_s:g} s: {problem}\n"
        f"  address: is --master-addr node 0's, as this node sees it? {host} is {', '.join(addresses) or 'unknown'} here\n"
        f"  port: does `gpucluster launch --run --node-rank 0` run there, with --master-port {port}?\n"
        f"  firewall: is TCP port {port} open from this node to that one? `nc -vz {host} {port}` shows it"
    )


PROBLEMS: dict[type[Exception], str] = {
    ConnectionRefusedError: "connection refused, nothing listens there",
    TimeoutError: "no answer (a wrong address, or a firewall that drops packets)",
    socket.gaierror: "no such host",
    ForgedMessageError: f"what answers there is not this run's launcher: another program, or another {SECRET_VARIABLE}",
}


# Both sides.


def _frame(message: JsonObject, *, key: str) -> bytes:
    return sign(json.dumps(message).encode(), name=f"joining/{key}", secret=Secret.read()) + b"\n"


def _read(data: bytes, kind: type[Message], *, key: str) -> Message:
    mac, _, rest = data.partition(b"\n")
    body = rest.partition(b"\n")[0]
    try:
        return kind.read(verify(mac + b"\n" + body, name=f"joining/{key}", secret=Secret.read()))
    except MalformedMessageError as wrong:
        raise ForgedMessageError(one_line(str(wrong)[:SHOWN_CHARACTERS])) from None


def _answer_key(challenge: str, nonce: str) -> str:
    return f"{challenge}/{nonce}"


def _receive(connection: socket.socket, kind: type[Message], *, key: str, within_s: float) -> Message:
    """Receive one whole message, at most ``within_s``."""
    received = bytearray()
    deadline_s = time.monotonic() + within_s
    while received.count(b"\n") < 2:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        data = connection.recv(MAX_MESSAGE_BYTES)
        received += data
        if not data:
            raise _NoAnswerError("the connection was closed")
        if len(received) > MAX_MESSAGE_BYTES:
            raise ForgedMessageError("more than a message may have")
    return _read(bytes(received), kind, key=key)


def _notice_death(connection: socket.socket) -> None:
    """Let the kernel probe the connection: a machine that loses its power closes none, and is noticed within seconds."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, number in DEAD_AFTER.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, number)
