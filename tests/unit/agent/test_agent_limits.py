"""The agent's own limits: a worker that SIGKILL does not end, one that does not read, a spawner that does not answer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.agent import agent, spawner, worker_process
from pytest_gpucluster.controller import controller
from pytest_gpucluster.controller.controller import Call, Controller
from pytest_gpucluster.controller.diagnosis import diagnose
from pytest_gpucluster.protocol.rank import spans
from pytest_gpucluster.worker import flight_recorder, python_stacks
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLOW_S = 4.0
"""What a busy machine may add to a limit that is a fraction of a second here; the limits of a real run are longer still."""

AGENT = """
import json, os, select, signal, socket, sys, threading, time
from pathlib import Path
from pytest_gpucluster.agent import agent, spawner, worker_process
from pytest_gpucluster.worker import flight_recorder, python_stacks, worker
from pytest_gpucluster.protocol.wire import Wire

DEADLINE_S = 0.3
CALL = {"function": {}, "ranks": [[1, 1]], "groups": None, "deadline_s": DEADLINE_S, "setup_s": 5.0, "device": "cpu",
        "any_device": True, "test": False, "test_arguments": [], "sys_path": [], "cwd": "/", "nodes": {}}

def main(request, link_fd):
    # A stand-in for worker.main, so that no torch is loaded here: does what the call's arguments say.
    python_stacks.answer_requests(Path(request["stacks"]))
    wire = Wire(socket.socket(fileno=link_fd))
    while (messages := wire.receive()) is not None:
        for message in messages:
            time.sleep(message["kwargs"].get("late_s", 0.0))
            wire.send({"t": "entered"})
            if message["kwargs"].get("hang"):
                time.sleep(600)
            time.sleep(message["kwargs"].get("pause_s", 0.0))
            wire.send({"t": "result", "ok": True, "value": os.getpid()})
            if message["kwargs"].get("deaf"):
                time.sleep(600)

class Store:
    # Plays the channel: keeps the answers, and sends the next command as soon as the last one was answered.
    def __init__(self, *commands):
        self.commands, self.answers, self.beats_s, self.said_s = list(commands), [], [], 0.0

    def put(self, key, message):
        if key.startswith("res/"):
            self.answers.append({**message, "took_s": time.monotonic() - self.said_s})
            self.next()

    def next(self):
        command = self.commands.pop(0) if self.commands else {"t": "quit", "code": 7}
        if callable(command):
            command = command()
        if command["t"] == "call":
            command = {**CALL, **command, "id": len(self.answers)}
        self.said_s = time.monotonic()
        one._commands.put(command)
        os.write(one._wake_write, b"c")
        if command["t"] == "kill":
            self.next()

    def beat(self, rank, count):
        self.beats_s.append(time.monotonic())

    def beats(self, ranks):
        return {}

def call(**arguments):
    return {"t": "call", "kwargs": arguments}

def serve(*commands):
    store = one._channel = Store(*commands)
    store.next()
    code = one.serve()
    silent_s = max(later - earlier for earlier, later in zip(store.beats_s, store.beats_s[1:])) if store.beats_s[1:] else 0.0
    print(json.dumps({"answers": store.answers, "code": code, "silent_s": silent_s}), flush=True)

def survive_kills():
    # As in state D. Only here: the spawner was forked before, and ends what is left when this process has ended.
    spawner.kill_group = lambda pid: None

def after(seconds, action):
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()

worker.main = main
worker_process.KILL_S = 0.5
python_stacks.ANSWER_S = 0.2
flight_recorder.ANSWER_S = 0.1
worker_process.SEND_S = 0.5
spawner.ANSWER_S = 0.5
one = agent.Agent(agent.Rank(rank=1, world_size=2, local_rank=1, local_world_size=2, group_rank=0), controller_fd=None)
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Run a process that plays agent and controller; what it told. Whatever it leaves is killed, by its mark."""
    mark = f"{os.getpid()}-{tmp_path.name}"

    def serve(program: str) -> dict[str, Any]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "GPUCLUSTER_UNIT_TEST": mark, "TMPDIR": str(tmp_path)}
        ran = subprocess.run(
            [sys.executable, "-c", AGENT + program], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == 0, ran.stderr
        told: dict[str, Any] = json.loads(ran.stdout)
        return told

    yield serve
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Living processes that carry the mark of one test."""
    wanted = f"GPUCLUSTER_UNIT_TEST={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


# A worker that SIGKILL does not end.


def test_hung_and_not_to_be_killed(served: Any) -> None:
    """The wait is bounded and the answer says it; from then on every call is answered at once, with the same reason."""
    told = served("survive_kills(); serve(call(hang=True), call(), call())")
    hung, lost, again = told["answers"]
    assert (hung["ok"], hung["kind"], hung["entered"]) == (False, "hung", True)
    assert hung["error"] == "did not return within 0.3 s; SIGKILL does not end it"
    assert "in main" in hung["stacks"]
    assert 0.3 + 0.5 <= hung["took_s"] < 0.3 + 0.2 + 0.5 + SLOW_S
    assert lost["kind"] == again["kind"] == "lost"
    assert lost["error"].startswith("worker ")
    assert "does not end on SIGKILL (state S)" in lost["error"]
    assert again["error"] == lost["error"]
    assert again["took_s"] < SLOW_S
    assert told["code"] == 7


def test_released_and_not_to_be_killed(served: Any) -> None:
    """A peer of the culprit that does not end either: released in time, and lost from the next call on."""
    told = served("""
survive_kills()
release = lambda: one._commands.put({"t": "abort", "id": 0, "ranks": [[1, 1]], "why": "released, because rank 0 died"})
after(0.1, lambda: (release(), os.write(one._wake_write, b"c")))
serve({**call(hang=True), "deadline_s": 60.0}, call())
""")
    released, lost = told["answers"]
    assert (released["kind"], released["error"]) == ("released", "released, because rank 0 died")
    assert released["took_s"] < 0.1 + 0.2 + 0.5 + SLOW_S
    assert lost["kind"] == "lost"
    assert "does not end on SIGKILL" in lost["error"]


RELEASE = """
def release():
    one._commands.put({"t": "abort", "id": 0, "ranks": [[1, 1]], "why": "released, because rank 0 raised", "grace_s": 0.4})
    os.write(one._wake_write, b"c")
"""


def test_late_for_a_call_in_which_a_peer_raised(served: Any) -> None:
    """It is given a moment in the call, in which it answers by itself: what all raise or skip is not one rank's fault."""
    told = served(RELEASE + "after(0.1, release); serve({**call(late_s=0.8, pause_s=0.05), 'deadline_s': 60.0})")
    (answer,) = told["answers"]
    assert answer["ok"]


def test_late_and_then_stuck(served: Any) -> None:
    """After that moment it is released; one that was long in the call is released at once."""
    told = served(RELEASE + "after(0.1, release); serve({**call(late_s=0.8, hang=True), 'deadline_s': 60.0})")
    (answer,) = told["answers"]
    assert (answer["kind"], answer["error"], answer["entered"]) == ("released", "released, because rank 0 raised", True)
    assert 0.8 + 0.4 <= answer["took_s"] < 0.8 + 0.4 + 0.2 + SLOW_S
    told = served(RELEASE + "after(1.0, release); serve({**call(hang=True), 'deadline_s': 60.0})")
    (answer,) = told["answers"]
    assert (answer["kind"], answer["entered"]) == ("released", True)
    assert 1.0 <= answer["took_s"] < 1.0 + 0.2 + SLOW_S


def test_too_late_for_a_call_in_which_a_peer_raised(served: Any) -> None:
    """Its set-up may hang because of that peer: it is not waited for until the set-up's own deadline."""
    program = "agent.LATEST_ENTRY_S = 0.5; after(0.1, release); serve({**call(late_s=50.0), 'setup_s': 60.0})"
    (answer,) = served(RELEASE + program)["answers"]
    assert (answer["kind"], answer["entered"]) == ("released", False)
    assert 0.6 <= answer["took_s"] < 0.6 + 0.2 + SLOW_S


def test_waiting_for_a_peer_that_never_came_in(served: Any) -> None:
    """A group joins as a whole: without that peer there is no way into the call, so nobody is waited for on the way."""
    release = RELEASE.replace('"grace_s": 0.4}', '"grace_s": 0.4, "entered": False}')
    assert release != RELEASE
    program = "after(0.1, release); serve({**call(late_s=50.0), 'setup_s': 60.0})"
    (answer,) = served(release + program)["answers"]
    assert (answer["kind"], answer["entered"]) == ("released", False)
    assert 0.5 <= answer["took_s"] < agent.LATEST_ENTRY_S


def test_a_worker_that_ends_between_two_calls(served: Any) -> None:
    """The next call is told so, because its group does not stand any more; the one after that has a new worker."""
    told = served("""
def end_worker():
    os.kill(one._worker.pid, signal.SIGKILL)
    time.sleep(0.3)
    one._on_exits()
    return call()
serve(call(), end_worker, call())
""")
    first, died, after = told["answers"]
    assert (first["ok"], after["ok"]) == (True, True)
    assert (died["kind"], died["error"], died["entered"]) == ("died", "the worker died: SIGKILL, between two calls", False)
    assert after["value"] != first["value"]


def test_told_to_kill_and_cannot(served: Any) -> None:
    """The worker of a broken group that does not end costs the place, not the run."""
    told = served('survive_kills(); serve(call(), {"t": "kill", "ranks": [[1, 1]]}, call())')
    first, lost = told["answers"]
    assert first["ok"]
    assert (lost["kind"], lost["took_s"] < 0.5 + SLOW_S) == ("lost", True)
    assert "does not end on SIGKILL" in lost["error"]


def test_an_ordinary_worker_is_killed_and_replaced(served: Any) -> None:
    """Where SIGKILL works nothing is lost: the next call has a worker of its own."""
    told = served("serve(call(), call(hang=True), call())")
    first, hung, last = told["answers"]
    assert (first["ok"], hung["kind"], last["ok"]) == (True, "hung", True)
    assert hung["error"] == "did not return within 0.3 s"
    assert first["value"] != last["value"]


def test_a_lost_place_is_named_and_not_asked_again(tmp_path: Path) -> None:
    """The controller remembers it: later calls are answered without the agent, the cause first, its peers not blamed."""
    told = "worker 4711 does not end on SIGKILL (state D)"
    good = {"ok": True, "kind": "", "value": 1}
    judge = Controller(None, num_local=2, device="cpu", rootdir=tmp_path)
    judge._bury({0: good, 1: {"ok": False, "kind": "lost", "error": told}})
    replies = judge.call(Call(function={"qualname": "product"}, ranks=[0, 1], groups=[[0, 1]], deadline_s=1.0))
    found = diagnose(replies, name=lambda rank: f"rank {rank} (node0-gpu{rank}, host)", what="product was not measured")
    assert (found.culprits, found.kind) == ((1,), "lost")
    assert found.text.splitlines()[0] == f"product was not measured: rank 1 (node0-gpu1, host): {told}"


# A spawner that does not answer, a worker that does not read.


def test_a_spawner_that_does_not_answer(served: Any) -> None:
    """Answered within the limit: no worker could be started, and why."""
    told = served("os.kill(one._spawner.pid, signal.SIGSTOP); serve(call()); os.kill(one._spawner.pid, signal.SIGKILL)")
    (answer,) = told["answers"]
    assert answer["error"].startswith("no worker could be started: ")
    assert (answer["ok"], answer["kind"], answer["entered"]) == (False, "died", False)
    assert 0.5 <= answer["took_s"] < 0.5 + SLOW_S
    assert told["code"] == 7


def test_a_spawner_that_answers_late(served: Any) -> None:
    """What it answers later is not taken for the answer to another request, and does not end the agent."""
    told = served("""
def go_on():
    os.kill(one._spawner.pid, signal.SIGCONT)
    assert select.select([one._spawner], [], [], 10.0)[0]  # the late answer lies ready
    return {**call(pause_s=1.0), "deadline_s": 20.0}

os.kill(one._spawner.pid, signal.SIGSTOP)
serve(call(), go_on, call())
""")
    late, *others = told["answers"]
    assert late["kind"] == "died"
    assert [answer["ok"] for answer in others] == [True, True]


def test_a_worker_that_does_not_read(served: Any) -> None:
    """More arguments than its line holds: the send ends at its limit, the worker is replaced, and the next call works."""
    told = served('serve(call(deaf=True), call(text="x" * 8_000_000), call())')
    deaf, unread, last = told["answers"]
    assert deaf["ok"]
    assert (unread["ok"], unread["kind"], unread["entered"]) == (False, "died", False)
    assert re.search("timed out|not take the call", unread["error"])
    assert 0.5 <= unread["took_s"] < 0.5 + SLOW_S
    assert last["ok"]
    assert last["value"] != deaf["value"]


def test_no_limit_is_longer_than_the_controllers_patience() -> None:
    """In these waits the agent does not beat: the controller must not take it for dead before it can say why."""
    waits_s = {
        "evidence": python_stacks.ANSWER_S + flight_recorder.ANSWER_S,
        "spawner": spawner.ANSWER_S,
        "worker": worker_process.SEND_S,
    }
    patience_s = controller.SILENT_S - agent.BEAT_S
    assert {what: wait_s for what, wait_s in waits_s.items() if wait_s > patience_s} == {}


def test_beats_while_it_waits_for_a_kill(served: Any) -> None:
    """The wait for a worker that does not end, the longest of all, is not silent, and it is not repeated."""
    told = served("worker_process.KILL_S = 6.0; survive_kills(); serve(call(hang=True), call())")
    assert told["silent_s"] < 5.0  # it beats once a second
    hung, lost = told["answers"]
    assert 6.0 < hung["took_s"] < 6.0 + SLOW_S
    assert lost["took_s"] < 6.0


@given(st.sets(st.integers(min_value=0, max_value=40)))
def test_spans_name_the_ranks_and_no_others(ranks: set[int]) -> None:
    """In as few as there can be."""
    found = spans(ranks)
    assert {rank for first, last in found for rank in range(first, last + 1)} == ranks
    assert len(found) == sum(rank - 1 not in ranks for rank in ranks)
