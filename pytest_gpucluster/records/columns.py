"""The values of a run in columns: one object a criterion, whatever the number of places; and what the keys of evidence mean."""

from __future__ import annotations

import csv
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.verdict import FAILED, OUTCOMES, Record
from pytest_gpucluster.thresholds.limit import SIGNS, Limit

FEWEST_ROWS = 3
"""A list of so many objects with equal keys is kept as columns too."""
MOST_WITHOUT = 0.25
"""The share of places without evidence up to which a column of equal values is one value."""


@dataclass(frozen=True, slots=True)
class NamedQuantity:
    """What a key of evidence is about. ``unit`` is None for text, and where the key says no unit."""

    name: str
    unit: str | None


with Path(__file__).with_name("quantities.csv").open(encoding="utf-8", newline="") as _opened:
    _ROWS = [*csv.DictReader(_opened)]
BY_UNIT = {row["key"]: row["name"] for row in _ROWS if row["kind"] == "unit"}
"""What a key that is a unit alone is about. Each may stand at the end of a key too."""
BY_KEY = {row["key"]: NamedQuantity(row["name"], row["unit"] or None) for row in _ROWS}
"""These, and keys whose words do not end in a unit, or do not name the quantity."""


def quantity_of(key: str, *, unit: str | None = None) -> NamedQuantity:
    """The quantity and the unit of a key of evidence, as a measurement or a site's own test wrote it.

    ``unit``: of the criterion, for keys that are about its own value.
    """
    if key in BY_KEY:
        return BY_KEY[key]
    if key.startswith("n=") and key[2:].isdecimal():
        return NamedQuantity(f"rate of products of size {key[2:]}", unit)
    own = next((one for one in BY_UNIT if key.endswith(f" {one}")), None)
    return NamedQuantity(key.removesuffix(f" {own}") if own is not None else key, own)


def described(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence, with ``temperature C`` where a key is a unit alone. A key that would be taken twice gets a number."""
    found: dict[str, Any] = {}
    for key, value in evidence.items():
        name = f"{BY_UNIT[key]} {key}" if key in BY_UNIT else key
        found[f"{name} ({len(found) + 1})" if name in found else name] = value
    return found


def values_in_columns(records: Iterable[Record]) -> list[dict[str, Any]]:
    """``values`` of results.json as strict JSON: one object a criterion, in the order of the records."""
    return [_of_criterion(criterion, rows) for criterion, rows in by_criterion(records).items()]


def by_criterion(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each criterion, in their order."""
    return grouped((record.criterion, record) for record in records)


def limit_facts(limit: Limit) -> dict[str, Any]:
    """A limit as results.json has it: a number with its operator, and the same in words."""
    return {
        "kind": limit.kind,
        "operator": SIGNS[limit.kind],
        **{name: getattr(limit, name) for name in ("value", "unit", "text", "basis")},
    }


def evidence_of(record: Record) -> dict[str, Any]:
    """The evidence of a record as strict JSON, under keys that say quantity and unit."""
    return described(_as_written(record))


def _as_written(record: Record) -> dict[str, Any]:
    facts = strict_json(dict(record.evidence))
    return facts if isinstance(facts, dict) else {"evidence": facts}


def number_of(value: Any) -> int | float | None:
    """The value if it can be reckoned with; None for a number that is not finite, and for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an int beyond every float
        return None


def margin_of(record: Record) -> float | None:
    """How far inside (above 0) or outside its limit the value is, in percent of the limit; None where nothing says it.

    To four decimals.
    """
    value, margin = number_of(record.value), record.margin_percent
    if margin is None and record.limit is not None and value is not None:
        margin = record.limit.margin_percent(value)
    return None if margin is None else round(margin, 4)


def packed(value: Any) -> Any:
    """A list of objects with equal keys as one object of columns, and anything else as it is."""
    if not isinstance(value, list) or len(value) < FEWEST_ROWS or not all(isinstance(row, dict) for row in value):
        return value
    keys = list(value[0])
    if not keys or any(list(row) != keys for row in value):
        return value
    return {"columns": {key: [row[key] for row in value] for key in keys}}


def unpacked(value: Any) -> Any:
    """The value before :func:`packed`."""
    if not isinstance(value, dict) or list(value) != ["columns"] or not isinstance(value["columns"], dict):
        return value
    columns = value["columns"]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _of_criterion(criterion: str, rows: Sequence[Record]) -> dict[str, Any]:
    limits = Counter(record.limit for record in rows if record.limit is not None or record.value is not None)
    limit = max((one for one in limits if one is not None), key=limits.__getitem__, default=None)
    margins = [margin_of(record) for record in rows]
    facts = {
        "criterion": criterion,
        "unit": limit.unit if limit is not None else None,
        "limit": limit_facts(limit) if limit is not None else None,
        "other_limits": [
            {
                "places": [record.place for record in rows if record.limit == other],
                "limit": limit_facts(other) if other is not None else None,
            }
            for other in limits
            if other != limit
        ],
        "summary": _summary(rows, limit, margins),
        "notes": _notes(rows),
    }
    return {
        **strict_json(facts),
        "place": [record.place for record in rows],
        "outcome": [record.outcome for record in rows],
        "value": strict_json([record.value for record in rows]),
        "margin_percent": margins,
        **({"part": [record.part for record in rows]} if any(record.part > 1 for record in rows) else {}),
        "evidence": _evidence(rows),
    }


def _summary(rows: Sequence[Record], limit: Limit | None, margins: Sequence[float | None]) -> dict[str, Any]:
    counts = Counter(record.outcome for record in rows)
    known = [(record, margin) for record, margin in zip(rows, margins, strict=True) if number_of(record.value) is not None]
    sign = 1 if limit is None or limit.is_floor else -1
    worst = min(known, key=lambda one: _goodness(*one, sign=sign), default=(None, None))[0]
    same = [record.value for record, _ in known if limit is None or record.limit is None or record.limit.unit == limit.unit]
    margin = margins[rows.index(worst)] if worst is not None else None
    return {
        "places": len(rows),
        "counts": {outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]},
        "worst": worst.value if worst is not None else None,
        "worst_place": worst.place if worst is not None else None,
        "median": statistics.median(value for value in same if value is not None) if same else None,
        "worst_margin_percent": margin,
    }


def _goodness(record: Record, margin: float | None, *, sign: int) -> tuple[bool, float]:
    return record.outcome != FAILED, margin if margin is not None else sign * float(record.value or 0)


def _notes(rows: Iterable[Record]) -> list[dict[str, Any]]:
    """What was said of places beside numbers; equal notes share one item."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in rows:
        if record.reason is None and record.remark is None and record.waiver is None and not record.advisory:
            continue
        waiver = dict(record.waiver) if record.waiver is not None else None
        key = (record.reason, record.remark, record.advisory, repr(waiver))
        if key not in found:
            texts = {"reason": record.text, "remark": record.remark}
            found[key] = {"places": [], **texts, "advisory": record.advisory, "waiver": waiver}
        found[key]["places"].append(record.place)
    return list(found.values())


def _evidence(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """The evidence by key, one value a place; null where a place has none, one value where all that have one have the same."""
    columns: dict[str, tuple[NamedQuantity, list[Any]]] = {}
    of_keys: dict[tuple[str, ...], list[list[Any]]] = {}  # most places have the same keys
    for at, record in enumerate(rows):
        if not record.evidence:
            continue
        facts = _as_written(record)
        if (keys := (*facts,)) not in of_keys:
            named = ((name, quantity_of(key, unit=record.unit)) for key, name in zip(keys, described(facts), strict=True))
            of_keys[keys] = [columns.setdefault(name, (about, [None] * len(rows)))[1] for name, about in named]
        for column, value in zip(of_keys[keys], facts.values(), strict=True):
            column[at] = packed(value) if type(value) is list else value
    return [
        {"key": name, "quantity": about.name, "unit": about.unit, **_column(values)}
        for name, (about, values) in columns.items()
    ]


def _column(values: list[Any]) -> Mapping[str, Any]:
    """One value where all places have the same, but for a few that have none: an absent node makes no column long."""
    without = [at for at, value in enumerate(values) if value is None]
    if len(without) > MOST_WITHOUT * len(values):
        return {"values": values}
    first = next(value for value in values if value is not None)
    if any(type(value) is not type(first) or value != first for value in values if value is not None):
        return {"values": values}
    return {"all": first, "without": without} if without else {"all": first}
