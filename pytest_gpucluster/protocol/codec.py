"""Dataclasses as JSON and back, with every field checked on the way in. msgspec does both.

msgspec neither writes nor reads a lone surrogate, which stands for a byte of a file name or of an error text that is not UTF-8.
Python's own JSON does, as an escape in ASCII, so messages with one go that way.

A :class:`Wire` carries them over a socket, one a line: between an agent and its worker, and between pytest-xdist's processes.
"""

from __future__ import annotations

import functools
import json
import reprlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

T = TypeVar("T")
TAG = "t"
SHOWN_CHARACTERS = 200
_MAKING = threading.Lock()


class RefusedMessageError(Exception):
    """A message that is not obeyed and not believed."""


class MalformedMessageError(RefusedMessageError):
    """Bytes that are none of the expected messages: no JSON, no known type, a field missing, or a field of another type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedMessage:
    """Base of everything that crosses between processes as one JSON object.

    A field ``t`` whose annotation is a ``Literal`` is a tag: it tells the message types of a union apart.
    """

    def to_json(self) -> bytes:
        """The fields as a JSON object in one line. A number that is not finite becomes null.

        Raises:
            ValueError: a whole number of more digits than Python writes.
        """
        try:
            return msgspec.json.encode(self)
        except UnicodeEncodeError:
            return json.dumps(msgspec.to_builtins(self), separators=(",", ":")).encode()

    @classmethod
    def read(cls, data: bytes) -> Self:
        """The message in a JSON object; keys that are no field are left out.

        Raises:
            MalformedMessageError: not JSON, not an object, or a field is missing or has a value of another type.
        """
        kind: Any = cls
        message: Self = read_one_of((kind,), data) if _tags_of(kind) else _decoded(kind, data)
        return message


def read_one_of(kinds: tuple[type[T], ...], data: bytes) -> T:
    """The message of the one type whose tag fits ``data``.

    Raises:
        MalformedMessageError: no tag fits, or the fields of the type whose tag fits do not.
    """
    try:
        kind = _by_tag(kinds)[_decoded(_Tagged, data).t]
    except (MalformedMessageError, LookupError, TypeError):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise MalformedMessageError(f"{reprlib.repr(data)} is none of {names}") from None
    message: T = _decoded(kind, data)
    return message


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tagged:
    t: Any = None


@functools.cache
def _tags_of(kind: Any) -> tuple[str, ...]:
    hint = get_type_hints(kind).get(TAG)
    return get_args(hint) if get_origin(hint) is Literal else ()


@functools.cache
def _by_tag(kinds: Any) -> Mapping[str, Any]:
    return {tag: kind for kind in kinds for tag in _tags_of(kind)}


@functools.cache
def _decoder_of(kind: Any) -> Callable[[bytes], Any]:
    with _MAKING:  # two threads that make decoders of one class at the same time crash msgspec 0.22
        return msgspec.json.Decoder(kind).decode


def _decoded(kind: Any, data: bytes) -> Any:
    try:
        try:
            return _decoder_of(kind)(data)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            return msgspec.convert(json.loads(data.decode("ascii"), parse_constant=_refuse_constant), kind)
    except msgspec.ValidationError as wrong:
        raise MalformedMessageError(f"{kind.__name__}: {wrong}") from None
    except (ValueError, RecursionError) as wrong:
        why = str(wrong)[:SHOWN_CHARACTERS]
        raise MalformedMessageError(f"{kind.__name__}: {reprlib.repr(data)} is not JSON: {why}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
"""More than any message has. What stands before the end of a line is kept in memory."""


class Wire:
    """Sends and receives messages, as long as the socket's own timeout allows."""

    def __init__(self, link: socket.socket) -> None:
        """Take over a connected stream socket."""
        self._link = link
        self._unfinished: list[bytes] = []

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._link.fileno()

    def send(self, message: TypedMessage) -> None:
        """Write one message.

        Raises:
            OSError: the other end is gone, or does not read.
        """
        self._link.sendall(message.to_json() + b"\n")

    def receive(self) -> list[bytes] | None:
        """The messages that one read completes, perhaps none, as JSON. None when the other end is closed.

        Raises:
            MalformedMessageError: a line is longer than :data:`MAX_LINE_BYTES`.
        """
        try:
            data = self._link.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._unfinished, lines[0]))
            self._unfinished = []
        self._unfinished.append(rest)
        if sum(map(len, self._unfinished)) > MAX_LINE_BYTES:
            self._unfinished = []
            raise MalformedMessageError(f"a line of more than {MAX_LINE_BYTES >> 20} MiB")
        return lines

    def close(self) -> None:
        """Close this end."""
        self._link.close()
