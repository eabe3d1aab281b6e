"""One agent of a node reads the commands for all, over real sockets and a real store; and what each does when it is gone."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.agent import command_reader
from pytest_gpucluster.agent.command_reader import CommandReader, CommandSharer, SharedCommands, call_sharer, commands_address
from pytest_gpucluster.protocol import channel
from pytest_gpucluster.protocol.channel import Address, ChannelLostError, command_key
from pytest_gpucluster.protocol.codec import Secret
from pytest_gpucluster.protocol.messages import AbortCall, KillWorkers, Quit
from pytest_gpucluster.protocol.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpucluster.protocol.messages import Command

SECRET = Secret.random()
RANKS = 4
LONG_S = 120.0


def rank_of(number: int) -> Rank:
    """One rank of a node."""
    return Rank(rank=number, world_size=RANKS, local_rank=number, local_world_size=RANKS, group_rank=0)


def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline_s, "never"
        time.sleep(0.01)


@dataclass
class Node:
    """A store, and the readers of the agents of one node."""

    store: channel.StoreChannel
    readers: list[CommandReader] = field(default_factory=list)
    num_sent: int = 0

    @property
    def address(self) -> str:
        """Where the agents share the commands."""
        return commands_address(self.store.address, SECRET, rank_of(0))

    def join(self, number: int, *, shared: bool = True) -> CommandReader:
        """One more agent reads commands."""
        own = channel.connect(self.store.address, SECRET)
        reader = CommandReader(own, rank_of(number), shared_at=self.address if shared else None)
        reader.start()
        self.readers.append(reader)
        return reader

    def send(self, command: Command) -> None:
        """The controller writes one more command."""
        self.store.put(command_key(self.num_sent), command)
        self.num_sent += 1

    def num_connections(self) -> int:
        """Connections at the store besides the one of its own process."""
        port = f"{self.store.address.port:04X}"
        lines = [line for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text("ascii").splitlines()[1:]]
        return sum(line.split()[1].endswith(f":{port}") and line.split()[3] == "01" for line in lines) - 1

    def sharer(self) -> CommandSharer:
        """The end of the agent that reads for all."""
        (found,) = [one._shared for one in self.readers if isinstance(one._shared, CommandSharer)]
        return found


def commands_of(reader: CommandReader, number: int) -> list[Command]:
    """The next commands that an agent gets."""
    found: list[Command] = []
    deadline_s = time.monotonic() + LONG_S
    while len(found) < number and time.monotonic() < deadline_s:
        found += reader.pending()
        time.sleep(0.005)
    return found


def kill(number: int) -> KillWorkers:
    """A command that can be told from others."""
    return KillWorkers(ranks=((number, number),))


@pytest.fixture
def node() -> Iterator[Node]:
    """A store, and no agent yet."""
    listener = channel.listen_on_loopback()
    host, port = listener.getsockname()[:2]
    found = Node(channel.host_store(Address(host=host, port=port, run_id="run"), SECRET, listener=listener))
    yield found
    found.send(Quit(code=0))
    for reader in found.readers:
        until(lambda reader=reader: reader.has_read_quit)


@pytest.fixture
def full(node: Node) -> Node:
    """Four agents have joined, the first one reads for all."""
    for number in range(RANKS):
        node.join(number)
        until(lambda number=number: node.readers[number]._shared is not None)
    return node


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that brings nothing is given up soon."""
    monkeypatch.setattr(command_reader, "LOOK_S", 0.3)
    monkeypatch.setattr(command_reader, "BEHIND_S", 0.3)


# What it carries.


def test_one_connection_more_than_agents(full: Node) -> None:
    """However many ranks a node has: one of them has a second one, to read the commands."""
    full.send(kill(0))
    assert [commands_of(reader, 1) for reader in full.readers] == [[kill(0)]] * RANKS
    until(lambda: full.num_connections() == RANKS + 1)


def test_a_single_rank_reads_for_itself(node: Node) -> None:
    """It shares with nobody."""
    reader = node.join(0, shared=False)
    node.send(kill(0))
    assert commands_of(reader, 1) == [kill(0)]
    until(lambda: node.num_connections() == 2)


def test_commands_in_their_order(full: Node) -> None:
    """Each agent gets each once, also one that joins late, and large ones."""
    sent: list[Command] = [kill(number) for number in range(100)]
    for command in sent[:60]:
        full.send(command)
    assert commands_of(full.readers[1], 60) == sent[:60]
    late = full.join(RANKS)
    until(lambda: late._shared is not None)
    large = AbortCall(id="1", ranks=(), why="x" * (channel.MAX_MESSAGE_BYTES - 1000))
    for command in [*sent[60:], large]:
        full.send(command)
    assert commands_of(late, 101) == [*sent, large]
    assert isinstance(late._shared, SharedCommands)
    assert commands_of(full.readers[1], 41) == [*sent[60:], large]
    assert [commands_of(reader, 101) for reader in (full.readers[0], full.readers[2], full.readers[3])] == [[*sent, large]] * 3


def test_a_forged_command_is_not_handed_on(full: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent that reads says so once, and waits for the controller's; nobody obeys it."""
    full.send(kill(0))
    full.store.store.set(command_key(1), b"\n{}")
    said: list[str] = []
    until(lambda: "does not obey" in (said.append(capsys.readouterr().err) or "".join(said)))
    assert [commands_of(reader, 1) for reader in full.readers] == [[kill(0)]] * RANKS
    full.send(kill(1))
    assert [commands_of(reader, 1) for reader in full.readers] == [[kill(1)]] * RANKS
    said.append(capsys.readouterr().err)
    assert "".join(said).count("does not obey") == 1


# When the agent that reads is gone.


def test_its_end_takes_nobody_along(full: Node) -> None:
    """The others read for themselves, from the command on that they waited for. None is lost, and none comes twice."""
    full.send(kill(0))
    assert commands_of(full.readers[3], 1) == [kill(0)]
    full.sharer().close()
    full.send(kill(1))
    full.send(kill(2))
    assert commands_of(full.readers[3], 2) == [kill(1), kill(2)]
    assert [commands_of(reader, 3) for reader in full.readers[:3]] == [[kill(0), kill(1), kill(2)]] * 3
    until(lambda: full.num_connections() == 2 * RANKS)
    assert [reader._shared for reader in full.readers[1:]] == [None] * 3


@pytest.mark.usefixtures("patience")
def test_it_is_stopped(full: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is in the store and does not come ends the line. While there is none, the line is waited at."""
    held = queue.SimpleQueue[bytes]()
    time.sleep(0.8)
    assert all(isinstance(reader._shared, SharedCommands) for reader in full.readers[1:])
    monkeypatch.setattr(full.sharer(), "hand_on", held.put)
    full.send(kill(0))
    assert [commands_of(reader, 1) for reader in full.readers] == [[kill(0)]] * RANKS
    assert [reader._shared for reader in full.readers[1:]] == [None] * 3
    assert held.qsize() == 1


def test_one_that_takes_nothing_holds_nobody_up(full: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped agent's line is full some day: it is ended, and the others get each command."""
    monkeypatch.setattr(command_reader, "SEND_S", 0.2)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.connect(full.address)
        until(lambda: len(full.sharer()._lines) == RANKS)
        large = AbortCall(id="1", ranks=(), why="x" * 1_000_000)
        for number in range(3):
            full.send(large if number else kill(0))
        assert [commands_of(reader, 3) for reader in full.readers] == [[kill(0), large, large]] * RANKS
        until(lambda: len(full.sharer()._lines) == RANKS - 1)


@contextlib.contextmanager
def other_process(address: str, body: str) -> Iterator[subprocess.Popen[str]]:
    """A process that listens at the node's address and does ``body``, without the ways of an agent."""
    listen = f"s = socket.socket(socket.AF_UNIX); s.bind({address!r}); s.listen(); print('listens', flush=True)"
    program = f"import socket, sys, time\n{listen}\n{body}\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "l = s.accept()[0]",
        "l = s.accept()[0]; l.close()",
        "l = s.accept()[0]; l.sendall(b'garbage' * 100 + b'\\n')",
        "l = s.accept()[0]; l.sendall(b'garbage' * 100)",
        "l = s.accept()[0]; l.sendall(b'9' * 5000 + b'\\n')",
        "l = s.accept()[0]; l.sendall(b'0\\n')",
        "l = s.accept()[0]; l.sendall(b'0\\nforged\\n{}\\n')",
        "l = s.accept()[0]; l.sendall(b'0\\n' + b'x' * 1000000)",
    ],
    ids=[
        "stopped before it accepts",
        "stopped after",
        "closes",
        "garbage",
        "garbage without an end",
        "a number without an end",
        "stopped after its number",
        "a forged command",
        "a command without an end",
    ],
)
@pytest.mark.usefixtures("patience")
def test_an_address_that_does_not_serve(node: Node, body: str) -> None:
    """Whatever holds it: the agent reads for itself, and obeys the controller alone."""
    with other_process(node.address, body):
        reader = node.join(1)
        node.send(kill(0))
        assert commands_of(reader, 1) == [kill(0)]
        assert reader._shared is None


def test_an_address_that_never_listens(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that was stopped between the two steps holds nobody up."""
    monkeypatch.setattr(command_reader, "START_S", 0.3)
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(node.address)
        reader = node.join(0)
        node.send(kill(0))
        assert commands_of(reader, 1) == [kill(0)]


def test_another_user_at_the_address(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither end speaks to one: not the agent that finds the address taken, and not the one that reads for all."""
    first = node.join(0)
    until(lambda: first._shared is not None)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    own = channel.connect(node.store.address, SECRET)
    assert call_sharer(node.address, own) is None
    with socket.socket(socket.AF_UNIX) as other:
        other.settimeout(LONG_S)
        other.connect(node.address)
        assert other.recv(1) == b""
    assert node.sharer()._lines == []


def test_no_open_file_is_left(full: Node) -> None:
    """Nobody is taken on any more. Those that were there go on, and whoever comes then takes the address."""
    listener = full.sharer()._listener
    listener.shutdown(socket.SHUT_RDWR)
    until(lambda: listener.fileno() == -1)  # its thread has closed it: the address is free
    late = full.join(RANKS)
    full.send(kill(0))
    assert [commands_of(reader, 1) for reader in full.readers] == [[kill(0)]] * (RANKS + 1)
    assert isinstance(late._shared, CommandSharer)


def test_the_store_is_gone(capfd: pytest.CaptureFixture[str]) -> None:
    """Each agent says so soon: the one that reads for all, and those that read through it."""
    code = (
        "import sys; from pytest_gpucluster.protocol import channel; listener = channel.listen_on_loopback();"
        "host, port = listener.getsockname()[:2];"
        "kept = channel.host_store(channel.Address(host=host, port=port, run_id='run'), None, listener=listener);"
        "print(port, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        address = Address(host="127.0.0.1", port=int(store.stdout.readline()), run_id="run")
        name = commands_address(address, None, rank_of(0))
        readers = [CommandReader(channel.connect(address, None), rank_of(number), shared_at=name) for number in range(2)]
        for reader in readers:
            reader.start()
            until(lambda reader=reader: reader._shared is not None)
        store.kill()
        store.wait()
    ends: list[Any] = []
    for reader in readers:
        waiting = threading.Thread(target=lambda reader=reader: ends.append(lost(reader)))
        waiting.start()
        waiting.join(LONG_S)
    assert ends == [True, True]
    assert "reads no more commands" in capfd.readouterr().err


def lost(reader: CommandReader) -> bool:
    """Whether an agent hears that no command comes any more."""
    deadline_s = time.monotonic() + LONG_S
    while time.monotonic() < deadline_s:
        try:
            assert list(reader.pending()) == []
        except ChannelLostError:
            return True
        time.sleep(0.01)
    return False
