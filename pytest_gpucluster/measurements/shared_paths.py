"""What hosts see of each other's files below paths that they are said to share.

Each host writes a file (``leave_mark``), then each host reads the digests of all files (``read_marks``). No process group is
needed: the controller asks for the reading when every host has written and closed its file. Then all hosts count up one
number under a lock (``count_under_lock``, by fcntl and by flock), read a file while one of them replaces it by rename
(``replace_file``), and each makes many small files (``small_files``). What they write lies in folders of their own
(:mod:`own_folder`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import random
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpucluster.inventory import program
from pytest_gpucluster.inventory.host import Mount, read_mount
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.measurements import own_folder, progress
from pytest_gpucluster.protocol.functions import without_device

MARK_BYTES = 4096
SMALL_BYTES = 4096
POLL_S = 0.01
READY_S = 5.0
"""How long a host waits for the others before it counts."""
PATIENCE_S = 2.0
"""How much longer a host counts that never had to wait: another one may be held up."""
HELD_S = 0.001
"""How long the lock is held, so that another host that does not respect it comes between."""
_MARK, _LOCK, _FLOCK, _READY, _STATE, _NEXT = "mark", "lock", "flock", "ready", "state", "next"
_IS_READY = b"1"
_ABSENT = "does not show"
_DIGITS = 20
_COPIES = 200
"""So often the file that is replaced has its number: a reader between two of them would see both."""
QUOTA_S = 5.0
_WORDS = {
    errno.ENOENT: "is not there",
    errno.ENOTDIR: "is a file, no folder",
    errno.EACCES: "gives no permission",
    errno.EPERM: "gives no permission",
    errno.EROFS: "is mounted read-only",
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is full: the quota is used up",
    errno.ESTALE: "is stale: its server does not know it any more",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PathMark:
    """A path as one host finds it, and the file that it wrote there.

    ``problem``: why the path cannot be used, None if it can. ``folder`` is the host's own below the path, ``digest`` the
    SHA-256 of the file. ``leftovers`` are the folders of killed runs that were removed. ``free_inodes`` is None where the
    file system counts none. ``quota`` is what the file system allows this user, in the words of ``lfs quota`` or ``quota``.
    """

    problem: str | None
    mount: Mount | NotAvailable
    folder: str = ""
    digest: str = ""
    free_gib: float | None = None
    free_inodes: int | None = None
    quota: str = ""
    leftovers: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarksSeen:
    """What one host sees of all hosts' files below one path.

    ``slowest_s`` is the longest time until a file's digest was right, counted from the call, which begins when all files are
    closed; None if none ever was. ``missed`` says, by folder, why a file was not seen in time; ``absent`` are those of these
    folders of which nothing was seen.
    """

    slowest_s: float | None
    missed: dict[str, str]
    absent: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockCount:
    """What one host did to the number that all hosts count up under a lock.

    ``updates`` is how often it added one, ``last`` the number it wrote last, ``waited`` how often another one had the lock.
    ``problem``: why it could not lock, None if it could. ``absent`` are the hosts' folders that showed no sign in time.
    """

    updates: int
    last: int
    waited: int
    problem: str | None = None
    absent: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """What one host saw of a file while another one replaced it by rename, again and again.

    ``replaced`` is how often this host replaced it, ``reads`` how often it read it. ``faults`` has what a rename never shows,
    each with how often: no file, a part of it, or parts of two. ``stale`` are reads of a file that was gone meanwhile (ESTALE),
    as NFS has them. ``problem``: why it could not replace or read the file, None if it could.
    """

    replaced: int
    reads: int
    faults: dict[str, int]
    stale: int
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallFiles:
    """Small files a second: each is made, written and closed, then read, then removed. ``files`` were done in ``seconds``."""

    files_s: float
    files: int
    seconds: float


@without_device
def leave_mark(*, path: str, run: str) -> PathMark:
    """Write a new file below a path, in this host's own folder, and close it. A path that cannot be used has a problem."""
    progress.report(f"write to {path}")
    try:
        return _leave_mark(Path(path), run)
    except OSError as error:
        return PathMark(problem=in_words(error), mount=_mount(path))


def _mount(path: str) -> Mount | NotAvailable:
    try:
        return read_mount(Path(path))
    except (OSError, RuntimeError) as error:
        return NotAvailable(str(error))


def _leave_mark(path: Path, run: str) -> PathMark:
    if not stat.S_ISDIR(path.stat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    leftovers = own_folder.remove_leftovers(path)
    contents = os.urandom(MARK_BYTES)
    with own_folder.find_own_folder(path, run) or own_folder.make_own_folder(path, run) as own:
        for name, copies in ((_LOCK, 1), (_FLOCK, 1), (_READY, 1), (_STATE, _COPIES)):
            with contextlib.suppress(FileExistsError), own.file(name, "xb") as file:
                file.write(b"0" * _DIGITS * copies)
        with own.file(_MARK, "wb") as mark:
            mark.write(contents)
            mark.flush()
            os.fsync(mark.fileno())
        system = os.statvfs(own.descriptor)
    mount = _mount(str(path))
    return PathMark(
        problem=None,
        mount=mount,
        quota=read_quota(path, mount),
        folder=own.path.name,
        digest=hashlib.sha256(contents).hexdigest(),
        free_gib=system.f_bavail * system.f_frsize / 2**30,
        free_inodes=system.f_favail if system.f_files else None,
        leftovers=leftovers,
    )


def read_quota(path: Path, mount: Mount | NotAvailable) -> str:
    """What the file system allows this user, by ``lfs`` for Lustre, else by ``quota``; why it is not known."""
    if isinstance(mount, NotAvailable):
        return str(mount)
    tool, arguments = "quota", ["-w", "-p", "-v"]
    if mount.kind == "lustre":
        tool, arguments = "lfs", ["quota", "-q", "-u", str(os.getuid()), str(path)]
    ended = program.run_by_name(tool, arguments, within_s=QUOTA_S)
    if isinstance(ended, NotAvailable):
        return f"not read: {ended.why}"
    lines = [" ".join(line.split()) for line in ended.printed.splitlines()]
    own = [line for line in lines if tool == "lfs" or line.startswith(f"{mount.source} ")]
    return "; ".join(own) or (f"not read: {ended.gist}" if ended.exit_code else "none for this user")


@without_device
def read_marks(*, path: str, digests: dict[str, str], within_s: float) -> MarksSeen:
    """Read the files of all hosts until each has the digest it should have, or ``within_s`` is over.

    Each file is tried in turn, those that are not right again and again. A first attempt counts for its own time.

    Args:
        path: that is shared.
        digests: of the file in each host's folder.
        within_s: an attempt that begins so late is the last one, in seconds since the call.
    """
    progress.report(f"read from {path}")
    start_s = time.monotonic()
    waiting, seen_s, missed = dict(digests), [], {}
    is_first = True
    while waiting:
        for folder, digest in list(waiting.items()):
            begun_s = time.monotonic()
            why = _wrong(Path(path) / folder, digest)
            took_s = time.monotonic() - (begun_s if is_first else start_s)
            if why is None and took_s <= within_s:
                seen_s.append(took_s)
                del waiting[folder]
            elif why is None or begun_s - start_s >= within_s:
                missed[folder] = why or f"came after {took_s:.1f} s"
                del waiting[folder]
        is_first = False
        time.sleep(POLL_S if waiting else 0)
    absent = [folder for folder, why in missed.items() if why == _ABSENT]
    return MarksSeen(slowest_s=max(seen_s, default=None), missed=missed, absent=absent)


def _wrong(folder: Path, digest: str) -> str | None:
    """Why the file in a host's folder is not what the host wrote; None if it is."""
    try:
        contents = _read(folder, _MARK)
    except OSError as error:
        return _ABSENT if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    return None if hashlib.sha256(contents).hexdigest() == digest else f"shows other contents ({len(contents)} bytes)"


def _read(folder: Path, name: str) -> bytes:
    """A small file in another host's folder, which is opened anew: a client of NFS asks its server then."""
    with own_folder.Folder(folder) as theirs:
        return theirs.read(name, MARK_BYTES + 1)


@without_device
def count_under_lock(*, path: str, run: str, parties: list[str], seconds: float, flock: bool = False) -> LockCount | None:
    """Count up one number with the other hosts, each time under an exclusive lock of the file that holds it.

    Args:
        path: that is shared.
        run: that made the folders.
        parties: the folders of the hosts that take part; the number lies in the first one's. None is returned elsewhere.
        seconds: how long to count, once all are there.
        flock: lock by flock, and not by fcntl.

    Raises:
        NotOwnFolderError: a folder that is written to is not the one that this run made.
    """
    progress.report(f"lock below {path}")
    folders = [Path(path) / folder for folder in parties]
    own = next((folder for folder in folders if own_folder.is_own_name(folder.name)), None)
    return _count(own, folders, run, seconds, flock=flock) if own is not None else None


def _count(own: Path, folders: list[Path], run: str, seconds: float, *, flock: bool) -> LockCount:
    updates = last = waited = 0
    absent: list[str] = []
    problem = None
    try:
        with own_folder.open_noted(own, run) as folder, folder.file(_READY, "wb") as ready:
            ready.write(_IS_READY)
        with own_folder.open_noted(folders[0], run) as first, first.file(_FLOCK if flock else _LOCK, "r+b") as file:
            absent = _absent(folders)
            end_s = time.monotonic() + seconds
            latest_s = end_s + (PATIENCE_S if len(folders) > 1 else 0)
            while time.monotonic() < (end_s if waited else latest_s):
                number = _add_one(file.fileno(), fcntl.flock if flock else fcntl.lockf)
                updates, last, waited = (updates, last, waited + 1) if number is None else (updates + 1, number, waited)
                time.sleep(HELD_S * random.random())
    except (OSError, ValueError) as error:
        problem = str(error) if isinstance(error, ValueError) else error.strerror or str(error)
    return LockCount(updates=updates, last=last, waited=waited, problem=problem, absent=absent)


def _absent(folders: list[Path]) -> list[str]:
    """The folders in which nobody is ready to count within :data:`READY_S`."""
    end_s = time.monotonic() + READY_S
    while True:
        absent = [folder.name for folder in folders if _read(folder, _READY) != _IS_READY]
        if not absent or time.monotonic() > end_s:
            return absent
        time.sleep(POLL_S)


def _add_one(file: int, lock: Callable[[int, int], None]) -> int | None:
    """The number after one was added, or None if another one has the lock."""
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return None
    try:
        number = int(os.pread(file, _DIGITS, 0)) + 1
        time.sleep(HELD_S)
        os.pwrite(file, f"{number:0{_DIGITS}d}".encode("ascii"), 0)
        os.fsync(file)
    finally:
        lock(file, fcntl.LOCK_UN)
    return number


@without_device
def replace_file(*, path: str, run: str, parties: list[str], seconds: float) -> Replaced | None:
    """Read a file in the first host's folder while that host replaces it by rename. A reader sees the old or the new one.

    Args:
        path: that is shared.
        run: that made the folders.
        parties: the folders of the hosts that take part. None is returned elsewhere.
        seconds: how long.

    Raises:
        NotOwnFolderError: the folder that is written to is not the one that this run made.
    """
    progress.report(f"rename below {path}")
    if not any(map(own_folder.is_own_name, parties)):
        return None
    folder, ends_s = Path(path) / parties[0], time.monotonic() + seconds
    is_writer = own_folder.is_own_name(parties[0])
    try:
        with ThreadPoolExecutor(1) as threads:
            replacing = threads.submit(_replace, folder, run, ends_s) if is_writer else None
            reads, stale, faults = _watch(folder, ends_s)
            replaced = replacing.result() if replacing is not None else 0
    except OSError as error:
        return Replaced(replaced=0, reads=0, faults={}, stale=0, problem=error.strerror or str(error))
    return Replaced(replaced=replaced, reads=reads, faults=faults, stale=stale)


def _replace(folder: Path, run: str, ends_s: float) -> int:
    """Write the next number into a file of another name, and rename that over the file; how often."""
    number = 0
    with own_folder.open_noted(folder, run) as own:
        while time.monotonic() < ends_s:
            number += 1
            with own.file(_NEXT, "wb") as file:
                file.write(f"{number:0{_DIGITS}d}".encode("ascii") * _COPIES)
            os.rename(_NEXT, _STATE, src_dir_fd=own.descriptor, dst_dir_fd=own.descriptor)
    return number


def _watch(folder: Path, ends_s: float) -> tuple[int, int, dict[str, int]]:
    """How often the file was read, how often it was stale, and what it showed that no rename shows."""
    reads = stale = 0
    faults: dict[str, int] = {}
    while not reads or time.monotonic() < ends_s:
        reads += 1
        try:
            with own_folder.Folder(folder) as theirs:
                contents = theirs.read(_STATE, _DIGITS * _COPIES + 1)
        except FileNotFoundError:
            faults["no file"] = faults.get("no file", 0) + 1
            continue
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            stale += 1
            continue
        is_whole = len(contents) == _DIGITS * _COPIES
        if not is_whole or contents != contents[:_DIGITS] * _COPIES:
            fault = "parts of two files" if is_whole else "a part of the file"
            faults[fault] = faults.get(fault, 0) + 1
    return reads, stale, faults


@without_device
def small_files(*, path: str, count: int, within_s: float) -> SmallFiles:
    """Make, read and remove many files of 4 KiB below a path, in a folder of this rank's own.

    Args:
        path: an existing folder.
        count: how many files, at most.
        within_s: no further file is begun after so many seconds.

    Raises:
        OSError: the path cannot be used.
        ArithmeticError: a file does not hold what was written.
    """
    progress.report(f"small files below {path}")
    with own_folder.within_own_folder(Path(path)) as own:
        return _turn_over(own, count, within_s)


def _turn_over(own: own_folder.Folder, count: int, within_s: float) -> SmallFiles:
    """Make files, then read them all, then remove them all."""
    contents = os.urandom(SMALL_BYTES)
    start_s = time.perf_counter()
    made: list[str] = []
    while len(made) < count and (not made or time.perf_counter() - start_s < within_s):
        made.append(str(len(made)))
        with own.file(made[-1], "xb") as file:
            file.write(contents)
    for name in made:
        with own.file(name, "rb") as file:
            if file.read() != contents:
                raise ArithmeticError(f"{own.path / name} does not hold what was written")
    for name in made:
        own.unlink(name)
    seconds = time.perf_counter() - start_s
    return SmallFiles(files_s=len(made) / seconds, files=len(made), seconds=seconds)


@without_device
def clear_path(*, path: str, run: str) -> str | None:
    """Remove this host's own folder below a path; why it could not be removed, None if it was."""
    progress.report(f"remove from {path}")
    try:
        own = own_folder.find_own_folder(Path(path), run)
        if own is not None:
            with own:
                own_folder.remove_own_folder(own)
    except OSError as error:
        return in_words(error)
    return None


def in_words(error: OSError) -> str:
    """What an error of a file system says about the path."""
    return _WORDS.get(error.errno or 0, f"cannot be used: {error.strerror or error}")
