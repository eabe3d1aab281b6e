"""The text of a failure: what is wrong, where, by how much, where the limit is written, evidence, what to do next."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.judging.numbers import format_miss, format_number
from pytest_gpucluster.text import hung, one_line, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.places import Place
    from pytest_gpucluster.thresholds.limit import Limit
    from pytest_gpucluster.thresholds.resolve import Threshold

SHOWN = 4
"""How many items of a long list in the evidence are shown at either end."""


def where_written(threshold: Threshold) -> str:
    """File and line of the entry: ``thresholds.yaml:41``."""
    return f"{Path(threshold.file).name}:{threshold.line}"


def shortfall(limit: Limit, value: float) -> str:
    """By how much the value misses the limit."""
    percent = limit.margin_percent(value)
    if percent is None:
        return f"{format_number(abs(value - limit.value))} {limit.unit} off"
    return f"{abs(percent):.1f} % {'short' if limit.is_floor else 'over'}"


def describe_failure(
    threshold: Threshold, limit: Limit, value: float, *, places: Sequence[Place], evidence: Mapping[str, Any]
) -> str:
    """The text of a failure of one criterion at one place, at a pair of places, or of the cluster (no places)."""
    where = " -> ".join(place.id for place in places) or "the cluster"
    lines = [
        (f"{threshold.key} at {where}: {format_miss(limit, value)} ({shortfall(limit, value)}; {where_written(threshold)})"),
        hung(f"  {threshold.criterion}"),
    ]
    lines += [f"  {place.label}" for place in places]
    if evidence:
        lines.append(f"  {show_evidence(evidence)}")
    lines.append(hung(f"  why: {threshold.why}"))
    lines.append(f"  next: {next_step(threshold, places[0] if len(places) == 1 else None)}")
    return "\n".join(lines)


def describe_noise(threshold: Threshold, limit: Limit, value: float, *, places: Sequence[Place], why: str) -> str:
    """The text of a value that cannot be judged because its repeats disagree; ``why`` says how much."""
    where = " -> ".join(place.id for place in places) or "the cluster"
    lines = [
        f"{threshold.key} at {where} is too close to call: {format_number(value)} {limit.unit}, {limit.text} asked",
        f"  {why} ({where_written(threshold)})",
        *(f"  {place.label}" for place in places),
        f"  next: look for what disturbs it (other processes, heat, traffic), then {next_step(threshold, None)}",
    ]
    return "\n".join(lines)


def next_step(threshold: Threshold, place: Place | None) -> str:
    """How to measure just this criterion again."""
    own_name = threshold.key.partition("[")[0]
    select = f"{own_name} and {place.id}" if place is not None else own_name
    return f'measure this again: the same command with -k "{select}"'


def summarize(values: Sequence[float]) -> str:
    """At least one value as ``min 731.2, median 742.8, max 748.1``; a single one as it is."""
    if len(values) == 1:
        return format_number(values[0])
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"min {format_number(low)}, median {format_number(middle)}, max {format_number(high)}"


def show_evidence(evidence: Mapping[str, Any]) -> str:
    """The evidence in one line."""
    return one_line(", ".join(f"{text_of(name)} {_show(found)}" for name, found in evidence.items()))


def _show(value: Any) -> str:
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, (list, tuple)):
        if len(value) > 2 * SHOWN:
            left_out = f"... ({len(value) - 2 * SHOWN} more in results.json) ..."
            value = [*value[:SHOWN], left_out, *value[-SHOWN:]]
        return " ".join(map(text_of, value)) or "none"
    return text_of(value)
