"""What a reader returns: a value, or the reason why there is none. And the table of readings: one row beside each field.

A value that could not be read is never zero, never empty and never None, so it cannot pass for a healthy one.

A dataclass of readings is the table. Each field stands beside its row: where the value comes from, what a healthy part
answers there, and who judges it. The reader (:func:`read`), the answers of simulated parts (:func:`healthy`), the page of
all readings (``docs/generate_readings.py``) and the test that every reading has a judge take what they need from the rows.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar, overload

Key = TypeVar("Key")
Value = TypeVar("Value")
Other = TypeVar("Other")
Result = TypeVar("Result")
EVIDENCE, THE_RUN, NOBODY = "evidence", "the run", "nobody"
"""Who has a reading that no criterion judges: shown beside a judged value, needed by the run itself, or only printed."""
NONE, CLOSED = "none", "closed"
"""The text of a thing that is known not to be there, and of one that is there and closed to this process."""
_ROW = "row"
WATCHED = 0.8
"""The share of the samples due under load that must have been read: a fault may lie in the others."""


@dataclass(frozen=True, slots=True)
class NotAvailable:
    """A value that could not be read; ``why`` is the source's own text, such as NVML's ``Not Supported``."""

    why: str

    def __bool__(self) -> NoReturn:
        """Refuse to be taken for a value: ``reading or 0`` would turn silence into health.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"not available ({self.why}): ask isinstance(reading, NotAvailable)")

    def __str__(self) -> str:
        """``not available: Not Supported``, for the evidence of a report."""
        return f"not available: {self.why}"


def unavailable(value: Any) -> str | None:
    """Why a reading is not available, as plain data have it; None where it is."""
    return str(value["not_available"]) if isinstance(value, dict) and value.keys() == {"not_available"} else None


def as_plain(value: Any) -> Any:
    """Data classes, and namespaces of those that this process does not know, as mappings; why a reading is not available."""
    if isinstance(value, NotAvailable):
        return {"not_available": value.why}
    if isinstance(value, SimpleNamespace):
        return as_plain(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: as_plain(one) for key, one in value.items()}
    return [as_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def or_none(reading: Value | NotAvailable) -> Value | None:
    """The value for evidence that no criterion judges; None where it is not available."""
    return None if isinstance(reading, NotAvailable) else reading


@overload
def apply(function: Callable[[Value], Result | NotAvailable], reading: Value | NotAvailable, /) -> Result | NotAvailable: ...
@overload
def apply(
    function: Callable[[Value, Other], Result | NotAvailable], reading: Value | NotAvailable, other: Other | NotAvailable, /
) -> Result | NotAvailable: ...
def apply(function: Callable[..., Any], *readings: Any) -> Any:
    """What ``function`` makes of the values; the first of them that is not available, if one is not."""
    known = all_or_why(readings)
    return known if isinstance(known, NotAvailable) else function(*known)


def all_or_why(readings: Iterable[Value | NotAvailable]) -> list[Value] | NotAvailable:
    """All values; the first that is not available, if one is not."""
    known: list[Value] = []
    for one in readings:
        if isinstance(one, NotAvailable):
            return one
        known.append(one)
    return known


def matching(pattern: str, what: str, convert: Callable[[str], Result] | None = None) -> Callable[[str], Result | NotAvailable]:
    """A conversion: the last group of the pattern, which matches from the text's start on; why not, where it is no ``what``."""
    compiled = re.compile(pattern, re.ASCII)

    def of_text(text: str) -> Any:
        found = compiled.match(text)
        if found is None:
            return NotAvailable(f"{text[:80]!r} is no {what}")
        return found[compiled.groups] if convert is None else convert(found[compiled.groups])

    return of_text


def yes_or_no(number: float, *, most: int = 1) -> bool | NotAvailable:
    """A conversion: whether a flag is set. A number that its source does not define, beyond ``most``, says nothing."""
    return bool(number) if number in range(most + 1) else NotAvailable(f"{number:g} is neither yes nor no")


def word_of(words: Mapping[int, str], what: str) -> Callable[[float], str | NotAvailable]:
    """A conversion: the word for a number of ``what``. A number without a word says nothing."""
    return lambda number: words.get(int(number)) or NotAvailable(f"{what} {number:g} is not known")


def split(readings: Mapping[Key, Value | NotAvailable]) -> tuple[dict[Key, Value], dict[Key, NotAvailable]]:
    """The values that are known, and why the others are not."""
    known = {key: one for key, one in readings.items() if not isinstance(one, NotAvailable)}
    return known, {key: one for key, one in readings.items() if isinstance(one, NotAvailable)}


@dataclass(frozen=True, slots=True)
class ReadingRow:
    """The row of one field.

    Attributes:
        source: gives the answer of a part; None for a field that the reader of the whole dataclass fills.
        healthy: what a healthy part answers: 700000 (mW) where the field says 700.0 (W).
        judged: the criteria that judge the field, or one of :data:`EVIDENCE`, :data:`THE_RUN` and :data:`NOBODY`.
        remark: why, or what else a reader has to know; for the page.
        convert: what the field says for an answer.
    """

    source: Callable[[Any], Any] | None
    healthy: Any
    judged: tuple[str, ...]
    remark: str
    convert: Callable[[Any], Any] | None

    def value_of(self, answer: Any) -> Any:
        """What the field says for this answer."""
        return answer if self.convert is None else apply(self.convert, answer)

    def read(self, part: Any) -> Any:
        """What the field says of a part."""
        assert self.source is not None
        return self.value_of(self.source(part))


def row(
    source: Callable[[Any], Any], healthy: Any, judged: str, remark: str = "", *, convert: Callable[[Any], Any] | None = None
) -> Any:
    """A field with its :class:`ReadingRow`, without a default; ``judged`` has the criteria by name, with commas between."""
    return dataclasses.field(metadata={_ROW: ReadingRow(source, healthy, tuple(judged.split(", ")), remark, convert)})


def judged(by: str, remark: str = "") -> Any:
    """A field that the reader of the whole dataclass fills, such as a number, or a part of a text."""
    return dataclasses.field(metadata={_ROW: ReadingRow(None, None, tuple(by.split(", ")), remark, None)})


def rows(kind: type) -> Mapping[str, ReadingRow]:
    """The rows of a dataclass by the names of its fields, those that have one."""
    return _rows(kind)


@functools.cache
def _rows(kind: type) -> Mapping[str, ReadingRow]:
    return {field.name: field.metadata[_ROW] for field in dataclasses.fields(kind) if _ROW in field.metadata}


def read(kind: type[Value], part: Any, **given: Any) -> Value:
    """A dataclass, each field read of ``part`` by its row; ``given`` are the fields without a source."""
    return kind(**{name: one.read(part) for name, one in rows(kind).items() if one.source is not None}, **given)


def healthy(kind: type[Value], **given: Any) -> Value:
    """The dataclass of a healthy part; ``given`` are the fields without a source, and those that differ."""
    sources = {name: one for name, one in rows(kind).items() if one.source is not None}
    return kind(**{**{name: one.value_of(one.healthy) for name, one in sources.items()}, **given})
