"""The text of a failure: what is wrong, where, by how much, where the limit is written, evidence, what to do next."""

from __future__ import annotations

import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.judging.numbers import format_asked, format_miss, format_number
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


@dataclass(frozen=True, slots=True)
class Located:
    """Where a fault is: a place, a pair of places, or the cluster (no places); and the parts that it names there.

    ``is_path``: several places are the ends of a way from the first to the last; else they are simply several.
    """

    places: Sequence[Place]
    parts: Sequence[str] = ()
    is_path: bool = True

    @property
    def text(self) -> str:
        """``node3 mlx5_2 port 1 (0000:1a:00.0)``."""
        where = (" -> " if self.is_path else ", ").join(place.id for place in self.places) or "the cluster"
        more = f" and {len(self.parts) - SHOWN} more" if len(self.parts) > SHOWN else ""
        return f"{where} {', '.join(self.parts[:SHOWN])}{more}" if self.parts else where


def describe_failure(threshold: Threshold, limit: Limit, value: float, *, at: Located, evidence: Mapping[str, Any]) -> str:
    """The text of a failure of one criterion; without :func:`next_step`."""
    places = at.places
    basis = f"; {limit.basis}" if limit.basis is not None else ""
    lines = [
        (
            f"{threshold.key} at {one_line(at.text)}: {format_miss(limit, value)} "
            f"({shortfall(limit, value)}; {where_written(threshold)}{basis})"
        ),
        hung(f"  {threshold.criterion}"),
    ]
    lines += [f"  {place.label}" for place in places]
    if evidence:
        lines.append(f"  {show_evidence(evidence)}")
    lines.append(hung(f"  why: {threshold.why}"))
    return "\n".join(lines)


def describe_noise(threshold: Threshold, limit: Limit, value: float, *, places: Sequence[Place], why: str) -> str:
    """The text of a value that cannot be judged because its repeats disagree, and ``why``. Without :func:`next_step`."""
    where = " -> ".join(place.id for place in places) or "the cluster"
    lines = [
        f"{threshold.key} at {where} is too close to call: {format_asked(limit, value)}",
        f"  {why} ({where_written(threshold)})",
        *(f"  {place.label}" for place in places),
    ]
    return "\n".join(lines)


def next_step(selection: str, *, is_noisy: bool, advice: str | None = None) -> str:
    """The last line of either text: how to measure just this again, after ``advice``.

    ``selection`` is what pytest's ``-k`` selects.
    """
    disturbed = "look for what disturbs it (other processes, heat, traffic)" if is_noisy else advice
    first = f"{disturbed}, then " if disturbed is not None else ""
    return f"  next: {first}measure this again: the same command with -k {shlex.quote(selection)}"


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
        if value and all(isinstance(one, dict) for one in value):
            return f"{len(value)} in results.json"
        if len(value) > 2 * SHOWN:
            left_out = f"... ({len(value) - 2 * SHOWN} more in results.json) ..."
            value = [*value[:SHOWN], left_out, *value[-SHOWN:]]
        return " ".join(map(text_of, value)) or "none"
    return text_of(value)
