"""``gpucluster history DIR``: the runs that a folder keeps, oldest first, and the trend of one criterion."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from pytest_gpucluster.commands.info_tables import NOTHING, number_or_nothing, print_parts, table_by_heading
from pytest_gpucluster.config.run_files import JOURNAL, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.records.columns import number_of
from pytest_gpucluster.records.matching import NAMES, where_of
from pytest_gpucluster.records.reading import read_results, rows_of
from pytest_gpucluster.text import counted, one_line

SECONDS = 19
"""So many characters of a moment in ISO 8601 say it to the second."""
DIGITS = 12
"""Of a digest."""
TABLES = ("criteria", "values", "limits", "places", "hardware")
"""Members of results.json that no list of runs shows: not kept in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """A run that a folder keeps.

    Attributes:
        folder: its results directory.
        head: what its results.json says of it.
        median: of the criterion in question, over all its places with a value.
        worst: the worst value there.
        value: that of the part in question.
        where: where that part was then.
    """

    folder: Path
    head: Mapping[str, Any]
    median: float | None = None
    worst: float | None = None
    value: float | None = None
    unit: str | None = None
    where: str | None = None

    @property
    def id(self) -> str:
        """Its id, which a copy has too; its folder where its file has none."""
        return str(self.head.get("run", {}).get("id") or self.folder)

    @property
    def started(self) -> str:
        """When it began, in ISO 8601; empty where its file does not say it."""
        return str(self.head.get("run", {}).get("started") or "")


def find_runs(folder: Path) -> tuple[list[Path], list[str]]:
    """The results directories below a folder, and what was left out because a run keeps no results.json, in sentences.

    Raises:
        ConfigurationError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder}")
    found = sorted(path.parent for path in folder.rglob(RESULTS) if path.is_file())
    cut = sorted(path.parent for path in folder.rglob(JOURNAL) if path.parent not in found)
    return found, [f"{path} has a journal and no {RESULTS}: 'gpucluster report {path}' writes it" for path in cut]


def read_run(folder: Path, *, criterion: str | None = None, part: str | None = None) -> KeptRun:
    """One kept run, with the values of a criterion, and those of one part.

    Args:
        folder: its results directory.
        criterion: whose values are read; None: the head alone.
        part: the UUID, serial number or hostname of a part, wherever it was.

    Raises:
        ConfigurationError: the file cannot be read, is damaged, or is of a newer version.
    """
    document = read_results(folder)
    kept = KeptRun(folder=folder, head={name: one for name, one in document.items() if name not in TABLES})
    known = rows_of(document, criterion=criterion) if criterion is not None else ()
    rows = [row for row in known if number_of(row["value"]) is not None]
    if not rows:
        return kept
    is_floor = next((row["limit_kind"] in ("above", "min") for row in rows if row["limit_kind"]), True)
    values = [row["value"] for row in rows]
    kept = replace(kept, median=statistics.median(values), worst=(min if is_floor else max)(values), unit=rows[0]["unit"])
    mine = [row for row in rows if part is not None and row["place"] is not None and part in map(row["place"].get, NAMES)]
    return replace(kept, value=mine[0]["value"], where=where_of(mine[0]["place"])) if mine else kept


def main(chosen: argparse.Namespace) -> int:
    """Print the list; what cannot be read is said and left out. 0 where there is at least one run.

    Raises:
        ConfigurationError: the folder keeps no run, or none of them has the criterion or the part.
    """
    if chosen.part is not None and chosen.criterion is None:
        raise ConfigurationError("--part needs a CRITERION, whose values of that part are shown")
    folders, remarks = find_runs(chosen.folder)
    found: list[KeptRun] = []
    for folder in folders:
        try:
            found.append(read_run(folder, criterion=chosen.criterion, part=chosen.part))
        except ConfigurationError as error:
            remarks.append(str(error))
    found.sort(key=lambda run: (run.started, str(run.head.get("run", {}).get("ended") or ""), str(run.folder)))
    last = {run.id: run for run in found}
    runs = [*last.values()]
    remarks += [f"{run.folder} is a copy of the run in {last[run.id].folder}" for run in found if last[run.id] is not run]
    for remark in remarks:
        sys.stderr.write(f"gpucluster history: left out: {one_line(remark)}\n")
    _require(runs, chosen)
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
    head = run.head
    cells = {"began": _when(run), "verdict": head["verdict"]}
    if chosen.criterion is None:
        shape = " x ".join(str(head.get("expected", {}).get(name, "?")) for name in ("nodes", "gpus_per_node"))
        cells |= {"nodes x GPUs": shape, **{name: head.get(name) or "" for name in ("profile", "level")}}
        cells["limits"] = (head.get("limits_sha256") or NOTHING)[:DIGITS]
    else:
        cells |= {"median": number_or_nothing(run.median), "worst": number_or_nothing(run.worst), "unit": run.unit or NOTHING}
    if chosen.part is not None:
        cells |= {"part": number_or_nothing(run.value), "where": run.where or NOTHING}
    cells["folder"] = str(run.folder.relative_to(chosen.folder))
    return {heading: one_line(text) for heading, text in cells.items()}


def _when(run: KeptRun) -> str:
    return run.started[:SECONDS].replace("T", " ") or "no date"
