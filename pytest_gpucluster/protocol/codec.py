"""Dataclasses as JSON objects and back, with every field checked on the way in."""

from __future__ import annotations

import contextlib
import functools
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from typing_extensions import Self

JsonObject = dict[str, Any]
Convert = Callable[[Any], Any]
T = TypeVar("T", bound="TypedMessage")


class RefusedMessageError(Exception):
    """A message that is not obeyed and not believed."""


class MalformedMessageError(RefusedMessageError):
    """A JSON value that is none of the expected messages: no known type, a field missing, or a field of another type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedMessage:
    """Base of everything that crosses between processes as one JSON object.

    A field whose annotation is a ``Literal`` and that has a default is a tag: it tells the message types of a union apart.
    """

    def to_json(self) -> JsonObject:
        """The fields as JSON data."""
        return {field.name: _as_json(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def read(cls, data: Any) -> Self:
        """The message in a JSON object; keys that are no field are left out.

        Raises:
            MalformedMessageError: not an object, or a field is missing or has a value of another type.
        """
        if not isinstance(data, dict):
            raise MalformedMessageError(f"{cls.__name__}: {reprlib.repr(data)} is not a JSON object")
        found = {}
        for name, convert, required in _fields_of(cls):
            if name in data:
                try:
                    found[name] = convert(data[name])
                except MalformedMessageError as wrong:
                    raise MalformedMessageError(f"{cls.__name__}.{name}: {wrong}") from None
            elif required:
                raise MalformedMessageError(f"{cls.__name__}.{name} is missing")
        return cls(**found)


def read_one_of(kinds: Sequence[type[T]], data: Any) -> T:
    """The message of the one type whose tags fit ``data``.

    Raises:
        MalformedMessageError: no tags fit, or the fields of the type whose tags fit do not.
    """
    if isinstance(data, dict):
        for kind in kinds:
            if all(name in data and _is_same(data[name], value) for name, value in _tags_of(kind).items()):
                return kind.read(data)
    names = ", ".join(kind.__name__ for kind in kinds)
    raise MalformedMessageError(f"{reprlib.repr(data)} is none of {names}")


def _find_tags(kind: type[Any]) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {
        field.name: field.default
        for field in fields(kind)
        if get_origin(hints[field.name]) is Literal and field.default is not MISSING
    }


def _find_fields(kind: type[Any]) -> tuple[tuple[str, Convert, bool], ...]:
    hints, tags = get_type_hints(kind), _tags_of(kind)
    return tuple(
        (
            field.name,
            _converter(hints[field.name]),
            field.name in tags or (field.default is MISSING and field.default_factory is MISSING),
        )
        for field in fields(kind)
    )


_tags_of: Callable[[Any], Mapping[str, Any]] = functools.cache(_find_tags)
_fields_of: Callable[[Any], tuple[tuple[str, Convert, bool], ...]] = functools.cache(_find_fields)


def _as_json(value: Any) -> Any:
    if isinstance(value, TypedMessage):
        return value.to_json()
    return [_as_json(item) for item in value] if isinstance(value, tuple) else value


def _is_same(value: Any, expected: Any) -> bool:
    return type(value) is type(expected) and bool(value == expected)  # 1 is not True


def _converter(kind: Any) -> Convert:
    """Turns a JSON value into a value of the annotation ``kind``, or raises :class:`MalformedMessageError`."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        (inner,) = (_converter(argument) for argument in get_args(kind) if argument is not type(None))
        return lambda value: None if value is None else inner(value)
    if origin in (dict, tuple):
        return _container_converter(kind, origin, get_args(kind))
    if kind is Any:
        return lambda value: value
    if isinstance(kind, type) and issubclass(kind, TypedMessage):
        return kind.read
    return _scalar_converter(kind)


def _scalar_converter(kind: Any) -> Convert:
    if kind is float:
        return _to_float
    if get_origin(kind) is Literal:
        known = get_args(kind)
        return lambda value: value if any(_is_same(value, one) for one in known) else _refuse(value, kind)
    assert kind in (bool, int, str), kind
    return lambda value: value if type(value) is kind else _refuse(value, kind)


def _to_float(value: Any) -> float:
    with contextlib.suppress(OverflowError):  # a whole number of more than 308 digits
        if type(value) in (int, float):
            return float(value)
    return _refuse(value, float)


def _container_converter(kind: Any, origin: type, arguments: tuple[Any, ...]) -> Convert:
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _fixed_tuple_converter(kind, [_converter(argument) for argument in arguments])
    convert = _converter(arguments[0 if origin is tuple else 1])

    def contents(value: Any) -> Any:
        if origin is tuple and isinstance(value, list):
            return tuple(convert(item) for item in value)
        if origin is dict and isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        return _refuse(value, kind)

    return contents


def _fixed_tuple_converter(kind: Any, converts: list[Convert]) -> Convert:
    def items(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(converts):
            _refuse(value, kind)
        return tuple(convert(item) for convert, item in zip(converts, value, strict=True))

    return items


def _refuse(value: Any, kind: Any) -> NoReturn:
    name = kind.__name__ if isinstance(kind, type) and get_origin(kind) is None else str(kind).replace("typing.", "")
    raise MalformedMessageError(f"{reprlib.repr(value)} is not {name}")
