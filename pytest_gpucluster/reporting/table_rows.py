"""The rows of the closing table as data: one for each criterion, over all of its places. Pure: records in, rows out."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.verdict import (
    ERROR,
    FAILED,
    MISSING,
    NOISY,
    NOT_SELECTED,
    PASSED,
    PENDING,
    SKIPPED,
    WAIVED,
    WORDS,
    Record,
    count_misses,
    counted_as,
)
from pytest_gpucluster.reporting.numbers import NOTHING, headroom_cell, value_cells

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.places import Place
    from pytest_gpucluster.thresholds.limit import Limit

SEVEREST_FIRST = (FAILED, ERROR, MISSING, NOISY, WAIVED, NOT_SELECTED, SKIPPED, PENDING, PASSED)
BAD = (FAILED, ERROR, MISSING, NOISY, WAIVED)
JUDGED = (FAILED, NOISY, WAIVED, PASSED)
"""What has a value or was found out otherwise; the other outcomes say why there is none."""
PERCENT = 100
OK, CLUSTER, EVERYWHERE = "ok", "cluster", "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table, in words.

    Attributes:
        where: the place of the worst value; ``all`` where every place has the same one.
        p1: one percent of more than 100 places is as bad as this, or worse.
        counted_as: the severest outcome, which gives the line its colour.
        misses: an advisory limit was missed somewhere.
    """

    criterion: str
    unit: str = NOTHING
    worst: str = NOTHING
    where: str = NOTHING
    p1: str = NOTHING
    median: str = NOTHING
    limit: str = NOTHING
    headroom: str = NOTHING
    outcome: str
    counted_as: str = PASSED
    misses: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A value with its limit and place."""

    value: float
    limit: Limit
    place: str | None

    @property
    def badness(self) -> tuple[bool, float]:
        """Sorts the worst value last: what misses its limit, then what is nearest to its limit."""
        limit, percent = self.limit, self.limit.margin_percent(self.value)
        if percent is None:
            percent = (self.value - limit.value) * (1 if limit.is_floor else -1)
        return not limit.holds(self.value), math.inf if math.isnan(percent) else -percent


class PlaceNames:
    """Short names of places: ``gpu2`` on one node, ``node23-gpu3`` on several."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        """``places``: every expected GPU and node by id."""
        self._places = places
        self._is_one_node = len({place.node for place in places.values()}) == 1

    def name(self, place: str | None) -> str:
        """The name of one place; None is the cluster."""
        if place is None:
            return CLUSTER
        known = self._places.get(place)
        if known is None or not self._is_one_node:
            return place
        return "node" if known.gpu is None else place.removeprefix(f"node{known.node}-")


def row_of(criterion: str, records: Sequence[Record], names: PlaceNames) -> Row:
    """The line of one criterion with at least one record."""
    outcomes = [counted_as(record) for record in records]
    misses = sum(record.advisory for record in records)
    row = Row(
        criterion=criterion,
        outcome=outcome_text(outcomes) + (f", {count_misses(misses)}" if misses else ""),
        counted_as=severest_of(outcomes),
        misses=misses > 0,
    )
    return with_values(row, records, names)


def severest_of(outcomes: Sequence[str]) -> str:
    """The outcome that is told of many."""
    return next(outcome for outcome in SEVEREST_FIRST if outcome in outcomes)


def outcome_text(outcomes: Sequence[str]) -> str:
    """``8 ok``, ``1 of 8 failed``, ``8 failed``, ``1 of 6 failed, 2 missing``: what failed is counted among what was judged."""
    bad = [(outcome, outcomes.count(outcome)) for outcome in SEVEREST_FIRST if outcome != PASSED and outcome in outcomes]
    if not bad:
        return f"{len(outcomes)} {OK}"
    (first, number), *others = bad
    others = [one for one in others if one[0] != SKIPPED]  # what a rule leaves out is no news beside what is bad
    among = sum(outcome in JUDGED for outcome in outcomes) if first in JUDGED else len(outcomes)
    of_all = f"{number}" if number == among else f"{number} of {among}"
    return ", ".join([f"{of_all} {WORDS.get(first, first)}", *(f"{count} {WORDS.get(word, word)}" for word, count in others)])


def with_values(row: Row, records: Sequence[Record], names: PlaceNames) -> Row:
    """The row with the worst value, its place, limit and headroom, and what all values are like.

    Where something is bad, the worst value is one of the severest outcome. If none of these has a value, the first of their
    places stands without one: no good place is ever named beside a bad outcome. Where places are missing and nothing else is
    bad, the worst value of the others stands. Each value is judged by its own limit, and the worst one's limit is shown.
    """
    told = told_of(records)
    limit = next((record.limit for record in (*told, *records) if record.limit is not None), None)
    if limit is None:
        return replace(row, where=_where(told, records, names) if is_bad(records) else NOTHING)
    every = readings_of(records)
    readings = every if severest_of([counted_as(record) for record in records]) == MISSING else readings_of(told)
    worst = max(readings, key=lambda reading: reading.badness) if readings else None
    median, p1 = _distribution(every)
    row = replace(row, unit=limit.unit or NOTHING, limit=value_cells(limit)[0], median=median, p1=p1)
    if worst is None:
        return replace(row, where=_where(told, records, names)) if is_bad(records) else row
    bound, shown = value_cells(worst.limit, worst.value)
    is_alike = len(readings) > 1 and len({one.value for one in readings}) == 1 and len({one.place for one in readings}) > 1
    where = names.name(worst.place)
    if is_alike and len(readings) < len(records) and readings is every:
        where = NOTHING  # of the places that are not missing, none is the worst
    return replace(
        row,
        unit=worst.limit.unit or NOTHING,
        worst=shown,
        where=EVERYWHERE if is_alike and len(readings) == len(records) else where,
        limit=bound,
        headroom=headroom_cell(worst.value, worst.limit),
    )


def is_bad(records: Sequence[Record]) -> bool:
    """Whether one of them has an outcome that somebody must look at."""
    return severest_of([counted_as(record) for record in records]) in BAD


def told_of(records: Sequence[Record]) -> Sequence[Record]:
    """Those with the severest outcome where something is bad, else all."""
    outcomes = [counted_as(record) for record in records]
    severest = severest_of(outcomes)
    if severest not in BAD:
        return records
    return [record for record, outcome in zip(records, outcomes, strict=True) if outcome == severest]


def readings_of(records: Sequence[Record]) -> list[Reading]:
    """Each value that has a limit."""
    return [
        Reading(value=record.value, limit=record.limit, place=record.place)
        for record in records
        if record.value is not None and record.limit is not None
    ]


def _where(told: Sequence[Record], records: Sequence[Record], names: PlaceNames) -> str:
    """The place of what has no value: all of them, or the first."""
    return EVERYWHERE if len({record.place for record in told}) == len(records) > 1 else names.name(told[0].place)


def _distribution(readings: Sequence[Reading]) -> tuple[str, str]:
    """The cells of median and one percent, each with digits of its own."""
    if len(readings) < 2:
        return NOTHING, NOTHING
    limit = readings[0].limit
    median = value_cells(limit, statistics.median(reading.value for reading in readings))[1]
    if len(readings) <= PERCENT:
        return median, NOTHING
    from_worst = sorted(readings, key=lambda reading: reading.badness, reverse=True)
    p1 = from_worst[math.ceil(len(readings) / PERCENT) - 1]
    return median, value_cells(p1.limit, p1.value)[1]
