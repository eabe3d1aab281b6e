"""What of the closing table is folded: good members of a family into one row, criteria without a result into one line."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.verdict import MISSING, NOT_SELECTED, PASSED, SKIPPED, Record, counted_as
from pytest_gpucluster.reporting.table_rows import OK, PlaceNames, Row, readings_of, row_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WITHOUT_RESULT = {MISSING: "missing", SKIPPED: "not applicable", NOT_SELECTED: "not selected"}
SHOWN_CAUSES = 4
FEWEST = 2
"""Good members of a family that are folded, and criteria that are missing for one reason."""
NOT_RUN = "not run: "


def folded_rows(by_criterion: Mapping[str, Sequence[Record]], names: PlaceNames) -> list[tuple[str, Row]]:
    """Each row with the first criterion that it is about. The good members of a family share one; a bad one has its own."""
    families = families_of(by_criterion)
    rows: list[tuple[str, Row]] = []
    for criterion, records in by_criterion.items():
        family = family_of(criterion)
        members = families.get(family, {})
        if criterion not in members or len(members) < FEWEST:
            rows.append((criterion, row_of(criterion, records, names)))
        elif criterion == next(iter(members)):
            number = sum(family_of(name) == family for name in by_criterion)
            rows.append((criterion, _family_row(family, members, f"{len(members)} of {number} {OK}", names)))
    return rows


def families_of(by_criterion: Mapping[str, Sequence[Record]]) -> dict[str, dict[str, Sequence[Record]]]:
    """The good members of each family, by its name."""
    families: dict[str, dict[str, Sequence[Record]]] = {}
    for criterion, records in by_criterion.items():
        family = family_of(criterion)
        if family and is_foldable(records):
            families.setdefault(family, {})[criterion] = records
    return families


def family_of(criterion: str) -> str:
    """``straggler`` for ``straggler[hbm_bandwidth]``; empty for a criterion without brackets."""
    name, bracket, rest = criterion.partition("[")
    return name if bracket and rest.endswith("]") else ""


def is_foldable(records: Sequence[Record]) -> bool:
    """Whether all is good and no rate is hidden: a value with a lower limit keeps its row."""
    return all(
        counted_as(record) == PASSED and not record.advisory and not (record.limit is not None and record.limit.is_floor)
        for record in records
    )


def _family_row(family: str, members: Mapping[str, Sequence[Record]], outcome: str, names: PlaceNames) -> Row:
    """The row of the member whose value is nearest to its limit, named with the number of the others.

    ``straggler[bf16_tflops] +6``; ``finetune_check[...]`` where all values are alike.
    """
    found = {member: readings_of(records) for member, records in members.items()}
    readings = {member: max(of_one, key=lambda one: one.badness) for member, of_one in found.items() if of_one}
    if len({reading.limit.unit for reading in readings.values()}) != 1 or len(readings) < len(members):
        return Row(criterion=f"{family}[...]", outcome=outcome)
    if len({(one.value, one.limit) for of_one in found.values() for one in of_one}) == 1:
        every = [record for records in members.values() for record in records]
        return replace(row_of(f"{family}[...]", every, names), outcome=outcome)
    worst = max(readings, key=lambda member: readings[member].badness)
    return replace(row_of(f"{worst} +{len(members) - 1}", members[worst], names), outcome=outcome)


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
    return (first.reason or "").removeprefix(NOT_RUN) or None if first.outcome == MISSING else first.cause


def summary_lines(left_out: Sequence[Sequence[Record]]) -> list[tuple[str, str]]:
    """``not applicable (22): one GPU (12), one node (10)``: each outcome, with the number of criteria by cause."""
    lines = []
    for outcome, words in WITHOUT_RESULT.items():
        causes = [_reason(records) for records in left_out if records[0].outcome == outcome]
        counts = Counter(cause for cause in causes if cause is not None)
        found = counts.most_common(SHOWN_CAUSES)
        shown = [cause if number == len(causes) else f"{cause} ({number})" for cause, number in found]
        shown += [f"{len(counts) - SHOWN_CAUSES} other reasons"] if len(counts) > SHOWN_CAUSES else []
        if causes:
            lines.append((outcome, f"{words} ({len(causes)}): {', '.join(shown)}" if shown else f"{words}: {len(causes)}"))
    return lines
