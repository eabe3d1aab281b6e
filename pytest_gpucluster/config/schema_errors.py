"""Pydantic's validation errors as problems with the document's lines, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from pytest_gpucluster.config.yaml_lines import Document, KeyPath, Problem

_TYPES = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "string_too_short": "text that is not empty",
    "string_pattern_mismatch": "text that is not empty",
    "too_short": "a list that is not empty",
    "expected": "{words}",
}
_CLOSE = 0.55
"""difflib's ratio: 'minimum' is 0.6 from 'min'."""
_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSection:
    """A mapping of the file, for messages: its noun, its place (``" (in 'bf16_tflops')"``) and its keys."""

    noun: str
    inside: str
    keys: tuple[str, ...]


def closest(word: str, known: Sequence[str], *, most: int = 1) -> list[str]:
    """The known words that begin with ``word``, else those nearest to it, nearest first; empty where none is near."""
    begun = [one for one in known if one.startswith(word)] if word else []
    return begun[:most] or get_close_matches(word, known, n=most, cutoff=_CLOSE)


def did_you_mean(word: str, known: Sequence[str], *, most: int = 1) -> str:
    """`` Did you mean 'min'?``, `` Did you mean 'min' or 'max'?``, or nothing."""
    near = closest(word, known, most=most)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def described(value: object) -> str:
    """Describe a wrong value in a few characters."""
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list, tuple)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(problems: Sequence[Problem]) -> str:
    """The text of an error: one problem a line, at most 10 of them."""
    lines = [str(problem) for problem in problems[:_MAX_SHOWN]]
    more = len(problems) - len(lines)
    return "\n".join([*lines, f"... and {counted(more, 'more problem')}."] if more else lines)


def _spelling(_path: KeyPath, word: str, choices: Sequence[str]) -> str:
    return did_you_mean(word, choices)


def shape_problems(
    errors: Sequence[Any],
    document: Document,
    *,
    part_of: Callable[[KeyPath], FileSection],
    hint: Callable[[KeyPath, str, Sequence[str]], str] = _spelling,
) -> list[Problem]:
    """Turn ``ValidationError.errors()`` into problems, one per key, in the file's order.

    Args:
        errors: pydantic's errors.
        document: the validated data.
        part_of: returns the mapping that a path points to.
        hint: returns what may be meant by a word at a path that is none of the choices there.
    """
    found: dict[tuple[KeyPath, str], Problem] = {}
    for error in errors:
        path: KeyPath = tuple(error["loc"])
        message = _message(error, path, part_of=part_of, hint=hint)
        found.setdefault((path, error["type"]), document.problem(path, message))
    return sorted(found.values(), key=lambda problem: (problem.file, problem.line))


def _message(
    error: Any,
    path: KeyPath,
    *,
    part_of: Callable[[KeyPath], FileSection],
    hint: Callable[[KeyPath, str, Sequence[str]], str],
) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if not path:
        return f"must be {_TYPES.get(kind, error['msg'])}."
    if kind == "invalid_key" or path[-1] == "[key]":
        *above, key = path[:-1] if path[-1] == "[key]" else path
        return f"the key {key!r} must be text{part_of(tuple(above)).inside}."
    name, part = path[-1], part_of(path[:-1])
    if kind == "extra_forbidden":
        near = did_you_mean(str(name), part.keys)
        return f"{str(name)!r} is not a key of {part.noun}{part.inside}. Keys: {', '.join(part.keys)}.{near}"
    if kind in ("missing", "empty"):
        return f"{name!r} is {kind}{part.inside}."
    if kind == "literal_error":
        choices = context["expected"].replace(" or ", ", ").replace("'", "")
        near = hint(path, str(error["input"]), choices.split(", "))
        return f"{name!r} is {described(error['input'])}{part.inside}. Choose from: {choices}.{near}"
    expected = _TYPES[kind].format(**context) if kind in _TYPES else f"otherwise ({error['msg']})"
    found = "" if kind == "expected" and isinstance(error["input"], (dict, list)) else described(error["input"])
    return f"{name!r} must be {expected}{found and f', not {found}'}{part.inside}."
