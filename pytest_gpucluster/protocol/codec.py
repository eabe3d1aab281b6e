"""Messages as JSON and back, with every field checked on the way in. msgspec does both.

msgspec neither writes nor reads a lone surrogate, which stands for a byte of a file name or of an error text that is not UTF-8.
Python's own JSON does, as an escape in ASCII, so messages with one go that way.

A :class:`Wire` carries them over a socket, one a line: between an agent and its worker, and between pytest-xdist's processes.

The secret that all processes of a run share: it signs messages, and nothing shows it.

pytest prints the arguments and locals of frames, and users print ``os.environ``. So no frame and no environment of a run holds
the secret: the object signs, and keeps a digest. A process that starts another one hands the digest over in a pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import hmac
import json
import os
import reprlib
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from pytest_gpucluster.config.torchrun import Launch, private_folder

if TYPE_CHECKING:
    import socket

    from typing_extensions import Self


T = TypeVar("T")
SHOWN_CHARACTERS = 200
_MAKING = threading.Lock()


class RefusedMessageError(Exception):
    """A message that is not obeyed and not believed."""


class MalformedMessageError(RefusedMessageError):
    """Bytes that are none of the expected messages: no JSON, no known type, a field missing, or a field of another type."""


class TypedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything that crosses between processes as one JSON object.

    Of a class with a ``tag`` the object has it as its member ``t``: it tells the message types of a union apart.
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
        message: Self = read_one_of((kind,), data) if kind.__struct_config__.tag else _decoded(kind, data)
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


class _Tagged(msgspec.Struct):
    t: Any = None


@functools.cache
def _by_tag(kinds: Any) -> Mapping[str, Any]:
    return {kind.__struct_config__.tag: kind for kind in kinds}


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


SECRET_VARIABLE = "GPUCLUSTER_SECRET"  # noqa: S105 -- the name of a variable, not a secret
SHARED_NAME = "gpucluster-secret"


class Secret:
    """Signs messages. It cannot be shown, compared, copied or pickled."""

    __slots__ = ("_key", "_keyed")

    def __init__(self, key: bytes) -> None:
        """``key``: 32 bytes that the processes of a run have in common."""
        self._key = key
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)

    @classmethod
    def read(cls) -> Secret | None:
        """The secret in the environment; None if there is none, or an empty one."""
        if not os.environ.get(SECRET_VARIABLE):
            return None
        return cls(hashlib.sha256(os.fsencode(os.environ[SECRET_VARIABLE])).digest())

    @classmethod
    def take(cls) -> Secret | None:
        """The secret in the environment, which then holds it no more: tests and the processes they start do not get it."""
        found = cls.read()
        os.environ.pop(SECRET_VARIABLE, None)
        return found

    @classmethod
    def of_run(cls, launch: Launch | None) -> Secret | None:
        """The secret in the environment, taken; where torchrun started all ranks on this node, else one that they share.

        Rank 0 removes the file with the shared one when it ends.
        """
        found = cls.take()
        folder = private_folder() if found is None and launch is not None and launch.num_nodes == 1 else None
        if launch is None or folder is None:
            return found
        with contextlib.suppress(OSError):  # no file can be made there: the run is not signed, and says so
            found = cls.shared_in(folder)
            if launch.rank == 0:
                atexit.register((folder / SHARED_NAME).unlink, missing_ok=True)
        return found

    @classmethod
    def shared_in(cls, folder: Path) -> Secret:
        """The secret that lies in a folder which no other user can enter; the first who asks makes it.

        Raises:
            OSError: the folder takes no file, or no hard link.
        """
        own, shared = folder / f"{SHARED_NAME}-{os.getpid()}", folder / SHARED_NAME
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        try:
            with contextlib.suppress(FileExistsError):
                os.link(own, shared)  # whole, or not there
        finally:
            own.unlink()
        return cls(shared.read_bytes())

    @classmethod
    def random(cls) -> Secret:
        """A secret of this run alone."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def from_pipe(cls, descriptor: int) -> Secret:
        """The secret of the process that started this one; see :meth:`to_pipe`."""
        with os.fdopen(descriptor, "rb") as pipe:
            return cls(pipe.read())

    def to_pipe(self) -> int:
        """A descriptor from which a child process can read the secret once."""
        reading, writing = os.pipe()
        os.write(writing, self._key)
        os.close(writing)
        os.set_inheritable(reading, True)  # noqa: FBT003 -- its only way
        return reading

    def sign(self, name: str, body: bytes) -> str:
        """The HMAC-SHA256 of a message's name and body, in hexadecimal."""
        mac = self._keyed.copy()
        mac.update(name.encode() + b"\n")
        mac.update(body)
        return mac.hexdigest()

    def __repr__(self) -> str:
        """That this is a secret, and nothing of it."""
        return "<secret>"

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: always.
        """
        raise TypeError("a secret is not copied and not pickled")
