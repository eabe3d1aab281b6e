"""``gpucluster history DIR``: the runs that a folder keeps, oldest first, and the trend of one criterion."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.text import Text

from pytest_gpucluster.commands.info_tables import NOTHING, number_or_nothing, print_parts, table_by_heading
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.records.kept_runs import KeptRun, find_runs, read_run
from pytest_gpucluster.text import counted, one_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

SECONDS = 19
"""So many characters of a moment in ISO 8601 say it to the second."""


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
    lines = [_line(run, chosen) for run in runs]
    said = [] if chosen.criterion is None else [Text(one_line(trend(runs, chosen.criterion, part=chosen.part)))]
    print_parts([table_by_heading(lines, right=("median", "worst", "part")), *said])
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


def _line(run: KeptRun, chosen: argparse.Namespace) -> dict[str, str]:
    cells = {"began": _when(run), "verdict": run.verdict}
    if chosen.criterion is None:
        cells |= {"nodes x GPUs": run.shape, "profile": run.profile, "level": run.level, "limits": run.limits or NOTHING}
    else:
        cells |= {"median": number_or_nothing(run.median), "worst": number_or_nothing(run.worst), "unit": run.unit or NOTHING}
    if chosen.part is not None:
        cells |= {"part": number_or_nothing(run.value), "where": run.where or NOTHING}
    cells["folder"] = str(run.folder.relative_to(chosen.folder))
    return {heading: one_line(text) for heading, text in cells.items()}


def _when(run: KeptRun) -> str:
    return run.started[:SECONDS].replace("T", " ") or "no date"
