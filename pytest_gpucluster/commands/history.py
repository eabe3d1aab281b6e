"""``gpucluster history DIR``: the runs that a folder keeps, oldest first, and the trend of one criterion."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from pytest_gpucluster.commands.info_tables import NOTHING, table
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.records.kept_runs import KeptRun, find_runs, read_run
from pytest_gpucluster.text import counted, one_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

SECONDS = 19
"""So many characters of a moment in ISO 8601 say it to the second."""
WHOLE = ("began", "verdict", "median", "worst", "unit", "part")


def main(chosen: argparse.Namespace) -> int:
    """Print the list; what cannot be read is said and left out. 0 where there is at least one run.

    Raises:
        ConfigurationError: the folder keeps no run, or none of them has the criterion or the part.
    """
    if chosen.part is not None and chosen.criterion is None:
        raise ConfigurationError("--part needs a CRITERION, whose values of that part are shown")
    folders, remarks = find_runs(chosen.folder)
    runs: list[KeptRun] = []
    for folder in folders:
        try:
            runs.append(read_run(folder, criterion=chosen.criterion, part=chosen.part))
        except ConfigurationError as error:
            remarks.append(str(error))
    for remark in remarks:
        sys.stderr.write(f"gpucluster history: left out: {one_line(remark)}\n")
    _require(runs, chosen)
    runs.sort(key=lambda run: (run.started, str(run.folder)))
    console = Console(highlight=False, markup=False, emoji=False)
    heads, lines = _table(runs, chosen)
    made = table(heads, lines, right=("median", "worst", "part"))
    for at, column in enumerate(made.columns):
        if heads[at] in WHOLE:
            column.min_width = max(len(heads[at]), *(len(line[at]) for line in lines))
    console.print(made)
    if chosen.criterion is not None:
        console.print(Text(one_line(trend(runs, chosen.criterion, part=chosen.part))))
    return 0


def trend(runs: Sequence[KeptRun], criterion: str, *, part: str | None) -> str:
    """From the first to the last run with a value, in one line."""
    values = [(run, run.median if part is None else run.value) for run in runs]
    known = [(run, value) for run, value in values if value is not None]
    (first, before), (last, after) = known[0], known[-1]
    what = f"median of {criterion}" if part is None else f"{criterion} of {part}"
    change = f", {100 * (after - before) / abs(before):+.2f} %" if before else ""
    numbers = f"{format_number(before)} -> {format_number(after)} {last.unit or ''}".strip()
    return f"{what} over {counted(len(known), 'run')}: {numbers}{change}, from {_when(first)} to {_when(last)}"


def _require(runs: Sequence[KeptRun], chosen: argparse.Namespace) -> None:
    if not runs:
        raise ConfigurationError(f"{chosen.folder} keeps no run: no results.json that can be read lies in it")
    if chosen.criterion is not None and all(run.median is None for run in runs):
        raise ConfigurationError(f"no run in {chosen.folder} has a value of {chosen.criterion!r}")
    if chosen.part is not None and all(run.value is None for run in runs):
        raise ConfigurationError(f"no run in {chosen.folder} has a value of {chosen.criterion!r} at {chosen.part!r}")


def _table(runs: Sequence[KeptRun], chosen: argparse.Namespace) -> tuple[list[str], list[list[str]]]:
    heads = ["began", "verdict"]
    lines = [[_when(run), run.verdict] for run in runs]
    if chosen.criterion is None:
        heads += ["nodes x GPUs", "profile", "level", "limits"]
        lines = [
            [*line, run.shape, run.profile, run.level, run.limits or NOTHING] for line, run in zip(lines, runs, strict=True)
        ]
    else:
        heads += ["median", "worst", "unit"]
        numbers = ([_number(run.median), _number(run.worst), run.unit or NOTHING] for run in runs)
        lines = [[*line, *some] for line, some in zip(lines, numbers, strict=True)]
    if chosen.part is not None:
        heads += ["part", "where"]
        lines = [[*line, _number(run.value), run.where or NOTHING] for line, run in zip(lines, runs, strict=True)]
    folders = [_folder(run, chosen) for run in runs]
    return [*heads, "folder"], [[*map(one_line, line), folder] for line, folder in zip(lines, folders, strict=True)]


def _folder(run: KeptRun, chosen: argparse.Namespace) -> str:
    return one_line(str(run.folder.relative_to(chosen.folder)))


def _when(run: KeptRun) -> str:
    return run.started[:SECONDS].replace("T", " ") or "no date"


def _number(value: float | None) -> str:
    return NOTHING if value is None else format_number(value)
