"""Which older run left a soak that may be gone on with, and why not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.judging.verdict import Record, Terms
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.reporting.journal import Journal, record_facts
from pytest_gpucluster.reporting.rebuild import read_journal
from pytest_gpucluster.reporting.recorder import planned_facts
from pytest_gpucluster.reporting.unfinished_run import InterruptedSoak, find_interrupted_soak
from tests.support.entries import limit

if TYPE_CHECKING:
    from pathlib import Path

FACTS: dict[str, Any] = {
    "level": "soak",
    "profile": "h200-sxm",
    "expected": {"nodes": 1, "gpus_per_node": 2},
    "thresholds_sha256": "0" * 64,
    "soak_s": 600.0,
    "simulated": None,
}
VERSIONS = {"python": "3.12.3", "torch": "2.11.0"}
GPU = Place(id="node0-gpu0", node=0, gpu=0, rank=0, hostname="gpu-node-0", uuid="GPU-1", serial="1", pci="0000:01:00.0")
TURN = {"round": 1, "criterion": "wear", "keep": "total", "usual": 0, "places": [GPU.id], "values": {}, "details": {}}
ENDED_S = 1e10
"""Later than now, so that the journal's own times lie within the last day by it when they are asked for."""


def write(folder: Path, *, events: list[tuple[str, dict[str, Any]]], facts: dict[str, Any] = FACTS, run: str = "aa") -> Path:
    """The folder of a run with this journal."""
    folder.mkdir(parents=True)
    journal = Journal(folder / "journal.jsonl")
    journal.write("started", run=run, versions=VERSIONS, settings={}, facts={**FACTS, **facts})
    terms = Terms(rehearsal=False, level_reached=True)
    journal.write("planned", **planned_facts(plan_of(), terms))
    place = {name: getattr(GPU, name) for name in ("id", "node", "gpu", "rank", "hostname", "uuid", "serial", "pci")}
    journal.write("bound", places=[place], nodes=[])
    for name, event in events:
        journal.write(name, **event)
    journal.close()
    return folder


def plan_of() -> Any:
    """One criterion is expected."""
    from pytest_gpucluster.judging.plan import Plan  # noqa: PLC0415

    plan = Plan()
    plan.expect("wear", GPU.id, nodeid="test_wear.py::test_wear[node0-gpu0]")
    return plan


def round_over(number: int, elapsed_s: float) -> tuple[str, dict[str, Any]]:
    """The end of a round."""
    return "soak_round", {"round": number, "elapsed_s": elapsed_s, "duration_s": 600.0, "worst": {}, "lost": []}


def turn(number: int) -> tuple[str, dict[str, Any]]:
    """A measurement in a round."""
    return "soak_turn", {**TURN, "round": number}


TWO_ROUNDS = [turn(1), round_over(1, 60.0), turn(2), round_over(2, 120.0), turn(3)]


def find(folder: Path, *, later_s: float = 60.0, **changes: Any) -> InterruptedSoak | None:
    """What a run finds that starts some seconds after the journal's last line."""
    versions = changes.pop("versions", VERSIONS)
    ended_s = read_journal(folder / "journal.jsonl").ended_s
    return find_interrupted_soak(folder, facts={**FACTS, **changes}, versions=versions, now_s=ended_s + later_s)


def test_a_soak_that_was_cut_short(tmp_path: Path) -> None:
    """After two whole rounds, and a part of the third."""
    found = find(write(tmp_path / "older", events=TWO_ROUNDS))
    assert found is not None
    assert (found.run, found.num_whole_rounds, found.elapsed_s, found.why_not) == ("aa", 2, 120.0, None)
    assert [one["round"] for one in found.turns] == [1, 2, 3]
    assert found.why_not_here({GPU.id: GPU}) is None
    assert found.words == "the soak that was cut short after round 2 (120 s)"


@pytest.mark.parametrize(
    ("nodeid", "digest", "why"),
    [
        ("test_wear.py::test_wear[node0-gpu0]", "a1", None),
        ("ours/test_wear.py::test_wear[node0-gpu0]", "a1", "wear was measured by another test"),
        ("test_wear.py::test_wear[node0-gpu0]", "b2", "wear was measured by another test"),
    ],
)
def test_the_rounds_of_another_test_are_not_taken(tmp_path: Path, nodeid: str, digest: str, why: str | None) -> None:
    """Another test of that name, or the same one in an edited file. A criterion that took no part is named elsewhere."""
    found = find(write(tmp_path / "older", events=[("test_files", {"files": {"test_wear.py": "a1"}}), *TWO_ROUNDS]))
    assert found is not None
    assert (
        found.beside({("wear", GPU.id): (nodeid, digest), ("other", None): ("t", "c3"), ("quick", None): ("t", "c3")}).why_not
        == why
    )


@pytest.mark.parametrize(("later_s", "away_s"), [(60.0, 60.0), (-5.0, 0.0), (-86400.0, 0.0)])
def test_a_clock_that_is_set_back_since_it_was_found(tmp_path: Path, later_s: float, away_s: float) -> None:
    """No soak goes on before it was cut; results.json takes no negative time."""
    found = find(write(tmp_path / "older", events=TWO_ROUNDS))
    assert found is not None
    assert found.away_s(found.ended_s + later_s) == away_s


def test_a_last_line_that_was_cut_too(tmp_path: Path) -> None:
    """A kill in the midst of a write takes that line, and no more."""
    folder = write(tmp_path / "older", events=TWO_ROUNDS)
    with (folder / "journal.jsonl").open("a", encoding="utf-8") as journal:
        journal.write('{"at_s": 1.0, "event": "soak_turn", "rou')
    found = find(folder)
    assert found is not None
    assert (found.why_not, len(found.turns)) == (None, 3)


@pytest.mark.parametrize(
    ("events", "facts"),
    [
        ([*TWO_ROUNDS, round_over(3, 600.0)], {}),
        ([turn(1)], {}),
        ([], {}),
        (TWO_ROUNDS, {"level": "standard"}),
    ],
    ids=["its time was over", "no whole round", "no soak began", "another level"],
)
def test_nothing_to_go_on_with(tmp_path: Path, events: list[Any], facts: dict[str, Any]) -> None:
    """Such a run is kept apart like any other."""
    found = find(write(tmp_path / "older", events=events, facts=facts))
    assert found is None or not found.turns


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"soak_s": 60.0}, "the duration of the soak is another one"),
        ({"profile": "lab"}, "the profile is another one"),
        ({"expected": {"nodes": 2, "gpus_per_node": 2}}, "the number of nodes or GPUs is another one"),
        ({"thresholds_sha256": "1" * 64}, "the file of limits is another one"),
        ({"simulated": {"nodes": 1}}, "the simulated fleet is another one"),
        ({"versions": {**VERSIONS, "torch": "2.13.0"}}, "torch is 2.13.0, and was 2.11.0"),
        ({"versions": {"python": "3.12.3"}}, "torch is not set, and was 2.11.0"),
        ({"later_s": 25 * 3600.0}, "it did not end within the last 24 h"),
        ({"later_s": -5.0}, "it did not end within the last 24 h"),
    ],
)
def test_another_run_does_not_go_on_with_it(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    """Every limit, version and number has to be the same, and the cut not long ago."""
    found = find(write(tmp_path / "older", events=TWO_ROUNDS), **changes)
    assert found is not None
    assert found.why_not == why


@pytest.mark.parametrize("outcome", ["failed", "error"])
def test_what_was_bad_in_it_begins_anew(tmp_path: Path, outcome: str) -> None:
    """A soak that has found something cannot pass any more; after a repair a whole one is needed."""
    bad = Record(criterion="wear", place=GPU.id, outcome=outcome, value=3, limit=limit("max", 0), reason="3 errors")
    written = {**record_facts(bad), "limit": {"kind": "max", "value": 0, "unit": "errors"}}
    found = find(write(tmp_path / "older", events=[*TWO_ROUNDS, ("outcome", {"record": written})]))
    assert found is not None
    assert found.why_not == f"wear at node0-gpu0 is {outcome} in it"


@pytest.mark.parametrize(("waiver", "goes_on"), [(None, False), ("W1", True)])
def test_a_bad_outcome_of_another_criterion(tmp_path: Path, waiver: str | None, *, goes_on: bool) -> None:
    """What failed before the soak is no better for it, unless somebody answers for it."""
    bad = Record(criterion="bf16_tflops", place=GPU.id, outcome="failed", value=3, reason="slow", waiver=waiver)
    found = find(write(tmp_path / "older", events=[*TWO_ROUNDS, ("outcome", {"record": record_facts(bad)})]))
    assert found is not None
    assert found.why_not == (None if goes_on else "bf16_tflops at node0-gpu0 is failed in it")


@pytest.mark.parametrize("what", ["hostname", "uuid", "serial", "pci", "boot_id", "driver"])
def test_other_hardware_begins_anew(tmp_path: Path, what: str) -> None:
    """A GPU that was replaced has not soaked. After a boot, or with another driver, counters begin anew."""
    found = find(write(tmp_path / "older", events=TWO_ROUNDS))
    assert found is not None
    other_one = {GPU.id: replace(GPU, **{what: "another"})}
    assert found.why_not_here(other_one) == f"node0-gpu0 has another {what.replace('_', ' ')}"
    assert bool(found.same_parts(other_one)) == (what in ("boot_id", "driver"))
    other = Inventory(num_nodes=1, gpus_per_node=2, device="cuda").by_id
    assert found.why_not_here(other) is not None


def test_a_soak_in_three_parts(tmp_path: Path) -> None:
    """A journal names the part before it; the measurements of all of them count."""
    write(tmp_path / "20261124-100000", events=TWO_ROUNDS, run="aa")
    resumed = {"run": "aa", "folder": "20261124-100000", "rounds": 2, "elapsed_s": 120.0, "away_s": 9.0}
    second = write(tmp_path / "20261124-110000", events=[("soak_resumed", resumed), turn(4), round_over(4, 180.0)], run="bb")
    found = find(second)
    assert found is not None
    assert (found.run, found.num_whole_rounds, found.elapsed_s) == ("bb", 4, 180.0)
    assert [one["round"] for one in found.turns] == [1, 2, 3, 4]


@pytest.mark.parametrize(("parts", "why"), [(3, None), (4, "it was cut short 4 times"), (100, "it was cut short 100 times")])
def test_a_soak_in_many_parts(tmp_path: Path, parts: int, why: str | None) -> None:
    """A hundred parts of five minutes are no soak of eight hours."""
    for number in range(1, parts + 1):
        before = {"run": f"r{number - 1}", "folder": f"20261124-{number - 1:06}", "rounds": 1, "elapsed_s": 5.0, "away_s": 9.0}
        events = [*([("soak_resumed", before)] if number > 1 else []), turn(number), round_over(number, 5.0 * number)]
        last = write(tmp_path / f"20261124-{number:06}", events=events, run=f"r{number}")
    found = find(last)
    assert found is not None
    assert (found.num_whole_rounds, found.why_not) == (parts if parts < 100 or why else 0, why)


@pytest.mark.parametrize(
    "resumed",
    [{"run": "cc"}, {"folder": "20261124-999999"}, {"folder": "../20261124-100000"}, {"folder": "/etc"}, {"folder": 5}],
    ids=str,
)
def test_a_part_that_is_not_there(tmp_path: Path, resumed: dict[str, Any]) -> None:
    """Another run's journal, or one elsewhere, is no part of this soak."""
    write(tmp_path / "20261124-100000", events=TWO_ROUNDS, run="aa")
    said = {"run": "aa", "folder": "20261124-100000", "rounds": 2, "elapsed_s": 120.0, "away_s": 9.0, **resumed}
    found = find(write(tmp_path / "20261124-110000", events=[("soak_resumed", said), turn(4), round_over(4, 180.0)], run="bb"))
    assert found is not None
    assert found.why_not == "its journal is damaged"


def test_a_part_that_names_itself_ends(tmp_path: Path) -> None:
    """A forged journal cannot hold up a run."""
    said = {"run": "bb", "folder": "20261124-110000", "rounds": 2, "elapsed_s": 120.0, "away_s": 9.0}
    found = find(write(tmp_path / "20261124-110000", events=[("soak_resumed", said), *TWO_ROUNDS], run="bb"))
    assert found is not None
    assert found.why_not == "its journal is damaged"


def test_a_damaged_journal(tmp_path: Path) -> None:
    """It is said, and a new soak begins."""
    folder = write(tmp_path / "older", events=TWO_ROUNDS)
    lines = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    broken = [line.replace('"round"', '"round') if "soak_turn" in line else line for line in lines]
    (folder / "journal.jsonl").write_text("".join(broken), encoding="utf-8")
    found = find(folder)
    assert found is not None
    assert found.why_not == "its journal is damaged"


def test_no_journal(tmp_path: Path) -> None:
    """An older run may have left other files only."""
    assert find_interrupted_soak(tmp_path, facts=FACTS, versions=VERSIONS, now_s=ENDED_S) is None


def test_reports_from_the_journal_say_that_the_soak_was_cut(tmp_path: Path) -> None:
    """In the verdict line, and as facts."""
    resumed = {"run": "aa", "folder": "20261124-100000", "rounds": 2, "elapsed_s": 120.0, "away_s": 9.0}
    folder = write(tmp_path / "older", events=[("soak_resumed", resumed)])
    state = read_journal(folder / "journal.jsonl")
    report = state.report(state.close())
    assert "the soak was cut short after 120 s and went on 9 s later" in report.verdict.line
    assert json.loads(json.dumps(report.facts["soak_resumed"])) == resumed
