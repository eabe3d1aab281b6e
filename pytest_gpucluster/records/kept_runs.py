"""Kept runs in a folder: what each was, its verdict, and one criterion over time. Reads what it needs of each file."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_gpucluster.config.run_files import JOURNAL, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import VERDICTS
from pytest_gpucluster.records.columns import number_of
from pytest_gpucluster.records.reading import NEWEST, read_results, rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class _Head(msgspec.Struct, kw_only=True):
    """The members of results.json that a list of runs shows; the others are skipped while reading."""

    verdict: str
    schema: int = 1
    schema_version: int = 1
    profile: str | None = None
    level: str | None = None
    expected: dict[str, int] = {}
    run: dict[str, Any] = {}
    limits_sha256: str | None = None


NAMES = ("uuid", "serial", "hostname", "id")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """A run that a folder keeps.

    Attributes:
        folder: its results directory.
        started: when it began, in ISO 8601; empty where its file does not say it.
        shape: nodes x GPUs of a node that were expected.
        median: of the criterion in question, over all its places with a value.
        worst: the worst value there.
        value: that of the part in question.
        where: where that part was then.
    """

    folder: Path
    verdict: str
    started: str
    profile: str
    level: str
    shape: str
    limits: str
    median: float | None = None
    worst: float | None = None
    value: float | None = None
    unit: str | None = None
    where: str | None = None


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
        criterion: whose values are read; None: the head alone, which is much faster.
        part: the UUID, serial number or hostname of a part, wherever it was.

    Raises:
        ConfigurationError: the file cannot be read, is damaged, or is of a newer version.
    """
    if criterion is not None:
        document = read_results(folder)
        return _with_values(_kept(folder, _head_of(document, folder)), document, criterion, part)
    try:
        head = msgspec.json.decode((folder / RESULTS).read_bytes(), type=_Head)
    except (msgspec.DecodeError, ValueError):
        head = None
    except OSError as error:
        raise ConfigurationError(f"{folder / RESULTS} cannot be read: {error.strerror}") from None
    if head is None or head.schema_version > NEWEST or head.schema != 1 or head.verdict not in VERDICTS:
        # its reader says what is wrong
        head = _head_of(read_results(folder), folder)
    return _kept(folder, head)


def _head_of(document: Mapping[str, Any], folder: Path) -> _Head:
    try:
        return msgspec.convert(document, _Head)
    except msgspec.ValidationError as wrong:
        raise ConfigurationError(f"{folder / RESULTS} is damaged: {wrong}") from None


def _kept(folder: Path, head: _Head) -> KeptRun:
    return KeptRun(
        folder=folder,
        verdict=head.verdict,
        started=str(head.run.get("started") or ""),
        profile=head.profile or "",
        level=head.level or "",
        shape=f"{head.expected.get('nodes', '?')} x {head.expected.get('gpus_per_node', '?')}",
        limits=(head.limits_sha256 or "")[:12],
    )


def _with_values(kept: KeptRun, document: Mapping[str, Any], criterion: str, part: str | None) -> KeptRun:
    rows = [row for row in rows_of(document, criterion=criterion) if number_of(row["value"]) is not None]
    if not rows:
        return kept
    is_floor = next((row["limit_kind"] in ("above", "min") for row in rows if row["limit_kind"]), True)
    values = [row["value"] for row in rows]
    worst = (min if is_floor else max)(values)
    found = replace(kept, median=statistics.median(values), worst=worst, unit=rows[0]["unit"])
    mine = [row for row in rows if part is not None and row["place"] is not None and part in map(row["place"].get, NAMES)]
    if mine:
        place = mine[0]["place"]
        where = f"{place.get('hostname') or place['id']} ({place['id']})"
        return replace(found, value=mine[0]["value"], where=where)
    return found
