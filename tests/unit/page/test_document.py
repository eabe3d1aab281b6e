"""results.json as data: of both versions the same, and of a damaged file a sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.page.document import document_of, read_document
from tests.support.fleet_records import failed, fleet, outcomes
from tests.support.result_files import document, of_version_1, of_version_2, text_of

if TYPE_CHECKING:
    from pathlib import Path

PLACES = fleet(2, 4, absent=[1])
RECORDS = outcomes(PLACES, [failed("bf16_tflops", "node0-gpu3", 543.25, evidence={"SM MHz": 1755.5, "rounds": [1, 2]})])
TODAY = document(RECORDS, PLACES)
MEMBERS = of_version_1(TODAY)


def test_both_versions_tell_the_same() -> None:
    """Columns and rows give the same outcomes, limits, margins, reasons and evidence."""
    rows = document_of(text_of(MEMBERS))
    columns = document_of(text_of(of_version_2(MEMBERS, RECORDS, PLACES)))
    assert columns.records == rows.records
    today = [replace(one, limit=None) for one in document_of(text_of(TODAY)).records]
    assert today == [replace(one, limit=None) for one in rows.records]  # of what has no value, columns know the limit too
    assert [(one.outcome, one.value) for one in rows.records] == [(one.outcome, one.value) for one in RECORDS]
    assert rows.by_criterion["bf16_tflops"][3].margin_percent == pytest.approx(100 * (543.25 - 700) / 700)
    assert set(rows.places) < set(columns.places)  # version 1 names only places that have an outcome
    assert list(columns.places)[:3] == ["node0", "node0-gpu0", "node0-gpu1"]
    assert columns.places["node0-gpu0"].board == {"slot": "U17"}
    assert columns.entries["bf16_tflops"]["where"] == "thresholds.yaml:41"
    assert rows.entries == {}


def test_evidence_that_all_places_share() -> None:
    """``all`` stands for every place; a null is nothing that was seen."""
    members = of_version_2(MEMBERS, RECORDS, PLACES)
    members["values"][0]["evidence"] = [
        {"key": "C", "all": 61},
        {"key": "W", "values": [None] * len(members["values"][0]["place"])},
    ]
    run = document_of(text_of(members))
    assert run.by_criterion["bf16_tflops"][0].evidence == {"C": 61}


def test_tables_in_the_evidence() -> None:
    """Version 2 keeps rows with equal keys as columns; the page reads rows."""
    members = of_version_2(MEMBERS, RECORDS, PLACES)
    rows = [{"source": "a", "gb_s": 396.5}, {"source": "b", "gb_s": 391.25}]
    members["values"][0]["evidence"] = [{"key": "pairs", "all": {"columns": {"source": ["a", "b"], "gb_s": [396.5, 391.25]}}}]
    assert document_of(text_of(members)).by_criterion["bf16_tflops"][0].evidence == {"pairs": rows}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not whole JSON"),
        (text_of(MEMBERS)[:-40], "is not whole JSON"),
        (b"\xff\xfe{}", "is not whole JSON"),
        (b"[" * 100_000, "is not whole JSON"),
        *((b'{"verdict": "ACCEPTED", "criteria": [], "x": ' + one + b"}", "whole JSON") for one in (b"NaN", b"-Infinity")),
        (b"[]", "holds no results of pytest-gpucluster"),
        (b"{}", "holds no results of pytest-gpucluster"),
        (json.dumps({**MEMBERS, "verdict": "FINE"}).encode(), "there is no verdict 'FINE'"),
        (json.dumps({**MEMBERS, "criteria": None}).encode(), "holds no results of pytest-gpucluster"),
        (json.dumps({**MEMBERS, "schema_version": 3}).encode(), "has schema_version 3, which is newer than 2"),
        (json.dumps({**MEMBERS, "schema": 2}).encode(), "has schema 2, which is newer than 1"),
        (json.dumps({**MEMBERS, "verdict": "ACCEPTED", "criteria": [], "values": []}).encode(), "holds no outcome"),
        (json.dumps({**MEMBERS, "schema": "x"}).encode(), "has the schema 'x', and this program reads 1"),
        (json.dumps({**MEMBERS, "criteria": [{"criterion": "x"}]}).encode(), "is damaged: "),
        (json.dumps({**MEMBERS, "criteria": [7]}).encode(), "is damaged: "),
    ],
)
def test_a_file_that_tells_of_no_run(tmp_path: Path, content: bytes, words: str) -> None:
    """Half a file, another file, another version: a sentence that names the file."""
    file = tmp_path / "results.json"
    file.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        read_document(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    """What is not there cannot be read."""
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_document(tmp_path / "results.json")


@pytest.mark.parametrize(
    "change", [{"outcome": "splendid"}, {"limit_kind": "about"}, {"value": "many"}, {"place": {"id": 7}}, {"evidence": [1]}]
)
def test_rows_that_make_no_sense(change: dict[str, Any]) -> None:
    """No guess is made of a row that no version writes."""
    rows = [{**MEMBERS["criteria"][0], **change}]
    with pytest.raises(ConfigurationError, match="damaged"):
        document_of(json.dumps({**MEMBERS, "criteria": rows}).encode())


def test_nothing_was_expected() -> None:
    """A run without outcomes is a run."""
    assert document_of(text_of({**MEMBERS, "verdict": "INCOMPLETE", "criteria": [], "culprits": []})).records == ()
