"""A process that stops for good (SIGSTOP) keeps nobody: reports are whole, and every process of the run ends."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.faults.test_faults_ends import BUSY, CHOSEN, SUITE, asleep, outcomes, written_s
from tests.support.processes import command_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

REPORTED_S = 60.0
"""From a stop that ends the run to its reports; 20 s are waited whether the process goes on."""
AGENT = "pytest_gpucluster.agent.main"
LEFT_S = 50.0
"""From the reports to the end of the last process: 30 s, and more for a busy machine."""
NODES_SUITE = """
import os
import time

import pytest

def sleepy(*, seconds):
    open(f"asleep-{os.environ['RANK']}", "w").close()
    time.sleep(seconds)
    return int(os.environ["RANK"])

@pytest.fixture(scope="session")
def slept(cluster):
    return cluster.run(sleepy, per="gpu", seconds=float(os.environ["SLEEP_S"]), deadline_s=100)

def test_slept(slept, place):
    assert slept[place] == place.rank

def test_without_a_call():
    pass
"""


def stop(processes: Iterable[psutil.Process]) -> float:
    """Stop them for good; when that was, in seconds since 1970."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    return time.time()


def spawner_of(launch: Launch, rank: int) -> psutil.Process:
    """The process that starts the workers of a rank: the child of its agent that has one."""
    return next(child for child in launch.agent_of(rank).children() if child.children())


def all_gone(launches: list[Launch], *, since_s: float) -> None:
    """Every process has ended soon after the reports."""
    for launch in launches:
        launch.gone(within_s=max(1.0, since_s + LEFT_S - time.time()))


@pytest.mark.slow  # by day, an agent that is alone on its node, agents with their spawners, and a worker (test_faults_ranks.py)
def test_agents_stop_on_both_nodes(starter: Starter) -> None:
    """One of each node, a worker, a spawner, and the torchrun of node 1: the run goes on without them, and all leave."""
    starter.write(test_nodes=NODES_SUITE)
    starter.environment["SLEEP_S"] = "16"
    launches = starter.nodes(*CHOSEN, ranks=3, prefixes=[(), ()])
    asleep(starter, launches[0], ranks=6)
    worker = spawner_of(launches[1], 4).children()[0]
    stop([launches[0].agent_of(1), launches[1].agent_of(3), worker, spawner_of(launches[1], 5)])
    stop([psutil.Process(launches[1].pid)])
    launches[0].until(lambda: "\nverdict " in launches[0].output, what="verdict")
    ended_s = time.time()
    all_gone(launches, since_s=ended_s)
    assert [launch.end() for launch in launches] == [1, 1]
    found = outcomes(launches[0])
    bound = next(event["places"] for event in launches[0].journal() if event["event"] == "bound")
    by_rank = {place["rank"]: found["slept", place["id"]] for place in bound}
    assert {rank for rank, (outcome, _) in by_rank.items() if outcome == "passed"} >= {0, 2}
    assert all("silent for 10 s" in by_rank[rank][1] for rank in (1, 3)), by_rank
    assert launches[0].junit()["gpucluster.verdict"] == "error"
    assert "was stopped" in launches[0].output + launches[1].output


def test_the_only_agent_of_a_node_stops(starter: Starter) -> None:
    """Nobody but its own spawner lives there; the verdict is of a test that measures nothing, and torchrun waits for 0."""
    starter.write(test_long=BUSY.replace("150", "8"))
    launches = starter.nodes(*CHOSEN, "-k", "fine or busy", ranks=1, prefixes=[(), ()])
    launches[0].until((starter.folder / "busy").exists, what="busy test")
    stop([launches[1].agent_of(1)])
    launches[0].until(lambda: "\nverdict " in launches[0].output, what="verdict")
    all_gone(launches, since_s=time.time())
    assert launches[0].junit()["test_busy"] == "passed"


def test_agents_stop_without_torchrun(starter: Starter) -> None:
    """An agent, and a spawner with its agent: the controller ends what it started, and the verdict does not depend on them."""
    starter.write(test_long=BUSY.replace("150", "1"))
    launch = starter.pytest(*CHOSEN, "-k", "fine or busy")
    launch.until((starter.folder / "busy").exists, what="busy test")
    agents = [one for one in launch.alive() if AGENT in command_of(one)]
    stop(agents)  # their spawners and their listener have the same command line
    launch.end()
    launch.gone()
    assert launch.junit()["test_busy"] == "passed"


@pytest.mark.parametrize("what", ["process", pytest.param("group", marks=pytest.mark.slow)])
def test_the_controller_stops(starter: Starter, what: str) -> None:
    """Alone, or with all that torchrun started as rank 0: an agent writes the reports, and all leave."""
    starter.write(test_long=SUITE)
    launch = starter.torchrun(*CHOSEN, SLEEP_S="150")
    asleep(starter, launch, ranks=2)
    controller = launch.controller()
    stopped_s = time.time()
    (os.kill if what == "process" else os.killpg)(controller.pid, signal.SIGSTOP)
    assert launch.end(within_s=REPORTED_S + LEFT_S) != 0
    assert written_s(launch) - stopped_s < REPORTED_S
    all_gone([launch], since_s=written_s(launch))
    found = outcomes(launch)
    assert found["fast", "node0-cpu0"][0] == "passed"
    assert {found[key][0] for key in (("slept", "node0-cpu0"), ("slept", "node0-cpu1"), ("after", None))} == {"missing"}
    assert launch.results()["environment"]["rebuilt_from_journal"] is True
    assert launch.results()["verdict"] == "INCOMPLETE"
    assert launch.junit()["gpucluster.verdict"] == "error"


@pytest.mark.slow
def test_the_controller_and_the_store_stop(starter: Starter) -> None:
    """Both at once: its agent waits in the store, and reports when it gives that up."""
    starter.write(test_long=SUITE)
    launch = starter.torchrun(*CHOSEN, SLEEP_S="150")
    asleep(starter, launch, ranks=2)
    stopped_s = stop([psutil.Process(launch.pid), launch.controller()])
    assert launch.end(within_s=2 * REPORTED_S + LEFT_S) != 0
    all_gone([launch], since_s=written_s(launch))
    assert written_s(launch) - stopped_s < 2 * REPORTED_S
    assert outcomes(launch)["fast", "node0-cpu0"][0] == "passed"
    assert launch.results()["verdict"] == "INCOMPLETE"


@pytest.mark.slow
def test_the_controller_stops_without_torchrun(starter: Starter) -> None:
    """Its agents have no torchrun that ends the node."""
    starter.write(test_long=SUITE)
    launch = starter.pytest(*CHOSEN, SLEEP_S="150")
    asleep(starter, launch, ranks=2)
    stopped_s = stop([psutil.Process(launch.pid)])
    assert launch.end(within_s=REPORTED_S + LEFT_S) != 0
    launch.gone()
    assert written_s(launch) - stopped_s < REPORTED_S
    assert outcomes(launch)["fast", "node0-cpu0"][0] == "passed"
    assert launch.results()["verdict"] == "INCOMPLETE"


def test_the_store_hangs(starter: Starter) -> None:
    """The torchrun that hosts it stops: the controller takes it for gone and writes its reports, and all leave."""
    starter.write(test_long=SUITE)
    starter.environment["SLEEP_S"] = "150"
    launches = starter.nodes(*CHOSEN, ranks=1, prefixes=[(), ()])
    asleep(starter, launches[0], ranks=2)
    stopped_s = stop([psutil.Process(launches[0].pid)])
    launches[0].until(lambda: "\nverdict " in launches[0].output, what="verdict", within_s=REPORTED_S)
    all_gone(launches, since_s=time.time())
    assert all(launch.end() != 0 for launch in launches)
    assert written_s(launches[0]) - stopped_s < REPORTED_S
    found = outcomes(launches[0])
    assert found["fast", "node0-cpu0"][0] == "passed"
    assert found["slept", "node0-cpu0"][0] == "missing"
    assert "has not answered for" in found["slept", "node0-cpu0"][1]
    assert launches[0].results()["verdict"] == "INCOMPLETE"
    assert launches[0].junit()["gpucluster.verdict"] == "error"


BRIEF = """
import os
import time

import pytest

def brief():
    open(f"asleep-{os.environ['RANK']}", "w").close()
    time.sleep(4)
    return int(os.environ["RANK"])

@pytest.fixture(scope="session")
def slept(cluster):
    return cluster.run(brief, per="gpu", deadline_s=8)

def test_slept(slept, place):
    assert slept[place] == place.rank

def test_after(cluster):
    pass
"""
PAUSE_S = 15.0
"""Longer than the deadline of that call, and not so long that the store is taken for gone."""


@pytest.mark.slow  # by day with a store that a test plays (test_call_runner.py, test_call_maker.py)
def test_the_store_pauses(starter: Starter) -> None:
    """The torchrun that hosts it is stopped for longer than the deadline of a call: ranks that have answered do not hang."""
    starter.write(test_brief=BRIEF)
    launches = starter.nodes(*CHOSEN, ranks=2, prefixes=[(), ()])
    asleep(starter, launches[0], ranks=4)
    stop([psutil.Process(launches[0].pid)])
    time.sleep(PAUSE_S)
    psutil.Process(launches[0].pid).send_signal(signal.SIGCONT)
    assert [launch.end(within_s=REPORTED_S + LEFT_S) for launch in launches] == [0, 0]
    assert [outcome for outcome, _ in outcomes(launches[0]).values()] == ["passed"] * 5
