"""What is undecided, or was disturbed, is measured once more when the rest is over; a failure never."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.fleets import not_green, simulate
from tests.support.runs import run_pytest, user_folder
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = pytest.mark.e2e

LIMIT = {"above": 100, "bound_waived": "a test", "per": "gpu", "unit": "TFLOPS", "noise": 0.1}
CASES = ("quiet_later", "noisy_twice", "slow_later", "failed", "good")
AGAIN = "measured again at the end"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of folders/second_chance."""
    return user_folder("second_chance", tmp_path_factory.mktemp("user") / "second_chance")


@pytest.fixture(scope="module")
def ran(folder: Path) -> FinishedRun:
    """All of its tests in one run."""
    criteria = {
        **{f"rate[{name}]": entry(**LIMIT) for name in CASES},
        "leaves": entry(per="gpu"),
        "over_run": entry(min=100),
        **{name: entry() for name in ("stays", "crashes_later", "hung")},
    }
    limits = write_limits(folder / "limits.yaml", criteria, extends=False)
    return run_pytest(folder, "--gpucluster", "test_second.py", limits)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("rate[quiet_later]", "passed"),
        ("rate[noisy_twice]", "noisy"),
        ("rate[slow_later]", "failed"),
        ("rate[failed]", "failed"),
        ("rate[good]", "passed"),
        ("leaves", "passed"),
        ("stays", "error"),
        ("crashes_later", "error"),
        ("hung", "error"),
        ("own", "passed"),
        ("over_run", "passed"),
    ],
)
def test_outcome(ran: FinishedRun, name: str, outcome: str) -> None:
    """The second look decides what the first one left open."""
    assert set(ran.outcomes(name).values()) == {outcome}, ran.stdout


def test_both_values_are_in_the_evidence(ran: FinishedRun) -> None:
    """The first outcome, its value and its reason stand beside the second ones: passed, undecided or failed."""
    for name, value in (("quiet_later", 120), ("noisy_twice", 100.4), ("slow_later", 80)):
        row = ran.row(f"rate[{name}]", "node0-cpu1")
        assert row["value"] == pytest.approx(value)
        evidence = row["evidence"]
        assert (evidence[AGAIN], evidence["first look"], evidence["first look value"]) == (True, "noisy", 100.5)
        assert "too close to call" in evidence["first look reason"]
    assert ran.row("leaves", "node0-cpu0")["evidence"]["first look reason"] == "GPU not idle: a job"
    assert ran.row("stays")["evidence"]["first look"] == "error"


def test_what_is_decided_is_never_measured_again(ran: FinishedRun, folder: Path) -> None:
    """A failure, a pass, and an error that a rank made itself."""
    for name, place in (("rate[failed]", "node0-cpu0"), ("rate[good]", "node0-cpu0"), ("hung", None)):
        assert AGAIN not in ran.row(name, place)["evidence"]
    order = (folder / "order.txt").read_text(encoding="utf-8").splitlines()
    assert order.count("hung") == 1
    assert order.count("rate failed") == order.count("rate good") == len(ran.outcomes("rate[failed]"))


def test_again_comes_after_all_others_and_before_what_judges_the_run(folder: Path, ran: FinishedRun) -> None:
    """An Xid during a second look is seen by the criterion of the whole run."""
    order = (folder / "order.txt").read_text(encoding="utf-8").splitlines()
    last_first_look = order.index("plain last")
    again = [at for at, name in enumerate(order) if name in ("stays", "own", "crashes later") and at > last_first_look]
    assert len(again) == 3, order
    assert max(again) < order.index("over the run")
    assert ran.row("over_run")["outcome"] == "passed"


def test_fixtures_of_the_user_are_not_broken(folder: Path, ran: FinishedRun) -> None:
    """One of the session is made once and ended once; one of a function is new for each look; ours is measured again."""
    order = (folder / "order.txt").read_text(encoding="utf-8").splitlines()
    assert order[-2:] == ["server", "down"]
    assert "FileExistsError" not in ran.stdout


def test_each_test_is_in_the_junit_file_once(ran: FinishedRun) -> None:
    """With its last outcome; the properties are those of the second look."""
    names = [case.name for case in ran.cases]
    assert len(names) == len(set(names))
    passed = ran.case("test_rate[node0-cpu0-quiet_later]")
    assert passed.outcome == "passed"
    assert AGAIN in passed.properties["remark"]
    assert passed.properties["value"].startswith("120")
    noisy = ran.case("test_rate[node0-cpu0-noisy_twice]")
    assert noisy.outcome == "error"
    assert AGAIN in noisy.text
    assert "100.5 TFLOPS" in noisy.text
    assert "100.4 TFLOPS" in noisy.text
    assert ran.case("test_rate[node0-cpu0-slow_later]").outcome == "failure"


def test_the_terminal_says_it(ran: FinishedRun) -> None:
    """How many are measured again, and what of it; pytest's own counts have each test once."""
    assert f"gpucluster: {AGAIN}: " in ran.stdout
    assert ran.stdout.count(AGAIN) > 3
    counts = next(line for line in reversed(ran.stdout.splitlines()) if " passed" in line and " in " in line)
    places = len(ran.outcomes("leaves"))
    assert f"{2 * places + 3 + places} passed" in counts.replace(",", ""), counts


def test_the_journal_has_both_outcomes(ran: FinishedRun) -> None:
    """The first one is on record at once: a run that dies meanwhile leaves it."""
    found = [
        event["record"]["outcome"]
        for event in ran.journal
        if event["event"] == "outcome"
        and (event["record"]["criterion"], event["record"]["place"]) == ("rate[quiet_later]", "node0-cpu0")
    ]
    assert found == ["noisy", "passed"]


DISTURBED = ("node0-gpu0:noisy", "node1:loaded", "node0-gpu2:guest", "node1-gpu1:busy", "node0-gpu1:pcie")
LINKS = {"host_to_device", "device_to_host"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A fleet: a disturbed link, a busy host, a competitor that leaves, one that stays, and a link at half its rate."""
    chosen = ("-k", "host_to_device or device_to_host or no_foreign_process or bf16_tflops", "--gpucluster-level=quick")
    return simulate(tmp_path_factory.mktemp("fleet"), "2x3", *chosen, bad=DISTURBED)


def test_only_what_stays_is_left(fleet: FinishedRun) -> None:
    """Of the disturbances, the program that stays; the slow link is a failure."""
    found = {where: outcomes for where, outcomes in not_green(fleet).items() if set(outcomes) != {"not_selected"}}
    bad = {where: {name: found[where][name] for name in found[where] if name != "not_selected"} for where in found}
    assert set(bad) == {"gpu-node-0 gpu 1", "gpu-node-1 gpu 1"}, fleet.stdout[-3000:]
    assert set(bad["gpu-node-1 gpu 1"]) == {"error"}
    assert bad["gpu-node-0 gpu 1"]["failed"] >= LINKS
    assert AGAIN not in fleet.row("host_to_device", "node0-gpu1")["evidence"]


def test_each_disturbance_is_told(fleet: FinishedRun) -> None:
    """The first look stands in the evidence: too close to call, the host with who, the GPU with who."""
    firsts = {
        place: fleet.row("host_to_device", place)["evidence"]["first look reason"]
        for place in ("node0-gpu0", "node1-gpu0", "node0-gpu2", "node1-gpu1")
    }
    assert "too close to call" in firsts["node0-gpu0"]
    assert firsts["node1-gpu0"].startswith("host not idle: stress-ng (pid 4712, alice) 800 % CPU (8.0 of 112 CPUs busy")
    assert "38." in firsts["node1-gpu0"]
    assert firsts["node0-gpu2"].startswith("GPU not idle: 23.4 GiB held by pid 4711 (python3)")
    assert firsts["node1-gpu1"].startswith("GPU not idle: 23.4 GiB held by pid 4711 (python3)")
    assert fleet.row("no_foreign_process", "node0-gpu2")["outcome"] == "passed"
    assert fleet.row("bf16_tflops", "node0-gpu2")["outcome"] == "passed"
