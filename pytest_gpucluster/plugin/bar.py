"""The one line of a terminal that is rewritten while a run measures. Pure: numbers and text in, a line out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from pytest_gpucluster.judging import forecast

BAR_WIDTH, NARROW_BAR_WIDTH, NARROW_WIDTH = 30, 10, 110


def bar_line(now: forecast.Progress, doing: str, *, bad: int, width: int, color: bool) -> str:
    """Bar, share, times, how many outcomes are bad, and what runs now; one column narrower than ``width``, filled with blanks.

    A longer line could not be rewritten.
    """
    columns = [
        BarColumn(NARROW_BAR_WIDTH if width < NARROW_WIDTH else BAR_WIDTH, complete_style="green", finished_style="green"),
        TextColumn(now.text, markup=False, table_column=Column(no_wrap=True)),
        *([TextColumn(f"{bad} bad", style="red", markup=False, table_column=Column(no_wrap=True))] if bad else []),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
    ]
    console = Console(width=width - 1, color_system="standard" if color else None, force_terminal=color, legacy_windows=False)
    line = Progress(*columns, console=console, expand=True)
    line.add_task(one_line(" ".join(doing.split())), completed=now.percent)
    with console.capture() as shown:
        console.print(line)
    return shown.get().rstrip("\n")
