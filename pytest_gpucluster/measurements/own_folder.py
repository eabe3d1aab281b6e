"""A folder of this rank's own below a path of the user's. Nothing else below that path is touched.

Other users may write below that path too. So the name is random, ``.gpucluster-0123456789abcdef-rank3``, and the folder is made
or it is an error. Files are opened below the folder's descriptor, and no link is followed. A note in the folder says whose it
is. A folder without its note is neither written to nor removed.

The folder is removed at the end. A run that was killed leaves the folder; the next run on the same host removes it, because no
process of the killed run is alive. A folder of a host that is never asked again is removed after a day, by any host.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from pytest_gpucluster.errors import Part
from pytest_gpucluster.protocol.rank import stat_of

PREFIX = ".gpucluster-"
OWNER = "owner.json"
OWNER_BYTES = 4096
ABANDONED_S = 86400.0
"""No run works in one of its folders for so long without writing there."""
_NAME = re.compile(r"\.gpucluster-[0-9a-f]{16}-rank\d+")
_OTHERS_WRITE = 0o022
_PROC = Path("/proc")
_START_TIME = 19
"""Where /proc/PID/stat has the start time, counted from behind the name; a pid with another start time is another process."""


class NotOwnFolderError(Exception):
    """What has the name of this rank's folder is not the folder that this rank made."""

    blames: ClassVar[Part] = "host"


class Folder(contextlib.AbstractContextManager["Folder"]):
    """An open folder: files are opened below its descriptor, whatever its path leads to by then."""

    def __init__(self, path: Path) -> None:
        """Open a folder.

        Raises:
            OSError: it cannot be opened. Where the path is a link, it is no folder (ENOTDIR).
        """
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def open_at(self, name: str, flags: int) -> int:
        """A descriptor of a file in the folder. What is written to is looked at before it is emptied.

        Raises:
            OSError: it cannot be opened, or is a link (ELOOP).
            NotOwnFolderError: it is to be written to, and has a second name (a hard link), or is no file.
        """
        file = os.open(name, flags & ~os.O_TRUNC | os.O_NOFOLLOW, 0o600, dir_fd=self.descriptor)
        try:
            if flags & (os.O_WRONLY | os.O_RDWR):
                _check_file(os.fstat(file), self.path / name)
            if flags & os.O_TRUNC:
                os.ftruncate(file, 0)
        except BaseException:
            os.close(file)
            raise
        return file

    def file(self, name: str, mode: str) -> Any:
        """A file in the folder, as the builtin ``open`` gives it."""
        return open(name, mode, opener=self.open_at)

    def read(self, name: str, most_bytes: int) -> bytes:
        """The beginning of a file.

        Raises:
            OSError: it cannot be read, or is a link, or a pipe, which would be waited for.
        """
        if stat.S_ISFIFO(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode):
            raise OSError(errno.ESPIPE, "it is a pipe")
        with self.file(name, "rb") as file:
            return bytes(file.read(most_bytes))

    def names(self) -> list[str]:
        """What is in the folder."""
        return _names(self.descriptor)

    def unlink(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def __exit__(self, *_: object) -> None:
        """Close it."""
        os.close(self.descriptor)


def _check_file(found: os.stat_result, path: Path) -> None:
    """Refuse what is not a file of this folder alone: others may have put it there where a file system keeps no modes."""
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise NotOwnFolderError(f"{path} is not a file that this run made: it has another name elsewhere, or is no file")


def _names(folder: Path | int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def name_of(number: str, rank: int) -> str:
    """The name of a folder; ``number`` is 16 hexadecimal digits."""
    return f"{PREFIX}{number}-rank{rank}"


def is_own_name(name: str) -> bool:
    """Whether a folder of this name can be this rank's."""
    return _NAME.fullmatch(name) is not None and name.endswith(f"-rank{_own_rank()}")


def _own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def make_own_folder(path: Path, run: str) -> Folder:
    """Make a folder of this rank's own, with a note of the run and of the process that owns it.

    Raises:
        NotOwnFolderError: another one has taken its place.
        OSError: it cannot be made: no such path, no permission, a full disk.
    """
    folder = path / name_of(secrets.token_hex(8), _own_rank())
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise NotOwnFolderError(f"{folder} is there already, and this rank has not made it") from None
    with contextlib.ExitStack() as until_noted:
        own = until_noted.enter_context(_opened(folder))
        if own.names():
            raise NotOwnFolderError(f"{folder} is not the folder that this rank made: it is not empty")
        until_noted.callback(_remove_if_empty, own)
        _write_note(own, run)
        _check_owner(own)
        until_noted.pop_all()
    return own


def _opened(folder: Path) -> Folder:
    try:
        return Folder(folder)
    except NotADirectoryError:
        raise NotOwnFolderError(f"{folder} is a link or a file, and not the folder that this run made") from None


def _write_note(own: Folder, run: str) -> None:
    with own.file(OWNER, "x") as file:
        json.dump({"run": run, "folder": own.path.name, **_owner(os.getppid())}, file)


def _remove_if_empty(own: Folder) -> None:
    """Remove a folder that has nothing but its note."""
    with contextlib.suppress(OSError):
        own.unlink(OWNER)
        own.path.rmdir()


def _check_owner(own: Folder) -> None:
    """Whoever owns the note owns the folder. A server may show both as a user's that this process is not (root squash)."""
    folder, note = os.fstat(own.descriptor), os.stat(OWNER, dir_fd=own.descriptor, follow_symlinks=False)
    if folder.st_uid != note.st_uid:
        raise NotOwnFolderError(f"{own.path} belongs to user {folder.st_uid}, and its files to user {note.st_uid}")
    if folder.st_mode & _OTHERS_WRITE and _keeps_modes(own, folder):
        raise NotOwnFolderError(f"{own.path} has mode {folder.st_mode & 0o777:o}: other users can write there")


def _keeps_modes(own: Folder, found: os.stat_result) -> bool:
    """Whether this file system keeps the mode that a folder is given.

    SMB (CIFS) and many of FUSE do not: each folder has the mode that the mount's options say, often 0777. Whether the server
    lets others write there, nothing here shows. Where it may not be changed either, such a mount gives each new file the owner
    of its options, who is not this process (docs/decisions/0037).
    """
    try:
        os.fchmod(own.descriptor, 0o700)
        stays_open = bool(os.fstat(own.descriptor).st_mode & _OTHERS_WRITE)
        os.fchmod(own.descriptor, stat.S_IMODE(found.st_mode))  # whoever looks next has to see the same
    except OSError:
        return found.st_uid != _owner_of_new_file(own)
    return not stays_open


def _owner_of_new_file(own: Folder) -> int | None:
    """The user to whom a file belongs that this process makes there; None if it can make none."""
    name = f"owner-{secrets.token_hex(8)}"
    try:
        with own.file(name, "x") as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None
    finally:
        own.unlink(name)


def open_noted(folder: Path, run: str) -> Folder:
    """Open a folder that a rank of this run has made.

    Raises:
        NotOwnFolderError: its note does not say so, or it is a link, or others can write there.
        OSError: it cannot be opened.
    """
    with contextlib.ExitStack() as until_checked:
        found = until_checked.enter_context(_opened(folder))
        if _read_note(found).get("run") != run:
            raise NotOwnFolderError(f"{folder} is not the folder that this run made: it has no note of it")
        _check_owner(found)
        until_checked.pop_all()
    return found


def find_own_folder(path: Path, run: str) -> Folder | None:
    """This rank's folder of this run, which another call has made; None if there is none.

    Raises:
        NotOwnFolderError: it has its note, and another owner, or others can write there.
        OSError: the path cannot be listed.
    """
    for name in _listed(path):
        if is_own_name(name) and _has_note(path / name, run):
            return open_noted(path / name, run)
    return None


def _has_note(folder: Path, run: str) -> bool:
    with contextlib.suppress(OSError), Folder(folder) as found:
        return _read_note(found).get("run") == run
    return False


def _listed(path: Path) -> list[str]:
    """The names below a path; none where no folder can have been made."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        return _names(path)
    return []


def remove_own_folder(own: Folder) -> None:
    """Remove a folder with all that it holds, the note last.

    Raises:
        OSError: it cannot be removed.
    """
    for name in sorted(own.names(), key=lambda name: name == OWNER):
        own.unlink(name)
    with contextlib.suppress(FileNotFoundError):
        own.path.rmdir()


@contextlib.contextmanager
def within_own_folder(path: Path) -> Iterator[Folder]:
    """A folder of this rank's own, removed at the end, whatever happens in between."""
    with make_own_folder(path, secrets.token_hex(8)) as own:
        try:
            yield own
        finally:
            remove_own_folder(own)


def remove_leftovers(path: Path) -> list[str]:
    """Remove the folders of runs that were killed; their names.

    Raises:
        OSError: the path cannot be listed.
    """
    removed = []
    for name in _names(path):
        if _NAME.fullmatch(name):
            with contextlib.suppress(OSError), Folder(path / name) as found:
                if _is_left_over(found):
                    removed.append(name)
                    remove_own_folder(found)  # another rank of this host may be faster
    return removed


def _is_left_over(folder: Folder) -> bool:
    """Whether a folder is ours, and nobody works in it any more."""
    found, note = os.fstat(folder.descriptor), _read_note(folder)
    if not note or found.st_uid != os.geteuid():
        return False
    has_ended = _has_ended(note)
    if has_ended is not None:
        return has_ended
    with os.scandir(folder.descriptor) as entries:
        newest_s = max([found.st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in entries)])
    with within_own_folder(folder.path.parent) as new:  # the clock of the file system: this host's may be ahead
        return os.fstat(new.descriptor).st_mtime - newest_s > ABANDONED_S


def _read_note(folder: Folder) -> dict[str, str]:
    """The note in a folder; empty if it is none of this very folder, as in one that was given another name."""
    try:
        note = json.loads(folder.read(OWNER, OWNER_BYTES))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) and note.get("folder") == folder.path.name else {}


def _has_ended(owner: dict[str, str]) -> bool | None:
    """Whether the process that owns a folder is gone; None where it was on another host, or is not seen from here."""
    here = _owner(os.getpid())
    if not all(here[part] and owner.get(part) == here[part] for part in ("boot", "pids")):
        return None
    pid = owner.get("pid", "")
    return pid.isdecimal() and _started(int(pid)) != owner.get("started")


def _owner(pid: int) -> dict[str, str]:
    """A process, told from every other one: this boot of the host, the name space of its pids, the pid and its start.

    The owner of a folder is the parent of the worker, which lives until the run ends.
    """
    boot, pids = "", ""
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pids = str((_PROC / "self/ns/pid").readlink())
    return {"boot": boot, "pids": pids, "pid": str(pid), "started": _started(pid)}


def _started(pid: int) -> str:
    """When a live process started, in the kernel's ticks; empty if there is none."""
    words = stat_of(pid)
    return "" if len(words) <= _START_TIME or words[0] in ("Z", "X") else words[_START_TIME]
