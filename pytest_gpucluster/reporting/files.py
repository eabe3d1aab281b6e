"""The results directory: one run at a time, an older run kept apart, nothing half-written."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

OWN = ("journal.jsonl", "results.json", "report.html", "metrics.prom", "junit.xml", "logs")
PREVIOUS = "previous"


class ResultsDirectory:
    """A directory that this run holds alone until it closes it."""

    def __init__(self, path: Path) -> None:
        """Make it, lock it, and move an older run's files into ``previous/<its time>/``.

        Raises:
            ConfigurationError: it cannot be written, or another run holds it.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigurationError(f"the results directory {path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigurationError(
                f"the results directory {path} is in use by another run; give this one its own: --gpucluster-results DIR"
            ) from None
        try:
            self._keep_older_run_apart()
            (path / "logs").mkdir(exist_ok=True)
            self._try_to_write()
        except OSError as error:
            self.close()
            raise ConfigurationError(f"the results directory {path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Let the next run have it."""
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def _keep_older_run_apart(self) -> None:
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
        """A full disk shows now, not when the verdict is due."""
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
def held(path: Path) -> Iterator[None]:
    """Hold a results directory alone, as it is.

    Raises:
        ConfigurationError: another run holds it.
    """
    with (path / ".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigurationError(f"the results directory {path} is in use by another run") from None
        yield


class Journal:
    """``journal.jsonl``: one event a line, flushed as it happens, never rewritten."""

    def __init__(self, path: Path, *, copy: Callable[[str], None] = lambda _line: None) -> None:
        """Open it for appending; ``copy`` gets every line too."""
        self._file = path.open("a", encoding="utf-8")
        self._copy = copy
        self.failed: str | None = None

    def write(self, event: str, **facts: Any) -> None:
        """Append one event. A disk that fails now is remembered, and does not end the run."""
        line = json.dumps(strict({"at_s": round(time.time(), 3), "event": event, **facts}), allow_nan=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self.failed = error.strerror or str(error)
        self._copy(line)

    def close(self) -> None:
        """Close it; a disk that is full says so once more, and we knew."""
        with contextlib.suppress(OSError):
            self._file.close()


def strict(value: Any) -> Any:
    """Any value as strict JSON data: a number that is not finite becomes null, what JSON does not know becomes text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [strict(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return strict(dataclasses.asdict(value))
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
