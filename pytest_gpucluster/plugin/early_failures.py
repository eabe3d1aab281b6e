"""Which failures are shown while a run still measures: each once, in one line, and at most 20."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.judging.failure_text import format_asked, format_miss
from pytest_gpucluster.judging.verdict import ERROR, FAILED, NOISY, WORDS, counted_as
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.judging.plan import Key
    from pytest_gpucluster.judging.verdict import Record
    from pytest_gpucluster.places import Place

SHOWN = 20
LONGEST = 200
"""Characters of a reason."""


class EarlyFailures:
    """Counts what is bad, and makes a line of the first ones. Absent places are not shown: the header names them."""

    def __init__(self) -> None:
        """Nothing is bad yet."""
        self._seen: set[Key] = set()
        self._causes: set[str] = set()
        self._shown = 0

    @property
    def number(self) -> int:
        """How many outcomes are bad: failed, not measured or too close to call."""
        return len(self._seen)

    def line_of(self, record: Record, places: Mapping[str, Place]) -> str | None:
        """The line of a bad outcome; None if it is good, was shown, has a cause that was shown, or comes too late."""
        key = (record.criterion, record.place)
        if counted_as(record) not in (FAILED, ERROR, NOISY) or key in self._seen:
            return None
        self._seen.add(key)
        if record.outcome == ERROR:
            cause = record.cause or record.message
            if cause in self._causes:
                return None
            self._causes.add(cause)
        self._shown += 1
        if self._shown > SHOWN:
            return f"{SHOWN} are shown; from here on they are counted, and all are below" if self._shown == SHOWN + 1 else None
        return describe(record, places.get(record.place or ""))


def describe(record: Record, place: Place | None) -> str:
    """Outcome, criterion, place, and the value with its limit or the reason."""
    where = record.place or "the cluster"
    if place is not None and place.hostname is not None:
        where += f" ({place.hostname})"
    text = one_line(f"{WORDS[record.outcome]}: {record.criterion} at {where}: {_what_is_bad(record)}")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _what_is_bad(record: Record) -> str:
    """A value that misses its limit, a value that could not be judged, or the reason."""
    limit, value = record.limit, record.value
    if limit is not None and value is not None:
        if record.outcome == NOISY:
            return format_asked(limit, value)
        if record.outcome == FAILED and not limit.holds(value):
            return format_miss(limit, value)
    return record.message
