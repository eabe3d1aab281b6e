"""The bad parts: what, where, evidence beside its siblings, what to do, and a ticket to copy. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_gpucluster.judging.failure_text import format_beside, format_number
from pytest_gpucluster.judging.verdict import FAILED, NOISY, PASSED, WAIVED, Record, counted_as
from pytest_gpucluster.page.criteria_view import Number, exact, host_of
from pytest_gpucluster.page.document import RunDocument, markdown
from pytest_gpucluster.places import Place
from pytest_gpucluster.text import counted, first_line, one_line, shortlist

MOST_PARTS = 40
"""Parts that are shown in full; the others have a line."""
SHOWN_CRITERIA = 24
NEGLIGIBLE = 5e-3
NAMES = {"pci": "PCI address", "serial": "Serial number", "uuid": "UUID"}
BOARD = {"slot": "Slot", "tray": "Tray", "module": "Module", "part_number": "Part number", "chassis_serial": "Chassis"}
KINDS = {
    "gpu": "GPU",
    "nic": "network adapter",
    "unknown": "part not known",
    "path": "path between places",
    "settings": "setting",
    "link": "link",
}
"""The kinds of culprits whose word is not plain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A criterion that points at a part: what it measured there, the limit, and what the siblings measured."""

    criterion: str
    value: Number
    limit: Number
    unit: str
    siblings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartView:
    """One thing that is bad, with a ticket about it in Markdown; ``is_open``: nothing failed there, it was not measured."""

    anchor: str
    name: str
    kind: str
    confidence: str = ""
    where: tuple[tuple[str, str], ...] = ()
    misses: tuple[Miss, ...]
    more_criteria: tuple[str, ...]
    evidence: tuple[str, ...]
    action: str = ""
    ticket: str = ""
    is_waived: bool
    is_open: bool = False


def parts_of(run: RunDocument) -> tuple[PartView, ...]:
    """Every culprit of the file, in its order, then what failed and names nobody."""
    by_criterion = run.by_criterion
    blamed = [_part(index, one, run, by_criterion) for index, one in enumerate(run.culprits)]
    named = {name for one in run.culprits for name in one["criteria"]}
    nobody = [record for record in run.records if record.outcome == FAILED and record.criterion not in named]
    return (*blamed, *([_nobody(len(blamed), nobody, by_criterion)] if nobody else []))


def name_of(place: Place) -> str:
    """``gpu-node-3 GPU 5``."""
    return host_of(place) if place.gpu is None else f"{host_of(place)} GPU {place.gpu}"


def _part(index: int, culprit: Mapping[str, Any], run: RunDocument, by_criterion: Mapping[str, Sequence[Record]]) -> PartView:
    place = run.places.get(culprit["place"]["id"]) if culprit.get("place") is not None else None
    names = culprit.get("places", ())
    nodes = {one.node: one.id for one in run.places.values() if one.gpu is None}
    node = None if place is None else nodes.get(place.node)
    misses, more = _misses(culprit["criteria"], {*names, node, None}, by_criterion)
    title = name_of(place) if place is not None else counted(len(names), "place") if names else "the cluster"
    where = _where(place) if place is not None else (("Places", shortlist(names, most=16)),)
    concerned = [record for name in culprit["criteria"] for record in by_criterion.get(name, ()) if record.place in names]
    bad = [record for record in concerned if record.outcome != PASSED]
    part = PartView(
        anchor=f"p{index}",
        name=title,
        kind=KINDS.get(str(culprit["kind"]), str(culprit["kind"])),
        confidence=str(culprit.get("confidence") or ""),
        where=where,
        misses=misses,
        more_criteria=more,
        evidence=tuple(one_line(str(text)) for text in culprit.get("evidence") or ()),
        action=str(culprit.get("action") or ""),
        is_waived=bool(bad) and all(counted_as(record) == WAIVED for record in bad),
        is_open=all(record.outcome != FAILED for record in bad),
    )
    return replace(part, ticket=markdown("ticket.md.j2", part=part, verdict=str(run.facts.get("verdict_line", run.word))))


def _nobody(index: int, failed: Sequence[Record], by_criterion: Mapping[str, Sequence[Record]]) -> PartView:
    misses, more = _misses(list(dict.fromkeys(one.criterion for one in failed)), {one.place for one in failed}, by_criterion)
    return PartView(
        anchor=f"p{index}",
        name="No part is named",
        kind="failed",
        misses=misses,
        more_criteria=more,
        evidence=tuple(dict.fromkeys(first_line(one.reason) for one in failed if one.reason)),
        is_waived=all(counted_as(one) == WAIVED for one in failed),
    )


def _where(place: Place) -> tuple[tuple[str, str], ...]:
    """Host, place, and by what the part itself is known."""
    found = {"Host": host_of(place), "Place": place.id}
    if place.gpu is not None:
        found |= {word: str(getattr(place, key) or "not recorded") for key, word in NAMES.items()}
        found |= {word: place.board[key] for key, word in BOARD.items() if key in place.board}
        found.setdefault("Slot", "not recorded")
    return tuple(found.items())


def _misses(
    criteria: Sequence[str], names: set[str | None], by_criterion: Mapping[str, Sequence[Record]]
) -> tuple[tuple[Miss, ...], tuple[str, ...]]:
    """Each criterion with a bad value at one of these places, or at the cluster; the names of all others."""
    shown: dict[str, Miss] = {}
    for criterion in criteria:
        records = by_criterion.get(criterion, ())
        bad = (one for one in records if one.outcome in (FAILED, NOISY) and one.place in names)
        own = next((one for one in bad if one.value is not None and one.limit is not None), None)
        if own is not None and len(shown) < SHOWN_CRITERIA:
            shown[criterion] = _miss(own, records)
    return tuple(shown.values()), tuple(name for name in criteria if name not in shown)


def _miss(record: Record, records: Sequence[Record]) -> Miss:
    assert record.limit is not None
    assert record.value is not None
    bound, value = format_beside(record.limit, record.value)
    good = [one.value for one in records if one.outcome == PASSED and one.value is not None]
    return Miss(
        criterion=record.criterion,
        value=exact(value, record.value),
        limit=exact(f"{record.limit.text.split(' ', 1)[0]} {bound}", record.limit.value),
        unit="" if record.limit.unit == "count" else record.limit.unit,
        siblings=_range(good),
    )


def _range(good: Sequence[float]) -> str:
    """What the places measured that passed: ``777 to 801, median 789 (1,015 places)``."""
    if not good:
        return "none passed"
    low, high = format_number(min(good)), format_number(max(good))
    count = f"{len(good):,} {'place' if len(good) == 1 else 'places'}"
    if low == high:
        return f"{low} ({count})"
    middle, widest = statistics.median(good), max(map(abs, good))
    median = "0" if abs(middle) < NEGLIGIBLE * widest else format_number(middle)  # a deviation of many that cancels out
    return f"{low} to {high}, median {median} ({count})"
