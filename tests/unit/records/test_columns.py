"""``values`` of results.json: columns that say what the records said, and what a summary says of them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.page.document import document_of
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.records.columns import BY_UNIT, described, packed, quantity_of, unpacked, values_in_columns
from pytest_gpucluster.records.reading import evidence_values, rows_of
from pytest_gpucluster.reporting import results
from pytest_gpucluster.reporting.results import ReportedTest, results_document, to_json
from pytest_gpucluster.thresholds.limit import Limit

TFLOPS = Limit(kind="above", value=700, unit="TFLOPS")
LATENCY = Limit(kind="max", value=20, unit="us")
PLACES = Inventory(num_nodes=2, gpus_per_node=4, device="cuda").by_id


def record(place: str | None, value: Any, **changes: Any) -> Record:
    """A passed value of BF16 products."""
    known = {"criterion": "bf16_tflops", "outcome": "passed", "limit": TFLOPS}
    return Record(**{**known, "place": place, "value": value, **changes})


def document(records: list[Record]) -> Any:
    """results.json as a program outside reads it."""
    cases = [ReportedTest(nodeid=one.criterion, record=one) for one in records]
    verdict = decide(records, Terms(rehearsal=False, level_reached=True))
    return json.loads(to_json(results_document(cases, places=PLACES, verdict=verdict, facts={"profile": "h100-sxm"})))


@pytest.mark.parametrize(
    ("limit", "values", "worst", "median", "margin"),
    [
        (TFLOPS, [712, 770, 498.0, 742.0], 498.0, 727.0, -28.8571),
        (LATENCY, [11.0, 26.0, 12.0], 26.0, 12.0, -30.0),
        (Limit(kind="max", value=0, unit="count"), [0, 3, 0], 3, 0, None),
        (None, [2.0, 1.0], 1.0, 1.5, None),
        (TFLOPS, [None, None], None, None, None),
        (TFLOPS, [math.nan, 10**400, 750, None], 750, 750, 7.1429),
    ],
    ids=["floor", "ceiling", "limit 0", "no limit", "no value", "no numbers"],
)
def test_summary_names_the_worst(
    limit: Limit | None, values: list[Any], worst: float, median: float, margin: float | None
) -> None:
    """The worst value is the one nearest to its limit or farthest outside it, whatever the direction."""
    rows = [record(f"node0-gpu{at}", value, limit=limit) for at, value in enumerate(values)]
    found = values_in_columns(rows)[0]["summary"]
    assert (found["worst"], found["median"], found["worst_margin_percent"]) == (worst, median, margin)
    assert found["counts"] == {"passed": len(values)}
    assert found["worst_place"] == (f"node0-gpu{values.index(worst)}" if worst is not None else None)


def test_a_failed_value_is_worse_than_a_nearer_one() -> None:
    """A value that failed by a limit of its own is the worst, also where another is nearer to the common limit."""
    stalls = Limit(kind="max", value=5, unit="%")
    rows = [record("node0-gpu0", 701.0), record("node0-gpu1", 9.0, outcome="failed", limit=stalls), record("node0-gpu2", 750.0)]
    found = values_in_columns(rows)[0]
    assert (found["summary"]["worst_place"], found["summary"]["median"]) == ("node0-gpu1", 725.5)
    assert found["other_limits"][0]["places"] == ["node0-gpu1"]


def test_every_field_is_read_back() -> None:
    """A reader gets from the columns what the rows say, outcome by outcome."""
    rows = [
        record("node0-gpu0", 750.0, evidence={"SM MHz": 1290, "C": 61, "pairs": [{"a": 1, "b": None}] * 3}),
        record("node0-gpu1", 498.0, outcome="failed", reason="slow\nnext: cool it", evidence={"C": 91}),
        record("node0-gpu2", None, outcome="error", limit=None, reason="died"),
        record("node0-gpu3", 690.0, advisory=True, reason="below", remark="seldom", part=2),
        record(None, 9, criterion="nodes_reached", limit=LATENCY, waiver={"who": "me"}),
    ]
    found = document(rows)
    with_rows = list(rows_of(found))
    by_columns = list(rows_of({**found, "criteria": []}))
    unmeasured = {"limit": None, "limit_kind": None, "limit_value": None, "unit": None, "operator": None}
    for ours, theirs in zip(with_rows, by_columns, strict=True):
        assert ours == (theirs if theirs["value"] is not None else {**theirs, **unmeasured, "operator": ours["operator"]})
    first = by_columns[0]
    assert first["evidence"] == {"SM MHz": 1290, "temperature C": 61, "pairs": [{"a": 1, "b": None}] * 3}
    assert by_columns[1]["reason"] == "slow\nnext: cool it"
    assert by_columns[3]["advisory"] is True
    assert by_columns[4]["place"] is None


@pytest.mark.parametrize("alike", [{"steps": 16}, {"steps": 0.0}, {"steps": [{"a": 1}] * 3}, {"steps": {}}, {"steps": False}])
def test_an_absent_node_makes_no_column_long(alike: dict[str, Any]) -> None:
    """Where few places have no evidence and all others the same, the value stands once; every reader leaves those few out."""
    places = [f"node{node}-gpu{gpu}" for node in range(8) for gpu in range(8)]
    gone = places[24:32]
    rows = [
        record(place, None, outcome="missing", limit=None) if place in gone else record(place, 750.0, evidence=alike)
        for place in places
    ]
    found = document(rows)
    (column,) = found["values"][0]["evidence"]
    assert "values" not in column
    assert column["without"] == list(range(24, 32))
    by_columns = list(rows_of({**found, "criteria": []}))
    assert [row["evidence"] for row in by_columns] == [{} if place in gone else alike for place in places]
    described = [{"id": name, "node": at // 8, "gpu": at % 8} for at, name in enumerate(places)]
    read = document_of(json.dumps({**found, "criteria": [], "places": described}).encode())
    assert [dict(one.evidence) for one in read.records] == [row["evidence"] for row in by_columns]


@pytest.mark.parametrize("values", [[1, None, None, 1], [1, None, 2, *[1] * 5], [1, None, True, *[1] * 5]])
def test_a_column_that_differs_stays_whole(values: list[Any]) -> None:
    """Where values differ, also by type alone, or where much is absent, each place has its own."""
    rows = [record(f"node0-gpu{at}", 750.0, evidence={} if one is None else {"n": one}) for at, one in enumerate(values)]
    (column,) = document(rows)["values"][0]["evidence"]
    assert [(type(one), one) for one in column["values"]] == [(type(one), one) for one in values]


def test_large_runs_list_what_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the number of whole rows ``criteria`` has the worst outcomes, and ``values`` has every outcome."""
    monkeypatch.setattr(results, "MOST_WHOLE", 6)
    monkeypatch.setattr(results, "MOST_LISTED", 3)
    outcomes = ["passed", "missing", "error", "failed", "skipped", "failed", "not_selected", "passed"]
    rows = [record(place, 1.0, outcome=outcome) for place, outcome in zip(PLACES, outcomes, strict=False)]
    rows[0] = record(rows[0].place, 1.0, advisory=True)
    found = document(rows)
    assert [row["outcome"] for row in found["criteria"]] == ["failed", "failed", "error"]
    assert found["criteria_omitted"] == {"passed": 2, "skipped": 1, "missing": 1, "not_selected": 1}
    assert found["values"][0]["outcome"] == outcomes
    assert [row["outcome"] for row in rows_of(found)] == outcomes
    assert document(rows[:6])["criteria_omitted"] == {}


@pytest.mark.parametrize(
    ("key", "name", "unit"),
    [
        ("C", "temperature C", "C"),
        ("W", "power W", "W"),
        ("SM MHz", "SM MHz", "MHz"),
        ("GB/s", "bandwidth GB/s", "GB/s"),
        ("p99 us", "p99 us", "us"),
        ("first measured TFLOPS", "first measured TFLOPS", "TFLOPS"),
        ("memory_gib", "memory_gib", "GiB"),
        ("n=8192", "n=8192", "TOPS"),
        ("rounds", "rounds", "count"),
        ("my own words", "my own words", None),
    ],
)
def test_keys_of_evidence_say_quantity_and_unit(key: str, name: str, unit: str | None) -> None:
    """No key is a unit alone, and a unit is a field of its own."""
    found = quantity_of(key, unit="TOPS")
    assert (list(described({key: 1})), found.unit) == ([name], unit)
    assert found.name not in BY_UNIT


def test_keys_that_would_be_one_stay_apart() -> None:
    """Two keys of one meaning lose no value."""
    found = document([record("node0-gpu0", 1.0, evidence={"C": 1, "temperature C": 2})])
    assert sorted(found["criteria"][0]["evidence"].values()) == [1, 2]
    assert sorted(evidence_values(one, 1)[0] for one in found["values"][0]["evidence"]) == [1, 2]


@pytest.mark.parametrize(
    "value",
    [[{"a": 1}, {"a": 2}, {"a": 3}], [{"a": 1}, {"b": 2}, {"a": 3}], [{}, {}, {}], [1, 2, 3], "text", {"columns": 3}, []],
    ids=str,
)
def test_packed_lists_are_unpacked(value: Any) -> None:
    """A list of like objects is kept as columns and read as the list that it was."""
    assert unpacked(packed(value)) == value
