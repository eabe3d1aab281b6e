"""Reports from a journal: never better than what the run itself said, and of old journals too."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.reporting import journal as writer
from pytest_gpucluster.reporting import rebuild as rebuilding
from pytest_gpucluster.reporting.journal import record_facts, record_from_facts
from pytest_gpucluster.reporting.rebuild import read_journal, rebuild
from pytest_gpucluster.thresholds.limit import Limit
from tests.support.entries import limit
from tests.support.operations import operations

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpucluster.reporting.results import RunReport

FACTS: dict[str, Any] = {
    "level": "quick",
    "profile": "h200-sxm",
    "expected": {"nodes": 1, "gpus_per_node": 1},
    "thresholds_sha256": "0" * 64,
    "changed_limits": [],
    "waivers": [],
}
TERMS = {"rehearsal": False, "level_reached": True, "objections": [], "changed_limits": []}
ROW = {"criterion": "tflops", "place": None}
PASSED = {**ROW, "outcome": "passed", "culprits": []}


def journal(folder: Path, *events: dict[str, Any]) -> None:
    """Of a run that measured its one criterion, and then what ``events`` say."""
    begun = [
        {"event": "started", "facts": FACTS, "versions": {}},
        {"event": "planned", "terms": TERMS, "expected": [{**ROW, "nodeid": "t", "outcome": "pending", "reason": None}]},
        {"event": "outcome", "record": PASSED},
    ]
    lines = [json.dumps({"at_s": 1.0, **event}) + "\n" for event in (*begun, *events)]
    (folder / "journal.jsonl").write_text("".join(lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([], "INCOMPLETE"),
        ([{"event": "verdict", "objections": []}], "ACCEPTED"),
        ([{"event": "verdict", "objections": ["more GPUs than expected"]}], "INCOMPLETE"),
        ([{"event": "verdict", "verdict": "ACCEPTED", "objections": []}], "ACCEPTED"),
        ([{"event": "verdict", "verdict": "INCOMPLETE", "objections": []}], "INCOMPLETE"),
    ],
)
def test_no_acceptance_without_a_verdict(tmp_path: Path, events: list[dict[str, Any]], word: str) -> None:
    """A controller that died when all was measured may have known what forbids an acceptance, and not have told.

    Nor does a rebuilt report accept what the run itself did not.
    """
    journal(tmp_path, *events)
    assert rebuild(tmp_path).word == word


@pytest.mark.parametrize(
    ("told", "word"), [({"waivable": True}, "ACCEPTED_WITH_WAIVERS"), ({"waivable": False}, "REJECTED"), ({}, "REJECTED")]
)
def test_what_may_be_waived_is_in_the_journal(tmp_path: Path, told: dict[str, Any], word: str) -> None:
    """A rebuilt report decides as the run did, and against a journal that does not say."""
    waiver = {"criterion": "other", "place": None, "until": "2099-12-31", "who": "J", "why": "w", "where": "waivers.yaml:3"}
    failed = {"criterion": "other", "place": None, "outcome": "failed", "culprits": [], "waiver": waiver, **told}
    journal(tmp_path, {"event": "outcome", "record": failed}, {"event": "verdict", "objections": []})
    assert rebuild(tmp_path).word == word
    assert ("<failure" in (tmp_path / "junit.xml").read_text(encoding="utf-8")) == (word == "REJECTED")


@pytest.mark.parametrize("number", [0, 1, -3, 12_345_678, 0.0, 1.0, 1e7, 498.5])
def test_whole_numbers_stay_whole(number: float) -> None:
    """A count is shown as one: 3, not 3.0; the same for what a limit says."""
    record = Record(
        criterion="c", place=None, outcome="passed", value=number, limit=Limit(kind="max", value=number, unit="errors")
    )
    again = record_from_facts(json.loads(json.dumps(strict_json(record_facts(record)))))
    assert again == record
    assert again.limit is not None
    assert (type(again.value), type(again.limit.value)) == (type(number), type(number))
    assert again.limit.text == f"<= {number if isinstance(number, int) else format(number, '.6g')} errors"


def test_a_record_survives_the_journal() -> None:
    """Every field, the limit among them."""
    record = Record(
        criterion="tflops",
        place="node0-gpu1",
        outcome="passed",
        value=498.0,
        limit=limit(),
        reason="below",
        advisory=True,
        margin_percent=-28.9,
        culprits=("node0-gpu1",),
        blames="link",
        among=("node0-gpu0", "node0-gpu1"),
        evidence={"C": 91},
    )
    assert record_from_facts(json.loads(json.dumps(strict_json(record_facts(record))))) == record


def test_the_journal_leaves_out_what_is_usual() -> None:
    """A value of 0 is none of it."""
    usual = Record(criterion="c", place=None, outcome="passed", value=0, reason="advisory: none", started=True)
    said = record_facts(usual)
    assert said.keys() == {"criterion", "place", "outcome", "value", "reason", "started", "evidence", "behind"}
    assert record_from_facts(json.loads(json.dumps(strict_json(said)))) == usual


def test_work_for_a_rebuilt_outcome(tmp_path: Path) -> None:
    """Reading, trying and writing an outcome is not much, and twice as many outcomes are twice the work."""

    def work(number: int) -> int:
        keys = [f"tflops[{index}]" for index in range(number)]
        rows = [{"criterion": key, "place": None, "nodeid": key, "outcome": "pending", "reason": None} for key in keys]
        journal(
            tmp_path,
            {"event": "planned", "terms": TERMS, "expected": rows},
            {"event": "bound", "places": [], "nodes": []},
            *({"event": "outcome", "record": {**PASSED, "criterion": key}} for key in keys),
            {"event": "verdict", "verdict": "ACCEPTED", "objections": []},
        )
        return operations(lambda: rebuild(tmp_path))

    work(1)
    few, many = work(100), work(200)
    assert many <= 2.2 * few
    assert (many - few) / 100 <= 18_000, (many - few) / 100


def test_work_grows_with_the_testcases_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reports are made of all records once; each event before is tried on one record of each place."""
    written: list[int] = []
    whole = writer.texts_of

    def counted(report: RunReport, **options: bool) -> tuple[str, str]:
        written.append(len(report.cases))
        return whole(report, **options)

    monkeypatch.setattr(rebuilding, "texts_of", counted)
    monkeypatch.setattr(writer, "texts_of", counted)
    places = [{"id": f"node0-gpu{gpu}", "node": 0, "gpu": gpu, "hostname": "h", "rank": gpu} for gpu in range(4)]
    rows = [{"criterion": f"c{number}", "place": place["id"]} for number in range(100) for place in places]
    planned = [{**row, "nodeid": "t", "outcome": "pending", "reason": None} for row in rows]
    journal(
        tmp_path,
        {"event": "planned", "terms": TERMS, "expected": planned},
        {"event": "bound", "places": places, "nodes": []},
        *({"event": "outcome", "record": {**row, "outcome": "passed", "culprits": []}} for row in rows),
        {"event": "verdict", "verdict": "ACCEPTED", "objections": []},
    )
    assert rebuild(tmp_path).word == "ACCEPTED"
    assert max(written) == len(rows) + 1
    assert sum(written) - max(written) <= len(written) * (len(places) + 1)


@pytest.mark.parametrize("wrong", [{"outcome": 5}, {"outcome": "good"}, {"nodeid": 5}, {"criterion": 5}, {"reason": []}])
def test_a_planned_row_that_is_none_damages_the_journal(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Wherever it stands among good ones, and also if its outcome is written later."""
    rows = [{"criterion": f"c{number}", "place": None} for number in range(3)]
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        planned = [{**row, "nodeid": "t", "outcome": "pending", "reason": None} for row in rows]
        planned[number].update(wrong)
        outcomes = [{"event": "outcome", "record": {**row, "outcome": "passed", "culprits": []}} for row in rows]
        journal(
            folder, {"event": "planned", "terms": TERMS, "expected": planned}, *outcomes, {"event": "verdict", "objections": []}
        )
        verdict = rebuild(folder)
        assert verdict.word == "INCOMPLETE"
        assert "damaged at line 4" in verdict.line


def test_a_pipe_in_the_place_of_a_journal_is_not_waited_for(tmp_path: Path) -> None:
    """As with a results.json: whoever writes into it may never come."""
    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises(ConfigurationError, match=r"journal\.jsonl is no file"):
        read_journal(tmp_path / "journal.jsonl")
