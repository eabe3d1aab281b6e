"""One voice a node, over real sockets and a real store: what it carries, and what each agent does when it is gone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.agent import node_links, voice, voice_link
from pytest_gpucluster.agent.node_links import NodeLinks, join_node, voice_address
from pytest_gpucluster.agent.voice_link import FrameReader, Kind, frame
from pytest_gpucluster.agent.voice_requests import KEPT_COMMANDS
from pytest_gpucluster.controller.members import Members
from pytest_gpucluster.protocol import channel
from pytest_gpucluster.protocol.channel import Address, ChannelLostError, ForgedMessageError, command_key, fault_key
from pytest_gpucluster.protocol.messages import Failure, Fault, Hello, KillWorkers, Quit, Reply, Success, read_command
from pytest_gpucluster.protocol.rank import Rank
from pytest_gpucluster.protocol.secret import Secret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpucluster.controller.arrivals import Arrivals
    from pytest_gpucluster.protocol.codec import RefusedMessageError

SECRET = Secret.random()
RANKS = 4
CALL = "call-0"
LONG_S = 30.0


def rank_of(number: int, *, of: int = RANKS) -> Rank:
    """One rank of a node."""
    return Rank(rank=number, world_size=of, local_rank=number, local_world_size=of, group_rank=0)


@dataclass
class Node:
    """A store, the agents of one node, and the controller's side."""

    store: channel.Channel
    agents: list[NodeLinks] = field(default_factory=list)
    members: Members = field(default_factory=Members)

    def join(self, number: int, *, of: int = RANKS) -> NodeLinks:
        """Have one more agent join, and the controller know where it speaks."""
        links = join_node(self.store.address, SECRET, rank_of(number, of=of))
        self.agents.append(links)
        said = links.channel.store.voice
        self.members.hellos[number] = Hello(
            hostname="h", machine="elsewhere", pid=1, group_rank=0, local_rank=number, voice=said
        )
        return links

    @property
    def arrivals(self) -> Arrivals:
        """What the controller knows."""
        return self.members.arrivals

    @property
    def voice(self) -> voice.Voice:
        """The voice of the first agent."""
        found = self.agents[0].voice
        assert found is not None
        return found

    def answer(self, *numbers: int, value: Any = None, call: str = CALL) -> None:
        """Have these ranks reply at the same time."""
        threads = [
            threading.Thread(
                target=self.agents[one].channel.put_value, args=(call, one, Success(value=one if value is None else value))
            )
            for one in numbers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)

    def replies(self, *numbers: int, call: str = CALL) -> dict[int, Reply | RefusedMessageError]:
        """What the controller reads, in as many rounds as it takes."""
        waiting, found = set(numbers), {}
        deadline_s = time.monotonic() + LONG_S
        while waiting and time.monotonic() < deadline_s:
            found.update(self.arrivals.replies(self.store, call, waiting))
            waiting -= found.keys()
        return found

    def values(self, *numbers: int, call: str = CALL) -> dict[int, Any]:
        """The values that the controller reads."""
        return {rank: reply.value for rank, reply in self.replies(*numbers, call=call).items() if isinstance(reply, Success)}

    def num_connections(self) -> int:
        """Connections at the store besides the one of its own process."""
        port = f"{self.store.address.port:04X}"
        lines = [line for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text("ascii").splitlines()[1:]]
        return sum(line.split()[1].endswith(f":{port}") and line.split()[3] == "01" for line in lines) - 1


@pytest.fixture
def node() -> Iterator[Node]:
    """A store, and no agent yet."""
    listener = channel.listen_on_loopback()
    host, port = listener.getsockname()[:2]
    found = Node(channel.host_store(Address(host=host, port=port, run_id="run"), SECRET, listener=listener))
    yield found
    for links in found.agents:
        hang_up(links)
    for links in found.agents:
        if links.voice is not None:
            until(lambda links=links: not links.voice._lines)
            links.voice.close()


def hang_up(links: NodeLinks) -> None:
    """End the lines of an agent, as the end of its process does."""
    for one in (links.channel.store, links.reader.store):
        if isinstance(one, voice_link.VoicedStore) and one._link is not None:
            one._link.close()


@pytest.fixture
def full(node: Node) -> Node:
    """Four agents have joined."""
    for number in range(RANKS):
        node.join(number)
    return node


def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline_s = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline_s, "never"
        time.sleep(0.01)


# What it carries.


def test_a_node_has_two_connections(full: Node) -> None:
    """However many ranks it has; exactly one agent is the voice, and all name it."""
    full.agents[1].channel.beat(1, 1)
    assert [links.voice is not None for links in full.agents] == [True, False, False, False]
    assert {links.channel.store.voice for links in full.agents} == {full.voice.name}
    until(lambda: full.num_connections() == 2)


def test_a_single_rank_needs_no_voice(node: Node) -> None:
    """It has its own two connections."""
    links = node.join(0, of=1)
    assert (links.voice, links.channel.store.voice) == (None, None)
    node.answer(0)
    assert node.values(0) == {0: 0}
    assert node.num_connections() == 2


@pytest.mark.parametrize(("hard", "is_voiced"), [(100_000, True), (70, False)], ids=["raised", "cannot be raised"])
def test_few_open_files(hard: int, *, is_voiced: bool) -> None:
    """An agent raises its limit for the lines of a voice; where it cannot, it has its own connections, and is answered."""
    code = (
        "import resource, sys; from pytest_gpucluster.agent.node_links import join_node;"
        "from pytest_gpucluster.protocol.channel import Address; from pytest_gpucluster.protocol.rank import Rank;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (40, min({hard}, resource.getrlimit(resource.RLIMIT_NOFILE)[1])));"
        "links = join_node(Address(host='127.0.0.1', port=int(sys.argv[1]), run_id='run'), None,"
        "  Rank(rank=0, world_size=8, local_rank=0, local_world_size=8, group_rank=0));"
        "links.channel.beat(0, 1); print(links.voice is not None, links.channel.store.voice is not None, flush=True);"
        "import os; os._exit(0)"
    )
    listener = channel.listen_on_loopback()
    host, port = listener.getsockname()[:2]
    kept = channel.host_store(Address(host=host, port=port, run_id="run"), None, listener=listener)
    done = subprocess.run([sys.executable, "-c", code, str(port)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [str(is_voiced)] * 2, done.stderr
    del kept


def test_replies_are_placed_by_rank(full: Node) -> None:
    """Together or one after the other, call after call, and the replies of a call that was given up are skipped."""
    full.answer(0, 1, 2, 3)
    assert full.values(0, 1, 2, 3) == {0: 0, 1: 1, 2: 2, 3: 3}
    full.answer(0, 1, call="given up")
    for number in (3, 1, 0, 2):
        full.answer(number, value=f"second {number}", call="second")
    assert full.values(0, 1, 2, 3, call="second") == {number: f"second {number}" for number in range(RANKS)}


def test_some_ranks_of_a_node(full: Node) -> None:
    """A call of two of them ends when those two have replied."""
    full.answer(1, 2)
    assert full.values(1, 2) == {1: 1, 2: 2}


def test_a_failure_is_under_its_own_key(full: Node) -> None:
    """Other agents look for it there. The values that came before are found, and the rank speaks through its voice still."""
    full.answer(0)
    full.agents[2].channel.put(channel.reply_key(CALL, 2), Failure(kind="raised", error="it does"))
    full.agents[2].channel.put(fault_key(CALL), Fault(rank=2))
    assert full.agents[1].channel.has(channel.reply_key(CALL, 2))
    assert set(full.replies(0, 2)) == {0, 2}
    full.answer(1, 2, 3, call="next")
    assert full.values(1, 2, 3, call="next") == {1: 1, 2: 2, 3: 3}


def test_large_replies(full: Node) -> None:
    """Nearly as much as may cross the channel, from each rank."""
    full.answer(0, 1, 2, 3, value="x" * (channel.MAX_MESSAGE_BYTES - 1000))
    assert {rank: len(value) for rank, value in full.values(0, 1, 2, 3).items()} == dict.fromkeys(
        range(RANKS), channel.MAX_MESSAGE_BYTES - 1000
    )


def test_heartbeats_are_of_ranks(full: Node) -> None:
    """Each rank has its own count, so one that stops goes silent by itself."""
    for count in (1, 2, 3):
        for number in range(RANKS):
            full.agents[number].channel.beat(number, count if number != 2 else 1)
    until(lambda: full.arrivals.beats(full.store, range(RANKS)) == {0: b"3", 1: b"3", 2: b"1", 3: b"3"})


def test_commands_in_their_order(full: Node) -> None:
    """Each agent reads each, whether it asks before or long after it was written; one that was refused is asked again."""
    sent = [KillWorkers(ranks=((number, number),)) for number in range(KEPT_COMMANDS + 3)]
    found: list[Any] = []
    early = threading.Thread(target=lambda: found.append(full.agents[1].reader.take_command(0, read_command)))
    early.start()
    for number, command in enumerate(sent):
        full.store.put(command_key(number), command)
    early.join(LONG_S)
    assert found == sent[:1]
    assert full.agents[3].reader.take_command(len(sent) - 1, read_command) == sent[-1]
    assert [full.agents[2].reader.take_command(number, read_command) for number in range(len(sent))] == sent
    full.store.store.set(command_key(len(sent)), b"\n{}")
    with pytest.raises(ForgedMessageError):
        full.agents[1].reader.take_command(len(sent), read_command)
    full.store.put(command_key(len(sent)), Quit(code=4))
    assert full.agents[1].reader.take_command(len(sent), read_command) == Quit(code=4)


def test_keys_are_read_and_written(full: Node) -> None:
    """What agents do besides: marks, and looks at other ranks' marks."""
    full.agents[1].channel.put("hung/0/0", Quit(code=1))
    assert full.agents[2].channel.has("hung/0/0")
    assert not full.agents[2].channel.has("hung/0/1")
    full.store.beat(channel.CONTROLLER, 5)
    assert full.agents[3].channel.beats([channel.CONTROLLER]) == {channel.CONTROLLER: b"5"}
    assert full.agents[3].channel.beats([7]) == {}


# When it is gone.


def test_a_voice_that_ends_takes_nobody_along(full: Node) -> None:
    """Each rank goes on by itself, at the command that it had; what was replied through the voice is not lost."""
    full.store.put(command_key(0), Quit(code=0))
    assert full.agents[3].reader.take_command(0, read_command) == Quit(code=0)
    full.answer(1)
    full.voice.close()
    full.answer(2, 3)
    assert full.values(1, 2, 3) == {1: 1, 2: 2, 3: 3}
    full.store.put(command_key(1), Quit(code=1))
    assert full.agents[3].reader.take_command(1, read_command) == Quit(code=1)
    full.answer(2, 3, call="next")
    assert full.values(2, 3, call="next") == {2: 2, 3: 3}


def test_a_rank_that_waits_for_a_command_when_the_voice_ends(full: Node) -> None:
    """Its thread goes on waiting by a connection of its own."""
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(full.agents[2].reader.take_command(0, read_command)))
    waiting.start()
    time.sleep(0.2)
    full.voice.close()
    full.store.put(command_key(0), Quit(code=2))
    waiting.join(LONG_S)
    assert found == [Quit(code=2)]


def test_a_reply_before_the_voice_ended(full: Node) -> None:
    """The rank beats by itself now, and its reply lies in a parcel: the controller still finds it, while another works on."""
    full.members.hellos[9] = Hello(hostname="h2", machine="elsewhere", pid=1, group_rank=1, local_rank=0)
    full.answer(1)
    full.voice.close()
    full.agents[1].channel.beat(1, 9)
    full.arrivals.note_direct(full.store, [1])
    found: dict[int, Any] = {}
    until(lambda: found.update(full.arrivals.replies(full.store, CALL, {1, 9})) or 1 in found)
    assert isinstance(found[1], Success)
    assert found[1].value == 1


def test_a_rank_without_its_voice_is_not_silent(full: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeats count again, before the silence of its voice counts as its own death; that of the dead does."""
    now_s = [1000.0]
    monkeypatch.setattr("pytest_gpucluster.controller.members.time", Clock(now_s))
    for number in range(RANKS):
        full.agents[number].channel.beat(number, 1)
    until(lambda: len(full.arrivals.beats(full.store, range(RANKS))) == RANKS)
    full.members.silent(range(RANKS), full.store)
    full.voice.close()
    found: dict[int, Any] = {}
    for second in range(14):
        now_s[0] += 1.0
        for number in (1, 2, 3):
            full.agents[number].channel.beat(number, 2 + second)
        found.update(full.members.silent(range(RANKS), full.store))
    assert set(found) == {0}


@dataclass
class Clock:
    """A clock that the test sets."""

    now_s: list[float]

    def monotonic(self) -> float:
        """The time."""
        return self.now_s[0]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A voice is given up soon."""
    monkeypatch.setattr(voice_link, "SILENT_S", 0.5)


@contextlib.contextmanager
def other_process(address: str, body: str) -> Iterator[subprocess.Popen[str]]:
    """A process that listens at the voice's address and does ``body``, without the ways of a voice."""
    listen = f"s = socket.socket(socket.AF_UNIX); s.bind({address!r}); s.listen(); print('listens', flush=True)"
    program = f"import socket, struct, sys, time\n{listen}\n{body}\ntime.sleep(600)"
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
        "l = s.accept()[0]; l.sendall(b'garbage' * 100)",
        "l = s.accept()[0]; l.sendall(struct.pack('!BI', 8, 9) + struct.pack('!I', 5) + b'voice')",
    ],
    ids=["stopped before it accepts", "stopped after", "closes", "garbage", "stopped after its name"],
)
@pytest.mark.usefixtures("patience")
def test_an_address_that_does_not_serve(node: Node, body: str) -> None:
    """Whatever holds it: the agent goes on by itself, and is answered."""
    name = voice_address(node.store.address, SECRET, rank_of(1))
    with other_process(name, body):
        node.agents.append(NodeLinks(channel=node.store, reader=node.store))
        node.join(1)
        assert node.agents[1].voice is None
        node.answer(1)
        node.store.put(command_key(0), Quit(code=0))
        assert node.values(1) == {1: 1}
        assert node.agents[1].reader.take_command(0, read_command) == Quit(code=0)


def test_an_address_that_never_listens(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that was stopped between the two steps holds nobody up."""
    monkeypatch.setattr(node_links, "START_S", 0.3)
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(voice_address(node.store.address, SECRET, rank_of(0)))
        node.join(0)
        assert node.agents[0].channel.store.voice is None
        node.answer(0)
        assert node.values(0) == {0: 0}


@pytest.mark.parametrize("side", [voice, voice_link], ids=["the voice refuses", "the agent refuses"])
def test_another_user(node: Node, monkeypatch: pytest.MonkeyPatch, side: Any) -> None:
    """Neither side speaks to one, and the agent has its own connections."""
    node.join(0)
    monkeypatch.setattr(side, "peer_of", lambda _: (os.getpid(), os.getuid() + 1))
    assert node.join(1).channel.store.voice is None
    node.answer(0 if side is voice_link else 1, 1)
    assert node.values(1) == {1: 1}


GARBAGE = {
    "text": b"GET / HTTP/1.0\r\n\r\n",
    "a frame of 4 GB": b"\x01\xff\xff\xff\xff",
    "no such kind": b"\x63\x00\x00\x00\x00",
    "an answer": frame(Kind.ANSWER, b"x"),
    "half a length": b"\x01\x00\x00\x00\x02ab",
    "a part longer than its frame": b"\x01\x00\x00\x00\x05\x00\x00\xff\xffa",
    "too few parts": frame(Kind.SET, b"key"),
    "a rank that is no number": frame(Kind.REPLY, b"one", b"res/0/1", b"x"),
    "a key that is no text": frame(Kind.SET, b"\xff\xfe", b"x"),
    "a reply that is no text": frame(Kind.REPLY, b"1", b"res/0/1", b"\xff\xfe"),
    "a beat that is no number": frame(Kind.BEAT, b"1", b"x"),
    "command -1": frame(Kind.COMMAND, b"-1"),
    "a command far ahead, twice": frame(Kind.COMMAND, b"99999") * 2,
    "a key that nobody writes": frame(Kind.GET, b"nothing"),
    "no keys": frame(Kind.GET) + frame(Kind.CHECK),
    "half a frame": frame(Kind.SET, b"key", b"data")[:-1],
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_on_a_line(full: Node, data: bytes) -> None:
    """It costs that line at most: the others go on through the voice."""
    with voice_link.call_voice(voice_address(full.store.address, SECRET, rank_of(0))) as line:
        line.sendall(data)
        full.answer(0, 1, 2, 3)
        assert full.values(0, 1, 2, 3) == {0: 0, 1: 1, 2: 2, 3: 3}
        full.store.put(command_key(0), Quit(code=0))
        assert full.agents[1].reader.take_command(0, read_command) == Quit(code=0)
    assert {links.channel.store.voice for links in full.agents} == {full.voice.name}


def test_a_forged_reply(full: Node) -> None:
    """One that this run did not sign is refused for its rank, and for no other."""
    with voice_link.call_voice(voice_address(full.store.address, SECRET, rank_of(0))) as line:
        line.sendall(frame(Kind.REPLY, b"1", b"res/call-0/1", b'00\n{"t": "result", "ok": true, "value": 1}'))
        time.sleep(0.1)
        full.answer(0, 2, 3)
        found = full.replies(0, 1, 2, 3)
    assert isinstance(found.pop(1), ForgedMessageError)
    assert all(isinstance(reply, Success) for reply in found.values())
    assert set(found) == {0, 2, 3}


def test_a_forged_parcel(full: Node) -> None:
    """Another program writes to the store where the voice would: the ranks are refused, and nobody waits."""
    full.store.store.set(channel.parcel_key(full.voice.name, 0), b"\n{}")
    found = full.replies(0, 1, 2, 3)
    assert set(found) == {0, 1, 2, 3}
    assert all(isinstance(reply, ForgedMessageError) for reply in found.values())


@pytest.mark.parametrize(
    "beats", [b"", b"[]", b"1", b"{", b'{"a": 1}', b"[" * 100_000, b'{"1": {"a": 1}}'], ids=lambda data: str(data[:12])
)
def test_garbage_as_heartbeats(full: Node, beats: bytes) -> None:
    """Nobody signs heartbeats: what is none is no error."""
    full.store.store.set(channel.beat_key(full.voice.name), beats)
    assert full.arrivals.beats(full.store, [0, 2, 3]) == {}


def put_for_long(links: NodeLinks) -> None:
    """Write again and again."""
    deadline_s = time.monotonic() + LONG_S
    while time.monotonic() < deadline_s:
        links.channel.put(fault_key("0"), Quit(code=0))


def test_the_store_is_gone() -> None:
    """Each agent says so, also those that speak through the voice, and those that wait; a first message may still be taken."""
    code = (
        "import sys; from pytest_gpucluster.protocol import channel; listener = channel.listen_on_loopback();"
        "host, port = listener.getsockname()[:2];"
        "kept = channel.host_store(channel.Address(host=host, port=port, run_id='run'), None, listener=listener);"
        "print(port, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        address = Address(host="127.0.0.1", port=int(store.stdout.readline()), run_id="run")
        agents = [join_node(address, None, rank_of(number)) for number in range(2)]
        assert not agents[1].channel.has(fault_key("0"))  # the voice has both its connections
        store.kill()
        store.wait()
    for links in agents:
        with pytest.raises(ChannelLostError):
            put_for_long(links)
        with pytest.raises(ChannelLostError):
            links.reader.take_command(0, read_command)


def test_it_stays_for_the_others(full: Node) -> None:
    """The agent that is the voice leaves when no other process has a line, or after the time that it has."""
    full.voice.wait_until_unused(LONG_S)  # all agents of this test are one process
    address = voice_address(full.store.address, SECRET, rank_of(0))
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({address!r}); print('on', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        until(lambda: len(full.voice._lines) == 2 * RANKS + 1)
        leaving = threading.Thread(target=full.voice.wait_until_unused, args=(LONG_S,))
        leaving.start()
        leaving.join(0.3)
        assert leaving.is_alive()
        other.communicate("\n")
        leaving.join(LONG_S)
        assert not leaving.is_alive()


def test_frames_in_pieces() -> None:
    """A frame may arrive byte by byte, or many at once."""
    sent = [(Kind.SET, [b"key", b"data"]), (Kind.CHECK, []), (Kind.GET, [b""])]
    data = b"".join(frame(kind, *parts) for kind, parts in sent)
    reader = FrameReader()
    assert [found for one in data for found in reader.feed(bytes([one]))] == sent
    assert list(FrameReader().feed(data)) == sent


def test_messages_are_json(full: Node) -> None:
    """A parcel holds no more than what crosses the channel anyway."""
    full.answer(2)
    raw = full.store.store.get(channel.parcel_key(full.voice.name, 0))
    (reply,) = json.loads(raw.partition(b"\n")[2])["replies"]
    assert reply[:2] == [2, "res/call-0/2"]
