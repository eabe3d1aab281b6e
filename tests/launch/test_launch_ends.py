"""How runs end when somebody ends them: reports, statuses, and no process left."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from starting import environment_of, parent_of

if TYPE_CHECKING:
    from starting import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

SUITE = """
import os
import subprocess
import time

import pytest

def quick():
    return 1

def sleepy(*, seconds):
    subprocess.Popen(["sleep", "600"])  # a grandchild of the agent must not outlive the run either
    open(f"asleep-{os.environ['RANK']}", "w").close()
    time.sleep(seconds)
    return int(os.environ["RANK"])

@pytest.fixture(scope="session")
def fast(cluster):
    return cluster.run(quick, per="gpu")

@pytest.fixture(scope="session")
def slept(cluster):
    return cluster.run(sleepy, per="gpu", seconds=float(os.environ["SLEEP_S"]), deadline_s=200)

def test_fast(fast, place):
    assert fast[place] == 1

def test_slept(slept, place):
    assert slept[place] == place.rank

def test_after(cluster):
    pass
"""
CHOSEN = ("--gpucluster", "--junitxml=junit.xml")


def asleep(starter: Starter, launch: Launch, *, ranks: int) -> None:
    """Wait until every rank is in the long call."""
    files = [starter.folder / f"asleep-{rank}" for rank in range(ranks)]
    launch.until(lambda: all(file.exists() for file in files), within_s=60, what="rank in the long call")


def outcomes(launch: Launch) -> dict[tuple[str, str | None], tuple[str, str]]:
    """(outcome, reason) by (criterion, place id) of what was selected."""
    rows = launch.results()["criteria"]
    return {
        (row["criterion"], row["place"] and row["place"]["id"]): (row["outcome"], row["reason"] or "")
        for row in rows
        if row["outcome"] != "not_selected"
    }


@pytest.mark.parametrize("started", ["pytest", "torchrun"])
@pytest.mark.parametrize(("number", "why"), [(signal.SIGTERM, "terminated by SIGTERM"), (signal.SIGINT, "interrupted")])
def test_signal_in_a_long_call(starter: Starter, started: str, number: int, why: str) -> None:
    """Reports within ten seconds, values so far kept, the rest missing with the reason, non-zero, nothing left."""
    starter.write(test_long=SUITE)
    launch = getattr(starter, started)(*CHOSEN, SLEEP_S="150")
    asleep(starter, launch, ranks=2)
    os.kill(launch.pid, number)
    sent_s = time.monotonic()
    assert launch.end(within_s=20) != 0
    assert launch.gone(within_s=5) - sent_s < 10
    found = outcomes(launch)
    assert found["fast", "node0-cpu0"][0] == found["fast", "node0-cpu1"][0] == "passed"
    for key in (("slept", "node0-cpu0"), ("slept", "node0-cpu1"), ("after", None)):
        assert found[key][0] == "missing"
        assert why in found[key][1]
    cases = launch.junit()
    assert [cases[f"test_{name}"] for name in ("slept[node0-cpu0]", "slept[node0-cpu1]", "after")] == ["error"] * 3
    assert (cases["test_fast[node0-cpu0]"], cases["gpucluster.verdict"]) == ("passed", "error")
    assert launch.results()["verdict"] == "INCOMPLETE"
    assert "verdict INCOMPLETE" in launch.output


def test_controller_killed(starter: Starter) -> None:
    """Agents, workers and what those started are gone soon after; the journal tells how far it came."""
    starter.write(test_long=SUITE)
    launch = starter.pytest(*CHOSEN, SLEEP_S="150")
    asleep(starter, launch, ranks=2)
    os.kill(launch.pid, signal.SIGKILL)
    launch.gone(within_s=10)
    assert launch.end(within_s=1) == -signal.SIGKILL
    records = [event["record"] for event in launch.journal() if event["event"] == "outcome"]
    assert [(record["criterion"], record["outcome"]) for record in records] == [("fast", "passed")] * 2
    found = outcomes(launch)  # written by the deputy
    assert found["fast", "node0-cpu0"][0] == "passed"
    assert {found[key][0] for key in (("slept", "node0-cpu0"), ("slept", "node0-cpu1"), ("after", None))} == {"missing"}
    assert launch.results()["verdict"] == "INCOMPLETE"


def test_controller_killed_under_torchrun(starter: Starter) -> None:
    """The other ranks do not wait for a word from the dead."""
    starter.write(test_long=SUITE)
    launch = starter.torchrun(*CHOSEN, SLEEP_S="150")
    asleep(starter, launch, ranks=2)
    time.sleep(3)  # by now every agent knows that there is a controller
    (controller,) = (p for p in launch.alive() if parent_of(p) == launch.pid and environment_of(p).get("RANK") == "0")
    os.kill(controller, signal.SIGKILL)
    launch.gone(within_s=10)
    assert launch.end(within_s=1) != 0


def test_agent_killed_under_torchrun(starter: Starter) -> None:
    """Its place is named, as the cause and nothing else; the others keep their values although torchrun ends the node."""
    starter.write(test_long=SUITE)
    launch = starter.torchrun(*CHOSEN, ranks=3, SLEEP_S="4")
    asleep(starter, launch, ranks=3)
    os.kill(launch.agent_of(1), signal.SIGKILL)
    assert launch.end(within_s=40) != 0
    launch.gone(within_s=5)
    found = outcomes(launch)
    outcome, reason = found["slept", "node0-cpu1"]
    assert outcome in ("error", "missing")
    assert "rank 1" in reason
    assert "SIGTERM" not in reason
    assert found["slept", "node0-cpu0"][0] == found["slept", "node0-cpu2"][0] == "passed"
    assert [culprit["place"]["id"] for culprit in launch.results()["culprits"]] == ["node0-cpu1"]
    assert launch.junit()["gpucluster.verdict"] == "error"


def test_exit_codes_and_the_gate(starter: Starter) -> None:
    """0 for good measurements, with the gate only for ACCEPTED; a criterion that fails is 1 with and without it."""
    starter.write(test_plain="def test_plain(cluster):\n    assert cluster.world_size == 2\n")
    ungated = starter.pytest("--gpucluster", "--gpucluster-results", "a")
    assert ungated.end(within_s=40) == 0, ungated.output
    gated = starter.pytest("--gpucluster", "--gpucluster-gate", "--gpucluster-results", "b")
    assert gated.end(within_s=40) == 1, gated.output
    assert gated.results("b")["verdict"] == "INCOMPLETE"
    starter.write(test_plain="def test_plain(cluster):\n    assert cluster.world_size == 3\n")
    failed = starter.torchrun("--gpucluster", "--gpucluster-results", "c")
    assert failed.end(within_s=40) == 1, failed.output
    assert failed.results("c")["verdict"] == "REJECTED"
    assert "handover REJECTED" in failed.output  # in torchrun's own banner
    failed.gone(within_s=2)
