"""A folder of this rank's own below a path of the user's. Nothing else below that path is touched.

The name holds the run and the rank: ``.gpucluster-0123456789abcdef-rank3``. The folder is removed at the end. A run that was
killed leaves the folder; the next run on the same host removes it, because no process of the killed run is alive. A folder of
a host that is never asked again is removed after a day, by any host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = ".gpucluster-"
OWNER = "owner.json"
ABANDONED_S = 86400.0
"""No run works in one of its folders for so long without writing there."""
_NAME = re.compile(r"\.gpucluster-[0-9a-f]{16}-rank\d+")
_PROC = Path("/proc")
_START_TIME = 21
"""Where /proc/PID/stat has the start time, counted from 0; a pid with another start time is another process."""


def name_of(run: str, rank: int) -> str:
    """The folder's name; ``run`` is 16 hexadecimal digits."""
    return f"{PREFIX}{run}-rank{rank}"


def own_folder(path: Path, run: str) -> Path:
    """Where this rank's folder is, made or not."""
    return path / name_of(run, int(os.environ.get("RANK", "0")))


def make_own_folder(path: Path, run: str) -> Path:
    """Make this rank's folder, unless it is there, and note which process owns it.

    Raises:
        OSError: it cannot be made: no such path, no permission, a full disk.
    """
    folder = own_folder(path, run)
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / OWNER).write_text(json.dumps(_owner(os.getppid())), encoding="ascii")
    return folder


def remove_own_folder(path: Path, run: str) -> None:
    """Remove this rank's folder with all that it holds, if it is there.

    Raises:
        OSError: it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(own_folder(path, run))


@contextlib.contextmanager
def within_own_folder(path: Path, run: str) -> Iterator[Path]:
    """A folder of this rank's own, removed at the end, whatever happens in between."""
    try:
        yield make_own_folder(path, run)
    finally:
        remove_own_folder(path, run)


def remove_leftovers(path: Path) -> list[str]:
    """Remove the folders of runs that were killed; their names.

    Raises:
        OSError: the path cannot be listed.
    """
    names = [entry.name for entry in os.scandir(path) if _NAME.fullmatch(entry.name)]
    removed = [name for name in names if _is_left_over(path / name)]
    for name in removed:
        shutil.rmtree(path / name, ignore_errors=True)  # another rank of this host may be faster
    return removed


def _is_left_over(folder: Path) -> bool:
    """Whether a folder is ours, and nobody works in it any more."""
    try:
        found = folder.lstat()
        newest_s = max([found.st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(folder))])
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    return _has_ended(_read_owner(folder)) or time.time() - newest_s > ABANDONED_S


def _read_owner(folder: Path) -> dict[str, str]:
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _has_ended(owner: dict[str, str]) -> bool:
    """Whether the process that owns a folder was on this host, among the processes seen from here, and is gone."""
    here = _owner(os.getpid())
    if not all(here[part] and owner.get(part) == here[part] for part in ("boot", "pids")):
        return False
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
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    words = ["", "", *text.rpartition(")")[2].split()]  # the name, in brackets, may hold anything
    return "" if len(words) <= _START_TIME or words[2] in ("Z", "X") else words[_START_TIME]
