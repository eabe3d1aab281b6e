"""The run as metrics of Prometheus, for the textfile collector of node_exporter: ``metrics.prom``.

Written by hand: the format is one line a sample with three signs to escape. The package ``prometheus_client`` would make a
registry and its threads for what is a text of one moment (docs/decisions/0043-the-page.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.verdict import FAILED, OUTCOMES, VERDICTS, WAIVED, counted_as
from pytest_gpucluster.page.criteria_view import host_of
from pytest_gpucluster.reporting.table_rows import readings_of, severest_records

if TYPE_CHECKING:
    from pytest_gpucluster.page.document import RunDocument

MOST_PARTS = 1_000
HELP = {
    "gpucluster_run_info": "The run: its id, profile, level and digests. Always 1.",
    "gpucluster_accepted": "1 if the verdict is ACCEPTED or ACCEPTED_WITH_WAIVERS, else 0.",
    "gpucluster_verdict": "1 for the verdict of the run, 0 for all others.",
    "gpucluster_run_end_timestamp_seconds": "When the run ended, or when its results were written.",
    "gpucluster_run_duration_seconds": "How long the run took.",
    "gpucluster_checks": "Outcomes by kind; a waived failure counts as waived.",
    "gpucluster_gpus": "GPUs that were expected, and that answered.",
    "gpucluster_bad_part": "A part that is to blame. Always 1.",
    "gpucluster_criterion_worst_value": "The worst value of a criterion, in its unit.",
    "gpucluster_criterion_limit": "The limit of the worst value.",
    "gpucluster_criterion_headroom_ratio": "How far the worst value is inside its limit, as a share of it; below 0: outside.",
    "gpucluster_criterion_failed_places": "Places at which a criterion failed.",
}
"""Every metric with its help text. All are gauges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of a metric."""

    name: str
    labels: Mapping[str, str]
    value: float


def metrics_of(run: RunDocument, *, written_s: float) -> str:
    """The text of ``metrics.prom``. ``written_s``: when results.json was written, for a file that has no time of its own."""
    samples = [*_of_the_run(run, written_s), *_counts(run), *_parts(run), *_criteria(run)]
    by_name: dict[str, list[Sample]] = {name: [] for name in HELP}
    for sample in samples:
        by_name[sample.name].append(sample)
    lines = []
    for name, found in by_name.items():
        if found:
            lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge"]
            lines += [f"{name}{_labels(one.labels)} {one.value!r}" for one in found]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{shown}}}" if shown else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _of_the_run(run: RunDocument, written_s: float) -> Iterable[Sample]:
    ran = run.facts.get("run") or {}
    info = {
        "run": str(ran.get("id") or ""),
        "profile": str(run.facts.get("profile") or ""),
        "level": str(run.facts.get("level") or ""),
        "limits_sha256": str(run.facts.get("limits_sha256") or run.facts.get("thresholds_sha256") or ""),
        "results_sha256": run.digest,
        "simulated": "true" if run.facts.get("simulated") else "false",
    }
    yield Sample(name="gpucluster_run_info", labels=info, value=1)
    yield Sample(name="gpucluster_accepted", labels={}, value=int(run.word in VERDICTS[:2]))
    for word in VERDICTS:
        yield Sample(name="gpucluster_verdict", labels={"verdict": word}, value=int(word == run.word))
    yield Sample(name="gpucluster_run_end_timestamp_seconds", labels={}, value=_ended_s(ran.get("ended"), written_s))
    seconds = ran.get("duration_s", (run.facts.get("timings") or {}).get("total_s"))
    if isinstance(seconds, (int, float)):
        yield Sample(name="gpucluster_run_duration_seconds", labels={}, value=seconds)


def _ended_s(ended: object, written_s: float) -> float:
    try:
        return datetime.fromisoformat(str(ended)).timestamp()
    except ValueError:
        return round(written_s, 3)


def _counts(run: RunDocument) -> Iterable[Sample]:
    counts = Counter(counted_as(record) for record in run.records)
    for outcome in (*OUTCOMES, WAIVED):
        yield Sample(name="gpucluster_checks", labels={"outcome": outcome}, value=counts[outcome])
    expected = run.facts.get("expected") or {}
    nodes, gpus = expected.get("nodes"), expected.get("gpus_per_node")
    if isinstance(nodes, int) and isinstance(gpus, int):
        yield Sample(name="gpucluster_gpus", labels={"state": "expected"}, value=nodes * gpus)
    found = sum(place.gpu is not None and place.rank is not None for place in run.places.values())
    yield Sample(name="gpucluster_gpus", labels={"state": "found"}, value=found)


def _parts(run: RunDocument) -> Iterable[Sample]:
    for index, culprit in enumerate(run.culprits[:MOST_PARTS]):
        place = run.places.get(culprit["place"]["id"]) if culprit.get("place") is not None else None
        labels = {
            "part": str(index),
            "kind": str(culprit["kind"]),
            "host": host_of(place) if place is not None else "",
            "gpu": str(place.gpu) if place is not None and place.gpu is not None else "",
            "serial": (place.serial if place is not None else None) or "",
            "uuid": (place.uuid if place is not None else None) or "",
            "confidence": str(culprit.get("confidence") or ""),
        }
        yield Sample(name="gpucluster_bad_part", labels=labels, value=1)


def _criteria(run: RunDocument) -> Iterable[Sample]:
    for criterion, records in run.by_criterion.items():
        labels = {"criterion": criterion}
        failed = sum(counted_as(record) == FAILED for record in records)
        yield Sample(name="gpucluster_criterion_failed_places", labels=labels, value=failed)
        readings = readings_of(severest_records(records)) or readings_of(records)
        if not readings:
            continue
        worst = max(readings, key=lambda reading: reading.badness)
        with_unit = {**labels, "unit": worst.limit.unit}
        yield Sample(name="gpucluster_criterion_worst_value", labels=with_unit, value=worst.value)
        kind = {**with_unit, "kind": worst.limit.kind}
        yield Sample(name="gpucluster_criterion_limit", labels=kind, value=worst.limit.value)
        margin = worst.limit.margin_percent(worst.value)
        if margin is not None:
            yield Sample(name="gpucluster_criterion_headroom_ratio", labels=labels, value=margin / 100)
