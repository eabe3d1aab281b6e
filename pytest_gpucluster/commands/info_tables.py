"""Cells and tables of ``gpucluster info``. Foreign text is made fit for a terminal here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pytest_gpucluster.inventory.reading import unavailable
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.reporting.lines import printed, whole, width_of, width_of_screen
from pytest_gpucluster.text import one_line

Machine: TypeAlias = Mapping[str, Any]
Shown: TypeAlias = Table | Text

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of readings: the field of each item, ``repair.recovery_action`` for one in another, or what makes the cell."""

    heading: str
    field: str | Callable[[Any], str]
    form: str = "{}"
    is_number: bool = False

    def cell_of(self, item: Any) -> str:
        """The cell of one item."""
        return self.field(item) if callable(self.field) else cell(value_at(item, self.field), self.form)


def number(heading: str, field: str | Callable[[Any], str], form: str = "{}") -> Column:
    """A column that is aligned at its right side."""
    return Column(heading, field, form, is_number=True)


def value_at(item: Any, field: str) -> Any:
    """A field of an item; of one that is not available, its reason."""
    for name in field.split("."):
        if unavailable(item) is not None:
            return item
        item = item[name]
    return item


def table_of(items: Sequence[Any], columns: Sequence[Column], *, is_bad: Callable[[Any], bool] = lambda _item: False) -> Table:
    """A row for each item, a red one for each that is bad."""
    rows = [[column.cell_of(item) for column in columns] for item in items]
    made = table([one.heading for one in columns], rows, right=[one.heading for one in columns if one.is_number])
    for row, item in zip(made.rows, items, strict=True):
        row.style = "red" if is_bad(item) else ""
    return made


def cell(value: Any, form: str = "{}") -> str:
    """A value in ``form``; ``-`` where it is not available."""
    if value is None or unavailable(value) is not None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return one_line(", ".join(map(str, value))) or "none"
    if isinstance(value, dict):
        return one_line(", ".join(f"{name} {cell(one)}" for name, one in value.items())) or "none"
    return one_line(form.format(value))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """A plain table, no cell of which is broken. Without a row not even a heading is shown."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    found = list(rows)
    for column in columns if found else ():
        made.add_column(column, no_wrap=True, justify="right" if column in right else "left")
    for row in found:
        made.add_row(*map(Text, row))
    return made


def table_by_heading(rows: Sequence[Mapping[str, str]], *, right: Sequence[str]) -> Table:
    """A table of rows that have the same headings."""
    return table([*rows[0]] if rows else (), [[*row.values()] for row in rows], right=right)


def pairs(names: Iterable[tuple[str, str]]) -> Table:
    """Names and values without a heading; a long value goes on in the next line."""
    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in names:
        made.add_row(Text(name), Text(value))
    return made


def without_gaps(parts: Iterable[Shown]) -> list[Shown]:
    """The parts without empty tables, and with one empty line at most between two others."""
    shown = [part for part in parts if not (isinstance(part, Table) and not part.columns)]
    found = [part for before, part in pairwise([Text(""), *shown]) if not (_is_gap(before) and _is_gap(part))]
    return found[:-1] if found and _is_gap(found[-1]) else found


def print_parts(parts: Iterable[Shown], *, spare: Sequence[str] = ()) -> None:
    """Print them without gaps, and without blanks at the ends of lines.

    They are as wide as the terminal. A table that does not fit it loses the columns ``spare``, then it takes more lines a row.
    Without a terminal a row is one line.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    width = width_of_screen()
    lines: list[str] = []
    for part in without_gaps(parts):
        if isinstance(part, Table) and part.show_header:
            fitted = whole(part, width=width, spare=spare)
            lines += printed([fitted], width=width_of(fitted), color=console.is_terminal)
            continue
        with console.capture() as shown:
            console.print(part)
        lines += shown.get().split("\n")[:-1]
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))


def number_or_nothing(value: float | None) -> str:
    """The number as a report writes it; ``-`` where there is none."""
    return NOTHING if value is None else format_number(value)


def _is_gap(part: Shown) -> bool:
    return isinstance(part, Text) and not part.plain
