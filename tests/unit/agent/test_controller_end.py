"""What an agent does once the controller of its node has ended: over a real store, with a real reader of commands."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pytest_gpucluster.agent import agent, heartbeat
from pytest_gpucluster.agent.call_runner import AgentContext
from pytest_gpucluster.agent.command_reader import CommandReader
from pytest_gpucluster.protocol import channel
from pytest_gpucluster.protocol.channel import Address, command_key
from pytest_gpucluster.protocol.messages import KillWorkers, Quit, ReportTarget
from pytest_gpucluster.protocol.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pytest_gpucluster.protocol.messages import Command

RANK = Rank(rank=1, world_size=2, local_rank=1, local_world_size=2, group_rank=0)
TARGET = ReportTarget(folder="f", junit=None, run="r")
LATE_S = 3 * agent.TICK_S


class LateReader(CommandReader):
    """Commands reach the agent late, as on a machine that is busy with other work."""

    def _take(self) -> Command:
        command = super()._take()
        time.sleep(LATE_S)
        return command


@pytest.fixture
def store() -> Iterator[channel.StoreChannel]:
    """A store that outlives the controller, as torchrun's does."""
    listener = channel.listen_on_loopback()
    host, port = listener.getsockname()[:2]
    found = channel.host_store(Address(host=host, port=port, run_id="run"), None, listener=listener)
    yield found
    for number in range(3):  # threads that still wait for a command end
        found.put(command_key(number), Quit(code=0))


@dataclass(frozen=True)
class Around:
    """The node of an agent, how it writes reports, and what watches it: the real one would end pytest."""

    has_controller: bool = True
    write: Callable[..., None] | None = None
    watch: Callable[[agent.Agent], None] = lambda _agent: None


def served(
    store: channel.StoreChannel,
    folder: Path,
    reader: type[CommandReader],
    monkeypatch: pytest.MonkeyPatch,
    around: Around = Around(),
) -> tuple[Quit, list[ReportTarget]]:
    """An agent whose controller has just ended, on its node or on another: how it leaves, and the reports that it wrote."""
    written: list[ReportTarget] = []
    monkeypatch.setattr(agent, "write_reports", around.write or written.append)
    monkeypatch.setattr(agent.Agent, "_end_if_stuck", around.watch)
    events, ends = os.pipe(), os.pipe()
    spawner: Any = SimpleNamespace(fileno=lambda: events[0], pid=os.getpid(), folder=folder)
    context = AgentContext(rank=RANK, channel=channel.connect(store.address, None), spawner=spawner, roots=())
    found = agent.Agent(
        context, reader(context.channel, RANK), controller_fd=ends[0] if around.has_controller else None, target=TARGET
    )
    found._commands.start()
    os.close(ends[1])
    try:
        return found.serve(), written
    finally:
        for descriptor in (*events, ends[0]):
            os.close(descriptor)


@pytest.mark.parametrize("reader", [CommandReader, LateReader])
@pytest.mark.parametrize("before", [0, 2])
def test_a_quit_that_is_written_counts(
    reader: type[CommandReader], before: int, store: channel.StoreChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late it is read: the reports stand as the controller wrote them, and so does the exit code of every rank."""
    for number in range(before):
        store.put(command_key(number), KillWorkers(ranks=((0, 0),)))
    store.put(command_key(before), Quit(code=1))
    quits, written = served(store, tmp_path, reader, monkeypatch)
    assert (quits.code, written) == (1, [])
    assert cast("Quit", store.take(command_key(before), Quit.read)).code == 1


@pytest.mark.parametrize("reader", [CommandReader, LateReader])
def test_without_a_quit_the_reports_are_written(
    reader: type[CommandReader], store: channel.StoreChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller died after a command: all ranks learn that it is lost."""
    store.put(command_key(0), KillWorkers(ranks=((0, 0),)))
    quits, written = served(store, tmp_path, reader, monkeypatch)
    assert (quits, written) == (agent.LOST, [TARGET])
    assert store.has(command_key(1))
    assert store.take(command_key(1), Quit.read) == agent.LOST


def test_a_quit_that_nobody_reads(store: channel.StoreChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent waits for it for a while only."""
    monkeypatch.setattr(agent, "BEHIND_S", 1.0)
    never = threading.Event()

    class StuckReader(CommandReader):
        def _take(self) -> Command:
            never.wait()
            return super()._take()

    store.put(command_key(0), Quit(code=0))
    quits, written = served(store, tmp_path, StuckReader, monkeypatch)
    never.set()
    assert (quits, written) == (agent.LOST, [TARGET])


class SlowlyTold(CommandReader):
    """A thread that does not run for a while, between the reading of a command and its way to the main thread."""

    def put(self, command: Command | None) -> None:
        """Be late, but for what the main thread itself adds."""
        if threading.current_thread() is not threading.main_thread():
            time.sleep(LATE_S)
        super().put(command)


def test_a_quit_stands_before_the_loss(store: channel.StoreChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread saw that a quit was read, which it had not got yet, and left with the code of a lost controller."""
    store.put(command_key(0), Quit(code=1))
    quits, written = served(store, tmp_path, SlowlyTold, monkeypatch)
    assert (quits.code, written) == (1, [])


@pytest.mark.parametrize("has_controller", [True, False])
def test_a_store_that_ends_after_the_quit(
    store: channel.StoreChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_controller: bool
) -> None:
    """An agent that was stopped hears of the end of the store first: it leaves as the quit says, without reports of its own."""
    replicas: list[str] = []

    def gone(_agent: object) -> None:
        raise channel.ChannelLostError("planted")

    monkeypatch.setattr(heartbeat.Heartbeat, "beat", gone)
    monkeypatch.setattr(agent.Agent, "_write_replica_reports", lambda _agent: replicas.append("written"))
    store.put(command_key(0), Quit(code=1))
    quits, written = served(store, tmp_path, LateReader, monkeypatch, Around(has_controller=has_controller))
    assert (quits.code, written, replicas) == (1, [], [])


END_IF_STUCK, SERVE = agent.Agent._end_if_stuck, agent.Agent._serve


@pytest.mark.parametrize("slower", [10, 1])
@pytest.mark.parametrize("has_controller", [True, False])
def test_reports_that_take_long(
    store: channel.StoreChannel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_controller: bool, slower: int
) -> None:
    """The agent that writes them, for longer than any wait for the store, is not stuck: it was ended, and wrote them twice."""
    exits: list[int] = []
    began: list[float] = []
    at_end: list[tuple[int, list[int]]] = []
    watches: list[threading.Thread] = []

    def watch(of: agent.Agent) -> None:
        watches.append(threading.current_thread())
        END_IF_STUCK(of)

    def write(*_: object, **__: object) -> None:
        began.append(time.monotonic())
        time.sleep(6 * agent.TICK_S)
        at_end.append((len(began), [*exits]))

    def served_by(of: agent.Agent) -> Quit:
        of._replica = cast("agent.JournalReplica", SimpleNamespace(write_reports=write)) if not has_controller else None
        return SERVE(of)

    monkeypatch.setattr(agent, "STUCK_S", 3 * agent.TICK_S)
    monkeypatch.setattr(agent, "SLOWER", slower)
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(agent.Agent, "_serve", served_by)
    if not has_controller:
        monkeypatch.setattr(heartbeat.Heartbeat, "is_controller_lost", lambda _heartbeat: True)
    served(store, tmp_path, CommandReader, monkeypatch, Around(has_controller=has_controller, write=write, watch=watch))
    assert at_end[0] == (1, [] if slower > 1 else [agent.LOST_CODE])  # a disk that hangs does not hold the node
    watches[0].join()  # an agent whose main thread goes no further ends, of course
    assert exits == [agent.LOST_CODE]
