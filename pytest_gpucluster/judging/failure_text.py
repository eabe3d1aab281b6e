"""What a failed criterion says: what is wrong, where, how much, where the limit is written, evidence, what to do next."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.judging.verdict import Record
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.thresholds.limit import Limit
    from pytest_gpucluster.thresholds.resolve import Threshold

SHOWN = 4
"""Of a long list in the evidence so many are shown at either end."""

NEGATED = {">": "not above", ">=": "below", "<": "not below", "<=": "above"}


def format_number(value: float) -> str:
    """Four significant digits, whole numbers as such."""
    if float(value).is_integer() and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"


def negated(limit: str) -> str:
    """What a value outside a limit is: ``> 700 TFLOPS`` becomes ``not above 700 TFLOPS``."""
    sign, _, rest = limit.partition(" ")
    return f"{NEGATED[sign]} {rest}" if sign in NEGATED else "within the limit"


def where_written(threshold: Threshold) -> str:
    """``thresholds.yaml:41``."""
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
    """The failure of one criterion at one place."""
    where = " -> ".join(place.id for place in places) or "the cluster"
    lines = [
        (
            f"{threshold.key} at {where}: {format_number(value)} {limit.unit}, {negated(limit.text)} "
            f"({shortfall(limit, value)}; {where_written(threshold)})"
        ),
        f"  {threshold.criterion}",
    ]
    lines += [f"  {place.label}" for place in places]
    if evidence:
        lines.append("  " + ", ".join(f"{name} {_show(shown)}" for name, shown in evidence.items()))
    lines.append(f"  why: {threshold.why}")
    lines.append(f"  next: {next_step(threshold, places[0] if len(places) == 1 else None)}")
    return "\n".join(lines)


def describe_noise(threshold: Threshold, limit: Limit, value: float, *, places: Sequence[Place], why: str) -> str:
    """A value that cannot be judged, because its repeats disagree."""
    where = " -> ".join(place.id for place in places) or "the cluster"
    lines = [
        f"{threshold.key} at {where} is too close to call: {format_number(value)} {limit.unit}, {limit.text} asked",
        f"  {why} ({where_written(threshold)})",
        *(f"  {place.label}" for place in places),
        f"  next: look for what disturbs it (other processes, heat, traffic), then {next_step(threshold, None)}",
    ]
    return "\n".join(lines)


def next_step(threshold: Threshold, place: Place | None) -> str:
    """What to do about it: the entry's own advice, then how to measure just this again."""
    own_name = threshold.key.partition("[")[0]
    select = f"{own_name} and {place.id}" if place is not None else own_name
    again = f'measure this again: the same command with -k "{select}"'
    advice = getattr(threshold, "advice", None)
    return f"{advice}; then {again}" if advice else again


def summarize(values: Sequence[float]) -> str:
    """``min 731.2, median 742.8, max 748.1``."""
    if len(values) == 1:
        return format_number(values[0])
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"min {format_number(low)}, median {format_number(middle)}, max {format_number(high)}"


def describe_together(records: Sequence[Record], names: Mapping[str, str], *, threshold: Threshold | None = None) -> list[str]:
    """One criterion's failures over all places, with the others beside them, for the end of the report.

    ``threshold`` adds where the limit is written and what to do next.
    """
    failed = [record for record in records if record.outcome == "failed" and record.waiver is None]
    passed = [record.value for record in records if record.outcome == "passed" and record.value is not None]
    kind = _kind(records)
    first = failed[0]
    written = f" ({where_written(threshold)})" if threshold is not None else ""
    lines = [f"{first.criterion}: {len(failed)} of {len(records)} {kind} {negated(first.limit or '')}{written}"]
    for record in failed:
        shown = format_number(record.value) if record.value is not None else "?"
        margin = f", {abs(record.margin_percent):.1f} % off" if record.margin_percent is not None else ""
        evidence = "  " + ", ".join(f"{name} {_show(told)}" for name, told in record.evidence.items())
        where = names.get(record.place or "", record.place or "cluster")
        lines.append(f"  {where}  {shown} {record.unit}{margin}{evidence.rstrip()}")
    if passed:
        lines.append(f"  the other {len(passed)}: {summarize(passed)}")
    if threshold is not None:
        lines.append(f"  next: {next_step(threshold, None)}")
    return lines


def _kind(records: Sequence[Record]) -> str:
    """What was judged, for ``1 of 16 GPUs``: a place's id tells."""
    places = [record.place for record in records if record.place]
    if not places:
        return "clusters"
    return "GPUs" if "-gpu" in places[0] else "ranks" if "-cpu" in places[0] else "nodes"


def _show(value: Any) -> str:
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, (list, tuple)):
        if len(value) > 2 * SHOWN:
            left_out = f"... ({len(value) - 2 * SHOWN} more in results.json) ..."
            value = [*value[:SHOWN], left_out, *value[-SHOWN:]]
        return " ".join(map(str, value)) or "none"
    return str(value)
