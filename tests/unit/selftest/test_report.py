"""The report of a self-test: what it states, and that nothing missed, alarmed or left out reads as found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import jsonschema  # type: ignore[import-untyped]  # its stubs would be one more thing to install
import pytest

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.places import Place
from pytest_gpucluster.reporting.junit import junit_text
from pytest_gpucluster.reporting.rebuild import rebuild
from pytest_gpucluster.reporting.results import SCHEMA_FILE, RunReport, selftest_lines
from pytest_gpucluster.selftest.report import DEAD, HUNG, SLOW, WRONG, NotPlanted, SelftestReport, Trial

if TYPE_CHECKING:
    from pathlib import Path

STRAGGLER, CORRUPTION = "straggler[hbm_bandwidth]", "silent_corruption"
ENVIRONMENT: dict[str, Any] = {"seconds": 12.3, "seed": 7, "places": 4, "rehearsal": False}


def slow(named: tuple[str, ...] = ("gpu1",), *, victim: str = "gpu1", **more: Any) -> Trial:
    """5 % planted at a place."""
    fields = {"kind": SLOW, "what": "5 % slow in copy", "where": "copy", "criterion": STRAGGLER, **more}
    return Trial(victim=victim, expected=(victim,), named=named, **fields)


def clean(*named: str, kind: str = SLOW, **more: Any) -> Trial:
    """A repeat without a plant."""
    return Trial(kind=kind, what="nothing planted", where="copy", victim=None, expected=(), named=named, **more)


def wrong(kind: str = "fp32", named: tuple[str, ...] = ("gpu2",), expected: tuple[str, ...] = ("gpu2",)) -> Trial:
    """A flipped bit."""
    fields = {"kind": WRONG, "what": "one wrong bit", "where": kind, "criterion": CORRUPTION}
    return Trial(victim="gpu2", expected=expected, named=named, **fields)


def ended(kind: str, named: tuple[str, ...] = ("gpu3",), fault: str | None = None) -> Trial:
    """A rank that is dead or hangs."""
    how = {DEAD: "in 0.4 s", HUNG: "at its deadline of 3 s, named"}[kind]
    return Trial(kind=kind, what=f"a {kind} rank", victim="gpu3", expected=("gpu3",), named=named, fault=fault, how=how)


def report(*trials: Trial, **more: Any) -> SelftestReport:
    """All of it together, in a run that judges both criteria."""
    return SelftestReport(**{**ENVIRONMENT, "trials": trials, "selected": frozenset({STRAGGLER, CORRUPTION}), **more})


WHOLE = (slow(), slow(), clean(), clean(), wrong("bf16"), wrong(), clean(kind=WRONG), ended(DEAD), ended(HUNG))


def test_all_found() -> None:
    """One sentence, no objection, passed."""
    found = report(*WHOLE)
    assert found.statement == (
        "this run finds: 5 % slow in copy 2 of 2, one wrong bit 2 of 2, a dead rank in 0.4 s, a hung rank at its deadline of "
        "3 s, named; no false alarms in 3 clean repeats"
    )
    assert (found.objections, found.remarks, found.outcome) == ([], [], "passed")


@pytest.mark.parametrize(
    ("missed", "shown"),
    [
        (slow(()), "missed 1 of 3 plants of 5 % slow in copy (gpu1 in copy: nobody named)"),
        (slow(("gpu0",)), "missed 1 of 3 plants of 5 % slow in copy (gpu1 in copy: gpu0 named)"),
        (slow(("gpu1", "gpu0")), "missed 1 of 3 plants of 5 % slow in copy (gpu1 in copy: gpu1, gpu0 named)"),
        (wrong(named=()), "missed 1 of 3 plants of one wrong bit (gpu2 in fp32: nobody named)"),
        (replace(ended(DEAD, ()), what="a rank"), "missed 1 of 1 plants of a rank (gpu3: nobody named)"),
        (replace(ended(HUNG, fault="told as: x"), what="a rank"), "missed 1 of 1 plants of a rank (gpu3: told as: x)"),
    ],
)
def test_a_missed_plant_is_told_and_objects(missed: Trial, shown: str) -> None:
    """Named nobody, another, or one more: not found."""
    found = report(*WHOLE, missed)
    assert found.objections == [f"the self-test {shown}"]
    assert found.outcome == "error"
    assert f"the self-test {shown}" in selftest_lines(found.facts)


def test_counts_tell_what_was_missed() -> None:
    """In the statement too; a dead rank that was not named has no seconds to show."""
    found = report(slow(), slow(()), ended(DEAD, ()))
    assert "5 % slow in copy 1 of 2, a dead rank 0 of 1" in found.statement
    assert "0.4 s" not in found.statement


def test_many_misses_are_told_short() -> None:
    """The first two, and how many more."""
    (shown,) = report(*[slow(())] * 5).objections
    assert shown.startswith("the self-test missed 5 of 5 plants")
    assert shown.count("gpu1 in copy") == 2
    assert shown.endswith("; and 3 more)")


def test_a_false_alarm_objects() -> None:
    """A healthy place that is named with nothing planted."""
    found = report(*WHOLE, clean("gpu0"))
    assert found.objections == ["in the self-test 1 of 4 clean repeats named somebody (nothing planted in copy: gpu0 named)"]
    assert "; 1 false alarm in 4 clean repeats" in found.statement


def test_what_cannot_be_shown_is_no_pass() -> None:
    """Two places cannot show a slow one: said, skipped, no objection; what should have been possible objects."""
    shown = [trial for trial in WHOLE if trial.kind != SLOW]
    cannot = report(*shown, not_planted=(NotPlanted(kind=SLOW, why="it takes 3 places, and 2 answer"),))
    assert (cannot.objections, cannot.outcome) == ([], "skipped")
    assert cannot.statement.endswith("; a slow GPU cannot be shown: it takes 3 places, and 2 answer")
    failed = report(*shown, not_planted=(NotPlanted(kind=SLOW, why="rank 2 died", is_error=True),))
    assert failed.objections == ["in the self-test a slow GPU could not be tried to the end: rank 2 died"]
    assert failed.outcome == "error"


def test_a_kind_that_is_absent_is_no_pass() -> None:
    """Nor is a self-test without any trial, or one that was stopped."""
    assert report(*[trial for trial in WHOLE if trial.kind != HUNG]).outcome == "skipped"
    assert report().outcome == "skipped"
    assert report().statement == "this run finds: nothing that was planted, as nothing was"
    stopped = report(*WHOLE, stopped="not run: terminated by SIGTERM")
    assert stopped.objections == ["the self-test did not come to its end: not run: terminated by SIGTERM"]
    assert stopped.outcome == "error"


def test_what_is_not_judged_is_told() -> None:
    """Neither a miss nor an alarm there objects; but all of a kind unjudged is no pass."""
    few = replace(slow(()), what="3 % slow in copy", not_judged="the limit is 4 %")
    found = report(*WHOLE, few, clean("gpu0", not_judged="a CPU"))
    assert (found.objections, found.outcome) == ([], "passed")
    assert "3 % slow in copy 0 of 1 (not judged)" in found.statement
    assert found.remarks == ["not judged (3 % slow in copy): the limit is 4 %"]
    assert "no false alarms in 3 clean repeats" in found.statement
    assert report(*WHOLE[4:], replace(slow(), not_judged="a CPU")).outcome == "skipped"


def test_what_this_run_does_not_look_for_is_said() -> None:
    """A sensitivity that no selected test uses must not read as one of this run."""
    found = report(*WHOLE, selected=frozenset({STRAGGLER}))
    assert "one wrong bit 2 of 2 (not looked for)" in found.statement
    assert found.remarks == ["not looked for (one wrong bit): no test of this run judges silent_corruption"]


def test_two_that_differ() -> None:
    """Finding it means naming both; naming one of them is a miss."""
    both = ("gpu1", "gpu2")
    found = report(wrong(named=both, expected=both))
    assert "one wrong bit 1 of 1" in found.statement
    assert found.remarks == [
        "two places (one wrong bit): gpu1 and gpu2 differ, and nobody can say which is wrong: both are named"
    ]
    assert report(wrong(expected=both)).objections != []


@pytest.mark.parametrize("trials", [WHOLE, (*WHOLE, slow(()), clean("gpu0")), ()], ids=["found", "missed", "nothing"])
def test_facts_fit_the_schema(trials: tuple[Trial, ...]) -> None:
    """What goes into results.json is strict JSON in its declared shape."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["properties"]["selftest"]
    facts = json.loads(json.dumps(report(*trials).facts, allow_nan=False))
    jsonschema.validate(facts, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**facts, "outcome": "fine"}, schema)


@pytest.mark.parametrize(
    ("found", "tag"),
    [
        (report(*WHOLE), None),
        (report(*WHOLE, slow(())), "error"),
        (report(*WHOLE, not_planted=(NotPlanted(kind=WRONG, why="fp8: no such kernel"),)), "skipped"),
    ],
    ids=["found", "missed", "not shown"],
)
def test_the_testcase(found: SelftestReport, tag: str | None) -> None:
    """The first of the file; an error where a plant was missed, with the words."""
    verdict = decide([Record(criterion="a", place=None, outcome="passed")], Terms(rehearsal=False, level_reached=True))
    report = RunReport(cases=(), verdict=verdict, places={}, facts={"selftest": found.facts}, is_rehearsal=False)
    text = junit_text(report)
    first, last = ET.fromstring(text).iter("testcase")  # noqa: S314 -- our own
    assert (first.get("name"), last.get("name")) == ("gpucluster.selftest", "gpucluster.verdict")
    assert [child.tag for child in first if child.tag not in ("properties", "system-out")] == ([] if tag is None else [tag])
    assert found.statement in "".join(first.itertext())


def journal(path: Path, facts: dict[str, Any], *, finished: bool) -> None:
    """A run with one passed criterion and a self-test."""
    place = Place(id="node0-gpu0", node=0, gpu=0, rank=0, hostname="h")
    shown = {name: getattr(place, name) for name in place.__slots__}
    record = {"criterion": "a", "place": None, "outcome": "passed", "reason": None}
    terms = {"rehearsal": False, "level_reached": True, "objections": [], "changed_limits": []}
    base = {
        "level": "quick",
        "profile": "h200-sxm",
        "expected": {"nodes": 1, "gpus_per_node": 1},
        "thresholds_sha256": "0" * 64,
        "changed_limits": [],
    }
    events: list[dict[str, Any]] = [
        {"event": "started", "versions": {}, "facts": base},
        {"event": "planned", "terms": terms, "expected": [{**record, "nodeid": "test_a", "outcome": "pending"}]},
        {"event": "bound", "places": [shown], "nodes": []},
        {"event": "selftest", "selftest": facts},
        {"event": "outcome", "record": {**record, "culprits": []}},
    ]
    if finished:
        events.append({"event": "verdict", "objections": facts["objections"]})
    path.write_text("".join(json.dumps({"at_s": 1.0, **event}) + "\n" for event in events), encoding="utf-8")


@pytest.mark.parametrize("finished", [True, False])
def test_a_rebuilt_report_keeps_it(tmp_path: Path, *, finished: bool) -> None:
    """In results.json and in the JUnit file; what it missed objects once, also where the run was cut short."""
    facts = report(*WHOLE, slow(())).facts
    journal(tmp_path / "journal.jsonl", facts, finished=finished)
    verdict = rebuild(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["selftest"] == json.loads(json.dumps(facts))
    assert verdict.word == "INCOMPLETE"
    assert verdict.line.count(facts["objections"][0]) == 1
    (case,) = (one for one in ET.parse(tmp_path / "junit.xml").iter("testcase") if one.get("name") == "gpucluster.selftest")  # noqa: S314 -- our own
    assert case.find("error") is not None


def test_a_rebuilt_report_without_one(tmp_path: Path) -> None:
    """A self-test that found all does not keep a rebuilt run from its acceptance."""
    journal(tmp_path / "journal.jsonl", report(*WHOLE).facts, finished=True)
    assert rebuild(tmp_path).word == "ACCEPTED"
