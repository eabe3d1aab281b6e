"""YAML to plain data in which every key knows its file and line.

The file may come from anyone, so only plain data is read: no aliases or anchors, no tags, no duplicate keys, no NaN or
infinity, one document, nothing deep, nothing large. PyYAML delivers events and nodes, and never constructs an object.
Scalars follow the YAML 1.2 core rules: ``yes``, ``off``, ``0777``, ``1:30`` and dates are text.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

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


def read(path: Path, *, file: str) -> Document:
    """Read and parse a regular file of at most 1 MiB. ``file`` is its name in messages."""
    try:
        if path.exists() and not path.is_file():
            return _unreadable(file, "not a regular file.")
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        return _unreadable(file, f"cannot be read: {error.strerror or error}.")
    if len(content) > MAX_BYTES:
        return _unreadable(file, f"larger than {MAX_BYTES} bytes: not a file of ours.")
    return replace(parse(content, file=file), sha256=hashlib.sha256(content).hexdigest())


def _unreadable(file: str, message: str) -> Document:
    return Document(file=file, problems=(Problem(file=file, line=0, message=message),))


def parse(content: bytes, *, file: str) -> Document:
    """Parse one YAML mapping in UTF-8. ``file`` is its name in messages."""
    reader = _Reader(file)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reader.note(content.count(b"\n", 0, error.start), "not UTF-8 text.")
        return Document(file=file, problems=tuple(reader.problems))
    try:
        data = reader.read(text, loader=_FAST_LOADER)
    except yaml.YAMLError:  # libyaml refuses escapes such as "\udc80", and words its errors differently
        reader = _Reader(file)
        data = reader.read_slowly(text)
    if reader.problems:
        return Document(file=file, problems=tuple(sorted(reader.problems, key=lambda problem: problem.line)))
    return Document(file=file, data=data, where=reader.where)


class _Reader:
    """Builds plain data from the nodes of one document and notes every problem."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.where: dict[KeyPath, Where] = {}
        self.problems: list[Problem] = []

    def note(self, line: int, message: str) -> None:
        """Note a problem; ``line`` counts from 0, as PyYAML's marks do."""
        self.problems.append(Problem(file=self.file, line=line + 1, message=message))

    def read(self, text: str, *, loader: Any) -> dict[str | int, Any]:
        """The data of a text. Empty if the text must not be composed; then a problem is noted."""
        if found := _UNPRINTABLE.search(text):
            self.note(text.count("\n", 0, found.start()), "not YAML: a character that text may not hold.")
            return {}
        if not self._may_be_composed(yaml.parse(text, Loader=loader)):
            return {}
        root = yaml.compose(text, Loader=loader)
        if root is None:
            self.note(0, "empty: a mapping was expected.")
        elif not isinstance(root, yaml.MappingNode):
            self.note(root.start_mark.line, "a mapping ('key: value') was expected at the top.")
        else:
            self._place((), root)
            return self._mapping(root, ())
        return {}

    def read_slowly(self, text: str) -> dict[str | int, Any]:
        """Read with PyYAML's own parser; its syntax error becomes a problem."""
        try:
            return self.read(text, loader=yaml.BaseLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.note(mark.line if mark else 0, f"not YAML: {', '.join(filter(None, (error.context, error.problem)))}.")
            return {}

    def _may_be_composed(self, events: Iterable[Any]) -> bool:
        """Check structure and size first: composing recurses, and walking its nodes follows aliases."""
        depth = nodes = documents = 0
        for event in events:
            depth -= isinstance(event, yaml.CollectionEndEvent)
            documents += isinstance(event, yaml.DocumentStartEvent)
            nodes += isinstance(event, yaml.NodeEvent)
            refusal = _refusal(event, depth=depth, nodes=nodes, documents=documents)
            if refusal is not None:
                self.note(event.start_mark.line, refusal)
                return False
            if tag := getattr(event, "tag", None):
                written = tag.replace("tag:yaml.org,2002:", "!!")
                self.note(event.start_mark.line, f"the tag '{written}' is not allowed: plain data only.")
            depth += isinstance(event, yaml.CollectionStartEvent)
        return True

    def _place(self, path: KeyPath, node: yaml.Node) -> None:
        self.where[path] = Where(self.file, node.start_mark.line + 1)

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        items = []
        for index, item in enumerate(node.value):
            self._place((*path, index), item)
            items.append(self._value(item, (*path, index)))
        return items

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str | int, Any]:
        entries: dict[str | int, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if key == "<<":
                self.note(line, "the merge key '<<' is not allowed: write the keys out.")
            elif isinstance(key, bool) or not isinstance(key, (str, int)):
                self.note(line, "a key must be text or a whole number.")
            else:
                if key in entries:
                    self.note(line, f"{key!r} is there twice; first in line {self.where[(*path, key)].line}.")
                self._place((*path, key), key_node)
                entries[key] = self._value(value_node, (*path, key))
        return entries

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        if node.style:  # quoted or block: always text
            return text
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _NOT_FINITE.match(text):
            self.note(node.start_mark.line, f"{text} is not a number that anything can be compared with.")
            return None
        if not _FLOAT.match(text):
            return text
        number = float(text)
        if not math.isfinite(number) or abs(number) > MAX_NUMBER:
            self.note(node.start_mark.line, f"{text[:40]} is too large: numbers end at {MAX_NUMBER}.")
            return None
        return int(text) if _INT.match(text) else number


def _refusal(event: Any, *, depth: int, nodes: int, documents: int) -> str | None:
    """Why reading stops at an event; None if it goes on."""
    if documents > 1:
        return "a second document ('---'): one file holds one."
    if not isinstance(event, yaml.NodeEvent):
        return None
    if isinstance(event, yaml.AliasEvent):
        return f"the alias '*{event.anchor}' is not allowed: write the value out."
    if event.anchor:
        return f"the anchor '&{event.anchor}' is not allowed: write the value out where it is used."
    if depth > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH} levels."
    return f"more than {MAX_NODES} values: not a file of ours." if nodes > MAX_NODES else None
