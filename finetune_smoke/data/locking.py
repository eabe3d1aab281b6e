"""A lock between the processes of a node: a file with ``flock``, waited for with a deadline.

The system takes the lock back however its holder ends, so a holder is alive. The file says who that is.
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
"""Who waits longer says for whom; shorter waits are nobody's business."""
POLL_S = 0.1


@contextmanager
def held(path: Path, *, deadline_s: float, doing: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock ``path``, in whose folder files can be written; ``doing`` names what its holder is doing.

    Raises InputError if it is still held after ``deadline_s``, or on a file system without locks, and OSError if the
    file cannot be written.
    """
    with path.open("a+") as lock:
        _take(lock, path, deadline_s, doing, say)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        yield
        lock.truncate(0)


def _take(lock: TextIO, path: Path, deadline_s: float, doing: str, say: Callable[[str], None]) -> None:
    begin, spoken = time.monotonic(), False
    while not _taken(lock, path):
        waited_s = time.monotonic() - begin
        if waited_s >= deadline_s:
            raise InputError(
                f"{_holder(path)} is {doing} and has held {path} for more than {deadline_s:.0f} s: wait until it is done and "
                "start again, end it if it hangs (its lock goes with it), or name another folder"
            )
        if waited_s >= SPEAK_AFTER_S and not spoken:
            say(f"waiting for {_holder(path)}, which is {doing} and holds {path}; at most {deadline_s:.0f} s")
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
    """What the holder wrote, which it does right after taking the lock."""
    try:
        return path.read_text()[:200] or "another process"
    except (OSError, ValueError):
        return "another process"
