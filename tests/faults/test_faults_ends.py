"""Rows 5 to 7: an agent, the controller, a whole node or the store dies, or a signal comes. Reports, statuses, nothing left."""

from __future__ import annotations

import os
import shutil
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.forked_launches import WHOLE_END

if TYPE_CHECKING:
    from tests.support.launching import Launch, Starter

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
BUSY = """
import time

def test_fine(cluster):
    assert cluster.world_size == 2

def test_busy(cluster):
    open("busy", "w").close()
    deadline_s = time.monotonic() + 150
    while time.monotonic() < deadline_s:
        time.sleep(0.1)

def test_after(cluster):
    pass
"""
SLOW_TO_COLLECT = """
import time

open("busy", "w").close()
time.sleep(150)

def test_never_collected(cluster):
    pass
"""
CHOSEN = ("--gpucluster", "--junitxml=junit.xml")
REPORTED_S = 28.0
"""torchrun kills its ranks 30 s after it was told to end: the reports must be there before."""


def asleep(starter: Starter, launch: Launch, *, ranks: int) -> None:
    """Wait until every rank is in the long call."""
    files = [starter.folder / f"asleep-{rank}" for rank in range(ranks)]
    launch.until(lambda: all(file.exists() for file in files), what="rank in the long call")


def outcomes(launch: Launch) -> dict[tuple[str, str | None], tuple[str, str]]:
    """(outcome, reason) by (criterion, place id) of what was selected."""
    rows = launch.results()["criteria"]
    return {
        (row["criterion"], row["place"] and row["place"]["id"]): (row["outcome"], row["reason"] or "")
        for row in rows
        if row["outcome"] != "not_selected"
    }


def written_s(launch: Launch) -> float:
    """When the last report was written, in seconds since 1970."""
    files = (launch.cwd / "junit.xml", launch.cwd / "gpucluster-results" / "results.json")
    return max(file.stat().st_mtime for file in files)


@pytest.mark.parametrize(
    ("started", "number", "why"),
    [
        ("torchrun", signal.SIGTERM, "terminated by SIGTERM"),
        ("pytest", signal.SIGINT, "interrupted"),
        pytest.param("pytest", signal.SIGTERM, "terminated by SIGTERM", marks=pytest.mark.slow),
        pytest.param("torchrun", signal.SIGINT, "interrupted", marks=pytest.mark.slow),
    ],
)
def test_signal_in_a_long_call(starter: Starter, started: str, number: int, why: str) -> None:
    """Reports in time, values so far kept, the rest missing with the reason, non-zero, nothing left."""
    starter.write(test_long=SUITE)
    launch = getattr(starter, started)(*CHOSEN, SLEEP_S="150")
    asleep(starter, launch, ranks=2)
    os.kill(launch.pid, number)
    sent_s = time.time()
    assert launch.end() != 0
    assert written_s(launch) - sent_s < REPORTED_S
    launch.gone()
    found = outcomes(launch)
    assert found["fast", "node0-cpu0"][0] == found["fast", "node0-cpu1"][0] == "passed"
    for key in (("slept", "node0-cpu0"), ("slept", "node0-cpu1"), ("after", None)):
        assert found[key][0] == "missing"
        assert why in found[key][1]
    cases = launch.junit()
    assert [cases[f"test_{name}"] for name in ("slept[node0-cpu0]", "slept[node0-cpu1]", "after")] == ["error"] * 3
    assert (cases["test_fast[node0-cpu0]"], cases["gpucluster.verdict"]) == ("passed", "error")
    assert launch.results()["verdict"] == "INCOMPLETE"
    said = [line for line in launch.output.splitlines() if line.startswith("verdict INCOMPLETE")]
    assert said
    assert [line for line in said if why not in line] == []  # torchrun's own banner has it too


@pytest.mark.parametrize(
    ("started", "number"),
    [  # by day without torchrun, of which the long call above has a SIGTERM
        ("pytest", signal.SIGTERM),
        pytest.param("torchrun", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("torchrun", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_signal_in_a_long_test_body(starter: Starter, started: str, number: int) -> None:
    """A test that never looks up is interrupted too, in time for its report."""
    starter.write(test_long=BUSY)
    launch = getattr(starter, started)(*CHOSEN)
    launch.until((starter.folder / "busy").exists, what="busy test")
    os.kill(launch.pid, number)
    sent_s = time.time()
    assert launch.end() != 0
    assert written_s(launch) - sent_s < REPORTED_S
    launch.gone()
    found = outcomes(launch)
    assert found["fine", None][0] == "passed"
    assert {found[name, None][0] for name in ("busy", "after")} <= {"missing", "error"}
    assert found["after", None][0] == "missing"
    assert launch.results()["verdict"] == "INCOMPLETE"
    assert launch.junit()["gpucluster.verdict"] == "error"


@pytest.mark.parametrize(
    ("busy", "code", "outcome"),
    [
        ("def pytest_runtest_setup():\n    wait()\n", 2, "error"),
        ("def pytest_sessionfinish():\n    wait()\n", 0, "passed"),
        ("class Last:\n    def __del__(self, wait=wait):\n        wait()\n\nlast = Last()\n", 0, "passed"),
        (
            (
                "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
                "class Last:\n    def __del__(self, wait=wait):\n        wait()\n\nlast = Last()\n"
            ),
            0,
            "passed",
        ),
    ],
    ids=["test", "reports", "exit", "exit in the background"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_pressed_again_costs_no_report(starter: Starter, busy: str, code: int, outcome: str, number: int) -> None:
    """Whoever presses it several times, before or while reports are written, or later, has them all, and the exit code."""
    starter.write(
        conftest=f"import time\ndef wait(open=open, sleep=time.sleep):\n    open('busy', 'w').close()\n    sleep(3)\n{busy}",
        test_plain="def test_fine(cluster):\n    pass\n",
    )
    launch = starter.pytest(*CHOSEN, "test_plain.py", **{WHOLE_END: "yes"})
    launch.until((starter.folder / "busy").exists, what="busy hook")
    for _ in range(5):
        os.kill(launch.pid, number)
        time.sleep(0.1)
    assert (launch.end(), launch.results()["verdict"]) == (code, "INCOMPLETE"), launch.output
    launch.gone()
    assert [line for line in launch.output.splitlines() if line.startswith("verdict INCOMPLETE")]
    assert launch.junit()["test_fine"] == outcome


@pytest.mark.slow
def test_agent_killed_during_a_long_test_body(starter: Starter) -> None:
    """Torchrun kills the node 30 s later: the test that never looks up is interrupted before that, and reported."""
    starter.write(test_long=BUSY)
    launch = starter.torchrun(*CHOSEN)
    launch.until((starter.folder / "busy").exists, what="busy test")
    launch.agent_of(1).kill()
    sent_s = time.time()
    assert launch.end() != 0
    assert written_s(launch) - sent_s < REPORTED_S
    launch.gone()
    found = outcomes(launch)
    assert found["fine", None][0] == "passed"
    assert found["after", None][0] == "missing"
    assert launch.results()["environment"].get("unfinished") is None
    assert launch.results()["verdict"] == "INCOMPLETE"


def test_signal_while_collecting(starter: Starter) -> None:
    """Nothing was planned yet: what the profile expects is missing, and says why."""
    starter.write(test_slow_to_collect=SLOW_TO_COLLECT)
    launch = starter.pytest(*CHOSEN)
    launch.until((starter.folder / "busy").exists, what="slow collection")
    os.kill(launch.pid, signal.SIGTERM)
    sent_s = time.time()
    assert launch.end() != 0
    assert written_s(launch) - sent_s < REPORTED_S
    launch.gone()
    found = outcomes(launch)
    assert found["nodes_reachable", None] == ("missing", "not run: terminated by SIGTERM")
    assert launch.junit()["nodes_reachable"] == "error"
    assert launch.results()["verdict"] == "INCOMPLETE"
    assert launch.junit()["gpucluster.verdict"] == "error"


def test_reports_are_on_disk_while_the_run_goes_on(starter: Starter) -> None:
    """SIGKILL for everything at once: the files of that moment are whole, and nothing in them is green by chance."""
    starter.write(test_long=SUITE)
    launch = starter.pytest(*CHOSEN, SLEEP_S="150")
    asleep(starter, launch, ranks=2)
    # The call has gone out first, and the reports follow.
    launch.until(lambda: outcomes(launch)["fast", "node0-cpu1"][0] == "passed", what="report of the tests before the long call")
    launch.until(lambda: launch.junit().get("test_fast[node0-cpu1]") == "passed", what="JUnit file, which comes after it")
    launch.kill_all()
    found = outcomes(launch)
    assert found["fast", "node0-cpu0"][0] == found["fast", "node0-cpu1"][0] == "passed"
    assert found["after", None][0] == "missing"
    assert "not run yet" in found["after", None][1]
    assert launch.results()["environment"]["unfinished"] is True
    cases = launch.junit()
    assert (cases["test_fast[node0-cpu0]"], cases["test_after"], cases["gpucluster.verdict"]) == ("passed", "error", "error")
    properties = {case.name: case.properties for case in launch.cases()}
    assert (properties["test_fast[node0-cpu1]"]["place"], properties["test_fast[node0-cpu1]"]["rank"]) == ("node0-cpu1", "1")
    assert properties["test_after"]["failure_type"] == "missing"
    assert "rebuilt_from" not in (launch.cwd / "junit.xml").read_text(encoding="utf-8")


def test_controller_killed(starter: Starter) -> None:
    """Agents, workers and what those started are gone soon after; the journal tells how far it came."""
    starter.write(test_long=SUITE)
    launch = starter.pytest(*CHOSEN, SLEEP_S="150")
    asleep(starter, launch, ranks=2)
    os.kill(launch.pid, signal.SIGKILL)
    launch.gone()
    assert launch.end() == -signal.SIGKILL
    records = [event["record"] for event in launch.journal() if event["event"] == "outcome"]
    assert [(record["criterion"], record["outcome"]) for record in records] == [("fast", "passed")] * 2
    found = outcomes(launch)  # written by the deputy
    assert found["fast", "node0-cpu0"][0] == "passed"
    assert {found[key][0] for key in (("slept", "node0-cpu0"), ("slept", "node0-cpu1"), ("after", None))} == {"missing"}
    assert launch.results()["verdict"] == "INCOMPLETE"


@pytest.mark.slow  # by day, it is killed without torchrun, and with its whole node
def test_controller_killed_under_torchrun(starter: Starter) -> None:
    """The other ranks do not wait for a word from the dead."""
    starter.write(test_long=SUITE)
    launch = starter.torchrun(*CHOSEN, SLEEP_S="150")
    asleep(starter, launch, ranks=2)
    time.sleep(3)  # by now every agent knows that there is a controller
    launch.controller().kill()
    launch.gone()
    assert launch.end() != 0


def test_agent_killed_under_torchrun(starter: Starter) -> None:
    """Its place is named, as the cause and nothing else; the others keep their values although torchrun ends the node."""
    starter.write(test_long=SUITE)
    launch = starter.torchrun(*CHOSEN, ranks=3, SLEEP_S="4")
    asleep(starter, launch, ranks=3)
    launch.agent_of(1).kill()
    assert launch.end() != 0
    launch.gone()
    assert not [file for file in starter.temporary_files() if file.name.startswith("gpucluster-")]
    found = outcomes(launch)
    outcome, reason = found["slept", "node0-cpu1"]
    assert outcome in ("error", "missing")
    assert "rank 1" in reason
    assert "SIGTERM" not in reason
    assert found["slept", "node0-cpu0"][0] == found["slept", "node0-cpu2"][0] == "passed"
    assert [culprit["place"]["id"] for culprit in launch.results()["culprits"]] == ["node0-cpu1"]
    assert launch.results()["environment"]["messages"] == "signed"  # by a secret that the ranks of one node share
    assert not [*starter.folder.rglob("gpucluster-secret*")]
    assert launch.junit()["gpucluster.verdict"] == "error"


NODES = """
import os
import time

import pytest
import torch
import torch.distributed as dist

def alone():
    return int(os.environ["RANK"])

def together(*, seconds):
    dist.barrier()
    open(f"asleep-{os.environ['RANK']}", "w").close()
    time.sleep(seconds)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

@pytest.fixture(scope="session")
def before(cluster):
    return cluster.run(alone, per="gpu")

@pytest.fixture(scope="session")
def summed(cluster):
    return cluster.run(together, per="cluster", seconds=float(os.environ["SLEEP_S"]), deadline_s=60)

@pytest.fixture(scope="session")
def after(cluster):
    return cluster.run(alone, per="gpu")

def test_before(before, place):
    assert before[place] == place.rank

def test_summed(summed):
    assert summed.value == 4

def test_after(after, place):
    assert after[place] == place.rank
"""
PLACES = ("node0-cpu0", "node0-cpu1", "node1-cpu0", "node1-cpu1")


def two_nodes(starter: Starter) -> list[Launch]:
    """Two torchruns x 2, all four ranks in a collective call."""
    starter.write(test_nodes=NODES)
    starter.environment["SLEEP_S"] = "3"
    starter.environment["GPUCLUSTER_SECRET"] = "of this test"  # noqa: S105 -- the test's own
    launches = starter.nodes(*CHOSEN, ranks=2, prefixes=[(), ()])
    asleep(starter, launches[0], ranks=4)
    return launches


def by_node(launches: list[Launch], *, node: int) -> list[str]:
    """The ids of the places that a torchrun's ranks were bound to."""
    bound = next(event["places"] for event in launches[0].journal() if event["event"] == "bound")
    return [place["id"] for place in bound if place["rank"] in (2 * node, 2 * node + 1)]


def test_a_whole_node_dies(starter: Starter) -> None:
    """Torchrun and all below it: its places are errors by name, the other node goes on, both leave non-zero, no long wait."""
    launches = two_nodes(starter)
    lost = by_node(launches, node=1)
    launches[1].kill_all()
    assert launches[0].end() != 0
    launches[0].gone()
    found = outcomes(launches[0])
    for place in PLACES:
        assert found["before", place][0] == "passed"
        assert found["after", place][0] == ("error" if place in lost else "passed"), found
    assert found["summed", None][0] == "error"
    guilty = {culprit["place"]["id"] for culprit in launches[0].results()["culprits"]}
    assert guilty == set(lost)
    assert launches[0].results()["verdict"] == "INCOMPLETE"
    assert "were not signed" not in launches[0].output
    assert launches[0].junit()["gpucluster.verdict"] == "error"


@pytest.mark.parametrize("files", [pytest.param("shared", marks=pytest.mark.slow), "gone"])  # by day, what is harder
def test_the_node_of_the_controller_dies(starter: Starter, files: str) -> None:
    """Controller, deputy, store and torchrun at once: an agent of the other node finishes the report from its copy."""
    launches = two_nodes(starter)
    # Else the heir may have begun to write before its files are taken away, and the controller may see its agent die first.
    with launches[1].standing_still(), launches[0].standing_still():
        launches[0].kill_all()
        if files == "gone":  # as on a node without a shared file system
            shutil.rmtree(starter.folder / "gpucluster-results")
            (starter.folder / "junit.xml").unlink(missing_ok=True)
    assert launches[1].end() != 0
    launches[1].gone()
    assert "the controller is lost; its report is finished here" in launches[1].output
    found = outcomes(launches[1])
    assert {found["before", place][0] for place in PLACES} == {"passed"}
    assert {found["after", place][0] for place in PLACES} == {found["summed", None][0]} == {"missing"}
    assert launches[1].results()["environment"]["rebuilt_from_journal"] is True
    cases = launches[1].junit()
    assert (cases["test_before[node0-cpu0]"], cases["test_summed"], cases["gpucluster.verdict"]) == ("passed", "error", "error")


def test_the_store_dies(starter: Starter) -> None:
    """Only node 0's torchrun, which hosts the store: the controller still writes its report, and everybody leaves."""
    launches = two_nodes(starter)
    os.kill(launches[0].pid, signal.SIGKILL)
    for launch in launches:
        assert launch.end() != 0
        launch.gone(within_s=60)
    found = outcomes(launches[0])
    assert {found["before", place][0] for place in PLACES} == {"passed"}
    assert {found["after", place][0] for place in PLACES} <= {"missing", "error"}
    assert launches[0].results()["verdict"] == "INCOMPLETE"
    assert launches[0].junit()["gpucluster.verdict"] == "error"
