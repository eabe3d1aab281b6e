"""The results directory: one run at a time, an older run kept apart, nothing half-written, no planted link followed.

The directory itself may be a link that the user chose. Nothing in it that a run writes may be one: it could lead anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_gpucluster.config.run_files import JOURNAL, LOGS, REPORT, RESULTS, RUN_FILES
from pytest_gpucluster.errors import ConfigurationError

KEPT_RUNS = 5
"""Of earlier runs in ``previous/``. A soak that goes on needs at most four."""
SHELF = re.compile(r"[0-9]{8}-[0-9]{6}(-[0-9]+)?\Z")
"""The name of an older run's folder in ``previous/``."""
PREVIOUS, LOCK, PROBE = "previous", ".lock", ".probe"
WRITTEN_THROUGH = (stat.S_ISREG, stat.S_ISCHR, stat.S_ISFIFO)
IS_LINK = "is a symbolic link, which is not followed; remove it"
OWN_DIRECTORY = "; give this one its own: --gpucluster-results DIR"
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say that a results directory cannot be written, and why, where the system refuses it."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"the results directory {path} cannot be written: {error.strerror}") from None


def require_no_links(folder: Path) -> None:
    """Refuse a results directory in which a link lies where a run writes.

    Raises:
        ConfigurationError: there is one, or none can be looked for.
    """
    with _writing(folder):
        for path in (*(folder / name for name in (LOCK, PROBE, PREVIOUS, *RUN_FILES)), *folder.glob(".*.tmp")):
            if path.is_symlink():
                raise ConfigurationError(f"the results directory {folder} cannot be written: {path.name} in it {IS_LINK}")


class ResultsDirectory:
    """A directory that only this run writes to, until it closes it."""

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        """Make the directory, lock it, and move an older run's files into ``previous/<its time>/``, the ``older_run``.

        Of the runs there, the newest :data:`KEPT_RUNS` stay; ``removed`` has the names of the others.
        Of a run that ``goes_on`` only the logs move: the journal and the reports are continued.

        Raises:
            ConfigurationError: the directory cannot be written, holds a link where a run writes, or another run holds it.
        """
        self.path = path
        self.older_run: Path | None = None
        self.removed: tuple[str, ...] = ()
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(path, advice=OWN_DIRECTORY)
            try:
                self._move_older_run((LOGS,) if goes_on else RUN_FILES)
                (path / LOGS).mkdir()
                self._try_to_write()
            except OSError:
                self.close()
                raise

    def close(self) -> None:
        """Release the lock, so that the next run can take it."""
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def _move_older_run(self, names: Iterable[str]) -> None:
        older = [self.path / name for name in names if (self.path / name).exists()]
        if not older:
            return
        at = time.strftime("%Y%m%d-%H%M%S", time.gmtime(max(path.stat().st_mtime for path in older)))
        number, shelf = 1, self.path / PREVIOUS / at
        while shelf.exists():
            number, shelf = number + 1, self.path / PREVIOUS / f"{at}-{number}"
        shelf.mkdir(parents=True)
        for path in older:
            path.rename(shelf / path.name)
        self.older_run = shelf
        self.removed = tuple(_remove_oldest(self.path / PREVIOUS, last=shelf.name))

    def _try_to_write(self) -> None:
        """Find a full disk now, not when the verdict is due."""
        probe = self.path / PROBE
        probe.unlink(missing_ok=True)  # of a run that was killed
        try:
            with os.fdopen(os.open(probe, NEW, 0o644), "wb") as file:
                file.write(b"\0" * 65536)
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)


def _remove_oldest(previous: Path, *, last: str) -> Iterator[str]:
    """Remove what a run wrote of all but the newest :data:`KEPT_RUNS` runs; the names of their folders.

    ``last`` is the newest, whatever its files say: somebody may have set the clock back.

    A folder is a run's if it has a journal or results: of a run that goes on, only the logs move. What somebody else put there
    stays, and so does a link.
    """
    shelves = [one for one in previous.iterdir() if SHELF.match(one.name) and one.is_dir() and not one.is_symlink()]
    shelves.sort(key=lambda one: (one.name == last, _turn(one.name)), reverse=True)
    runs = [one for one in shelves if any((one / name).exists() for name in (JOURNAL, RESULTS))]
    for shelf in shelves[shelves.index(runs[KEPT_RUNS - 1]) + 1 :] if len(runs) > KEPT_RUNS else ():
        with contextlib.suppress(OSError):  # it holds something else, or may not be changed
            for path in (shelf / name for name in RUN_FILES if os.path.lexists(shelf / name)):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            shelf.rmdir()
            yield shelf.name


def _turn(name: str) -> tuple[str, int]:
    """``20261126-120000-2`` as its time and its number among those of that second."""
    day, at, *number = name.split("-")
    return f"{day}-{at}", int(number[0]) if number else 0


def is_replaceable(file: Path) -> bool:
    """Whether a report may replace what is there: a regular file, or nothing yet.

    A link, a device or a pipe stays what it is. What is written goes through it, as pytest writes.
    """
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except OSError:
        return True  # nothing yet, or nothing that can be written


def require_unread(file: Path, read: Iterable[Path]) -> None:
    """Make sure that a report replaces no input, by whatever name or link: none of ``read``, no Python file, no record.

    Raises:
        ConfigurationError: it would.
    """
    place = _place_of(file)
    same = next((one for one in read if _place_of(one) == place), None)
    if same is None and isinstance(place, tuple) and os.path.realpath(file).endswith((".py", f"/{JOURNAL}", f"/{RESULTS}")):
        same = file
    if same is not None:
        why = f"it would replace {same}, an input or another report; choose another name"
        raise ConfigurationError(f"the report {file} cannot be written: {why}")


def require_apart(reports: Iterable[Path | None], *, folder: Path, read: Iterable[Path], emptied: Path | None = None) -> None:
    """Make sure that no report of a run takes the place of an input, or of another report, and that none is removed.

    Args:
        reports: where the user wants reports besides those in the results directory; None: nowhere.
        folder: the results directory, whose files may be inputs no more than the others may.
        read: the inputs.
        emptied: the folder that pytest empties for the temporary folders of tests; None: a new one.

    Raises:
        ConfigurationError: one would.
    """
    inputs, cleared = [*read], Path(os.path.realpath(emptied or os.devnull))
    parts = [Path(os.path.realpath(folder)) / name for name in ("", *RUN_FILES, PREVIOUS)]
    if parts[0].is_relative_to(cleared) or any(cleared.is_relative_to(part) for part in parts[1:]):
        raise ConfigurationError(f"pytest empties --basetemp={emptied}, and {folder}, where the run writes; keep them apart")
    for name in RUN_FILES:
        own = os.path.realpath(folder / name)
        moved = next((one for one in inputs if Path(os.path.realpath(one)).is_relative_to(own)), None)
        if moved is not None:
            raise ConfigurationError(f"{moved} lies where the run writes: {folder / name}; keep it elsewhere")
    taken = [folder / JOURNAL, folder / RESULTS, folder / REPORT]
    for file in filter(None, reports):
        if is_replaceable(Path(os.path.realpath(file))):  # a device or a pipe replaces nothing
            require_unread(file, [*inputs, *taken])
            taken.append(file)


def _place_of(file: Path) -> tuple[int, int] | str:
    """What is equal for two names of one file; of one that is not there yet, or cannot be looked at, a name."""
    try:
        found = file.stat()
    except OSError:
        return os.path.realpath(file)
    return found.st_dev, found.st_ino


def require_writable(file: Path) -> None:
    """Make sure that a report can be written there, and leave an older one as it is.

    A pipe or a device is not opened: that could wait for a reader, or be taken for a report.

    Raises:
        ConfigurationError: it cannot.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not is_replaceable(file):
            _require_writable_through(file)
        elif file.exists():
            file.open("ab").close()
        else:
            with contextlib.suppress(FileExistsError):  # another run made it since we looked: so it can be written
                os.close(os.open(file, NEW, 0o644))
                file.unlink(missing_ok=True)
    except OSError as error:
        why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror  # FileExistsError: of its folder
        raise ConfigurationError(f"the report {file} cannot be written: {why}") from None


def _require_writable_through(file: Path) -> None:
    """The same for a link, a device or a pipe."""
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:  # a link to a file that is made when the report is written
        target = Path(os.path.realpath(file))
        if target.parent.is_dir() and os.access(target.parent, os.W_OK):
            return
        raise
    if not any(is_kind(mode) for is_kind in WRITTEN_THROUGH):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "it is a directory" if stat.S_ISDIR(mode) else "it is a disk or a socket")
    if not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def write_report(file: Path, text: str) -> None:
    """Write a report where a user wants it: atomically, or through the link, device or pipe that is there.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if is_replaceable(file):
        write_atomically(file, text)
    else:
        file.write_text(text, encoding="utf-8")


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is either the old one or the whole new one, whatever happens.

    Raises:
        OSError: it cannot be written, or there is a link in its place or in that of the temporary file.
    """
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A new file beside ``path`` to write to, which takes its place at the end, unless anything is raised.

    Raises:
        OSError: it cannot be made, or there is a link in its place or in that of the temporary file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    for one in (path, temporary):
        if one.is_symlink():
            raise OSError(errno.ELOOP, f"{one.name} {IS_LINK}", str(one))
    temporary.unlink(missing_ok=True)  # of a process that was killed
    os.close(os.open(temporary, NEW, 0o644))
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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


def require_unused(path: Path) -> None:
    """Check that no run holds a results directory, and that it can be written.

    Raises:
        ConfigurationError: one does, or it cannot.
    """
    with _writing(path), results_lock(path):
        pass


def is_in_use(path: Path) -> bool:
    """Whether a run, also one of this process, holds a results directory. Nothing is made there."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def require_takeable(path: Path) -> None:
    """Check early that a run could take a results directory, and leave everything as it is.

    Whether the disk is full is seen when the directory is taken.

    Raises:
        ConfigurationError: it is no directory, cannot be made or written to, holds a link, or another run holds it.
    """
    require_no_links(path)
    if is_in_use(path):
        raise ConfigurationError(f"the results directory {path} is in use by another run{OWN_DIRECTORY}")
    there = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    with _writing(path):
        if there == path and not path.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        tempfile.TemporaryDirectory(dir=there, prefix=f"{PROBE}-").cleanup()


def _take_lock(path: Path, *, advice: str = "") -> int:
    """The open and locked lock file of a directory. The system releases the lock however the process ends.

    The package filelock is not used: where there is no ``flock``, its lock is a file that a killed run leaves behind.
    """
    require_no_links(path)
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigurationError(f"the results directory {path} is in use by another run{advice}") from None
    return lock
