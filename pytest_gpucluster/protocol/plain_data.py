"""Values as plain data and back: only JSON crosses between processes, never pickle.

A dataclass crosses as its fields and the name of its class. It is rebuilt only if its module is imported already, so a
message never causes an import. A number that is not finite crosses by its name, because JSON has none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

MARK, NUMBER = "$dataclass", "$float"
NOT_FINITE = ("nan", "inf", "-inf")
MAX_DEPTH = 32
SCALARS = frozenset({type(None), bool, int, float, str})


class NotPlainDataError(TypeError):
    """A value that cannot cross a process: a tensor, an object, a dict with other keys than text."""


def to_plain(value: Any, *, depth: int = 0) -> Any:
    """``value`` as JSON data: None, bool, int, float, str, lists, dicts of text, dataclasses of these.

    Raises:
        NotPlainDataError: any other type, which the message names.
    """
    if depth > MAX_DEPTH:
        raise NotPlainDataError(f"nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, (bool, int, float, str)):
        return _scalar(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: to_plain(getattr(value, name), depth=depth + 1) for name in _field_names(type(value))}
        return {MARK: f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, depth=depth + 1) for item in value]
    if isinstance(value, dict):
        return {_key(key): to_plain(item, depth=depth + 1) for key, item in value.items()}
    plain = "; its .tolist() is" if hasattr(value, "tolist") else ""  # of a tensor without dimensions, a number
    raise NotPlainDataError(
        f"{type(value).__module__}.{type(value).__qualname__} is not plain data; "
        f"numbers, text, lists, dicts of text and dataclasses of these can cross between processes{plain}"
    )


def is_frozen(value: Any) -> bool:
    """Whether this is an instance of a frozen dataclass."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


class _ReadOnly:
    """In front of a list or a dict: nobody changes it in place. A copy of it, in whatever way, is an ordinary one."""

    __slots__ = ()

    def _refuse(self, *_arguments: Any, **_more: Any) -> NoReturn:
        raise TypeError("ranks may share this value, so it is not changed in place: change a copy, list(...) or dict(...)")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = __ior__ = append = extend = insert = remove = pop = popitem = _refuse
    clear = sort = reverse = update = setdefault = _refuse

    def __reduce_ex__(self, _protocol: Any) -> Any:
        kind = type(self).__mro__[2]
        return kind, (kind(self),)


class _ReadOnlyList(_ReadOnly, list[Any]):
    __slots__ = ()


class _ReadOnlyDict(_ReadOnly, dict[str, Any]):
    __slots__ = ()


def shareable(value: Any) -> bool:
    """Make the lists and dicts in a value read-only; whether the whole value is, so that several ranks may have the same one.

    Only what frozen dataclasses hold is touched: any other value is a user's to change.
    """
    return is_frozen(value) and _read_only(value)[1]


def _read_only(value: Any) -> tuple[Any, bool]:
    """The value with read-only lists and dicts, and whether all in it is so."""
    if type(value) in SCALARS:
        return value, True
    if is_frozen(value):
        kind: type = type(value)
        found = {name: _read_only(getattr(value, name)) for name in _field_names(kind) if hasattr(value, name)}
        for name, (one, _) in found.items():
            object.__setattr__(value, name, one)
        return value, all(is_whole for _, is_whole in found.values())
    if type(value) is list:
        items = [(one, True) if type(one) in SCALARS else _read_only(one) for one in value]
        return _ReadOnlyList(one for one, _ in items), all(is_whole for _, is_whole in items)
    if type(value) is dict:
        items = [_read_only(one) for one in value.values()]
        return _ReadOnlyDict(zip(value, (one for one, _ in items), strict=True)), all(is_whole for _, is_whole in items)
    return value, False


def _scalar(value: Any) -> Any:
    """The value as JSON has it: of no subclass (NumPy's numbers, enumerations), and finite."""
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else {NUMBER: str(number)}
    if type(value) in SCALARS:
        return value
    return int.__int__(value) if isinstance(value, int) else str.__str__(value)


def _key(key: Any) -> str:
    if not isinstance(key, str) or key in (MARK, NUMBER):
        raise NotPlainDataError(f"{key!r} cannot be a key here; keys are text")
    return str.__str__(key)


def from_plain(data: Any) -> Any:
    """The value from which :func:`to_plain` made ``data``; a dataclass that is not imported here becomes a SimpleNamespace.

    Raises:
        NotPlainDataError: :func:`to_plain` cannot have made it: it is nested too deep, or a dataclass has no name or no fields.
    """
    return data if type(data) in SCALARS else _rebuilt(data, 0)


def _rebuilt(data: Any, depth: int) -> Any:
    """The value of a list or an object. Scalars, of which most values consist, are not visited."""
    if depth > MAX_DEPTH:
        raise NotPlainDataError(f"nested deeper than {MAX_DEPTH} levels")
    depth += 1
    if type(data) is list:
        return [item if type(item) in SCALARS else _rebuilt(item, depth) for item in data]
    if MARK in data:
        return _rebuilt_dataclass(data[MARK], data.get("fields"), depth)
    if NUMBER in data:
        if len(data) != 1 or data[NUMBER] not in NOT_FINITE:
            raise NotPlainDataError("a number that is not finite has one of three names")
        return float(data[NUMBER])
    return {key: item if type(item) in SCALARS else _rebuilt(item, depth) for key, item in data.items()}


def _rebuilt_dataclass(name: Any, contents: Any, depth: int) -> Any:
    if type(contents) is not dict or type(name) is not str:
        raise NotPlainDataError("a dataclass without a name or without fields")
    fields = {key: item if type(item) in SCALARS else _rebuilt(item, depth) for key, item in contents.items()}
    module, _, qualname = name.partition(":")
    try:
        found = _dataclass_in(sys.modules.get(module), qualname)
    except LookupError:
        return SimpleNamespace(**fields)
    value: Any = object.__new__(found)
    for field in _field_names(found):
        if field in fields:
            object.__setattr__(value, field, fields[field])
    return value


@functools.lru_cache(maxsize=256)
def _dataclass_in(module: Any, qualname: str) -> type:
    """The dataclass of this name.

    Raises:
        LookupError: there is none, or none yet.
    """
    found = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        raise LookupError(qualname)
    return found


@functools.lru_cache(maxsize=256)
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
