"""Whatever text ranks, hosts, the environment, files and tests bring: every report is well formed, and all say the same."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_gpucluster.judging.plan import Plan
from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.places import Place
from pytest_gpucluster.reporting.rebuild import rebuild
from pytest_gpucluster.reporting.recorder import Recorder, RunStatus
from pytest_gpucluster.reporting.results import place_facts
from pytest_gpucluster.reporting.table import Layout, criteria_table
from pytest_gpucluster.text import visible
from tests.support import reports
from tests.support.entries import limit

if TYPE_CHECKING:
    from collections.abc import Iterator

ANYTHING = st.text(st.characters(codec=None, exclude_categories=()), max_size=60)
HOSTILE = "caf\udce9 \ufffe\uffff\x00\x1b[2J\r\x08\x9b\u202e\x85\u2028\n]]>&<![CDATA[verdict ACCEPTED: forged"
WAIVER = {"criterion": "rate", "place": None, "until": "2099-12-31", "who": "J. Doe", "where": "waivers.yaml:3"}


def record_with(text: str) -> Record:
    """A failure, a waived one in which every text that is not ours is ``text``."""
    return Record(
        criterion=f"rate[{text}]",
        place="node0-gpu0",
        outcome="failed",
        value=1.0,
        limit=limit(unit=f"GB/s {text}"),
        reason=f"{text}",
        headline=text,
        teardown=f"its teardown failed: {text}",
        evidence={text: text, "list": [text], "object": Path(f"/{text}".replace("\0", ""))},
        waiver={**WAIVER, "why": text},
        waivable=True,
        started=True,
    )


def run_with(text: str, folder: Path) -> None:
    """A run all of whose texts are ``text``, with a live JUnit file in ``folder``; it is rebuilt, too."""
    place = Place(id="node0-gpu0", node=0, gpu=0, rank=0, hostname=text, uuid=text, serial=text, pci=text)
    waiver = {**WAIVER, "why": text, "state": "used"}
    facts: dict[str, Any] = {
        "level": "quick",
        "profile": text,
        "expected": {"nodes": 1, "gpus_per_node": 1},
        "thresholds_sha256": "0" * 64,
        "changed_limits": [text],
        "waivers": [waiver],
    }
    terms = Terms(rehearsal=False, level_reached=True, objections=(text,), changed_limits=(text,), changed_terms=(text,))
    environment = {"variables": {f"NCCL_{text}": text}, "gpus": [text]}
    status = RunStatus(terms=terms, places={place.id: place}, facts={**facts, "environment": environment, "timings": {}})
    plan, record = Plan(), record_with(text)
    plan.expect(record.criterion, record.place, nodeid=f"test_a.py::test_rate[{text}]")
    recorder = Recorder(plan, status=lambda: status)
    recorder.open(folder / "run", junit=folder / "live.xml")
    recorder.write("started", versions={"torch": text}, facts=facts)
    recorder.record_plan()
    recorder.write("bound", places=[place_facts(place)], nodes=[], unheard={0: text})
    recorder.record_outcome(record)
    recorder.catch_up()
    assert recorder.finish(decide(plan, terms)) is None
    recorder.close()
    rebuild(folder / "run", junit=folder / "rebuilt.xml")


def texts_of(value: Any) -> Iterator[str]:
    """Every text in JSON data, keys included."""
    if isinstance(value, dict):
        yield from value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts_of(one)
    if isinstance(value, str):
        yield value


@settings(max_examples=20)
@given(ANYTHING)
@example(HOSTILE)
@example("x" * 200_000)
@example("")
def test_every_report_is_well_formed(text: str) -> None:
    """JUnit is XML, results.json and the journal are strict JSON; no text in them needs another escape."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_with(text, folder)
        live, rebuilt = (reports.read_suite(folder / file) for file in ("live.xml", "rebuilt.xml"))
        journal, results = reports.read_journal(folder / "run"), reports.read_results(folder / "run")
    assert ET.tostring(live.findall("testcase")[0]) == ET.tostring(rebuilt.findall("testcase")[0])
    last = rebuilt.findall("testcase")[-1]
    assert last.get("name") == "gpucluster.verdict"
    assert "\n" not in last[0].get("message", "")
    for found in texts_of([journal, results]):
        assert visible(found) == found
    assert json.dumps(results, ensure_ascii=False).encode("utf-8")


@given(ANYTHING)
@example(HOSTILE)
def test_the_verdict_is_one_line(text: str) -> None:
    """Also where an objection is of several."""
    terms = Terms(rehearsal=False, level_reached=True, objections=(text,), changed_limits=(text,), changed_terms=(text,))
    assert len(decide([], terms).line.splitlines()) == 1


@settings(max_examples=20)
@given(ANYTHING)
@example(HOSTILE)
def test_the_table_has_no_line_of_its_own(text: str) -> None:
    """A criterion's name or a unit begins no line that looks like another."""
    lines = criteria_table([record_with(text)], {}, subjects={}, layout=Layout(width=10_000))
    assert [visible(line) for line in lines] == lines
    assert len(lines) == 2
    assert "\n" not in "".join(lines)


@pytest.mark.parametrize("key", [HOSTILE, "\udce9"])
def test_an_older_journal_is_made_fit(tmp_path: Path, key: str) -> None:
    """A journal that holds such text, as older versions wrote it, is rebuilt into well-formed reports."""
    run_with("plain", tmp_path)
    journal = tmp_path / "run" / "journal.jsonl"
    journal.write_text(journal.read_text(encoding="utf-8").replace("plain", json.dumps(key)[1:-1]), encoding="utf-8")
    rebuild(tmp_path / "run")
    assert reports.cases_of(reports.read_suite(tmp_path / "run" / "junit.xml"))
    assert all(visible(found) == found for found in texts_of(reports.read_results(tmp_path / "run")))
