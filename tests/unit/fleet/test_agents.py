"""A process of the simulated fleet: it ends whatever the store does, and a node that is lost says nothing more."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.fleet import agents
from pytest_gpucluster.fleet.agents import FleetSettings, Speaker
from pytest_gpucluster.fleet.simulation import parse_simulation
from pytest_gpucluster.protocol.channel import Address, ChannelLostError
from pytest_gpucluster.protocol.messages import FunctionName, Quit, ReportTarget, StartCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIMULATION = parse_simulation("2x2", faults=["node1:lost"])


class Ended(BaseException):
    """In place of the end of the process."""


class Store:
    """In place of a channel: writes are kept, and ``take`` and ``beat`` do what the test says."""

    def __init__(self, *, take: Callable[[], Any], beat: Callable[[], None] = lambda: None) -> None:
        self.written: list[str] = []
        self._take, self._beat = take, beat

    def put(self, key: str, _message: object) -> None:
        """Keep the key."""
        self.written.append(key)

    def beat(self, _rank: int, _count: int) -> None:
        """A heartbeat."""
        self._beat()

    def take(self, _key: str, _read: object) -> Any:
        """The next command."""
        return self._take()

    def reconnect(self) -> Store:
        """The same."""
        return self


@pytest.fixture
def controller() -> Iterator[tuple[int, int]]:
    """The pipe by which the fleet notices the end of its controller, which is still there."""
    read, write = os.pipe()
    yield read, write
    os.close(read)


def lost() -> Any:
    """The store is gone."""
    raise ChannelLostError("planted")


def become(store: Store, controller_fd: int, patch: pytest.MonkeyPatch) -> tuple[list[int], list[ReportTarget]]:
    """Serve as one process of the fleet: its exit codes (the first ends it), and the reports that it wrote."""
    codes: list[int] = []
    written: list[ReportTarget] = []
    has_ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        has_ended.set()
        raise Ended

    patch.setattr(agents.channel, "connect", lambda *_arguments: store)
    patch.setattr(agents, "write_reports", written.append)
    patch.setattr(agents.os, "_exit", end)
    target = ReportTarget(folder="f", junit=None, run="r")
    settings = FleetSettings(
        simulation=SIMULATION,
        address=Address(host="h", port=1, run_id="i"),
        secret_fd=0,
        controller_fd=controller_fd,
        target=target,
    )
    with pytest.raises(Ended):
        agents._become(settings, frozenset(range(4)), Any, target=target)  # type: ignore[arg-type]
    return codes, written


@pytest.mark.parametrize("first", ["the store", "the controller"])
def test_reports_are_written_whatever_is_noticed_first(
    first: str, controller: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that dies takes its store along."""
    read, write = controller
    monkeypatch.setattr(agents, "BEAT_S", 0.05)

    def beat() -> None:
        os.close(write)
        lost()

    if first == "the controller":
        os.close(write)
    codes, written = become(Store(take=lost, beat=beat), read, monkeypatch)
    assert codes == [agents.LOST_CODE]
    assert len(written) == 1


def test_no_reports_beside_a_controller_that_lives(controller: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is gone, and the controller writes its own reports."""
    read, write = controller
    monkeypatch.setattr(agents, "BEAT_S", 0.05)
    monkeypatch.setattr(agents, "GOODBYE_S", 0.1)
    assert become(Store(take=lost, beat=lost), read, monkeypatch) == ([agents.LOST_CODE], [])
    os.close(write)


def test_a_goodbye_that_hangs_is_not_waited_for(controller: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller said quit and ended, and its store answers no more."""
    read, write = controller
    os.close(write)
    monkeypatch.setattr(agents, "GOODBYE_S", 0.1)
    hanging = threading.Event()
    store = Store(take=lambda: Quit(code=0, last_lines=""))
    monkeypatch.setattr(Speaker, "say_goodbye", lambda _speaker: hanging.wait())
    codes, written = become(store, read, monkeypatch)
    assert (codes, written) == ([agents.LOST_CODE], [])


def test_a_lost_node_says_nothing_more() -> None:
    """From the call in which it is lost on: no reply, no goodbye."""
    store: Any = Store(take=lost)
    speaker = Speaker(SIMULATION, frozenset(range(4)), store)
    for number, function in enumerate(("measurements.sustained:sustained", "inventory.identity:identity")):
        module, _, qualname = function.partition(":")
        speaker.start(
            StartCall(
                id=str(number),
                ranks=((0, 3),),
                groups=None,
                function=FunctionName(module=f"pytest_gpucluster.{module}", qualname=qualname, file="", relative="", digest=""),
                kwargs={},
                deadline_s=1.0,
                setup_s=1.0,
                device="cuda",
                any_device=False,
                test_arguments=None,
                sys_path=(),
                cwd="",
                nodes={},
                variables={},
            )
        )
    speaker.say_goodbye()
    assert store.written == ["res/0/0", "res/0/1", "res/1/0", "res/1/1", "bye/0", "bye/1"]
