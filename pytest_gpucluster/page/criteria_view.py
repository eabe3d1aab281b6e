"""Every criterion as the page shows it: its entry, its worst value, and the value of each place as a grid. Pure."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging import verdict
from pytest_gpucluster.judging.failure_text import format_beside, format_number
from pytest_gpucluster.reporting import table_rows
from pytest_gpucluster.reporting.lines import hostlist
from pytest_gpucluster.text import shortlist

if TYPE_CHECKING:
    from pytest_gpucluster.page.document import RunDocument
    from pytest_gpucluster.places import Place

GOOD, BAD, OPEN, NONE = "good", "bad", "open", "none"
TONES = {
    verdict.PASSED: GOOD,
    table_rows.MEASURED: NONE,
    verdict.FAILED: BAD,
    verdict.ERROR: OPEN,
    verdict.MISSING: OPEN,
    verdict.NOISY: OPEN,
    verdict.WAIVED: OPEN,
    verdict.SKIPPED: NONE,
    verdict.NOT_SELECTED: NONE,
}
"""How a line of this outcome looks: good, bad, open (nobody knows, or somebody answers for it), or none of these."""
EXACT_UP_TO = 4_000
"""Outcomes of a run up to which every visible number carries its exact value and every place its evidence. A larger page
would pass 3 MB; there, the exact numbers are in the results that the page holds."""
MOST_NOTES = 40
MOST_PLACES = 8
NARROW = 54
"""Characters of most rows up to which a grid is narrow on paper."""
SHORT = 12
"""So many rows are not broken into columns on paper."""
FEWEST_ALIKE, SHARE_ALIKE = 4, 1 / 8
"""So many rows of a large page with the same values, and this share of all, are printed as one."""
FAR_PERCENT = 1.0
NOT_RECORDED = "not recorded"


class Number(NamedTuple):
    """A number as people read it, and as the file has it; ``exact`` is empty where the page is too large to repeat it."""

    text: str
    exact: str = ""


class Cell(NamedTuple):
    """One value in a grid. Without a value, ``text`` is a word for its outcome."""

    number: Number
    tone: str


Row = tuple[str, tuple[Cell, ...]]
"""A host, or several as a list, and what it has at each GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values by node and GPU; of equal values only one. A row with one cell has the same word at every GPU.

    Attributes:
        heads: of the columns; empty where each row has one value.
        rows: what stands on screen and on paper.
        alike: rows of a large page that are not printed, because others have the same values.
        printed: what is printed in their place, each with all its hosts.
        same: the value of all places, where it is one.
        count: how many places there are.
    """

    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    alike: tuple[Row, ...] = ()
    printed: tuple[Row, ...] = ()
    same: Cell | None = None
    count: int = 0

    @property
    def is_long(self) -> bool:
        """Whether it is printed in columns."""
        return len(self.rows) + len(self.printed) > SHORT

    @property
    def is_narrow(self) -> bool:
        """Whether three of it fit beside each other on paper."""
        wide = [len(host) + sum(1 + len(cell.number.text) for cell in cells) for host, cells in self.rows]
        return statistics.median(wide or [0]) <= NARROW


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A reason or a remark, with all places that have it word for word."""

    text: str
    where: str
    tone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CriterionView:
    """One criterion. ``row`` is its line in the table of the screen."""

    row: table_rows.TableRow
    anchor: str
    title: str
    tone: str
    worst: Number
    limit: Number
    unit: str
    facts: tuple[tuple[str, str], ...]
    ids: tuple[str, ...]
    grid: Grid
    notes: tuple[Note, ...]
    more_notes: int
    evidence: tuple[tuple[str, str], ...]


def views_of(run: RunDocument) -> tuple[CriterionView, ...]:
    """Every criterion of the run, in its order."""
    names = table_rows.PlaceNames(run.places)
    groups = run.by_criterion
    present = dict(groups)
    absent = table_rows.without_absent_nodes(present, run.places)
    rows = {key: table_rows.row_of(key, records, names) for key, records in present.items()}
    rows |= {key: replace(rows[key], outcome=f"{rows[key].outcome}, {len(lost)} absent") for key, lost in absent.items()}
    return tuple(_view(f"c{index}", some, run, (rows[key], names)) for index, (key, some) in enumerate(groups.items()))


def _view(
    anchor: str, records: Sequence[verdict.Record], run: RunDocument, shown: tuple[table_rows.TableRow, table_rows.PlaceNames]
) -> CriterionView:
    """``shown``: the row of those places whose node answers, and how places are called."""
    row, names = shown
    is_exact = len(run.records) <= EXACT_UP_TO
    entry = run.entries.get(row.criterion, {})
    limit = next((record.limit for record in records if record.limit is not None), None)
    readings = table_rows.readings_of(table_rows.severest_records(records)) or table_rows.readings_of(records)
    worst = max(readings, key=lambda reading: reading.badness) if readings and row.worst != table_rows.NOTHING else None
    notes = _notes(records, names, run.places)
    return CriterionView(
        row=row,
        anchor=anchor,
        title=str(entry.get("title") or ""),
        tone=BAD if row.counted_as == verdict.FAILED else OPEN if row.misses else TONES.get(row.counted_as, OPEN),
        worst=exact(row.worst, worst.value if worst is not None else None),
        limit=exact(row.limit, limit.value if limit is not None else None),
        unit="" if row.unit == table_rows.NOTHING else row.unit,
        facts=_facts(entry),
        ids=tuple(map(str, entry.get("ids") or ())),
        grid=grid_of(records, run.places, is_exact=is_exact),
        notes=notes[:MOST_NOTES],
        more_notes=max(0, len(notes) - MOST_NOTES),
        evidence=_evidence(records, names, is_exact=is_exact),
    )


def _shown(record: verdict.Record) -> str:
    """The value with as many digits as it takes to tell it from its limit; four do where it is far from that."""
    assert record.value is not None
    if record.limit is None or (record.margin_percent is not None and abs(record.margin_percent) > FAR_PERCENT):
        return format_number(record.value)
    return format_beside(record.limit, record.value)[1]


def exact(text: str, value: float | None) -> Number:
    """A number that is shown as ``text``."""
    return Number(text=text, exact="" if value is None else json.dumps(value))


def _facts(entry: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What the limits say of a criterion; nothing for results of version 1, which do not tell it."""
    if not entry:
        return ()
    found = {
        "Why": entry.get("why"),
        "Recipe": plain(entry["recipe"]) if entry.get("recipe") is not None else None,
        "Source of the limit": entry.get("source"),
        "Written in": entry.get("where"),
        "Measured for each": entry.get("per"),
        "Level": entry.get("level"),
        "Kind": ("advisory" if entry["advisory"] else "decides") if "advisory" in entry else None,
    }
    return tuple((name, str(text)) if text is not None else (name, NOT_RECORDED) for name, text in found.items())


def plain(value: object) -> str:
    """Evidence in words: ``n=4096: 786.0; C: 61``. Every number keeps all of its digits."""
    if isinstance(value, dict) and value:
        return "; ".join(f"{key}: {_inner(one)}" for key, one in value.items())
    return _inner(value)


def _inner(value: object) -> str:
    """A value inside another one; what is inside that stands in parentheses."""
    if isinstance(value, dict) and value:
        return f"({'; '.join(f'{key} {_inner(one)}' for key, one in value.items())})"
    if isinstance(value, (list, tuple)) and value:
        return ", ".join(f"({_inner(one)})" if isinstance(one, (list, tuple)) and one else _inner(one) for one in value)
    if value is None or value in ([], {}, ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value)


def grid_of(records: Sequence[verdict.Record], places: Mapping[str, Place], *, is_exact: bool) -> Grid:
    """The value, or the outcome, of each place."""
    if len({(record.value, verdict.counted_as(record), record.advisory) for record in records}) == 1:
        return Grid(heads=(), rows=(), same=_cell(records[0], is_exact=True), count=len(records))
    cells = {record.place: _cell(record, is_exact=is_exact) for record in records}
    by_node = grouped((places[name].node, places[name]) for name in cells if name is not None)
    gpus = sorted({place.gpu for found in by_node.values() for place in found if place.gpu is not None})
    rows = [(host_of(found[0]), _row(cells[place.id] for place in found)) for _, found in sorted(by_node.items())]
    cluster = [("cluster", (cells[None],))] if None in cells else []
    known = Grid(heads=tuple(f"GPU {gpu}" for gpu in gpus), rows=(*cluster, *rows), count=len(records))
    return known if is_exact else _folded(known)


def _row(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """The cells of a node; one where all have the same word and no number, as those of an absent node."""
    found = tuple(cells)
    return found[:1] if len(set(found)) == 1 and found[0].number.text in verdict.WORDS.values() else found


def _folded(grid: Grid) -> Grid:
    """A grid whose rows with the same values are printed as one."""
    hosts = grouped((cells, host) for host, cells in grid.rows)
    fewest = max(FEWEST_ALIKE, SHARE_ALIKE * len(grid.rows))
    folded = {cells: found for cells, found in hosts.items() if len(found) >= fewest}
    return replace(
        grid,
        rows=tuple(row for row in grid.rows if row[1] not in folded),
        alike=tuple(row for row in grid.rows if row[1] in folded),
        printed=tuple((hostlist(found), cells) for cells, found in folded.items()),
    )


def _cell(record: verdict.Record, *, is_exact: bool) -> Cell:
    outcome, tone = verdict.counted_as(record), _tone_of(record)
    if record.value is None:
        return Cell(number=Number(text="ok" if outcome == verdict.PASSED else verdict.WORDS[outcome]), tone=tone)
    return Cell(number=exact(_shown(record), record.value if is_exact else None), tone=tone)


def _tone_of(record: verdict.Record) -> str:
    return OPEN if record.advisory else TONES[verdict.counted_as(record)]


def host_of(place: Place) -> str:
    """The host of a place, or its node where nobody knows it."""
    return place.hostname or f"node{place.node}"


def _notes(records: Sequence[verdict.Record], names: table_rows.PlaceNames, places: Mapping[str, Place]) -> tuple[Note, ...]:
    texts = ((text, record) for record in records for text in (record.reason, record.remark) if text)
    alike = grouped(((text, _tone_of(record)), record.place) for text, record in texts)
    severest = {BAD: 0, OPEN: 1, GOOD: 2, NONE: 3}
    found = sorted(alike.items(), key=lambda item: severest[item[0][1]])
    on_node = Counter(places[record.place].node for record in records if record.place is not None)

    def where(noted: Sequence[str | None]) -> str:
        """The places in short; a node of which all places are meant is one of them, under its own name."""
        if len(noted) == len(records) > MOST_PLACES:
            return f"all {len(noted):,} places"
        here = Counter(places[name].node for name in noted if name is not None)
        whole = {node for node, number in here.items() if number == on_node[node] > 1 and len(on_node) > 1}
        known = [(name, places[name]) if name is not None else (None, None) for name in noted]
        short = [host_of(at) if at is not None and at.node in whole else names.name(name) for name, at in known]
        return shortlist(list(dict.fromkeys(short)), most=MOST_PLACES)

    return tuple(Note(text=text, where=where(noted), tone=tone) for (text, tone), noted in found)


def _evidence(
    records: Sequence[verdict.Record], names: table_rows.PlaceNames, *, is_exact: bool
) -> tuple[tuple[str, str], ...]:
    """What was seen beside the values: of every place in a small run, else where something is not good."""
    shown = [
        one
        for one in records
        if one.evidence and (is_exact or verdict.counted_as(one) not in (verdict.PASSED, verdict.SKIPPED, verdict.NOT_SELECTED))
    ]
    return tuple((names.name(record.place), plain(record.evidence)) for record in shown[: MOST_NOTES if not is_exact else None])
