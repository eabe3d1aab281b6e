"""YAML to plain data in which every key knows its file and line.

The file may come from anyone, so only plain data is read: no aliases or anchors (and so no bombs), no tags (and so no
objects), no duplicate keys, no NaN or infinity, no second document, nothing deep, nothing large. Nothing is ever
constructed: PyYAML only delivers its stream of events. Scalars follow the YAML 1.2 core rules, so ``yes``, ``off``,
``0777``, ``1:30`` and dates are text, never something else.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_NODES = 20_000
MAX_NUMBER = 2**53
"""Whole numbers above this lose digits in JSON."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?(((0|[1-9][0-9]*)(\.[0-9]*)?)|\.[0-9]+)([eE][-+]?[0-9]{1,4})?\Z")
_NOT_FINITE = re.compile(r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z")
_CONSTANTS = {"": None, "~": None, "null": None, "true": True, "false": False}

KeyPath: TypeAlias = "tuple[str | int, ...]"


class Where(NamedTuple):
    """A place in a file; ``line`` counts from 1."""

    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a file. ``line`` is 0 when the file as a whole is meant."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        """``thresholds.yaml:41: what is wrong``, as compilers and editors write it."""
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Plain data and, for every path of keys in it, where that key is written. With ``problems``, data is empty."""

    file: str
    data: dict[str | int, Any] = field(default_factory=dict)
    where: dict[KeyPath, Where] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def find(self, path: KeyPath) -> Where:
        """Where ``path`` is written, or its nearest parent that is."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.where:
                return self.where[path[:length]]
        return Where(self.file, 1)

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Make a problem at the line of ``path``."""
        file, line = self.find(path)
        return Problem(file=file, line=line, message=message)


class _StopReadingError(Exception):
    """The file is hostile or broken beyond this point."""


def read_bytes(path: Path, *, file: str) -> tuple[bytes, tuple[Problem, ...]]:
    """Read a regular file of at most 1 MiB."""
    try:
        if path.exists() and not path.is_file():
            return b"", (Problem(file=file, line=0, message="not a regular file."),)
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        return b"", (Problem(file=file, line=0, message=f"cannot be read: {error.strerror or error}."),)
    if len(content) > MAX_BYTES:
        return b"", (Problem(file=file, line=0, message=f"larger than {MAX_BYTES} bytes: not a file of ours."),)
    return content, ()


def parse(content: bytes, *, file: str) -> Document:
    """Parse one YAML mapping.

    Args:
        content: the bytes of the file, UTF-8.
        file: how messages name it.
    """
    reader = _Reader(file)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return Document(file=file, problems=(Problem(file=file, line=line, message="not UTF-8 text."),))
    try:
        data = reader.document(yaml.parse(text, Loader=yaml.SafeLoader))
    except _StopReadingError:
        data = {}
    except yaml.YAMLError as error:
        reader.problems.append(_syntax_problem(error, text, file=file))
    if reader.problems:
        return Document(file=file, problems=tuple(reader.problems))
    return Document(file=file, data=data, where=reader.where)


def _syntax_problem(error: yaml.YAMLError, text: str, *, file: str) -> Problem:
    """PyYAML's complaint in one line."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        parts = [part for part in (error.context, error.problem) if part]
        return Problem(file=file, line=line, message=f"not YAML: {', '.join(parts)}.")
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return Problem(file=file, line=line, message="not YAML: a character that text may not hold.")
    return Problem(file=file, line=1, message=f"not YAML: {error}.")


def _line(event: yaml.Event) -> int:
    """Where an event starts, counted from 1."""
    return event.start_mark.line + 1 if event.start_mark else 1


class _Reader:
    """Builds plain data from the events of one document."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.where: dict[KeyPath, Where] = {}
        self.problems: list[Problem] = []
        self._events: Iterator[yaml.Event] = iter(())
        self._nodes = 0

    def document(self, events: Iterator[yaml.Event]) -> dict[str | int, Any]:
        self._events = events
        next(events)  # the start of the stream
        first = next(events)
        if isinstance(first, yaml.StreamEndEvent):
            self._stop(first, "empty: a mapping was expected.")
        root = next(events)
        if not isinstance(root, yaml.MappingStartEvent):
            self._refuse_references(root)
            self._stop(root, "a mapping ('key: value') was expected at the top.")
        self.where[()] = Where(self.file, _line(root))
        data: dict[str | int, Any] = self._value(root, ())
        next(events)  # the end of the document
        after = next(events)
        if not isinstance(after, yaml.StreamEndEvent):
            self._stop(after, "a second document ('---'): one file holds one.")
        return data

    def _note(self, event: yaml.Event, message: str) -> None:
        self.problems.append(Problem(file=self.file, line=_line(event), message=message))

    def _stop(self, event: yaml.Event, message: str) -> None:
        self._note(event, message)
        raise _StopReadingError

    def _value(self, event: yaml.Event, path: KeyPath) -> Any:
        self._refuse_references(event)
        self._nodes += 1
        if len(path) > MAX_DEPTH:
            self._stop(event, f"nested deeper than {MAX_DEPTH} levels.")
        if self._nodes > MAX_NODES:
            self._stop(event, f"more than {MAX_NODES} values: not a file of ours.")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        return self._mapping(path)

    def _refuse_references(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.AliasEvent):
            self._stop(event, f"the alias '*{event.anchor}' is not allowed: write the value out.")
        if isinstance(event, yaml.NodeEvent) and event.anchor:
            self._stop(event, f"the anchor '&{event.anchor}' is not allowed: write the value out where it is used.")
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._stop(event, f"the tag '{tag}' is not allowed: plain data only.")

    def _sequence(self, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            here = (*path, len(items))
            self.where[here] = Where(self.file, _line(event))
            items.append(self._value(event, here))
        return items

    def _mapping(self, path: KeyPath) -> dict[str | int, Any]:
        entries: dict[str | int, Any] = {}
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._key(event)
            here = (*path, key)
            if key in entries:
                self._note(event, f"{key!r} is there twice; first in line {self.where[here].line}.")
            self.where[here] = Where(self.file, _line(event))
            entries[key] = self._value(next(self._events), here)
        return entries

    def _key(self, event: yaml.Event) -> str | int:
        self._refuse_references(event)
        key = self._scalar(event) if isinstance(event, yaml.ScalarEvent) else None
        if key == "<<":
            self._stop(event, "the merge key '<<' is not allowed: write the keys out.")
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            self._stop(event, "a key must be text or a whole number.")
        return key  # type: ignore[return-value]  # _stop raised for everything else

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        text: str = event.value
        if event.style is not None:  # quoted or block: always text
            return text
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _NOT_FINITE.match(text):
            self._note(event, f"{text} is not a number that anything can be compared with.")
            return None
        if not _FLOAT.match(text):
            return text
        number = float(text)
        if not math.isfinite(number) or abs(number) > MAX_NUMBER:
            self._note(event, f"{text[:40]} is too large: numbers end at {MAX_NUMBER}.")
            return None
        return int(text) if _INT.match(text) else number
