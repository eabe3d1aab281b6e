"""``--gpucluster-selftest`` in rehearsals: the real ranks die and hang, and what the run says of it is its certificate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.reporting.rebuild import rebuild
from tests.support.runs import Torchrun, run_pytest, user_folder
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

STRAGGLERS = {
    f"straggler[{quantity}]": entry(max=3, unit="%", recipe={"floor_spread": 0.005})
    for quantity in ("bf16_tflops", "hbm_bandwidth")
}
LIMITS = {**STRAGGLERS, "silent_corruption": entry(max=0)}
AT_ONCE_S = 15.0
"""As in tests/faults: 0.03 to 0.3 s were measured, the rest is for a busy machine."""


def launched(folder: Path, *arguments: str, ranks: int, torchrun: Torchrun | None = None) -> FinishedRun:
    """The folder of the self-test, with so many ranks on the CPU."""
    limits = write_limits(folder / "limits.yaml", LIMITS, extends=False)
    expect = f"--gpucluster-expect=nodes=1,gpus_per_node={ranks}"
    given = ("--gpucluster-selftest", expect, limits, *arguments, "test_looking.py")
    return run_pytest(folder, *given, torchrun=torchrun)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Four ranks."""
    return launched(user_folder("selftest", tmp_path_factory.mktemp("user") / "four"), ranks=4)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two ranks of torchrun, which cannot show everything."""
    folder = user_folder("selftest", tmp_path_factory.mktemp("user") / "two")
    return launched(folder, ranks=2, torchrun=Torchrun(ranks=2))


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two ranks, and nothing that is wrong is seen."""
    return launched(user_folder("selftest", tmp_path_factory.mktemp("user") / "blind"), "-p", "blind", ranks=2)


def trials(ran: FinishedRun, kind: str) -> list[dict[str, Any]]:
    """The trials of a kind with a plant."""
    return [trial for trial in ran.results["selftest"]["trials"] if trial["kind"] == kind and trial["victim"] is not None]


def test_wrong_bits_are_found(four: FinishedRun) -> None:
    """Each kind of output once, at places in turn; nobody in the clean round."""
    found = trials(four, "wrong")
    assert {trial["where"] for trial in found} >= {"bf16", "fp32", "attention", "softmax", "reduction"}
    assert len({trial["victim"] for trial in found}) == 4
    assert all(trial["named"] == [trial["victim"]] for trial in found)
    assert f"one wrong bit {len(found)} of {len(found)}" in four.results["selftest"]["statement"]
    assert (four.results["selftest"]["clean_repeats"], four.results["selftest"]["false_alarms"]) == (1, 0)


def test_a_dead_rank_is_found(four: FinishedRun) -> None:
    """By name, at once, and the next collective works."""
    (trial,) = trials(four, "dead")
    assert (trial["found"], trial["named"], trial["fault"]) == (True, [trial["victim"]], None)
    assert 0 < trial["measured"]["seconds"] < AT_ONCE_S
    assert trial["measured"]["next_collective_s"] > 0


def test_a_hung_rank_is_found(four: FinishedRun) -> None:
    """By name, at the deadline."""
    (trial,) = trials(four, "hung")
    assert (trial["found"], trial["named"], trial["fault"]) == (True, [trial["victim"]], None)
    assert 3.0 <= trial["measured"]["seconds"] < 3.0 + AT_ONCE_S
    assert "a hung rank at its deadline of 3 s, named" in four.results["selftest"]["statement"]


def test_slow_ranks_are_planted_and_not_judged(four: FinishedRun) -> None:
    """On a CPU, where each operation of the victim was made twice as long."""
    found = trials(four, "slow")
    assert {trial["where"] for trial in found} == {"bf16", "copy"}
    assert all(trial["measured"]["delay_us"] > 0 for trial in found)
    assert not any(trial["judged"] for trial in found)
    assert "(not judged)" in four.results["selftest"]["statement"]


def test_it_is_told(four: FinishedRun) -> None:
    """Before the first test on the terminal; in the journal; as the first testcase, skipped as a rehearsal's verdict is."""
    statement = four.results["selftest"]["statement"]
    told = f"gpucluster: self-test: {statement}"
    assert four.stdout.index(told) < four.stdout.index("\nsilent_corruption ")
    events = [event["event"] for event in four.journal]
    assert events.index("planned") < events.index("selftest") < events.index("outcome")
    assert next(case.name for case in four.cases) == "gpucluster.selftest"
    case = four.case("gpucluster.selftest")
    assert (case.outcome, case.properties["statement"]) == ("skipped", statement)


def test_it_leaves_a_sound_cluster(four: FinishedRun) -> None:
    """Everything after it passes, and the verdict is what it would have been."""
    assert (four.returncode, four.results["verdict"], four.results["culprits"]) == (0, "REHEARSED", [])
    assert four.results["selftest"]["objections"] == []


def test_it_is_rebuilt(four: FinishedRun, tmp_path: Path) -> None:
    """From the journal alone, word for word."""
    lines = "".join(json.dumps(event) + "\n" for event in four.journal)
    (tmp_path / "journal.jsonl").write_text(lines, encoding="utf-8")
    assert rebuild(tmp_path).line == four.results["verdict_line"]
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["selftest"] == four.results["selftest"]


def test_what_two_ranks_cannot_show(two: FinishedRun) -> None:
    """Who is slow of two; a wrong bit names both; dead and hung are found as ever."""
    statement = two.results["selftest"]["statement"]
    assert "a slow GPU cannot be shown: it takes 3 places to say which is slow, and 2 answer" in statement
    assert all(set(trial["named"]) == {"node0-cpu0", "node0-cpu1"} for trial in trials(two, "wrong"))
    assert [trial["found"] for kind in ("dead", "hung") for trial in trials(two, kind)] == [True, True]
    assert "and nobody can say which is wrong: both are named" in two.stdout
    assert two.case("gpucluster.selftest").outcome == "skipped"
    assert (two.returncode, two.results["verdict"]) == (0, "REHEARSED")


def test_a_broken_detection_is_told(blind: FinishedRun) -> None:
    """Which plants were missed: on the terminal, as an error in the JUnit file, and in the verdict, which is INCOMPLETE."""
    missed = len(trials(blind, "wrong"))
    assert missed >= 5
    words = (
        f"the self-test missed {missed} of {missed} plants of one wrong bit (node0-cpu",
        "the self-test missed 1 of 1 plants of a dead rank (node0-cpu",
        "the self-test missed 1 of 1 plants of a hung rank (node0-cpu",
    )
    case = blind.case("gpucluster.selftest")
    assert case.outcome == "error"
    for told in words:
        assert f"gpucluster: self-test: {told}" in blind.stdout
        assert told in blind.verdict_line
        assert told in case.text
    assert blind.verdict_line.startswith("verdict INCOMPLETE")
    assert blind.results["verdict"] == "INCOMPLETE"
    assert blind.returncode == 1
    assert {row["outcome"] for row in blind.results["criteria"]} == {"passed"}


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--gpucluster-inline", "--gpucluster-selftest kills workers, and --gpucluster-inline has none"),
        ("--gpucluster-audit", "--gpucluster-selftest works the GPUs, and --gpucluster-audit only reads"),
        ("-n2", "--gpucluster-selftest needs all GPUs at once; leave -n out"),
    ],
)
def test_refused(tmp_path: Path, option: str, told: str) -> None:
    """Where there are no workers of its own that may die."""
    ran = launched(user_folder("selftest", tmp_path / "refused"), option, ranks=2)
    assert ran.returncode == 4
    assert told in ran.stdout
