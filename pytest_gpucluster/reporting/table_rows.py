"""The rows of the closing table as data. Pure: records in, rows out.

A criterion has one row for all of its places. Criteria without a result share a line.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pytest_gpucluster.judging.culprits import absent_nodes
from pytest_gpucluster.judging.failure_text import COUNTED, format_beside
from pytest_gpucluster.judging.verdict import (
    BAD,
    FAILED,
    MISSING,
    NOISY,
    NOT_SELECTED,
    PASSED,
    SEVERITY,
    SKIPPED,
    WAIVED,
    WORDS,
    Record,
    count_misses,
    count_of,
    counted_as,
    is_only_measured,
)
from pytest_gpucluster.places import Place
from pytest_gpucluster.text import counted
from pytest_gpucluster.thresholds.limit import SIGNS, Limit

NOTHING = "-"
COUNTS = (*COUNTED, "count")
TINY_PERCENT, TINY_RATIO = 0.005, 1e-3
"""A percentage below both, the second as a part of its limit, is shown as 0."""
TWICE_PERCENT, WHOLE_PERCENT = 100.0, 9.95
MILLION = 1e6
SEVEREST_FIRST = SEVERITY[::-1]
JUDGED = (FAILED, NOISY, WAIVED, PASSED)
"""What has a value or was found out otherwise; the other outcomes say why there is none."""
PERCENT = 100
OK, MEASURED, CLUSTER, EVERYWHERE = "ok", "measured", "cluster", "all"
WITHOUT_RESULT = {MISSING: "missing", SKIPPED: "not applicable", NOT_SELECTED: "not selected"}
SHOWN_CAUSES = 4
FEWEST = 2
"""Criteria that are missing for one reason, and so have no row of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One line of the table, in words.

    Attributes:
        where: the place of the worst value; ``all`` where every place has the same one.
        p1: one percent of more than 100 places is as bad as this, or worse.
        counted_as: the severest outcome, which gives the line its colour; ``measured`` where no value has a limit.
        misses: an advisory limit was missed somewhere.
        is_heading: no criterion, but the subject of the rows below; its outcome says that all is good, if it is.
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
    is_heading: bool = False


class Reading(NamedTuple):
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


def row_of(criterion: str, records: Sequence[Record], names: PlaceNames) -> TableRow:
    """The line of one criterion with at least one record."""
    outcomes = [counted_as(record) for record in records]
    misses = sum(record.advisory for record in records)
    if all(map(is_only_measured, records)):
        row = TableRow(criterion=criterion, outcome=f"{len(records)} {MEASURED}", counted_as=MEASURED)
    else:
        text = outcome_text(outcomes) + (f", {count_misses(misses)}" if misses else "")
        row = TableRow(criterion=criterion, outcome=text, counted_as=severest_of(outcomes), misses=misses > 0)
    return with_values(row, records, names)


def severest_of(outcomes: Sequence[str]) -> str:
    """The outcome of many that is shown for all of them."""
    return next(outcome for outcome in SEVEREST_FIRST if outcome in outcomes)


def outcome_text(outcomes: Sequence[str]) -> str:
    """``8 ok``, ``1 of 8 failed``, ``8 failed``, ``1 of 6 failed, 2 missing``: what failed is counted among what was judged."""
    bad = [(outcome, outcomes.count(outcome)) for outcome in SEVEREST_FIRST if outcome != PASSED and outcome in outcomes]
    if not bad:
        return f"{len(outcomes)} {OK}"
    (first, number), *others = bad
    others = [one for one in others if one[0] != SKIPPED]  # what a rule leaves out is no news beside what is bad
    among = sum(outcome in JUDGED for outcome in outcomes) if first in JUDGED else len(outcomes)
    rest = [count_of(word, count) for word, count in others]
    return ", ".join([count_of(first, number) if number == among else f"{number} of {among} {WORDS.get(first, first)}", *rest])


def with_values(row: TableRow, records: Sequence[Record], names: PlaceNames) -> TableRow:
    """The row with the worst value, its place, limit and headroom, and what all values are like.

    Where something is bad, the worst value is one of the severest outcome. If none of these has a value, the first of their
    places stands without one: no good place is ever named beside a bad outcome. Where places are missing and nothing else is
    bad, the worst value of the others stands. Each value is judged by its own limit, and the worst one's limit is shown.
    """
    bad = severest_records(records)
    limit = next((record.limit for record in (*bad, *records) if record.limit is not None), None)
    row = replace(row, where=_where(bad, records, names) if is_bad(records) else NOTHING)
    if limit is None:
        return row
    every = readings_of(records)
    readings = every if severest_of([counted_as(record) for record in records]) == MISSING else readings_of(bad)
    worst = max(readings, key=lambda reading: reading.badness) if readings else None
    median, p1 = _distribution(every)
    row = replace(row, unit=unit_cell(limit), limit=value_cells(limit)[0], median=median, p1=p1)
    if worst is None:
        return row
    bound, shown = value_cells(worst.limit, worst.value)
    is_alike = len(readings) > 1 and len({one.value for one in readings}) == 1 and len({one.place for one in readings}) > 1
    where = names.name(worst.place)
    if is_alike and len(readings) < len(records) and readings is every:
        where = NOTHING  # of the places that are not missing, none is the worst
    return replace(
        row,
        unit=unit_cell(worst.limit),
        worst=shown,
        where=EVERYWHERE if is_alike and len(readings) == len(records) else where,
        limit=bound,
        headroom=headroom_cell(worst.value, worst.limit),
    )


def is_bad(records: Sequence[Record]) -> bool:
    """Whether one of them has an outcome that somebody must look at."""
    return severest_of([counted_as(record) for record in records]) in (*BAD, WAIVED)


def severest_records(records: Sequence[Record]) -> Sequence[Record]:
    """The records with the severest outcome; all records if none is bad."""
    outcomes = [counted_as(record) for record in records]
    severest = severest_of(outcomes)
    if severest not in (*BAD, WAIVED):
        return records
    return [record for record, outcome in zip(records, outcomes, strict=True) if outcome == severest]


def readings_of(records: Sequence[Record]) -> list[Reading]:
    """Each value that has a limit."""
    return [
        Reading(value=record.value, limit=record.limit, place=record.place)
        for record in records
        if record.value is not None and record.limit is not None
    ]


def _where(bad: Sequence[Record], records: Sequence[Record], names: PlaceNames) -> str:
    """The place of what has no value: all of them, or the first."""
    return EVERYWHERE if len({record.place for record in bad}) == len(records) > 1 else names.name(bad[0].place)


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


def value_cells(limit: Limit, *values: float) -> tuple[str, ...]:
    """The limit without its unit, then each value: ``("> 700", "777.2")``."""
    tiny = abs(limit.value) * TINY_RATIO if limit.unit == "%" else 0.0
    bound, *shown = format_beside(limit, *(0.0 if abs(value) < min(tiny, TINY_PERCENT) else value for value in values))
    return (f"{SIGNS[limit.kind]} {bound}", *shown)


def unit_cell(limit: Limit) -> str:
    """The unit of a value; nothing where it is a number of findings."""
    return NOTHING if limit.unit in ("", "count") else limit.unit


def allows_nothing(limit: Limit) -> bool:
    """Whether the limit is an upper bound of zero."""
    return limit.kind == "max" and limit.value == 0


def headroom_cell(value: float, limit: Limit) -> str:
    """How far a value is from its limit, in percent of the limit: ``11 %``, ``-4.2 %``.

    A value of more than twice a lower limit is shown as its multiple: ``5.8 x``. Counts have no headroom, nor has a limit of 0.
    """
    percent = limit.margin_percent(value)
    if percent is None or limit.unit in COUNTS:
        return NOTHING
    if percent > TWICE_PERCENT and limit.is_floor and limit.value > 0:
        return f"{_short(value / limit.value)} x"
    return f"{_short(percent)} %"


def _short(number: float) -> str:
    """Two significant digits; every digit before the point up to a million."""
    return f"{number:.0f}" if WHOLE_PERCENT <= abs(number) < MILLION else f"{number:.2g}"


def without_absent_nodes(by_criterion: dict[str, list[Record]], places: Mapping[str, Place]) -> dict[str, list[Record]]:
    """Take what is missing with absent nodes out of ``by_criterion``, and return it: it is one fact, not one of each row.

    A criterion of which nothing else would be left keeps its row.
    """
    gone = absent_nodes(places)
    found: dict[str, list[Record]] = {}
    for criterion, records in by_criterion.items():
        lost = [record for record in records if record.outcome == MISSING and record.place in gone]
        if 0 < len(lost) < len(records):
            found[criterion] = lost
            by_criterion[criterion] = [record for record in records if record.outcome != MISSING or record.place not in gone]
    return found


def is_lost(records: Sequence[Record], places: Mapping[str, Place]) -> bool:
    """Whether all is missing because nodes are absent, which the bad parts say."""
    gone = absent_nodes(places)
    return all(record.outcome == MISSING and not gone.keys().isdisjoint((record.place, *record.culprits)) for record in records)


def without_result(by_criterion: Mapping[str, Sequence[Record]]) -> dict[str, str]:
    """The outcome of each criterion that was nowhere judged: it does not apply, was not selected, or is missing everywhere.

    A criterion that is missing by itself keeps its row; two and more with one reason do not.
    """
    found: dict[str, str] = {}
    for criterion, records in by_criterion.items():
        outcome = records[0].outcome
        if outcome in WITHOUT_RESULT and all(record.outcome == outcome for record in records):
            found[criterion] = outcome
    reasons = Counter(_reason(by_criterion[criterion]) for criterion, outcome in found.items() if outcome == MISSING)
    return {
        criterion: outcome
        for criterion, outcome in found.items()
        if outcome != MISSING or reasons[_reason(by_criterion[criterion])] >= FEWEST
    }


def _reason(records: Sequence[Record]) -> str | None:
    """Why a criterion has no result: for all places the same, or as it is for the first one."""
    first = records[0]
    return first.reason if first.outcome == MISSING else first.cause


def missing_reasons(by_criterion: Mapping[str, Sequence[Record]]) -> frozenset[str]:
    """Why criteria are missing, as far as :func:`summary_lines` says it: no other block has to say it again."""
    outcomes = without_result(by_criterion)
    causes = (_reason(by_criterion[criterion]) for criterion, outcome in outcomes.items() if outcome == MISSING)
    counts = Counter(cause for cause in causes if cause is not None)
    return frozenset(cause for cause, _ in counts.most_common(SHOWN_CAUSES))


def summary_lines(left_out: Sequence[Sequence[Record]]) -> list[tuple[str, str]]:
    """``not applicable (22): one GPU (12), one node (10)``: each outcome, with the number of criteria by cause."""
    lines = []
    for outcome, words in WITHOUT_RESULT.items():
        causes = [_reason(records) for records in left_out if records[0].outcome == outcome]
        counts = Counter(cause for cause in causes if cause is not None)
        found = counts.most_common(SHOWN_CAUSES)
        shown = [cause if number == len(causes) else f"{cause} ({number})" for cause, number in found]
        shown += [counted(len(counts) - SHOWN_CAUSES, "other reason")] if len(counts) > SHOWN_CAUSES else []
        if causes:
            lines.append((outcome, f"{words} ({len(causes)}): {', '.join(shown)}" if shown else f"{words}: {len(causes)}"))
    return lines
