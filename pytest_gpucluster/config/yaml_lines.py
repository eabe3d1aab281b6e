"""YAML to plain data in which every key knows its file and line.

The file may come from anyone, so only plain data is read: no aliases or anchors, no tags, no duplicate keys, no NaN or
infinity, one document, nothing deep, nothing large. PyYAML delivers events, and never constructs an object.
Scalars follow the YAML 1.2 core rules: ``yes``, ``off``, ``0777``, ``1:30`` and dates are text.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_NODES = 20_000
MAX_NUMBER = 2**53
"""Whole numbers above this lose digits in JSON."""

_FAST_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_UNPRINTABLE = yaml.reader.Reader.NON_PRINTABLE
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
    """Plain data and, for every path of keys in it, where that key is written. With ``problems``, data is empty.

    ``sha256`` is that of the file's bytes; empty where no file was read.
    """

    file: str
    data: dict[str | int, Any] = field(default_factory=dict)
    where: dict[KeyPath, Where] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    sha256: str = ""

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


def read(path: Path, *, file: str, parsed: Callable[[bytes, str], Document] | None = None) -> Document:
    """Read and parse a regular file of at most 1 MiB. ``file`` is its name in messages, ``parsed`` replaces :func:`parse`."""
    try:
        if path.exists() and not path.is_file():
            return _unreadable(file, "not a regular file.")
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        return _unreadable(file, f"cannot be read: {error.strerror or error}.")
    if len(content) > MAX_BYTES:
        return _unreadable(file, f"larger than {MAX_BYTES} bytes: not a file of ours.")
    return replace(parsed(content, file) if parsed else parse(content, file=file), sha256=hashlib.sha256(content).hexdigest())


def _unreadable(file: str, message: str, *, line: int = 0) -> Document:
    return Document(file=file, problems=(Problem(file=file, line=line, message=message),))


def parse(content: bytes, *, file: str) -> Document:
    """Parse one YAML mapping in UTF-8. ``file`` is its name in messages."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _unreadable(file, "not UTF-8 text.", line=content.count(b"\n", 0, error.start) + 1)
    for loader in (_FAST_LOADER, yaml.BaseLoader):  # libyaml refuses escapes such as "\udc80", and words its errors differently
        reader = _Reader(file)
        try:
            data = reader.read(text, loader=loader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            words = filter(None, (getattr(error, "context", None), getattr(error, "problem", None)))
            reader.note(mark.line if mark is not None else 0, f"not YAML: {', '.join(words)}.")
        else:
            break
    if reader.problems:
        return Document(file=file, problems=tuple(sorted(reader.problems, key=lambda problem: problem.line)))
    return Document(file=file, data=data, where=reader.where)


class _RefusedError(Exception):
    """Reading stops: what follows may be endless, or of a kind that no file of ours has."""


class _Reader:
    """Builds plain data from the parser's events, in one walk, and notes every problem.

    Events know no aliases and no objects, and what is nested too deep is refused before anything recurses.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.where: dict[KeyPath, Where] = {}
        self.problems: list[Problem] = []
        self._events: Iterator[Any] = iter(())
        self._depth = self._nodes = 0

    def note(self, line: int, message: str) -> None:
        """Note a problem; ``line`` counts from 0, as PyYAML's marks do."""
        self.problems.append(Problem(file=self.file, line=line + 1, message=message))

    def read(self, text: str, *, loader: Any) -> dict[str | int, Any]:
        """The data of a text; empty where reading had to stop, and a problem is noted.

        Raises:
            yaml.YAMLError: a text that is no YAML.
        """
        if found := _UNPRINTABLE.search(text):
            self.note(text.count("\n", 0, found.start()), "not YAML: a character that text may not hold.")
            return {}
        self._events = yaml.parse(text, Loader=loader)
        try:
            return self._document()
        except _RefusedError:
            return {}

    def _next(self) -> Any:
        """The next event, if it may be read.

        Raises:
            _RefusedError: it may not; the reason is noted.
        """
        event = next(self._events)
        self._depth -= isinstance(event, yaml.CollectionEndEvent)
        self._nodes += isinstance(event, yaml.NodeEvent)
        if refusal := _refusal(event, depth=self._depth, nodes=self._nodes):
            self.note(event.start_mark.line, refusal)
            raise _RefusedError
        if tag := getattr(event, "tag", None):
            written = tag.replace("tag:yaml.org,2002:", "!!")
            self.note(event.start_mark.line, f"the tag '{written}' is not allowed: plain data only.")
        self._depth += isinstance(event, yaml.CollectionStartEvent)
        return event

    def _document(self) -> dict[str | int, Any]:
        self._next()  # the stream begins
        if isinstance(self._next(), yaml.StreamEndEvent):
            self.note(0, "empty: a mapping was expected.")
            return {}
        root = self._next()
        self._place((), root)
        data = self._value(root, ())
        self._next()  # the document ends
        after = self._next()
        line = after.start_mark.line
        if isinstance(after, yaml.DocumentStartEvent):
            self.note(line, "a second document ('---'): one file holds one.")
        elif not isinstance(data, dict):
            self.note(root.start_mark.line, "a mapping ('key: value') was expected at the top.")
        return data if isinstance(data, dict) else {}

    def _place(self, path: KeyPath, event: Any) -> None:
        self.where[path] = Where(self.file, event.start_mark.line + 1)

    def _value(self, event: Any, path: KeyPath) -> Any:
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        items: list[Any] = []
        while not isinstance(item := self._next(), yaml.SequenceEndEvent):
            here = (*path, len(items))
            self._place(here, item)
            items.append(self._value(item, here))
        return items

    def _mapping(self, path: KeyPath) -> dict[str | int, Any]:
        entries: dict[str | int, Any] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            line, key = event.start_mark.line, self._value(event, path)
            if key == "<<":
                self.note(line, "the merge key '<<' is not allowed: write the keys out.")
            elif isinstance(key, bool) or not isinstance(key, (str, int)):
                self.note(line, "a key must be text or a whole number.")
                key = ""
            elif key in entries:
                self.note(line, f"{key!r} is there twice; first in line {self.where[(*path, key)].line}.")
            self._place((*path, key), event)
            entries[key] = self._value(self._next(), (*path, key))
        return entries

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        if event.style:  # quoted or block: always text
            return text
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _NOT_FINITE.match(text):
            self.note(event.start_mark.line, f"{text} is not a number that anything can be compared with.")
            return None
        if not _FLOAT.match(text):
            return text
        number = float(text)
        if not math.isfinite(number) or abs(number) > MAX_NUMBER:
            self.note(event.start_mark.line, f"{text[:40]} is too large: numbers end at {MAX_NUMBER}.")
            return None
        return int(text) if _INT.match(text) else number


def _refusal(event: Any, *, depth: int, nodes: int) -> str | None:
    """Why reading stops at an event; None if it goes on."""
    if not isinstance(event, yaml.NodeEvent):
        return None
    if isinstance(event, yaml.AliasEvent):
        return f"the alias '*{event.anchor}' is not allowed: write the value out."
    if event.anchor:
        return f"the anchor '&{event.anchor}' is not allowed: write the value out where it is used."
    if depth > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH} levels."
    return f"more than {MAX_NODES} values: not a file of ours." if nodes > MAX_NODES else None
