"""Rows 1 to 4 of the fault list: ranks that raise, die, hang or suffer from another, one after the other in one launch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

SUITE = Path(__file__).with_name("planted_ranks.py").read_text(encoding="utf-8")
PLANNED = re.findall(r"^def (test_\w+)", SUITE, re.MULTILINE)
RANKS = 4
SHORT_S = 3.0
"""The deadline of the calls that hang, as in the suite."""

AT_ONCE_S = 30.0
"""Far below the deadline of a call (120 s): the other ranks were released, and did not wait for the dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted fault: whose, who was inside the collective when it struck, and what must be told of it."""

    case: str
    victim: int
    inside: tuple[int, ...]
    told: tuple[str, ...]
    within_s: float = AT_ONCE_S


WAITED = "waited in all_reduce and did not finish because of it"
LATE = SHORT_S + AT_ONCE_S
FAULTS = (
    Fault(
        case="raised",
        victim=1,
        inside=(0, 2, 3),
        told=("ArithmeticError: planted: the product is wrong", f"ranks 0, 2-3 {WAITED}", "in raise_early"),
    ),
    Fault(
        case="killed", victim=2, inside=(0, 1, 2), told=("the worker died: SIGKILL, last in all_reduce", f"ranks 0-1 {WAITED}")
    ),
    Fault(
        case="left",
        victim=3,
        inside=(1, 2, 3),
        told=("the worker left with exit code 0, last in all_reduce", f"ranks 1-2 {WAITED}"),
    ),
    Fault(
        case="crashed", victim=0, inside=(0, 2, 3), told=("the worker died: SIGSEGV, last in all_reduce", f"ranks 2-3 {WAITED}")
    ),
    Fault(case="echoed", victim=1, inside=(0, 2, 3), told=("ArithmeticError: planted: the cause", f"ranks 0, 2-3 {WAITED}")),
    Fault(
        case="late",
        victim=0,
        inside=(1, 2, 3),
        told=("ArithmeticError: planted: the cause", f"ranks 1-3 {WAITED}"),
        within_s=1.5 + AT_ONCE_S,
    ),
    Fault(
        case="hung",
        victim=3,
        inside=(0, 1, 2),
        told=(
            "never arrived in all_reduce (collective 2 of the call), which ranks 0-2 had entered",
            f"the call did not return within {SHORT_S:g} s",
            f"ranks 0-2 {WAITED}",
            "flight recorder of rank 3",
        ),
        within_s=LATE,
    ),
    Fault(
        case="stopped",
        victim=2,
        inside=(0, 1, 3),
        told=(f"is stopped (SIGSTOP): the call did not return within {SHORT_S:g} s", f"ranks 0-1, 3 {WAITED}"),
        within_s=LATE,
    ),
    Fault(
        case="mismatched",
        victim=1,
        inside=(0, 2, 3),
        told=(
            "did not enter what the others did (ranks 0, 2-3 all_reduce of Float [1], rank 1 broadcast of Float [1]; ",
            f"ranks 0, 2-3 {WAITED}",
            "in enter_another",
        ),
        within_s=LATE,
    ),
)
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.case)


@pytest.fixture(scope="module")
def faulty(shared_starter: Starter) -> tuple[Launch, int]:
    """The suite with every fault in it, and torchrun's exit status; no process of it is left."""
    shared_starter.write(test_planted=SUITE)
    return ended(shared_starter.torchrun("--gpucluster", "--junitxml=junit.xml", ranks=RANKS))


def ended(launch: Launch) -> tuple[Launch, int]:
    """The same launch when it is over and gone, with its exit status."""
    status = launch.end(within_s=120)
    launch.gone()
    return launch, status


def time_s(launch: Launch, name: str) -> float:
    """What the suite noted: seconds since 1970."""
    return float((launch.cwd / name).read_text(encoding="ascii"))


def text_of(launch: Launch, case: str) -> str:
    """What the JUnit file says of the error of a test."""
    (found,) = (one for one in launch.cases() if one.name == f"test_{case}")
    assert found.outcome == "error"
    return found.text


def reasons(launch: Launch) -> dict[str, tuple[str, str]]:
    """(outcome, reason) of each test of the suite in results.json."""
    rows = launch.results()["criteria"]
    return {row["criterion"]: (row["outcome"], row["reason"] or "") for row in rows if row["outcome"] != "not_selected"}


@each_fault
def test_struck_while_the_others_were_inside(faulty: tuple[Launch, int], fault: Fault) -> None:
    """The plant itself: these ranks had entered the collective when the fault struck, and no other one had."""
    launch, _ = faulty
    struck_s = time_s(launch, f"struck-{fault.case}")
    entered_s = {rank: launch.cwd / f"entered-{fault.case}-{rank}" for rank in range(RANKS)}
    assert tuple(rank for rank, file in entered_s.items() if file.exists()) == fault.inside
    assert all(time_s(launch, f"entered-{fault.case}-{rank}") < struck_s for rank in fault.inside)


@each_fault
def test_seen_and_told(faulty: tuple[Launch, int], fault: Fault) -> None:
    """An error in JUnit and results.json; its first line names the rank and the cause, the consequences stand below."""
    launch, _ = faulty
    outcome, reason = reasons(launch)[fault.case]
    assert outcome == "error"
    first, *below = reason.splitlines()
    assert f" was not measured: rank {fault.victim} (node0-" in first
    assert fault.told[0] in first
    for part in fault.told:
        assert part in reason
        assert part in text_of(launch, fault.case)
    assert WAITED not in first
    assert any(WAITED in line for line in below)


@each_fault
def test_placed(faulty: tuple[Launch, int], fault: Fault) -> None:
    """results.json points at the one rank, and at nobody who only waited for it."""
    launch, _ = faulty
    blamed = [culprit["place"]["rank"] for culprit in launch.results()["culprits"] if fault.case in culprit["criteria"]]
    assert blamed == [fault.victim]


@each_fault
def test_over_in_time(faulty: tuple[Launch, int], fault: Fault) -> None:
    """From the fault to the end of the call on the controller: at once, or at the deadline."""
    launch, _ = faulty
    took_s = time_s(launch, f"ended-{fault.case}") - time_s(launch, f"struck-{fault.case}")
    assert 0 < took_s < fault.within_s


@each_fault
def test_goes_on(faulty: tuple[Launch, int], fault: Fault) -> None:
    """The next test, a collective of all four ranks, passes."""
    launch, _ = faulty
    assert launch.junit()[f"test_after_{fault.case}"] == "passed"
    assert reasons(launch)[f"after_{fault.case}"][0] == "passed"


def test_stacks_of_a_hang(faulty: tuple[Launch, int]) -> None:
    """The report shows where the rank hangs that never arrived."""
    launch, _ = faulty
    below = text_of(launch, "hung").partition("Python stacks of rank 3 (node0-")[2]
    assert 'test_planted.py", line' in below
    assert "in hang" in below


def test_stacks_of_a_stop(faulty: tuple[Launch, int]) -> None:
    """The report shows where the stopped rank is, or else where one that waits for it is."""
    launch, _ = faulty
    below = text_of(launch, "stopped").partition("Python stacks of rank ")[2]
    assert re.search(r'test_planted.py", line \d+ in (stop|add_up)', below)


def test_stacks_of_a_crash(faulty: tuple[Launch, int]) -> None:
    """The report shows the Python stacks at the segmentation fault: the thread that caused it, and where the others were."""
    launch, _ = faulty
    below = text_of(launch, "crashed").partition("Python stacks of rank 0 (node0-")[2]
    assert "Fatal Python error: Segmentation fault" in below
    assert "in strike_inside" in below


def test_reports_are_whole(faulty: tuple[Launch, int]) -> None:
    """Every planned test stands once in the JUnit file and in results.json, the verdict last; the status is not 0."""
    launch, status = faulty
    assert status != 0
    names = [case.name for case in launch.cases()]
    assert names == [*PLANNED, "gpucluster.verdict"]
    assert set(reasons(launch)) == {name.removeprefix("test_") for name in PLANNED}
    errors = {f"test_{fault.case}" for fault in FAULTS}
    assert {name for name, outcome in launch.junit().items() if outcome == "error"} == {*errors, "gpucluster.verdict"}
    assert launch.results()["verdict"] == "INCOMPLETE"


def test_nothing_is_left_in_the_temporary_folder(faulty: tuple[Launch, int], shared_starter: Starter) -> None:
    """Agents take their folders along, also those whose workers were killed."""
    assert not [path.name for path in shared_starter.temporary_files() if path.name.startswith("gpucluster-")]


OUTSIDE = """
import os
import signal
import time
from pathlib import Path

import planted_ranks

if os.environ.get("RANK") == "1" and Path("planted").exists():
    Path("planted").unlink()
    planted_ranks.note("struck-unready")
    raise ArithmeticError("planted: no way in")

def add_up(*, case):
    return planted_ranks.add_up()

def own_pid():
    return os.getpid()

def test_unready(cluster):
    Path("planted").touch()
    planted_ranks.judge(cluster, add_up, "unready")

def test_before_idle(cluster):
    planted_ranks.judge_healthy(cluster)

def test_idle(cluster):
    os.kill(list(cluster.run(own_pid, per="gpu").values())[2], signal.SIGKILL)
    planted_ranks.note("struck-idle")
    time.sleep(1)
    planted_ranks.judge(cluster, add_up, "idle")

def test_after_idle(cluster):
    planted_ranks.judge_healthy(cluster)
"""


@pytest.fixture(scope="module")
def outside(shared_starter: Starter) -> Launch:
    """Faults of ranks that are not inside a call: before they joined the group, and between two calls of it."""
    shared_starter.write(test_outside=OUTSIDE, planted_ranks=SUITE)
    arguments = ("--gpucluster", "--gpucluster-results=outside", "--junitxml=outside.xml", "test_outside.py")
    launch, status = ended(shared_starter.torchrun(*arguments, ranks=3))
    assert status != 0
    return launch


@pytest.mark.parametrize(
    ("case", "victim", "told"),
    [
        ("unready", 1, "ArithmeticError: planted: no way in"),
        ("idle", 2, "the worker died: SIGKILL, between two calls"),
    ],
)
def test_struck_outside_a_call(outside: Launch, case: str, victim: int, told: str) -> None:
    """Nobody waits for a set-up that cannot end, the cause is named and nobody else, and the next collective works."""
    found = outside.results("outside")
    (row,) = (row for row in found["criteria"] if row["criterion"] == case)
    assert row["outcome"] == "error"
    first = row["reason"].splitlines()[0]
    assert f" was not measured: rank {victim} (node0-" in first
    assert told in first
    assert [culprit["place"]["rank"] for culprit in found["culprits"] if case in culprit["criteria"]] == [victim]
    assert 0 < time_s(outside, f"ended-{case}") - time_s(outside, f"struck-{case}") < AT_ONCE_S + 1
    passed = {name for name, outcome in outside.junit("outside.xml").items() if outcome == "passed"}
    assert passed == {"test_before_idle", "test_after_idle"}


def test_healthy(starter: Starter) -> None:
    """The same suite without a fault: everything passes, nobody is blamed, status 0."""
    starter.write(test_planted=SUITE)
    launch, status = ended(starter.torchrun("--gpucluster", "--junitxml=junit.xml", ranks=RANKS, PLANTED="none"))
    assert status == 0, launch.output
    assert {name: outcome for name, outcome in launch.junit().items() if name in PLANNED} == dict.fromkeys(PLANNED, "passed")
    assert {outcome for outcome, _ in reasons(launch).values()} == {"passed"}
    assert launch.results()["culprits"] == []
    assert not list(starter.folder.glob("struck-*"))
