"""Who is there before torchrun starts: every node's launcher says hello to node 0's, on the port that torchrun uses next.

torchrun starts no Python before all nodes have joined, and waits for them without an end. This meeting has a deadline, so
that a node that never comes has a name. It is on ``--master-port`` itself, before torchrun takes it over: what torchrun
will need (that address, that port, no firewall between) is what is tried.

A message is two lines: the HMAC (empty without GPUCLUSTER_SECRET) and a JSON object (:mod:`channel` signs and checks them).
Node 0: ``{"challenge", "left_s"}`` at once; the other: ``{"hello": {...}, "nonce"}``; node 0: ``{"t": "go"}``, or
``{"t": "end", "why"}``. Whatever else comes in on that port is dropped, and nothing of it is executed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_gpucluster.errors import ConfigurationError, GpuclusterError
from pytest_gpucluster.protocol.channel import SECRET_VARIABLE, ForgedMessageError, Message, decode, encode

MAX_MESSAGE_BYTES = 4096
MAX_STRANGERS = 64
LOOK_S = 0.5
HELLO_S = 10.0
CONNECT_S = 5.0
PAUSE_S = 0.5
MARGIN_S = 10.0
MAX_WAIT_S = 7 * 86400.0
FAREWELL_S = 2.0
WELCOME = "welcome"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
DEAD_AFTER_S = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}

Notice = Callable[[str], None]


class NotJoinedError(GpuclusterError):
    """This node cannot take part: node 0 was not reached, or said no, or ended the wait."""


class _NoAnswerError(Exception):
    """The other side closed the line, or sent more than a message may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a launcher says of its node, and how it understands the whole."""

    node_rank: int
    hostname: str
    num_nodes: int
    num_local: int

    def complaint_about(self, other: Hello) -> str | None:
        """Why ``other`` cannot join this node 0; None if it can."""
        for option, ours, theirs in (
            ("--nnodes", self.num_nodes, other.num_nodes),
            ("--nproc-per-node", self.num_local, other.num_local),
        ):
            if ours != theirs:
                return f"node {other.node_rank} says {option} {theirs}, node 0 says {ours}: give every node the same"
        if not 0 < other.node_rank < self.num_nodes:
            return f"--node-rank {other.node_rank} is not one of 1 to {self.num_nodes - 1}"
        return None


def read_hello(message: Message) -> Hello:
    """The hello in a message.

    Raises:
        ValueError: it holds something else.
    """
    said = message.get("hello")
    if not isinstance(said, dict) or set(said) != set(Hello.__slots__):
        raise ValueError("no hello")
    numbers = [said[name] for name in ("node_rank", "num_nodes", "num_local")]
    hostname = said["hostname"]
    if not all(type(number) is int for number in numbers) or not isinstance(hostname, str):
        raise ValueError("not whole numbers and a name")
    if not hostname.isprintable() or len(hostname) > 255 or not isinstance(message.get("nonce"), str):
        raise ValueError("no hostname, or no nonce")
    return Hello(**said)


# Node 0.


@dataclass(slots=True, kw_only=True, eq=False)
class _Guest:
    """One connection; ``hello`` once it said a good one."""

    line: socket.socket
    peer: str
    challenge: str
    since_s: float
    heard: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None
    nonce: str = ""


class Meeting:
    """Node 0's side: listens until everybody is there or the time is up."""

    def __init__(self, own: Hello, *, host: str, port: int, notice: Notice) -> None:
        """Take the port.

        Raises:
            ConfigurationError: it is taken, or may not be had.
        """
        self._own = own
        self._notice = notice
        self._listener = _listen(host, port)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._guests: set[_Guest] = set()
        self._joined: dict[int, _Guest] = {}
        self._told: set[str] = set()

    @property
    def hostnames(self) -> dict[int, str]:
        """The nodes that are here by node rank, with the hostnames they gave; this one too."""
        others = {rank: guest.hello.hostname for rank, guest in self._joined.items() if guest.hello is not None}
        return {0: self._own.hostname, **others}

    @property
    def is_complete(self) -> bool:
        """Whether everybody is here."""
        return len(self._joined) == self._own.num_nodes - 1

    def gather(self, *, within_s: float) -> None:
        """Hear hellos until everybody is here, at most ``within_s``."""
        deadline_s = time.monotonic() + within_s
        while True:
            left_s = deadline_s - time.monotonic()
            events = self._selector.select(0 if self.is_complete else max(0.0, min(left_s, LOOK_S)))
            if left_s <= 0 or (self.is_complete and not events):
                return
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._welcome(left_s)
                else:
                    self._hear(key.data)
            self._drop_silent()

    def end(self, message: Message) -> None:
        """Tell everybody who is here, let them hang up first (so that no connection of ours keeps the port), close."""
        joined = list(self._joined.values())
        for guest in joined:
            self._say(guest, message)
        deadline_s = time.monotonic() + FAREWELL_S
        for guest in joined:
            guest.line.settimeout(max(0.01, deadline_s - time.monotonic()))
            with contextlib.suppress(OSError):
                guest.line.recv(MAX_MESSAGE_BYTES)
        self.close()

    def close(self) -> None:
        """Give the port back; whoever still waits sees the line closed."""
        for guest in list(self._guests):
            self._drop(guest)
        self._selector.close()
        self._listener.close()

    def _welcome(self, left_s: float) -> None:
        try:
            line, address = self._listener.accept()
        except OSError:
            return  # it hung up, or this process has no more file descriptors: who means it comes again
        if len(self._guests) - len(self._joined) >= MAX_STRANGERS:
            line.close()
            return
        line.settimeout(0)  # never waits
        _notice_death(line)
        guest = _Guest(line=line, peer=str(address[0]), challenge=secrets.token_hex(16), since_s=time.monotonic())
        self._guests.add(guest)
        self._selector.register(line, selectors.EVENT_READ, guest)
        with contextlib.suppress(OSError):
            line.sendall(_frame({"challenge": guest.challenge, "left_s": round(left_s, 1)}, key=WELCOME))

    def _hear(self, guest: _Guest) -> None:
        try:
            data = guest.line.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        guest.heard += data
        if not data or guest.hello is not None:  # after its hello there is nothing to say but goodbye
            self._leave(guest)
        elif len(guest.heard) > MAX_MESSAGE_BYTES:
            self._drop(guest)
        elif guest.heard.count(b"\n") >= 2:
            self._understand(guest)

    def _understand(self, guest: _Guest) -> None:
        try:
            message = _read(bytes(guest.heard), key=guest.challenge)
            hello = read_hello(message)
        except (ForgedMessageError, ValueError) as error:
            self._tell_once(f"{guest.peer} said no hello of this run ({error})")
            self._drop(guest)
            return
        guest.nonce = message["nonce"]
        complaint = self._own.complaint_about(hello)
        if complaint is None and hello.node_rank in self._joined:
            complaint = f"node rank {hello.node_rank} is here already, from {self.hostnames[hello.node_rank]}"
        if complaint is not None:
            self._tell_once(f"{hello.hostname} cannot join: {complaint}")
            self._say(guest, {"t": "end", "why": complaint})
            self._drop(guest)
            return
        guest.hello = hello
        self._joined[hello.node_rank] = guest
        self._notice(f"node {hello.node_rank} ({hello.hostname}) is here: {len(self._joined) + 1} of {self._own.num_nodes}")

    def _tell_once(self, text: str) -> None:
        """What others cause is said once, and not without an end."""
        if text not in self._told and len(self._told) < MAX_STRANGERS:
            self._told.add(text)
            self._notice(text)

    def _leave(self, guest: _Guest) -> None:
        if guest.hello is not None:
            self._notice(f"node {guest.hello.node_rank} ({guest.hello.hostname}) has left again")
        self._drop(guest)

    def _drop_silent(self) -> None:
        now_s = time.monotonic()
        for guest in [guest for guest in self._guests if guest.hello is None and now_s - guest.since_s > HELLO_S]:
            self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        self._guests.discard(guest)
        if guest.hello is not None:
            self._joined.pop(guest.hello.node_rank, None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(guest.line)
        guest.line.close()

    def _say(self, guest: _Guest, message: Message) -> None:
        with contextlib.suppress(OSError):
            guest.line.sendall(_frame(message, key=_answer_key(guest.challenge, guest.nonce)))


def _listen(host: str, port: int) -> socket.socket:
    """All interfaces, as torchrun's store; the loopback alone where only that is meant."""
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


def join(own: Hello, *, host: str, port: int, within_s: float, notice: Notice) -> None:
    """Say hello to node 0, trying again until it answers; returns when it says go.

    ``within_s`` is for reaching node 0; how long it then waits for others is its own deadline.

    Raises:
        NotJoinedError: not reached in time, or node 0 ended the wait.
    """
    deadline_s = time.monotonic() + within_s
    problem = ""
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(left_s, CONNECT_S)) as line:
                left = _hello(line, own)
                notice(f"node 0 is reached; it waits {left.left_s:g} s more for whoever is not there")
                _await_go(line, left)
                return
        except (OSError, _NoAnswerError, ForgedMessageError) as error:
            if problem != (problem := _explain(error)):
                notice(f"waiting for node 0 at {host}:{port}: {problem}")
            time.sleep(max(0.0, min(PAUSE_S, deadline_s - time.monotonic())))
    raise NotJoinedError(unreached(host, port, within_s=within_s, problem=problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Welcomed:
    """Said hello, and how long node 0 will wait at most."""

    key: str
    left_s: float


def _hello(line: socket.socket, own: Hello) -> _Welcomed:
    welcome = _receive(line, key=WELCOME, within_s=CONNECT_S)
    challenge, left_s = welcome.get("challenge"), welcome.get("left_s")
    if not isinstance(challenge, str) or not isinstance(left_s, (int, float)) or not 0 <= left_s <= MAX_WAIT_S:
        raise ForgedMessageError("no welcome")
    nonce = secrets.token_hex(16)
    line.sendall(_frame({"hello": asdict(own), "nonce": nonce}, key=challenge))
    return _Welcomed(key=_answer_key(challenge, nonce), left_s=float(left_s))


def _await_go(line: socket.socket, welcomed: _Welcomed) -> None:
    _notice_death(line)
    try:
        answer = _receive(line, key=welcomed.key, within_s=welcomed.left_s + MARGIN_S)
    except (OSError, _NoAnswerError, ForgedMessageError) as error:
        raise NotJoinedError(f"node 0 was reached, and then its launcher went away ({error}); nothing was started") from None
    if answer.get("t") != "go":
        raise NotJoinedError(f"nothing was started: {answer.get('why')}")


def unreached(host: str, port: int, *, within_s: float, problem: str) -> str:
    """What to say, and what to look at, when node 0 did not answer."""
    addresses = _resolve(host)
    return (
        f"node 0's launcher was not reached at {host}:{port} within {within_s:g} s: {problem}\n"
        f"  address: is --master-addr node 0's, as this node sees it? {host} is {', '.join(addresses) or 'unknown'} here\n"
        f"  port: does `gpucluster launch --run --node-rank 0` run there, with --master-port {port}?\n"
        f"  firewall: is TCP port {port} open from this node to that one? `nc -vz {host} {port}` tells"
    )


def _resolve(host: str) -> list[str]:
    with contextlib.suppress(OSError):
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))
    return []


def _explain(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, nothing listens there"
    if isinstance(error, TimeoutError):
        return "no answer (a wrong address, or a firewall that drops packets)"
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, ForgedMessageError):
        return f"what answers there is not this run's launcher: another program, or another {SECRET_VARIABLE}"
    return str(error)


# Both sides.


def _frame(message: Message, *, key: str) -> bytes:
    return encode(message, key=f"joining/{key}", secret=os.environ.get(SECRET_VARIABLE) or None) + b"\n"


def _read(data: bytes, *, key: str) -> Message:
    mac, _, rest = data.partition(b"\n")
    body = rest.partition(b"\n")[0]
    return decode(mac + b"\n" + body, key=f"joining/{key}", secret=os.environ.get(SECRET_VARIABLE) or None)


def _answer_key(challenge: str, nonce: str) -> str:
    return f"{challenge}/{nonce}"


def _receive(line: socket.socket, *, key: str, within_s: float) -> Message:
    """One whole message, at most ``within_s``."""
    heard = bytearray()
    deadline_s = time.monotonic() + within_s
    while heard.count(b"\n") < 2:
        line.settimeout(max(0.001, deadline_s - time.monotonic()))
        data = line.recv(MAX_MESSAGE_BYTES)
        heard += data
        if not data:
            raise _NoAnswerError("the connection was closed")
        if len(heard) > MAX_MESSAGE_BYTES:
            raise ForgedMessageError("more than a message may have")
    return _read(bytes(heard), key=key)


def _notice_death(line: socket.socket) -> None:
    """A machine that loses its power closes no connection: let the kernel ask, so that it is noticed within seconds."""
    options: dict[str, Any] = {name: getattr(socket, name, None) for name in DEAD_AFTER_S}
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, option in options.items():
            if option is not None:
                line.setsockopt(socket.IPPROTO_TCP, option, DEAD_AFTER_S[name])
