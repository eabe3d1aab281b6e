"""The results directory: one run at a time, an older run kept apart, nothing half-written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OWN = ("journal.jsonl", "results.json", "report.html", "metrics.prom", "junit.xml", "logs")
PREVIOUS = "previous"


class ResultsDirectory:
    """A directory that only this run writes to, until it closes it."""

    def __init__(self, path: Path) -> None:
        """Make the directory, lock it, and move an older run's files into ``previous/<its time>/``.

        Raises:
            ConfigurationError: the directory cannot be written, or another run holds it.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(path, advice="; give this one its own: --gpucluster-results DIR")
        except OSError as error:
            raise ConfigurationError(f"the results directory {path} cannot be written: {error.strerror}") from None
        try:
            self._move_older_run()
            (path / "logs").mkdir(exist_ok=True)
            self._try_to_write()
        except OSError as error:
            self.close()
            raise ConfigurationError(f"the results directory {path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Release the lock, so that the next run can take it."""
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def _move_older_run(self) -> None:
        older = [self.path / name for name in OWN if (self.path / name).exists()]
        if not older:
            return
        at = time.strftime("%Y%m%d-%H%M%S", time.gmtime(max(path.stat().st_mtime for path in older)))
        number, shelf = 1, self.path / PREVIOUS / at
        while shelf.exists():
            number, shelf = number + 1, self.path / PREVIOUS / f"{at}-{number}"
        shelf.mkdir(parents=True)
        for path in older:
            path.rename(shelf / path.name)

    def _try_to_write(self) -> None:
        """Find a full disk now, not when the verdict is due."""
        probe = self.path / ".probe"
        try:
            with probe.open("wb") as file:
                file.write(b"\0" * 65536)
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)


def require_writable(file: Path) -> None:
    """Make sure that a report can be written there, and leave an older one as it is.

    Raises:
        ConfigurationError: it cannot.
    """
    there = file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
        if not there:
            file.unlink()
    except OSError as error:
        raise ConfigurationError(f"the report {file} cannot be written: {error.strerror}") from None


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is either the old one or the whole new one, whatever happens."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def results_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a results directory, and change nothing in it.

    Raises:
        ConfigurationError: another run holds it.
        OSError: there is no such directory, or it cannot be written.
    """
    lock = _take_lock(path)
    try:
        yield
    finally:
        os.close(lock)


def _take_lock(path: Path, *, advice: str = "") -> int:
    """The open and locked lock file of a directory. The system releases the lock however the process ends.

    The package filelock is not used: where there is no ``flock``, its lock is a file that a killed run leaves behind.
    """
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigurationError(f"the results directory {path} is in use by another run{advice}") from None
    return lock
