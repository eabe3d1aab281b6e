"""The text of a failure: what is wrong, where, by how much, where the limit is written, evidence, what to do next.

Values that no hardware can give: then the measurement is wrong, and nothing is known of the hardware. Pure.

A clock or a size that is wrong by ten makes every GPU ten times as fast, also one that is slow by five. So such a value is
never judged, and nothing else is compared with it.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import Blame, MeasurementError
from pytest_gpucluster.text import barred_below, one_line, shortlist, text_of
from pytest_gpucluster.thresholds.limit import HOLDS, SIGNS, Bound, Limit

if TYPE_CHECKING:
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.thresholds.resolve import Threshold


DIGITS, ALL_DIGITS = 4, 17
COUNTED = frozenset({"GPUs", "nodes", "errors", "rows", "reasons", "links"})
"""Units that are plain plurals. A distance in percent says nothing about such a number, nor about one of ``count``."""
WHOLE = 1e7
"""Whole numbers below this are shown with all of their digits: they may be counts."""


def format_number(value: float, *, digits: int = DIGITS) -> str:
    """A number with ``digits`` significant digits: ``771.0``, ``18910``, ``0.001311``; an exact one as it is: ``0.5``."""
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < WHOLE:
        return str(int(value))
    short = f"{value:.{digits}g}"
    if float(short) != value:
        short = f"{value:#.{digits}g}".removesuffix(".")
    if "e" in short and 1 <= abs(value) < WHOLE:
        return str(int(float(short)))
    return short


def format_miss(limit: Limit, value: float) -> str:
    """A value outside its limit, and the limit: ``699.99 TFLOPS, not above 700 TFLOPS``."""
    bound, shown = _with_units(limit, value)
    return f"{shown}, {limit.missed_word} {bound}"


def format_asked(limit: Limit, value: float) -> str:
    """A value and its limit, without a word on which is better: ``-42.26 %, <= 6 % asked``."""
    bound, shown = _with_units(limit, value)
    return f"{shown}, {SIGNS[limit.kind]} {bound} asked"


def _with_units(limit: Limit, value: float) -> list[str]:
    return [f"{number}{unit_beside(limit.unit, number)}" for number in format_beside(limit, value)]


def unit_beside(unit: str, number: str) -> str:
    """A blank and the unit: ``1 row``, ``2 rows``. Nothing where the number counts what is bad, or is 1 for yes."""
    if unit in ("", "count"):
        return ""
    return f" {unit.removesuffix('s') if number == '1' and unit in COUNTED else unit}"


def format_beside(limit: Limit, *values: float) -> tuple[str, ...]:
    """The number of a limit, then each value, with enough digits that the texts compare as the numbers do.

    A value that misses its limit is never shown as equal to the limit or better, unless it is equal.
    """
    shown: tuple[str, ...] = ()
    for digits in range(DIGITS, ALL_DIGITS + 1):
        shown = tuple(format_number(number, digits=digits) for number in (limit.value, *values))
        if all(_is_true(text, shown[0], value, limit) for text, value in zip(shown[1:], values, strict=True)):
            break
    return shown


def _is_true(shown: str, shown_limit: str, value: float, limit: Limit) -> bool:
    """Whether the texts of a value and of its limit say whether the value holds."""
    seen, seen_limit = float(shown), float(shown_limit)
    holds = limit.holds(value)
    is_equal = (seen == seen_limit) == (value == limit.value)
    return (math.isfinite(seen) and HOLDS[limit.kind](seen, seen_limit)) == holds and (holds or is_equal)


SHOWN = 4
"""How many items of a long list in the evidence are shown at either end."""


def where_written(threshold: Threshold) -> str:
    """File and line of the entry: ``thresholds.yaml:41``."""
    return f"{Path(threshold.file).name}:{threshold.line}"


def shortfall(limit: Limit, value: float) -> str:
    """By how much the value misses the limit."""
    percent = limit.margin_percent(value)
    if percent is None:
        number = format_number(abs(value - limit.value))
        return f"{number}{unit_beside(limit.unit, number)} off"
    return f"{abs(percent):.1f} % {'short' if limit.is_floor else 'over'}"


@dataclass(frozen=True, slots=True)
class Located:
    """Where a fault is: a place, a pair of places, or the cluster (no places); and the parts that it names there.

    ``is_path``: several places are the ends of a way from the first to the last, and the parts are theirs; else both are
    simply several.
    """

    places: Sequence[Place]
    parts: Sequence[str] = ()
    is_path: bool = True

    @property
    def text(self) -> str:
        """``gpu-node-3 (node3) mlx5_2 port 1 (0000:1a:00.0)``."""
        where = (" -> " if self.is_path else ", ").join(place.named for place in self.places) or "the cluster"
        return f"{where}{' ' if self.is_path else ', '}{shortlist(self.parts, most=SHOWN)}" if self.parts else where


def describe_failure(threshold: Threshold, limit: Limit, value: float, *, at: Located, evidence: Mapping[str, Any]) -> str:
    """The text of a failure of one criterion; without :func:`next_step`."""
    basis = f"; {limit.basis}" if limit.basis is not None else ""
    how_much = f"{format_miss(limit, value)} ({shortfall(limit, value)}; {where_written(threshold)}{basis})"
    lines = [
        f"{threshold.key} at {one_line(at.text)}: {how_much}",
        barred_below(f"  {threshold.criterion}"),
        *(f"  {place.label}" for place in at.places),
        *([f"  {show_evidence(evidence)}"] if evidence else []),
        barred_below(f"  why: {threshold.why}"),
    ]
    return "\n".join(lines)


def describe_noise(threshold: Threshold, limit: Limit, value: float, *, places: Sequence[Place], why: str) -> str:
    """The text of a value that cannot be judged because its repeats disagree, and ``why``. Without :func:`next_step`."""
    where = one_line(Located(places).text)
    lines = [
        f"{threshold.key} at {where} is too close to call: {format_asked(limit, value)}",
        f"  {why} ({where_written(threshold)})",
        *(f"  {place.label}" for place in places),
    ]
    return "\n".join(lines)


def describe_disturbed(
    threshold: Threshold, what: str, *, places: Sequence[Place], who: str, evidence: Mapping[str, Any]
) -> str:
    """The text of a value that does not hold, ``what``, measured while others kept the host busy. Without :func:`next_step`."""
    hosts = ", ".join(dict.fromkeys(place.of_node.named for place in places)) or "the cluster"
    lines = [
        f"host not idle: {who} on {hosts}; {threshold.key} at {Located(places).text}: {what}",
        f"  what was measured beside that is no value of this part ({where_written(threshold)})",
        *(f"  {place.label}" for place in places),
    ]
    return "\n".join([*map(one_line, lines), *([f"  {show_evidence(evidence)}"] if evidence else [])])


def next_step(arguments: Sequence[str], *, is_noisy: bool, advice: str | None = None) -> str:
    """The last line of either text: how to measure just this again, after ``advice``.

    ``arguments`` of pytest select it.
    """
    disturbed = "look for what disturbs it (other processes, heat, traffic)" if is_noisy else advice
    first = f"{disturbed}, then " if disturbed is not None else ""
    return f"  next: {first}measure this again: the same command with {shlex.join(arguments)}"


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
    if isinstance(value, dict):
        return "; ".join(_ends([f"{text_of(name)} {_show_one(one)}" for name, one in dict.items(value)])) or "none"
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(one, dict) for one in value):
            return f"{len(value)} in results.json"
        return " ".join(_ends([_show_one(one) for one in value])) or "none"
    return _show_one(value)


def _show_one(value: Any) -> str:
    if value is None:
        return "not known"
    return format_number(value) if isinstance(value, float) else text_of(value)


def _ends(texts: list[str]) -> list[str]:
    """The texts; of many those at either end."""
    left_out = f"... ({len(texts) - 2 * SHOWN} more in results.json) ..."
    return [*texts[:SHOWN], left_out, *texts[-SHOWN:]] if len(texts) > 2 * SHOWN else texts


TOO_MUCH = "more than the hardware can: the measurement is wrong"
TOO_LITTLE = "less than the hardware needs: the measurement is wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Possible:
    """What the values of an entry can be, for a test that compares or divides them; ``bound`` is None where nobody knows."""

    key: str
    bound: Bound | None = None

    def error(self, value: float, *, where: object) -> MeasurementError | None:
        """Why a value is none, where no hardware could give it; ``where`` is what it was measured at."""
        return impossible(value, self.bound, what=f"{self.key} at {where}")

    def require(self, value: float, *, where: object) -> None:
        """Raise that error."""
        require_possible(value, self.bound, what=f"{self.key} at {where}")


def require_possible(value: float, bound: Bound | None, *, what: str) -> None:
    """Refuse a value that is better than hardware can be; ``what`` says whose value it is, and where.

    Raises:
        MeasurementError: nothing is known of the hardware, and no place is to blame.
    """
    error = impossible(value, bound, what=what)
    if error is not None:
        raise error


def impossible(value: float, bound: Bound | None, *, what: str) -> MeasurementError | None:
    """The error of a value that is better than hardware can be; None for any other value.

    Args:
        value: in the unit of the bound.
        bound: the best value that is possible; None where nobody knows it, and then any is.
        what: whose value it is, and where.
    """
    if bound is None or bound.allows(value):
        return None
    why, most = (TOO_MUCH, "at most") if bound.is_most else (TOO_LITTLE, "at least")
    best = f"{most} {format_number(bound.value)} {bound.unit} is possible, {bound.by}"
    text = f"{what}: {format_number(value)} {bound.unit} is {why} ({best})"
    return MeasurementError(text, blame=Blame(part="software", cause=why))
