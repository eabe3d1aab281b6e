"""results.json as one CSV table for spreadsheets: a line an outcome, then a line for every other number."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_gpucluster.places import PLACE_FIELDS
from pytest_gpucluster.records.reading import rows_of
from pytest_gpucluster.text import visible

OUTCOME = "outcome"
"""What ``member`` says of a line that is an outcome; of every other line it is the path of a number."""
OF_PLACE = PLACE_FIELDS[1:]
OF_LIMIT = ("operator", "limit_value", "limit_kind", "limit", "margin_percent")
AS_JSON = ("waiver", "evidence")
OF_OUTCOME = ("outcome", "value", "unit", *OF_LIMIT, "advisory", "reason", "remark", *AS_JSON)
COLUMNS = ("member", "criterion", "place", *OF_PLACE, "slot", *OF_OUTCOME)
IN_THE_OUTCOMES = ("criteria", "values", "places")
"""Members whose numbers stand in the lines of the outcomes, but for the summaries of ``values``."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A text that begins so is a formula to a spreadsheet: it comes behind an apostrophe."""


def csv_text(document: Mapping[str, Any], rows: Iterable[Mapping[str, Any]] | None = None) -> str:
    """The table.

    Args:
        document: a results.json.
        rows: some of its outcomes, and nothing else; None: all of them, and every other number.
    """
    slots = {place["id"]: place.get("slot") for place in document.get("places", ())}
    lines = [_line(row, slots) for row in (rows_of(document) if rows is None else rows)]
    for path, number, unit in other_numbers(document) if rows is None else ():
        facts = {"member": path, "value": number, "unit": unit}
        lines.append([_cell(facts.get(name)) for name in COLUMNS])
    return as_csv(COLUMNS, lines)


def as_csv(head: Sequence[str], lines: Iterable[Iterable[str]]) -> str:
    """The text of a table with this head."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows((head, *lines))
    return text.getvalue()


def other_numbers(document: Mapping[str, Any]) -> Iterator[tuple[str, int | float, str | None]]:
    """Every number that is none of an outcome: its path, itself, and its unit where something says it."""
    for name, value in document.items():
        if name not in IN_THE_OUTCOMES:
            yield from ((path, number, None) for path, number in _numbers(value, name))
    for values in document.get("values", ()):
        for path, number in _numbers(values.get("summary"), f"values.{values['criterion']}.summary"):
            is_value = path.endswith((".worst", ".median"))
            yield path, number, values.get("unit") if is_value else "%" if path.endswith("percent") else "count"


def _numbers(value: Any, path: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}")
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _numbers(item, f"{path}[{at}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def _line(row: Mapping[str, Any], slots: Mapping[str, Any]) -> list[str]:
    place = row["place"] or {}
    facts = {**row, **{name: place.get(name) for name in OF_PLACE}}
    facts |= {"member": OUTCOME, "place": place.get("id"), "slot": slots.get(place.get("id", ""))}
    facts |= {name: json.dumps(facts[name]) if facts[name] else None for name in AS_JSON}
    return [_cell(facts.get(name)) for name in COLUMNS]


def _cell(value: Any) -> str:
    """A number as Python reads it back, a text that no spreadsheet takes for a formula."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return as_text(visible(str(value)))


def as_text(text: str) -> str:
    """The text behind an apostrophe where a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(FORMULA) else text
