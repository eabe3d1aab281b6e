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
OK, CLUSTER, EVERYWHERE = "ok", "cluster", "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table, in words.

    Attributes:
        where: the place of the worst value; ``all`` where every place has the same one.
        counted_as: the severest outcome, which gives the line its colour.
        misses: an advisory limit was missed somewhere.
    """

    criterion: str
    unit: str = NOTHING
    worst: str = NOTHING
    where: str = NOTHING
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
    limit = next((record.limit for record in records if record.limit is not None), None)
    outcomes = [counted_as(record) for record in records]
    severest = next(outcome for outcome in SEVEREST_FIRST if outcome in outcomes)
    misses = sum(record.advisory for record in records)
    row = Row(
        criterion=criterion,
        unit=(limit.unit if limit is not None else "") or NOTHING,
        limit=value_cells(limit)[0] if limit is not None else NOTHING,
        outcome=outcome_text(outcomes) + (f", {count_misses(misses)}" if misses else ""),
        counted_as=severest,
        misses=misses > 0,
    )
    return with_values(row, records, names)


def outcome_text(outcomes: Sequence[str]) -> str:
    """``8 ok``, ``1 of 8 failed``, ``1 of 8 failed, 2 missing``, ``8 failed``."""
    bad = [(outcome, outcomes.count(outcome)) for outcome in SEVEREST_FIRST if outcome != PASSED and outcome in outcomes]
    if not bad:
        return f"{len(outcomes)} {OK}"
    (first, number), *others = bad
    of_all = f"{number}" if number == len(outcomes) else f"{number} of {len(outcomes)}"
    return ", ".join([f"{of_all} {WORDS.get(first, first)}", *(f"{count} {WORDS.get(word, word)}" for word, count in others)])


def with_values(row: Row, records: Sequence[Record], names: PlaceNames) -> Row:
    """The row with the worst value, its place, limit and headroom, and the median; as it is where nothing has a value.

    Each value is judged by its own limit, and the worst one's limit is shown.
    """
    readings = [
        Reading(value=record.value, limit=record.limit, place=record.place)
        for record in records
        if record.value is not None and record.limit is not None
    ]
    if not readings:
        return row
    worst = max(readings, key=lambda reading: reading.badness)
    values = [reading.value for reading in readings]
    bound, shown, median = value_cells(worst.limit, worst.value, statistics.median(values))
    is_everywhere = len({reading.place for reading in readings}) > 1 and all(value == worst.value for value in values)
    return replace(
        row,
        worst=shown,
        where=EVERYWHERE if is_everywhere else names.name(worst.place),
        median=median if len(values) > 1 else NOTHING,
        limit=bound,
        headroom=headroom_cell(worst.value, worst.limit),
    )
