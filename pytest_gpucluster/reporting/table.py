"""The closing table: criterion, outcomes, values over all places, limit, margin."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pytest_gpucluster.judging.failure_text import summarize
from pytest_gpucluster.judging.verdict import (
    ERROR,
    FAILED,
    MISSING,
    NOISY,
    NOT_SELECTED,
    PASSED,
    SKIPPED,
    WAIVED,
    WORDS,
    Record,
    count_misses,
    counted_as,
)
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

STYLES = {
    PASSED: "green",
    SKIPPED: "dim",
    NOT_SELECTED: "dim",
    FAILED: "red",
    ERROR: "red",
    MISSING: "red",
    NOISY: "yellow",
    WAIVED: "yellow",
}
SHOWN_LEFT_OUT = 8
"""More criteria of which nothing was selected share one row."""
SEVEREST_FIRST = (FAILED, ERROR, MISSING, NOISY, WAIVED, NOT_SELECTED, PASSED, SKIPPED)


def criteria_table(records: Iterable[Record], *, width: int, color: bool) -> str:
    """The table with one row for each criterion, as text ``width`` columns wide."""
    by_criterion: dict[str, list[Record]] = {}
    for record in records:
        by_criterion.setdefault(record.criterion, []).append(record)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("criterion", "places", "measured", "limit", "margin", "outcome"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("margin", "places"))
    left_out = [name for name, rows in by_criterion.items() if all(row.outcome == NOT_SELECTED for row in rows)]
    folded = left_out if len(left_out) > SHOWN_LEFT_OUT else []
    for criterion, rows in by_criterion.items():
        if criterion not in folded:
            table.add_row(_shown(criterion), *_cells(rows))
    if folded:
        table.add_row(f"{len(folded)} others", *_cells([row for name in folded for row in by_criterion[name]]))
    sink = io.StringIO()
    Console(file=sink, width=width, force_terminal=color, no_color=not color, highlight=False, emoji=False).print(table)
    return sink.getvalue()


def _cells(rows: list[Record]) -> list[str]:
    values = [row.value for row in rows if row.value is not None]
    margins = [row.margin_percent for row in rows if row.margin_percent is not None]
    limits = list(dict.fromkeys(row.limit.text for row in rows if row.limit))
    worst = next(outcome for outcome in SEVEREST_FIRST if any(counted_as(row) == outcome for row in rows))
    number = sum(counted_as(row) == worst for row in rows)
    misses = sum(row.advisory for row in rows)
    outcome = WORDS[worst] if number == len(rows) else f"{number} of {len(rows)} {WORDS[worst]}"
    style = STYLES[NOISY] if misses and worst == PASSED else STYLES[worst]
    return [
        str(len(rows)),
        _shown(f"{summarize(values)} {rows[0].unit or ''}") if values else "-",
        _shown(", ".join(limits)) or "-",
        f"{min(margins):+.1f} %" if margins else "-",
        f"[{style}]{outcome}[/]{f', {count_misses(misses)}' if misses else ''}",
    ]


def _shown(text: str) -> str:
    return escape(one_line(text).replace("\t", " "))
