"""Files results.json of fleets that were never measured, in the shape of today and in that of version 2."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.judging.verdict import MISSING, PASSED, Record, Terms, decide
from pytest_gpucluster.reporting.results import ReportedTest, place_facts, results_document, to_json
from tests.support.entries import limit
from tests.support.fleet_records import failed, fleet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.places import Place

FACTS: dict[str, Any] = {
    "level": "standard",
    "profile": "h200-sxm",
    "expected": {"nodes": 2, "gpus_per_node": 4},
    "thresholds_sha256": "a" * 64,
    "changed_limits": [],
    "waivers": [],
    "environment": {"versions": {"torch": "2.11.0"}, "gpus": ["NVIDIA H200"]},
    "timings": {"total_s": 61.5},
}
RUN = {
    "id": "6f1c0f3e",
    "started": "2026-11-26T18:22:04.123+00:00",
    "ended": "2026-11-26T18:31:04.123+00:00",
    "duration_s": 540.0,
    "command": ["pytest", "--pyargs", "tests_acceptance"],
    "user": "ada",
    "host": "gpu-node-0",
    "hosts": ["gpu-node-0", "gpu-node-1"],
}


def document(
    records: Sequence[Record], places: Mapping[str, Place], *, terms: Terms | None = None, **facts: Any
) -> dict[str, Any]:
    """The members of a results.json as this version writes it."""
    verdict = decide(records, terms or Terms(rehearsal=False, level_reached=True, shape="2 nodes x 4 NVIDIA H200"))
    cases = [ReportedTest(nodeid=record.criterion, record=record) for record in records]
    return results_document(cases, places=places, verdict=verdict, facts={**FACTS, **facts})


NEW = ("schema_version", "run", "places", "limits", "limits_sha256", "values", "criteria_omitted")
"""What version 1 did not have; it had a row for each outcome."""


def of_version_1(members: Mapping[str, Any]) -> dict[str, Any]:
    """The same run as version 1 wrote it; of more than 10,000 outcomes, today's file has rows for the bad ones only."""
    return {name: value for name, value in members.items() if name not in NEW}


def text_of(members: Mapping[str, Any]) -> bytes:
    """The file itself."""
    return to_json(members).encode()


def of_version_2(members: Mapping[str, Any], records: Sequence[Record], places: Mapping[str, Place]) -> dict[str, Any]:
    """The same run with its values in columns, when and by whom it ran, and what the limits say."""
    names = list(dict.fromkeys(record.criterion for record in records))
    entries = {
        name: {
            "title": f"{name} is as promised.",
            "per": "gpu",
            "level": "quick",
            "advisory": False,
            "why": f"why of {name}",
            "source": "measured here",
            "where": "thresholds.yaml:41",
            "ids": ["REQ-7"] if name == names[0] else [],
            "recipe": {"sizes": [8192]},
        }
        for name in names
    }
    return {
        **json.loads(json.dumps(members)),
        "schema_version": 2,
        "run": RUN,
        "places": [{**place_facts(place), "slot": "U17" if place.gpu == 0 else None} for place in places.values()],
        "limits": entries,
        "limits_sha256": "b" * 64,
        "values": [_column(name, [one for one in records if one.criterion == name]) for name in names],
        "criteria": [],
        "criteria_omitted": {"passed": len(records)},
    }


def _column(name: str, records: Sequence[Record]) -> dict[str, Any]:
    keys = list(dict.fromkeys(key for record in records for key in record.evidence))
    limit = next((record.limit for record in records if record.limit is not None), None)
    facts = {"kind": limit.kind, "value": limit.value, "unit": limit.unit, "text": limit.text} if limit is not None else None
    return {
        "criterion": name,
        "unit": limit.unit if limit is not None else None,
        "limit": facts,
        "other_limits": [{"places": [one.place for one in records if one.limit is None], "limit": None}],
        "place": [one.place for one in records],
        "outcome": [one.outcome for one in records],
        "value": [one.value for one in records],
        "margin_percent": [one.margin_percent for one in records],
        "notes": [
            {"places": [one.place], "reason": one.text, "remark": one.remark, "advisory": one.advisory, "waiver": one.waiver}
            for one in records
            if one.text or one.remark or one.waiver
        ],
        "evidence": [
            {"key": key, "quantity": key, "unit": None, "values": [one.evidence.get(key) for one in records]} for key in keys
        ],
    }


def large_run(*, criteria: int = 45, rates: int = 25, nodes: int = 128) -> tuple[list[Record], dict[str, Place]]:
    """Nodes of 8 GPUs, the 78th absent, and four bad GPUs; with the defaults as many values as a real suite has."""
    places = fleet(nodes, 8, absent=[77] if nodes > 77 else [])
    gpus = [place for place in places.values() if place.gpu is not None]
    bad = {("bf16_tflops", "node3-gpu5"), ("c1", "node17-gpu0"), ("c2", "node40-gpu2"), ("c3", "node99-gpu6")}
    rows = []
    for index in range(criteria):
        name = "bf16_tflops" if index == 0 else f"c{index}"
        asked = limit("above", 700, "TFLOPS") if index < rates else limit("max", 0, "count")
        for rank, place in enumerate(gpus):
            value = 781.123456789 + (rank * 7919 + index * 104729) % 2003 / 97.0 if index < rates else 0.0
            evidence = {"SM MHz": 1755.0 + rank % 13, "W": 420.5, "C": 58 + rank % 5, "repeats": rank % 3}
            if place.rank is None:
                rows.append(Record(criterion=name, place=place.id, outcome=MISSING, reason="not run: gpu-node-77 is absent"))
            elif (name, place.id) in bad:
                rows.append(failed(name, place.id, 543.25, limit=asked, evidence=evidence))
            else:
                rows.append(Record(criterion=name, place=place.id, outcome=PASSED, value=value, limit=asked, evidence=evidence))
    return rows, places
