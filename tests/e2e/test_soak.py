"""A soak in a real run: whole rounds for a duration, reports after each, and what one round found is kept."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launching import ACCEPTANCE
from tests.support.runs import collect, run_pytest, start_pytest, user_folder
from tests.support.thresholds_files import entry, in_rehearsal, write_limits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.launching import Launch
    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PACKAGED = ("bf16_soak", "silent_corruption_soak", "hbm_pattern_soak")
PLACES = ("node0-cpu0", "node0-cpu1")
SOAK_S = 30
"""Long enough for two rounds on a machine that is busy with other things."""
LIMITS: dict[str, Any] = {
    key: entry(
        max=0, per="gpu", level="soak", deadline_s=5, takes_s=0.2, unit="errors", recipe={"pause_s": 0.1}, criterion="It holds."
    )
    for key in ("wear", "tear")
}
LIMITS["zeal"] = entry()


def start(folder: Path, planted: dict[str, dict[str, Any]], *arguments: str) -> tuple[Path, tuple[str, ...]]:
    """A user's folder with this plan of faults, and the arguments of a soak in it."""
    user = user_folder("soak", folder / "soak")
    (user / "planted").write_text(json.dumps(planted), encoding="utf-8")
    limits = write_limits(user / "limits.yaml", LIMITS, extends=False)
    return user, ("--gpucluster", "test_wear.py", limits, *arguments)


def rounds_of(ran: FinishedRun) -> list[dict[str, Any]]:
    """What the journal has of each round."""
    return [event for event in ran.journal if event["event"] == "soak_round"]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The packaged soak for some seconds, with nothing else."""
    folder = tmp_path_factory.mktemp("healthy")
    return run_pytest(folder, ACCEPTANCE, "--gpucluster-level", f"soak:{SOAK_S}s", "-k", "soak")


@pytest.fixture(scope="module")
def worn(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Rank 0 has errors in round 2 alone, the worker of rank 1 is killed in round 2."""
    planted = {"0": {"2": 3}, "1": {"2": "kill"}}
    folder, arguments = start(tmp_path_factory.mktemp("worn"), planted, "--gpucluster-level", "soak:5s")
    return run_pytest(folder, *arguments)


def test_the_packaged_soak(healthy: FinishedRun) -> None:
    """Several rounds of three works, on each rank; the soak lasts as long as it should; all pass."""
    rounds = rounds_of(healthy)
    assert len(rounds) >= 2
    assert [one["round"] for one in rounds] == list(range(1, len(rounds) + 1))
    assert rounds[-2]["elapsed_s"] < SOAK_S <= rounds[-1]["elapsed_s"]
    for criterion in PACKAGED:
        assert healthy.outcomes(criterion) == dict.fromkeys(PLACES, "passed")
        assert rounds[-1]["worst"][criterion]["place"] in PLACES
    evidence = healthy.row("bf16_soak", PLACES[0])["evidence"]
    assert evidence["rounds"] == len(rounds)
    assert min(evidence["first round"], evidence["last round"]) >= healthy.row("bf16_soak", PLACES[0])["value"]
    assert healthy.outcomes("busbw_soak") == {"node0": "passed"}
    assert healthy.row("busbw_soak", "node0")["evidence"]["rounds"] == len(rounds)


def test_a_line_when_the_worst_value_changes(healthy: FinishedRun) -> None:
    """Round, time, what is left, the worst so far: after the first round, and not after each."""
    line = rf"(?m)^soak round (\d+): \d+ s of {SOAK_S} s, \d+ s left; worst so far: bf16_soak .* TFLOPS \(node0-"
    shown = [int(number) for number in re.findall(line, healthy.stdout)]
    assert shown[0] == 1
    assert set(shown) <= {one["round"] for one in rounds_of(healthy)}


def test_the_plan_of_a_soak(healthy: FinishedRun) -> None:
    """The duration is in the estimate."""
    plan = re.search(
        r"plan: 4 criteria, 7 checks, 4 not applicable, about 0:(\d+)\s+\(soak 0:\d+,\s+start-up 0:04\)", healthy.stdout
    )
    assert plan is not None
    assert SOAK_S + 4 <= int(plan[1]) <= SOAK_S + 6


@pytest.mark.fault
def test_each_packaged_work_can_fail(tmp_path: Path) -> None:
    """A bit flipped on rank 1 in every round's second repetition, a byte flipped in memory, a rate that nobody has."""
    planted = {
        "silent_corruption_soak": in_rehearsal(recipe={"flips": [{"kind": "softmax", "bit": 5, "round": 1, "rank": 1}]}),
        "hbm_pattern_soak": in_rehearsal(recipe={"flip": 4096}),
        "bf16_soak": in_rehearsal(above=1000),
        "busbw_soak": in_rehearsal(above={"any": 1000}),
    }
    limits = write_limits(tmp_path / "planted.yaml", planted)
    ran = run_pytest(tmp_path, ACCEPTANCE, limits, "--gpucluster-level", "soak:1s", "-k", "soak")
    assert ran.outcomes("bf16_soak") == ran.outcomes("hbm_pattern_soak") == dict.fromkeys(PLACES, "failed")
    assert ran.outcomes("busbw_soak") == {"node0": "failed"}
    assert ran.outcomes("silent_corruption_soak") == {PLACES[0]: "passed", PLACES[1]: "failed"}
    bits = ran.row("silent_corruption_soak", PLACES[1])
    assert bits["value"] == len(rounds_of(ran))  # one kind in each
    assert "rounds are not like the first: 1" in bits["evidence"]["softmax"]
    assert ran.row("hbm_pattern_soak", PLACES[0])["evidence"]["random"] > 0


@pytest.mark.fault
@pytest.mark.parametrize(("bad", "outcome"), [((), "passed"), (("node1:uplink",), "failed")])
def test_rounds_between_nodes(tmp_path: Path, bad: tuple[str, ...], outcome: str) -> None:
    """One value for all nodes, of the worst round: a slow uplink is missed in it, and blames nobody by itself."""
    planted = [f"--fleet-bad={fault}" for fault in bad]
    fleet = ("-p", "pytest_gpucluster.plugin.fleet", "--fleet=3x4", *planted)
    ran = run_pytest(tmp_path, *fleet, ACCEPTANCE, "--gpucluster-level", "soak:1s", "-k", "busbw_soak")
    assert ran.outcomes("busbw_soak") == dict.fromkeys(("node0", "node1", "node2"), "passed")
    (row,) = (row for row in ran.results["criteria"] if row["criterion"] == "inter_node_busbw_soak")
    assert (row["place"], row["outcome"]) == (None, outcome)
    assert row["evidence"]["rounds"] == len(rounds_of(ran))
    assert ran.results["culprits"] == []
    assert rounds_of(ran)[-1]["worst"]["inter_node_busbw_soak"]["place"] == "cluster"


@pytest.mark.fault
def test_a_fault_in_round_2_is_kept(worn: FinishedRun) -> None:
    """Later rounds are clean; the errors of round 2 are judged, with their round, and were on record at once."""
    rounds = rounds_of(worn)
    assert len(rounds) >= 3
    row = worn.row("wear", PLACES[0])
    assert (row["outcome"], row["value"]) == ("failed", 3)
    assert (row["evidence"]["worst in round"], row["evidence"]["last round"]) == (2, 0)
    assert row["evidence"]["rounds"] == len(rounds)
    assert worn.case(f"test_wear[{PLACES[0]}]").outcome == "failure"
    assert worn.results["verdict"] == "REJECTED"
    outcomes = [event for event in worn.journal if event["event"] == "outcome" and event["record"]["outcome"] == "failed"]
    assert worn.journal.index(outcomes[0]) < worn.journal.index(rounds[2])


def test_the_soak_comes_last(worn: FinishedRun) -> None:
    """What is quick is on record before hours begin, wherever its test stands."""
    events = [event["record"]["criterion"] if event["event"] == "outcome" else event["event"] for event in worn.journal]
    assert events.index("zeal") < events.index("soak_round")


@pytest.mark.fault
def test_a_death_in_round_2_is_an_error_there(worn: FinishedRun) -> None:
    """With its round; the other place went on in that work, and this one in the other work."""
    case = worn.case(f"test_wear[{PLACES[1]}]")
    assert case.outcome == "error"
    assert "in round 2 of the soak, after 1 good ones: wear was not measured: rank 1 (node0-cpu1, " in case.text
    assert "SIGKILL" in case.text
    assert worn.outcomes("wear") == {PLACES[0]: "failed", PLACES[1]: "error"}
    assert worn.outcomes("tear") == dict.fromkeys(PLACES, "passed")
    rounds = rounds_of(worn)
    assert worn.row("tear", PLACES[1])["evidence"]["rounds"] == len(rounds)
    assert [len(one["lost"]) for one in rounds[:3]] == [0, 1, 0]
    assert re.search(r"^not measured: wear at .+ cpu 1 \(node0-cpu1\): in round 2 of the soak", worn.stdout, re.MULTILINE)
    assert worn.culprit(PLACES[1])["criteria"] == ["wear"]


@pytest.fixture(scope="module")
def taken_back(tmp_path_factory: pytest.TempPathFactory) -> tuple[FinishedRun, dict[str, Any]]:
    """Rank 0 has errors in round 1; the tests skip, or judge another value. And results.json in the run's last teardown."""
    folder, (first, _, *others) = start(tmp_path_factory.mktemp("taken"), {"0": {"1": 2}}, "--gpucluster-level", "soak:2s")
    ran = run_pytest(folder, first, "test_taken_back.py", *others)
    return ran, json.loads((folder / "at_the_last_teardown.json").read_text(encoding="utf-8"))


@pytest.mark.fault
def test_what_a_round_found_is_not_taken_back(taken_back: tuple[FinishedRun, dict[str, Any]]) -> None:
    """Not by a skip, a value of the test's own, xfail, or the good rounds that follow; without it a skip is an error."""
    ran, _ = taken_back
    assert len(rounds_of(ran)) >= 2
    assert ran.outcomes("wear") == {PLACES[0]: "failed", PLACES[1]: "error"}
    assert ran.outcomes("tear") == {PLACES[0]: "failed", PLACES[1]: "passed"}
    assert [ran.case(f"test_{name}[{PLACES[0]}]").outcome for name in ("wear", "tear")] == ["failure", "failure"]
    assert ran.results["verdict"] == "REJECTED"
    assert ran.results["soak_s"] == 2


@pytest.mark.fault
def test_a_soak_left_early_passes_nobody(tmp_path: Path) -> None:
    """Good values of less than a round, of a soak of an hour."""
    folder, (first, _, *others) = start(tmp_path, {}, "--gpucluster-level", "soak:1h")
    ran = run_pytest(folder, first, "test_taken_back.py", *others, variables={"LEAVE_EARLY": "1"})
    assert {**ran.outcomes("wear"), **ran.outcomes("tear")} == dict.fromkeys(PLACES, "error")
    assert "not measured to its end: no whole round of the soak was measured" in ran.case(f"test_tear[{PLACES[0]}]").text
    assert ran.results["verdict"] == "INCOMPLETE"
    so_far = json.loads((folder / "at_the_last_teardown.json").read_text(encoding="utf-8"))
    assert (so_far["verdict"], so_far["environment"]["unfinished"]) == ("INCOMPLETE", True)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Launch]:
    """A soak of an hour that has errors on rank 0 in its first round; ended after the test."""
    folder, arguments = start(tmp_path, {"0": {"1": 2}}, "--gpucluster-level", "soak:1h")
    (launch,) = start_pytest(folder, *arguments)
    yield launch
    launch.kill_all()


@pytest.mark.fault
def test_reports_while_it_runs_and_when_it_is_ended(running: Launch) -> None:
    """After a round the reports are there, with the failure and the values so far; SIGTERM does not take the failure back."""
    running.until(
        lambda: any(event["event"] == "soak_round" and event["round"] == 2 for event in running.journal()), what="round 2"
    )
    so_far = running.results()
    rows = {(row["criterion"], (row["place"] or {"id": None})["id"]): row for row in so_far["criteria"]}
    assert rows["wear", PLACES[0]]["outcome"] == "failed"
    waiting = rows["wear", PLACES[1]]
    assert (waiting["outcome"], waiting["value"]) == ("missing", 0)
    assert re.match(r"\d+ rounds? of its soak so far; not run yet", waiting["reason"])
    assert so_far["verdict"] == "REJECTED"
    assert "test_wear[node0-cpu0]" in running.junit()
    os.kill(running.pid, signal.SIGTERM)
    assert running.end() != 0
    running.gone()
    ran = collect([running])
    assert ran.outcomes("wear") == {PLACES[0]: "failed", PLACES[1]: "missing"}
    assert ran.outcomes("tear") == dict.fromkeys(PLACES, "missing")
    assert ran.case(f"test_wear[{PLACES[0]}]").outcome == "failure"
    assert ran.case(f"test_wear[{PLACES[1]}]").outcome == "error"
    assert ran.results["verdict"] == "REJECTED"


def cut_after(folder: Path, arguments: tuple[str, ...], number: int, how: signal.Signals) -> None:
    """Start a soak, and end it by this signal after a round."""
    (launch,) = start_pytest(folder, *arguments)
    try:
        launch.until(
            lambda: any(event["event"] == "soak_round" and event["round"] == number for event in launch.journal()),
            what="a round",
        )
        os.kill(launch.pid, how)
        launch.end()
        launch.gone()
    finally:
        launch.kill_all()


@pytest.mark.fault
@pytest.mark.parametrize(
    "how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)], ids=lambda how: how.name
)
def test_a_soak_that_was_cut_short_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    """The same command again: rounds, time and values are those of one soak, which the verdict says. The older run is kept."""
    folder, arguments = start(tmp_path, {}, "--gpucluster-level", "soak:12s")
    cut_after(folder, arguments, 2, how)
    ran = run_pytest(folder, *arguments)
    rounds = rounds_of(ran)
    numbers = [one["round"] for one in rounds]
    assert numbers[0] in (3, 4)  # 4, if the third was cut in its midst
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert rounds[0]["elapsed_s"] < rounds[-2]["elapsed_s"] <= 12 <= rounds[-1]["elapsed_s"]  # in whole milliseconds
    assert ran.outcomes("wear") == ran.outcomes("tear") == dict.fromkeys(PLACES, "passed")
    row = ran.row("tear", PLACES[0])
    assert row["evidence"]["rounds"] in (numbers[-1], numbers[-1] - 1)
    resumed = ran.results["soak_resumed"]
    assert resumed["rounds"] >= 2
    assert (folder / "gpucluster-results" / "previous" / resumed["folder"] / "journal.jsonl").is_file()
    assert "will go on with the soak that was cut short after round" in ran.stdout
    assert re.search(r"; the soak was cut short after \d+ s and went on \d+ s later", ran.verdict_line)


@pytest.mark.fault
@pytest.mark.slow
def test_a_soak_of_another_duration_begins_anew(tmp_path: Path) -> None:
    """And says why."""
    folder, (*arguments, _) = start(tmp_path, {}, "--gpucluster-level", "soak:1h")
    cut_after(folder, (*arguments, "soak:1h"), 1, signal.SIGKILL)
    ran = run_pytest(folder, *arguments, "soak:1s")
    assert rounds_of(ran)[0]["round"] == 1
    why = "as the duration of the soak is another one; the soak that was cut short after round"
    assert f"a new soak begins, {why}" in ran.stdout
    assert "soak_resumed" not in ran.results


def test_not_with_xdist(tmp_path: Path) -> None:
    """Each of its processes would soak for itself."""
    folder, arguments = start(tmp_path, {}, "--gpucluster-level", "soak:3s", "-n", "2")
    ran = run_pytest(folder, *arguments)
    assert ran.returncode == 4
    assert "a soak measures all GPUs in turns of its own; leave -n out" in ran.stdout


def test_a_soak_at_another_level_is_left_out(tmp_path: Path) -> None:
    """Its tests are deselected, and nothing runs."""
    folder, arguments = start(tmp_path, {})
    ran = run_pytest(folder, *arguments)
    assert "4 deselected" in ran.stdout
    assert "soak round" not in ran.stdout
