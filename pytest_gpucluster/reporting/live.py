"""results.json and the JUnit file as whole files at any moment of a run: rewritten as outcomes come in, never half-written."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.verdict import MISSING, PENDING, Record
from pytest_gpucluster.reporting.files import write_atomically
from pytest_gpucluster.reporting.junit import junit_text
from pytest_gpucluster.reporting.results import results_document, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pytest_gpucluster.judging.verdict import Terms
    from pytest_gpucluster.reporting.report import Report

NOT_ENDED = "the run has not ended"
NOT_YET = "not run yet: the run goes on, or was killed with all that could finish its report"
COST_SHARE = 0.05
"""Writing takes at most this part of a run's time, however large the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where a run's reports go; no JUnit file where none was asked for."""

    results: Path
    junit: Path | None

    def write(self, report: Report) -> None:
        """Write both, each atomically.

        Raises:
            OSError: the disk.
        """
        records = [case.record for case in report.cases]
        document = results_document(records=records, places=report.places, verdict=report.verdict, facts=report.facts)
        write_atomically(self.results, to_json(document))
        if self.junit is not None:
            self.junit.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.junit, junit_text(report))


class Live:
    """Writes when something is new and enough time has passed since the last, costly or cheap, time."""

    def __init__(self, write: Callable[[], None]) -> None:
        """``write`` writes everything; a disk that refuses is noticed by the journal and at the end."""
        self._write = write
        self._next_s = 0.0
        self._is_new = False

    def note(self) -> None:
        """Something changed."""
        self._is_new = True
        if time.monotonic() >= self._next_s:
            self.catch_up()

    def catch_up(self) -> None:
        """Write what is new, however short ago the last time was: something long may begin now."""
        if not self._is_new:
            return
        self._is_new = False
        began_s = time.monotonic()
        with contextlib.suppress(OSError):
            self._write()
        ended_s = time.monotonic()
        self._next_s = ended_s + (ended_s - began_s) / COST_SHARE


def so_far(records: Iterable[Record]) -> list[Record]:
    """The records with what has no outcome yet as missing: the truth, should nobody write again."""
    return [_not_yet(one) if one.outcome == PENDING else one for one in records]


def not_ended(terms: Terms) -> Terms:
    """The terms of a report that is written while the run goes on: no acceptance, whatever has an outcome already.

    A teardown may still fail, and what forbids an acceptance may still be found.
    """
    return replace(terms, objections=(*terms.objections, NOT_ENDED))


def _not_yet(record: Record) -> Record:
    told = f"{record.reason}; {NOT_YET}" if record.reason else NOT_YET
    return replace(record, outcome=MISSING, reason=told)
