"""results.json and the JUnit file as whole files at any moment of a run: rewritten as outcomes come in, never half-written."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.verdict import MISSING, PENDING, Record
from pytest_gpucluster.reporting.files import write_atomically, write_report
from pytest_gpucluster.reporting.junit import junit_text
from pytest_gpucluster.reporting.results import results_document, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pytest_gpucluster.judging.verdict import Terms
    from pytest_gpucluster.reporting.results import RunReport

NOT_ENDED = "the run has not ended"
NOT_YET = "not run yet: the run goes on, or was killed with all that could finish its report"
EVERY_S = 30.0
"""While a run goes on, the reports are written at most so often."""
CHEAP_S = 0.1
"""What takes no longer may delay a call that has just begun; it is less than two looks at the ranks are apart."""


def write_reports(report: RunReport, results: Path, junit: Path | None) -> None:
    """Write both files, each atomically; a JUnit file that is a link, a device or a pipe is written as pytest writes it.

    Args:
        report: what they say.
        results: the file results.json.
        junit: None if nobody wants a JUnit file.

    Raises:
        OSError: a file cannot be written.
    """
    text, junit_xml = texts_of(report, with_junit=junit is not None)
    write_atomically(results, text)
    if junit is not None:
        write_report(junit, junit_xml)


def texts_of(report: RunReport, *, with_junit: bool = True) -> tuple[str, str]:
    """The text of results.json, and that of the JUnit file, empty without ``with_junit``."""
    document = results_document(report.cases, places=report.places, verdict=report.verdict, facts=report.facts)
    return to_json(document), junit_text(report) if with_junit else ""


class ReportWriter:
    """Writes the reports while the ranks work, at most every :data:`EVERY_S`. The journal has every outcome at once.

    No call waits for reports: they are written in a call that has already lasted as long as the last writing took.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        """``write`` writes all reports. Its OSError is ignored here: the journal and the last write report a full disk."""
        self._write = write
        self._next_s = self._cost_s = 0.0
        self._is_new = False
        self._is_first = True

    def note(self, *, is_due: bool = False) -> None:
        """Remember that a record changed. Write the first one at once: the ranks start; no older file may stand here.

        ``is_due``: the next call has time for it, however long ago the last writing was.
        """
        self._is_new = True
        self._next_s = 0.0 if is_due else self._next_s
        if self._is_first:
            self._is_first = False
            self._write_new()
            self._next_s = 0.0

    def catch_up(self, worked_s: float = math.inf) -> None:
        """Write if a record changed and it is time. Called while ranks work; ``worked_s``: for how long they have."""
        if self._is_new and worked_s >= self._cost_s - CHEAP_S and time.monotonic() >= self._next_s:
            self._write_new()

    def _write_new(self) -> None:
        self._is_new = False
        began_s = time.monotonic()
        with contextlib.suppress(OSError):
            self._write()
        ended_s = time.monotonic()
        self._cost_s, self._next_s = ended_s - began_s, ended_s + EVERY_S


def with_pending_as_missing(records: Iterable[Record]) -> list[Record]:
    """The records, with each pending one as missing. That is true if nobody writes the reports again."""
    return [_missing(record) if record.outcome == PENDING else record for record in records]


def not_ended(terms: Terms) -> Terms:
    """The terms of a report that is written while the run goes on: they forbid an acceptance.

    A teardown may still fail, and an objection may still be found.
    """
    return replace(terms, objections=(*terms.objections, NOT_ENDED))


def _missing(record: Record) -> Record:
    reason = f"{record.reason}; {NOT_YET}" if record.reason else NOT_YET
    return replace(record, outcome=MISSING, reason=reason)
