"""A lock between the processes of a node: a file with ``flock``, waited for with a deadline.

The system releases the lock however its holder ends, so a holder is alive. The file names the holder. The package
filelock is not used: its older releases truncate the file while they wait, which erases that name, and without ``flock``
its newer ones fall back to a lock file, which a killed holder leaves behind.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from finetune_smoke.settings.config import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SPEAK_AFTER_S = 3.0
"""A process that waits longer reports whom it waits for."""
POLL_S = 0.1


@contextmanager
def file_lock(path: Path, *, deadline_s: float, activity: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock ``path``.

    Args:
        path: the lock file, in a folder that exists.
        deadline_s: how long to wait for another holder.
        activity: what a holder does meanwhile, for messages: "making the rows".
        say: called once with the holder's name if the wait is long.

    Raises:
        InputError: another process still holds it after ``deadline_s``, or the file system has no locks.
        OSError: the file cannot be written.
    """
    with path.open("a+") as lock:
        _take(lock, path, deadline_s, activity, say)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield
        lock.truncate(0)


def _take(lock: TextIO, path: Path, deadline_s: float, activity: str, say: Callable[[str], None]) -> None:
    begin, spoken = time.monotonic(), False
    while not _taken(lock, path):
        waited_s = time.monotonic() - begin
        if waited_s >= deadline_s:
            raise InputError(
                f"{_holder(path)} is {activity} and has held {path} for more than {deadline_s:.0f} s: wait until it is done "
                "and start again, end it if it hangs (its lock goes with it), or name another folder"
            )
        if waited_s >= SPEAK_AFTER_S and not spoken:
            say(f"waiting for {_holder(path)}, which is {activity} and holds {path}; at most {deadline_s:.0f} s")
            spoken = True
        time.sleep(POLL_S)


def _taken(lock: TextIO, path: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise InputError(f"{path} cannot be locked ({error.strerror}): name a folder on a disk of this node") from error
    return True


def _holder(path: Path) -> str:
    """The name that the holder wrote right after it took the lock."""
    try:
        return path.read_text()[:200] or "another process"
    except (OSError, ValueError):
        return "another process"
