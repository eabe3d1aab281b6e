"""The agent's own limits: a worker that SIGKILL does not end, one that does not read, a spawner that does not answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.agent import call_runner, heartbeat, nccl_ras, spawner, worker_process
from pytest_gpucluster.agent.agent import LOST_CODE
from pytest_gpucluster.controller import command_link
from pytest_gpucluster.worker import flight_recorder, python_stacks
from tests.support import REPOSITORY
from tests.support.agent_alone import GARBAGE
from tests.support.processes import MARK, kill_marked, marked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SLOW_S = 20.0
"""What a busy machine may add to a limit that is a fraction of a second here; the limits of a real run are longer still."""


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs a scenario of :mod:`tests.support.agent_alone`; returns what it printed. Whatever it leaves is killed."""
    mark = f"{os.getpid()}-{tmp_path.name}"

    def play(scenario: str) -> dict[str, Any]:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), MARK: mark, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-m", "tests.support.agent_alone", scenario]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        printed: dict[str, Any] = json.loads(ran.stdout)
        return printed

    yield play
    kill_marked(mark)


def test_a_store_that_never_answers(tmp_path: Path) -> None:
    """The agent of a host whose network is cut ends by itself, says why, and takes its worker along."""
    mark = f"{os.getpid()}-{tmp_path.name}"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), MARK: mark, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.agent_alone", "store_without_an_answer"]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (ran.returncode, ran.stdout) == (LOST_CODE, ""), ran.stderr
        assert "rank 1 leaves: the store has not answered for 2 s. Is its network cut?" in ran.stderr
        deadline_s = time.monotonic() + 120
        while marked(mark):
            assert time.monotonic() < deadline_s, marked(mark)
            time.sleep(0.05)
    finally:
        kill_marked(mark)


def test_a_store_that_answers_late(played: Any) -> None:
    """What the worker did while the agent waited for the store counts; its rank was "hung"."""
    answered, died, hung = played("answered_meanwhile")["replies"]
    assert answered["ok"], answered
    assert (died["kind"], died["error"]) == ("died", "the worker left with exit code 3")
    assert (hung["kind"], hung["error"]) == ("hung", "did not return within 1.3 s")


# A worker that SIGKILL does not end.


def test_hung_and_not_to_be_killed(played: Any) -> None:
    """The wait is bounded and the answer says it; from then on every call is answered at once, with the same reason."""
    printed = played("hung_and_survives")
    hung, lost, again = printed["replies"]
    assert (hung["ok"], hung["kind"], hung["entered"]) == (False, "hung", True)
    assert hung["error"] == "did not return within 0.3 s; SIGKILL does not end it"
    assert "in play_worker" in hung["stacks"]
    assert 0.3 + 0.5 <= hung["took_s"] < 0.3 + 0.2 + 0.5 + SLOW_S
    assert lost["kind"] == again["kind"] == "lost"
    assert lost["error"].startswith("worker ")
    assert "does not end on SIGKILL (state S)" in lost["error"]
    assert again["error"] == lost["error"]
    assert again["took_s"] < SLOW_S
    assert printed["code"] == 7


def test_released_and_not_to_be_killed(played: Any) -> None:
    """A peer of the culprit that does not end either: released in time, and lost from the next call on."""
    released, lost = played("released_and_survives")["replies"]
    assert (released["kind"], released["error"]) == ("released", "released, because rank 0 died")
    assert released["took_s"] < 2.0 + 0.2 + 0.5 + SLOW_S
    assert lost["kind"] == "lost"
    assert "does not end on SIGKILL" in lost["error"]


def test_late_for_a_call_in_which_a_peer_raised(played: Any) -> None:
    """It is given a moment in the call, in which it answers by itself: what all raise or skip is not one rank's fault."""
    (answer,) = played("late_and_answers")["replies"]
    assert answer["ok"]


def test_late_and_then_stuck(played: Any) -> None:
    """After that moment it is released; one that was long in the call is released at once."""
    (answer,) = played("late_and_stuck")["replies"]
    assert (answer["kind"], answer["error"], answer["entered"]) == ("released", "released, because rank 0 raised", True)
    assert 0.8 + 0.4 <= answer["took_s"] < 0.8 + 0.4 + 0.2 + SLOW_S
    (answer,) = played("long_stuck")["replies"]
    assert (answer["kind"], answer["entered"]) == ("released", True)
    assert 1.0 <= answer["took_s"] < 1.0 + 0.2 + SLOW_S


def test_too_late_for_a_call_in_which_a_peer_raised(played: Any) -> None:
    """Its set-up may hang because of that peer: it is not waited for until the set-up's own deadline."""
    (answer,) = played("too_late")["replies"]
    assert (answer["kind"], answer["entered"]) == ("released", False)
    assert 0.6 <= answer["took_s"] < 0.6 + 0.2 + SLOW_S


def test_waiting_for_a_peer_that_never_came_in(played: Any) -> None:
    """A group joins as a whole: without that peer there is no way into the call, so nobody is waited for on the way."""
    (answer,) = played("late_without_way_in")["replies"]
    assert (answer["kind"], answer["entered"]) == ("released", False)
    assert 0.5 <= answer["took_s"] < call_runner.LATEST_ENTRY_S


def test_a_worker_that_ends_between_two_calls(played: Any) -> None:
    """The next call is told so, because its group does not stand any more; the one after that has a new worker."""
    first, died, after = played("ends_between_calls")["replies"]
    assert (first["ok"], after["ok"]) == (True, True)
    assert (died["kind"], died["error"], died["entered"]) == ("died", "the worker died: SIGKILL, between two calls", False)
    assert after["value"] != first["value"]


@pytest.mark.parametrize(
    "scenario",
    [
        "leaves_its_pipes_to_a_child",
        "leaves_its_output_to_a_child_that_prints",
        "leaves_its_line_to_a_child_that_prints",
    ],
)
def test_a_worker_that_leaves_its_pipes_to_a_child(played: Any, scenario: str) -> None:
    """The call is an error, the child cannot keep the agent waiting, and the next call has a new worker."""
    left, after = played(scenario)["replies"]
    assert not left["ok"]
    assert (left["kind"], after["ok"]) in (("died", True), ("refused", True))
    assert "left with exit code 3" in left["error"] or "no message" in left["error"]


def test_garbage_in_the_line_of_a_worker(played: Any) -> None:
    """Whatever it is, it costs one call, whose error says so; the next call has a new worker, and works."""
    printed = played("garbage")
    replies = dict(zip(GARBAGE, zip(printed["replies"][::2], printed["replies"][1::2], strict=True), strict=True))
    assert {kind for kind, (_, after) in replies.items() if not after["ok"]} == set()
    assert {kind for kind, (spoilt, _) in replies.items() if spoilt["ok"]} == set()
    texts = {kind: spoilt["error"] for kind, (spoilt, _) in replies.items()}
    assert {kind: text for kind, text in texts.items() if "the worker sent what is no message: " not in text} == {}
    assert max(map(len, texts.values())) < 500
    assert "garbage" in texts["text"]
    assert printed["code"] == 7


def test_garbage_between_two_calls(played: Any) -> None:
    """The next call is told, because the worker cannot be trusted and its group goes with it; then all is well."""
    first, spoilt, last = played("garbage_between_calls")["replies"]
    assert (first["ok"], spoilt["ok"], last["ok"]) == (True, False, True)
    assert spoilt["error"].startswith("the worker sent what is no message: ")
    assert spoilt["error"].endswith(", between two calls")


def test_a_hang_in_a_wait_that_a_signal_interrupts(played: Any) -> None:
    """The answer says what it was in before the signal. The signal ends the worker, so it does not go on because of it."""
    marked, hung, after = played("interruptible")["replies"]
    assert marked["marked"] == "hung/0/0"
    assert (hung["kind"], hung["collectives"], hung["members"]) == ("hung", 0, [[0, 1]])
    assert "in wait_and_join" in hung["stacks"]
    assert "all_reduce" not in hung["stacks"]
    assert marked["took_s"] + 0.5 <= hung["took_s"]  # the peer's agent reads meanwhile what its worker is in
    assert after["ok"]


def test_a_worker_that_its_peers_end_wakes(played: Any) -> None:
    """Its stacks would show that it waits for the next call, so there are none; one that still hangs shows its own."""
    _, woken, _, hung = played("woken")["replies"]
    assert (woken["kind"], woken["stacks"]) == ("hung", "")
    assert hung["kind"] == "hung"
    assert "in play_worker" in hung["stacks"]


def test_a_worker_is_held_while_its_peers_end(played: Any) -> None:
    """What would wake it comes after it was held, so it still shows what it waited in, and not its next wait."""
    _, held = played("woken_when_held")["replies"]
    assert (held["kind"], held["state"]) == ("hung", "S")
    assert "in hold_up" in held["stacks"]


def test_a_stopped_worker_is_killed_last(played: Any) -> None:
    """It has no stacks, and its end wakes its peers: they show what they are in before. They are not waited for without end."""
    marked, stopped = played("stopped")["replies"]
    assert (stopped["kind"], stopped["state"], stopped["stacks"]) == ("hung", "T", "")
    assert marked["took_s"] + 1.5 <= stopped["took_s"]


def test_a_stopped_worker_is_killed_when_its_peers_have_replied(played: Any) -> None:
    """Nothing that its end does to them can count any more."""
    marked, stopped = played("stopped_last")["replies"]
    assert (stopped["kind"], stopped["state"]) == ("hung", "T")
    assert stopped["took_s"] < marked["took_s"] + 30.0


def test_a_value_after_a_peer_was_found_to_hang(played: Any) -> None:
    """It does not count; without a group there is nobody whose hang could matter."""
    late, after = played("late_value")["replies"]
    assert (late["ok"], late["kind"]) == (False, "released")
    assert late["error"] == "it returned only after another rank was found to hang"
    assert after["ok"]


def test_told_to_kill_and_cannot(played: Any) -> None:
    """The worker of a broken group that does not end costs the place, not the run."""
    first, lost = played("told_to_kill_and_survives")["replies"]
    assert first["ok"]
    assert (lost["kind"], lost["took_s"] < 0.5 + SLOW_S) == ("lost", True)
    assert "does not end on SIGKILL" in lost["error"]


def test_an_ordinary_worker_is_killed_and_replaced(played: Any) -> None:
    """Where SIGKILL works nothing is lost: the next call has a worker of its own."""
    first, hung, last = played("hung")["replies"]
    assert (first["ok"], hung["kind"], last["ok"]) == (True, "hung", True)
    assert hung["error"] == "did not return within 0.3 s"
    assert first["value"] != last["value"]


# A spawner that does not answer, a worker that does not read.


def test_a_spawner_that_does_not_answer(played: Any) -> None:
    """Answered within the limit: no worker could be started, and why."""
    printed = played("spawner_stopped")
    (answer,) = printed["replies"]
    assert answer["error"].startswith("no worker could be started: ")
    assert (answer["ok"], answer["kind"], answer["entered"]) == (False, "died", False)
    assert 0.5 <= answer["took_s"] < 0.5 + SLOW_S
    assert printed["code"] == 7


def test_a_spawner_that_answers_late(played: Any) -> None:
    """What it answers later is not taken for the answer to another request, and does not end the agent."""
    late, *others = played("spawner_late")["replies"]
    assert late["kind"] == "died"
    assert [answer["ok"] for answer in others] == [True, True]


def test_a_worker_that_does_not_read(played: Any) -> None:
    """More arguments than its line holds: the send ends at its limit, the worker is replaced, and the next call works."""
    deaf, unread, last = played("worker_does_not_read")["replies"]
    assert deaf["ok"]
    assert (unread["ok"], unread["kind"], unread["entered"]) == (False, "died", False)
    assert re.search("timed out|not take the call", unread["error"])
    assert 0.5 <= unread["took_s"] < 0.5 + SLOW_S
    assert last["ok"]
    assert last["value"] != deaf["value"]


def test_no_limit_is_longer_than_the_controllers_patience() -> None:
    """In these waits the agent does not beat: the controller must not take it for dead before it can say why."""
    waits_s = {
        "evidence": python_stacks.ANSWER_S + flight_recorder.ANSWER_S + nccl_ras.ANSWER_S,
        "spawner": spawner.ANSWER_S,
        "worker": worker_process.SEND_S,
    }
    patience_s = command_link.SILENT_S - heartbeat.BEAT_S
    assert {what: wait_s for what, wait_s in waits_s.items() if wait_s > patience_s} == {}


def test_beats_while_it_waits_for_a_kill(played: Any) -> None:
    """The wait for a worker that does not end, the longest of all, is not silent, and it is not repeated."""
    printed = played("long_kill")
    assert printed["silent_s"] < 6.0  # it beats once a second
    hung, lost = printed["replies"]
    assert 6.0 < hung["took_s"] < 6.0 + SLOW_S
    assert lost["took_s"] < 6.0


def test_beats_between_a_slow_spawner_and_a_slow_worker(played: Any) -> None:
    """Each wait is within the controller's patience; both in a row were not, and the rank was lost."""
    printed = played("slow_start")
    assert printed["replies"][0]["ok"]
    assert printed["silent_s"] < 5.0
