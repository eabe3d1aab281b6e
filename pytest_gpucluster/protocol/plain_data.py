"""Values as plain data and back: only JSON crosses between processes, never pickle.

A dataclass crosses as its fields and the name of its class. It is rebuilt only if its module is imported already, so a
message never causes an import.
"""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

MARK = "$dataclass"
MAX_DEPTH = 32


class NotPlainError(TypeError):
    """A value that cannot cross a process: a tensor, an object, a dict with other keys than text."""


def to_plain(value: Any, *, depth: int = 0) -> Any:
    """``value`` as JSON data: None, bool, int, float, str, lists, dicts of text, dataclasses of these.

    Raises:
        NotPlainError: any other type, which the message names.
    """
    if depth > MAX_DEPTH:
        raise NotPlainError(f"nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_plain(getattr(value, field.name), depth=depth + 1) for field in dataclasses.fields(value)}
        return {MARK: f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, depth=depth + 1) for item in value]
    if isinstance(value, dict):
        return {_key(key): to_plain(item, depth=depth + 1) for key, item in value.items()}
    raise NotPlainError(
        f"{type(value).__module__}.{type(value).__qualname__} is not plain data; "
        "numbers, text, lists, dicts of text and dataclasses of these can cross between processes"
    )


def _key(key: Any) -> str:
    if not isinstance(key, str) or key == MARK:
        raise NotPlainError(f"{key!r} cannot be a key here; keys are text")
    return key


def from_plain(data: Any, *, depth: int = 0) -> Any:
    """The value from which :func:`to_plain` made ``data``; a dataclass that is not imported here becomes a SimpleNamespace.

    Raises:
        NotPlainError: :func:`to_plain` cannot have made it: it is nested too deep, or a dataclass has no name or no fields.
    """
    if depth > MAX_DEPTH:
        raise NotPlainError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(data, list):
        return [from_plain(item, depth=depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    is_dataclass = MARK in data
    contents = data.get("fields") if is_dataclass else data
    if not isinstance(contents, dict) or not isinstance(data.get(MARK, ""), str):
        raise NotPlainError("a dataclass without a name or without fields")
    fields = {key: from_plain(item, depth=depth + 1) for key, item in contents.items()}
    if not is_dataclass:
        return fields
    found = _dataclass_named(data[MARK])
    return SimpleNamespace(**fields) if found is None else _rebuild(found, fields)


def _dataclass_named(name: str) -> type | None:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def _rebuild(found: type, fields: dict[str, Any]) -> Any:
    value: Any = object.__new__(found)
    for field in dataclasses.fields(found):
        if field.name in fields:
            object.__setattr__(value, field.name, fields[field.name])
    return value
