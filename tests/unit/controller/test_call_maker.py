"""What a call leaves behind: ranks that are lost, replies that are kept."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pytest_gpucluster.controller import call as calls
from pytest_gpucluster.controller import call as replies_of
from pytest_gpucluster.controller import call_maker
from pytest_gpucluster.controller.call import Call, CallClock, Observer, lost_reply
from pytest_gpucluster.controller.call_maker import CallMaker
from pytest_gpucluster.controller.controller import Controller
from pytest_gpucluster.controller.diagnosis import diagnose
from pytest_gpucluster.protocol.channel import ChannelLostError
from pytest_gpucluster.protocol.messages import Failure, KillWorkers, Success
from tests.support.names import function_named

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpucluster.protocol.messages import Command


def test_a_lost_place_is_named_and_not_asked_again(tmp_path: Path) -> None:
    """The controller remembers it: later calls are answered without the agent, the cause first, its peers not blamed."""
    why = "worker 4711 does not end on SIGKILL (state D)"
    controller = Controller(None, num_local=2, device="cpu", rootdir=tmp_path)
    controller._calls._drop_broken_groups({0: Success(value=1), 1: lost_reply(why)})
    replies = controller.call(Call(function=function_named("product"), ranks=[0, 1], groups=[[0, 1]], deadline_s=1.0))
    found = diagnose(replies, name=lambda rank: f"rank {rank} (node0-gpu{rank}, host)", what="product was not measured")
    assert (found.culprits, found.kind) == ((1,), "lost")
    assert found.text.splitlines()[0] == f"product was not measured: rank 1 (node0-gpu1, host): {why}"


class Gathered:
    """A controller's calls over a store that answers after so many looks, and whose clock a test moves."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, *, looks: int, books_s: float) -> None:
        self.now_s, self.looks, self.books_s = 100.0, looks, books_s
        self.forgotten: list[list[str]] = []
        for module in (calls, call_maker, replies_of):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        context: Any = SimpleNamespace(
            link=SimpleNamespace(channel=self, send=lambda _command: None, forget=self.forgotten.append, silence=None),
            members=SimpleNamespace(
                hellos={}, failures_before=lambda _call: {}, silent=lambda *_: {}, note_lost=lambda _replies: None
            ),
            early_end=SimpleNamespace(check=lambda: None, check_before_call=lambda: None),
            device="cpu",
            rootdir=folder,
        )
        self.maker = CallMaker(context)
        self.maker.observe(Observer(on_work=self._write), logs=folder)

    def _write(self, _worked_s: float) -> None:
        self.now_s += self.books_s

    def missing(self, keys: Any, *, within_s: float) -> list[str]:
        """All of them, until the last look, which takes no time."""
        self.looks -= 1
        self.now_s += within_s if self.looks else 0.0
        return [*keys] if self.looks else []

    def faults(self, _call_id: str) -> set[int]:
        """None."""
        return set()

    def written(self, keys: Any) -> list[str]:
        """None."""
        del keys
        return []

    def take_written(self, keys: Any, _read: Any) -> list[Success]:
        """It takes half a second to read them."""
        self.now_s += 0.5 if keys else 0.0
        return [Success(value=1.0) for _ in keys]

    def call(self) -> None:
        """One call of two ranks."""
        self.maker.call(Call(function=function_named("product"), ranks=[0, 1], deadline_s=60.0))


def test_the_ranks_wait_for_what_is_no_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Between two calls, while replies are read, and where books are written after the last reply."""
    made = Gathered(monkeypatch, tmp_path, looks=3, books_s=0.0)
    assert made.maker.clock.waited_s == 0.0
    made.call()  # 0.2 s of work, 0.5 s of reading
    assert made.maker.clock.waited_s == pytest.approx(0.5)
    assert made.maker.clock.measuring_s == pytest.approx(0.7)
    made.now_s += 3
    made.looks = 1
    made.call()
    assert made.maker.clock.waited_s == pytest.approx(0.5 + 3 + 0.5)
    made.looks, made.books_s = 1, 2.0
    made.call()  # nobody knows when the replies came meanwhile: all of it counts
    assert made.maker.clock.waited_s == pytest.approx(4.0 + 2.0 + 0.5)


def test_a_call_that_was_interrupted_is_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the 20 s of a call that Ctrl-C ended, a run said that its ranks had waited."""
    made = Gathered(monkeypatch, tmp_path, looks=9, books_s=0.0)

    def interrupted(_keys: Any, *, within_s: float) -> list[str]:
        made.now_s += 20 + within_s
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "missing", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.call()
    assert made.maker.clock.measuring_s >= 20
    assert made.maker.clock.waited_s == pytest.approx(0.0)


def test_books_beside_a_call_cost_nobody_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ranks still work after them."""
    made = Gathered(monkeypatch, tmp_path, looks=4, books_s=0.0)
    made.books_s = 2.0
    made.call()
    assert made.maker.clock.waited_s == pytest.approx(0.5 + 2.0)  # the last writing, after which all replies were there


def test_the_start_up_is_no_measuring() -> None:
    """It is a call, and the ranks wait after it."""
    clock = CallClock()
    clock.add(Call(function=function_named("product"), ranks=[0], deadline_s=1.0, is_startup=True), began_s=1.0, ended_s=4.0)
    assert clock.measuring_s == 0.0


def test_a_call_is_forgotten_after_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An agent may still look for what others replied to the last one."""
    made = Gathered(monkeypatch, tmp_path, looks=1, books_s=0.0)
    for _ in range(3):
        made.looks = 1
        made.call()
    ids = [{key.split("/")[1] for key in keys} for keys in made.forgotten]
    assert ids[0] == set()
    assert [len(one) for one in ids[1:]] == [1, 1]
    assert ids[1] != ids[2]
    assert len(made.forgotten[1]) == 3


class Overlapping(CallMaker):
    """Counts how many calls go on at once."""

    def __init__(self) -> None:
        """None yet."""
        super().__init__(Any)  # type: ignore[arg-type]
        self.running, self.most = 0, 0

    def _call(self, call: Call) -> dict[int, Any]:
        if call.once:
            return self.call(replace(call, once=False))
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.05)
        self.running -= 1
        return {}


def test_threads_of_a_test_call_one_after_the_other() -> None:
    """Each waits for the other's replies: two at once took them from each other, and did not end."""
    maker = Overlapping()
    call = Call(function=function_named("product"), ranks=[0], groups=None, deadline_s=1.0)
    threads = [threading.Thread(target=maker.call, args=(replace(call, once=once),)) for once in (False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert maker.most == 1


def test_replies_that_came_during_a_long_look_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A store that answered nobody for longer than the deadline: the replies are looked for once more before anyone is lost."""
    made = Gathered(monkeypatch, tmp_path, looks=9, books_s=0.0)

    def blocked(keys: Any, *, within_s: float) -> list[str]:
        made.now_s += 300 + within_s
        return [*keys]

    monkeypatch.setattr(made, "missing", blocked)
    monkeypatch.setattr(made, "written", lambda keys: [key for key in keys if key.endswith("/0")])
    call = Call(function=function_named("product"), ranks=[0, 1], deadline_s=60.0)
    assert made.maker.call(call) == {0: Success(value=1.0), 1: lost_reply("its agent did not answer within the deadline")}


@pytest.mark.parametrize("paused_s", [50.0, 300.0])
def test_agents_have_their_margin_after_a_pause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, paused_s: float) -> None:
    """A store that answers nobody keeps agents from replying, too: all were lost for the run, a moment before they could."""
    made = Gathered(monkeypatch, tmp_path, looks=9, books_s=0.0)
    late_s = made.now_s + 40.0 + paused_s + 5.0

    def blocked(keys: Any, *, within_s: float) -> list[str]:
        made.now_s += paused_s if 40 < made.now_s - 100.0 < 40 + within_s else within_s
        return [*keys] if made.now_s < late_s else []

    monkeypatch.setattr(made, "missing", blocked)
    call = Call(function=function_named("product"), ranks=[0, 1], deadline_s=40.0, setup_s=10.0)
    assert made.maker.call(call) == {0: Success(value=1.0), 1: Success(value=1.0)}


@pytest.mark.parametrize("variables", [{}, {"NCCL_ALGO": "Ring"}], ids=["", "with workers of its own"])
@pytest.mark.parametrize("interrupted", [True, False])
def test_a_store_that_is_lost_with_the_last_reply(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], *, interrupted: bool
) -> None:
    """What ranks answered counts, and so does Ctrl-C: the commands that follow, which nobody gets, took their place."""
    made = Gathered(monkeypatch, tmp_path, looks=2, books_s=0.0)
    has_answered: list[bool] = []

    def looked(keys: Any, *, within_s: float) -> list[str]:
        del keys, within_s
        has_answered.append(True)
        if interrupted:
            raise KeyboardInterrupt
        return []

    def send(command: Command) -> None:
        if has_answered and not (isinstance(command, KillWorkers) and not command.ranks):
            raise ChannelLostError("planted")

    monkeypatch.setattr(made, "missing", looked)
    monkeypatch.setattr(
        made, "take_written", lambda keys, _read: [Failure(kind="died", error=""), Success(value=1.0)][: len(keys)]
    )
    monkeypatch.setattr(made.maker._context.link, "send", send)
    call = Call(function=function_named("product"), ranks=[0, 1], groups=[[0, 1]], deadline_s=60.0, variables=variables)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            made.maker.call(call)
    else:
        assert [reply.ok for reply in made.maker.call(call).values()] == [False, True]
