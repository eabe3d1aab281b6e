"""The secret that all processes of a run share: it signs messages, and nothing shows it.

pytest prints the arguments and locals of frames, and users print ``os.environ``. So no frame and no environment of a run holds
the secret: the object signs, and keeps a digest. A process that starts another one hands the digest over in a pipe.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import os
import secrets
from typing import TYPE_CHECKING, NoReturn

from pytest_gpucluster.config.torchrun import private_folder

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpucluster.config.torchrun import Launch

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
