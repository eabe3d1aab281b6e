"""The journal of a run, and how it and pytest-xdist's reports carry a record.

results.json and the JUnit file as whole files at any moment of a run: rewritten as outcomes come in, never half-written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.judging.forecast import in_words
from pytest_gpucluster.judging.verdict import MISSING, OUTCOMES, PENDING, Record, Terms
from pytest_gpucluster.reporting.files import write_atomically, write_report
from pytest_gpucluster.reporting.junit import junit_text
from pytest_gpucluster.reporting.results import RunReport, results_document, to_json

ENCODER = json.JSONEncoder(allow_nan=False)
FOUND_AT_END = ("environment", "timings")
"""Members of results.json that the last event repeats, so that a report made of a whole journal is the run's own."""
RESUMED = ("run", "folder", "rounds", "elapsed_s", "away_s")
"""Of a soak that goes on: the run that had begun it, its folder in ``previous/``, its whole rounds, and their seconds."""


class Journal:
    """``journal.jsonl``: one event a line, flushed as it happens, never rewritten."""

    def __init__(self, path: Path, *, copy: Callable[[str], None] = lambda _line: None, keep: int | None = None) -> None:
        """Open the file for appending; ``copy`` is called with every line.

        ``keep``: the bytes of the whole lines of a run that goes on. What a kill left behind them is cut off, and the lines are
        copied too.

        Raises:
            OSError: the file cannot be opened, read or cut.
        """
        if keep is not None:
            for line in path.read_bytes()[:keep].decode("utf-8", "backslashreplace").splitlines(keepends=True):
                copy(line)
            os.truncate(path, keep)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(path, flags, 0o644), "a", encoding="utf-8")
        self._copy = copy
        self.failed: str | None = None

    def write(self, event: str, **facts: Any) -> None:
        """Append one event. A write that fails is remembered in ``failed`` and does not end the run."""
        line = ENCODER.encode(strict_json({"at_s": round(time.time(), 3), "event": event, **facts})) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self.failed = error.strerror or str(error)
        self._copy(line)

    def is_at(self, path: Path) -> bool:
        """Whether what was written lies there: nobody has removed, moved or replaced the file since it was opened."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Close the file. A full disk fails here once more, and ``failed`` says so already."""
        with contextlib.suppress(OSError):
            self._file.close()


USUAL = {field.name: field.default for field in fields(Record)}
"""What a record is where nothing else is said."""


def record_facts(record: Record) -> dict[str, Any]:
    """A record as plain data but for its limit, a dataclass, and its evidence, which may be anything; less what is usual."""
    return {name: fact for name, usual in USUAL.items() if (fact := getattr(record, name)) is not usual}


def record_from_facts(facts: Mapping[str, Any]) -> Record:
    """The record that :func:`record_facts` described, from JSON. Its fields have the types that the class declares.

    Raises:
        ValueError: these are not the facts of a record.
    """
    record = msgspec.convert(facts, Record)
    if record.outcome not in (*OUTCOMES, PENDING):
        raise ValueError(record.outcome)
    return record


def soak_remark(resumed: Mapping[str, Any]) -> str:
    """What the verdict says of a soak that another run had begun; ``resumed`` has the facts of :data:`RESUMED`."""
    return f"the soak was cut short after {in_words(resumed['elapsed_s'])} and went on {in_words(resumed['away_s'])} later"


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
