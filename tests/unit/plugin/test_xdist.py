"""Under pytest-xdist: who makes a call, and what becomes of the tests of a worker that dies."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from xdist.remote import Producer  # type: ignore[import-untyped]  # xdist ships no types

from pytest_gpucluster.controller.call import Call
from pytest_gpucluster.controller.relay import Relay, RelayedController
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.plugin.xdist import PlaceScheduling, XdistController
from pytest_gpucluster.protocol.messages import Success
from tests.support.names import function_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class FakeController:
    """Answers with the number of the call; one at a time, or it fails."""

    terminated: str | None = None

    def __init__(self) -> None:
        """No call yet."""
        self.calls: list[Call] = []
        self.free = threading.Lock()

    def terminate(self, by: str) -> None:
        """Remember who ended it."""
        self.terminated = by

    def call(self, call: Call) -> dict[int, Any]:
        """One reply for each rank."""
        assert self.free.acquire(blocking=False), "two calls at a time"
        self.calls.append(call)
        number = len(self.calls)
        threading.Event().wait(0.02)
        self.free.release()
        if call.kwargs.get("fails"):
            raise MeasurementError("not run: terminated by SIGTERM", kind="missing")
        return {rank: Success(value=number) for rank in call.ranks}


Joined = tuple[FakeController, "Callable[[], RelayedController]"]


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Joined]:
    """A controller behind a relay, and how to become one of its workers."""
    controller = FakeController()
    relay = Relay(controller)  # type: ignore[arg-type]
    workers: list[RelayedController] = []

    def join() -> RelayedController:
        workers.append(RelayedController(relay.address, world_size=2, rootdir=tmp_path))
        return workers[-1]

    yield controller, join
    relay.close()
    for worker in workers:
        worker._wire.close()
    assert controller.terminated == "the end of the session"


def call(**kwargs: Any) -> Call:
    """A call of two ranks."""
    return Call(function=function_named("f"), ranks=range(2), deadline_s=9.0, kwargs=kwargs)


def values(replies: dict[int, Any]) -> list[int]:
    """The values of both ranks."""
    return [replies[rank].value for rank in (0, 1)]


def test_a_call_is_made_once(joined: Joined) -> None:
    """Eight workers that ask at the same time, and a late one, get the replies of one call."""
    controller, join = joined
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(values(join().call(call(size=3))))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [[1, 1]] * 8
    assert values(join().call(call(size=3))) == [1, 1]
    assert [(made.kwargs, list(made.ranks), made.deadline_s) for made in controller.calls] == [({"size": 3}, [0, 1], 9.0)]


def test_other_calls_are_made(joined: Joined) -> None:
    """Other arguments are another call; a worker that repeats its own call wants it made again, and so does the next."""
    controller, join = joined
    first, second = join(), join()
    assert [values(first.call(call(size=size)))[0] for size in (3, 4, 3)] == [1, 2, 3]
    assert [values(second.call(call(size=size)))[0] for size in (3, 3, 4)] == [1, 3, 2]
    assert len(controller.calls) == 3


def test_a_call_that_cannot_be_made(joined: Joined) -> None:
    """The worker hears why, and may ask for something else."""
    _, join = joined
    worker = join()
    with pytest.raises(MeasurementError, match="terminated by SIGTERM") as caught:
        worker.call(call(fails=True))
    assert caught.value.kind == "missing"
    assert values(worker.call(call())) == [2, 2]


def test_late_answer_is_no_answer(joined: Joined) -> None:
    """A time limit may interrupt a test that waits for its call; the next call is not answered with that one's values."""
    _, join = joined
    worker = join()

    class ImpatientError(Exception):
        """As a time limit has it."""

    def interrupted() -> None:
        raise ImpatientError

    receive, worker._wire.receive = worker._wire.receive, interrupted  # type: ignore[assignment, method-assign]
    with pytest.raises(ImpatientError):
        worker.call(call(size=3))
    worker._wire.receive = receive  # type: ignore[method-assign]
    assert values(worker.call(call(size=4))) == [2, 2]


def test_another_user_is_not_heard(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay's name can be seen by every user of the machine; its line is closed to them."""
    controller, join = joined
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(MeasurementError, match="pytest-xdist controller, which makes the calls, is gone"):
        join().call(call())
    assert controller.calls == []


# Scheduling


class FakeNode:
    """A worker as the scheduler sees it."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        """It was sent nothing yet."""
        self.gateway = SimpleNamespace(id=name)
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        """Remember."""
        self.sent += indices

    def shutdown(self) -> None:
        """No more tests will come."""
        self.shutting_down = True


TESTS = [f"t.py::test_{what}[{place}]" for what in "abc" for place in ("gpu0", "gpu1")]
KEYS = {**{test: (test[:12], test[-5:-1]) for test in TESTS}, "t.py::test_all": ("all", None)}


def scheduled(*nodes: FakeNode) -> PlaceScheduling:
    """A scheduler that has sent these workers their first tests."""
    option = SimpleNamespace(loadscopereorder=True, maxschedchunk=None)
    found = {"tx": ["popen"] * len(nodes), "dist": "load"}
    config: Any = SimpleNamespace(option=option, getvalue=found.__getitem__)
    made = PlaceScheduling(config, Producer("scheduler", enabled=False), keys=KEYS)
    for node in nodes:
        made.add_node(node)
    for node in nodes:
        made.add_node_collection(node, list(KEYS))
    made.schedule()
    return made


def test_one_place_stays_together() -> None:
    """Two workers, two GPUs: each gets all tests of one, whoever it is; what belongs to no GPU comes after."""
    nodes = FakeNode("gw3"), FakeNode("gw7")
    scheduled(*nodes)
    assert [node.sent[:3] for node in nodes] == [[0, 2, 4], [1, 3, 5]]
    assert [index for node in nodes for index in node.sent[3:]] in ([], [6])


def test_crashed_worker() -> None:
    """The test that it ran is told and not sent again; what it had not begun goes to the next."""
    first, second = FakeNode("gw0"), FakeNode("gw1")
    scheduler = scheduled(first, second)
    scheduler.mark_test_complete(first, 0)
    assert scheduler.remove_node(first) == "t.py::test_b[gpu0]"
    replacement = FakeNode("gw2")
    scheduler.add_node(replacement)
    scheduler.add_node_collection(replacement, list(KEYS))
    scheduler.schedule()
    assert 2 not in replacement.sent + second.sent[3:]
    assert 4 in replacement.sent + second.sent


def test_worker_that_crashes_in_its_last_test() -> None:
    """Nothing is left of its place, so nobody gets it; a worker that ran nothing leaves no test behind."""
    first, second = FakeNode("gw0"), FakeNode("gw1")
    scheduler = scheduled(first, second)
    for index in (1, 3, 5, 6):
        scheduler.mark_test_complete(second, index)
    for index in (0, 2):
        scheduler.mark_test_complete(first, index)
    assert scheduler.remove_node(first) == "t.py::test_c[gpu0]"
    assert not scheduler.has_pending
    assert scheduler.remove_node(second) is None


# The end of a session


@pytest.mark.parametrize(("maxfail", "failed", "told"), [(1, 1, "stopping after 1 failures"), (2, 1, False), (None, 1, False)])
def test_max_fail_is_no_interruption(maxfail: int | None, failed: int, told: object) -> None:
    """What ``-x`` leaves out was left out by who started the run; Ctrl-C is something else."""
    run: Any = SimpleNamespace(session=SimpleNamespace(state=SimpleNamespace(objections=[]), controller=SimpleNamespace()))
    controller = XdistController(SimpleNamespace(), run)  # type: ignore[arg-type]
    option = SimpleNamespace(maxfail=maxfail)
    session: Any = SimpleNamespace(config=SimpleNamespace(option=option), testsfailed=failed, shouldfail=False)
    loop = controller.pytest_runtestloop(session)
    next(loop)
    with pytest.raises(KeyboardInterrupt):
        loop.throw(KeyboardInterrupt("stopping after 1 failures"))
    assert session.shouldfail == told
