"""Another user of this host, without rights: a process that root starts and that gives up its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

STRANGER = 65534
ANSWER_S = 30.0
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")


def end_by_sigterm() -> None:
    """Let a pool end this process of it: a handler in Python, as coverage's, never runs where the signal precedes the wait."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _become_stranger() -> None:
    end_by_sigterm()
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)


@contextlib.contextmanager
def stranger() -> Iterator[Callable[..., Any]]:
    """What a process of another user returns or raises, for each function called in it. It keeps what it opens."""
    with multiprocessing.get_context("fork").Pool(1, initializer=_become_stranger) as pool:
        yield lambda work, *arguments: pool.apply_async(work, arguments).get(ANSWER_S)


@contextlib.contextmanager
def home_of_stranger() -> Iterator[Path]:
    """A folder that belongs to this user, below no folder of root's."""
    folder = Path(tempfile.mkdtemp(prefix="gpucluster-stranger-"))
    if os.geteuid() == 0:
        os.chown(folder, STRANGER, STRANGER)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def as_stranger(command: Sequence[str]) -> list[str]:
    """A command of the interpreter, run by this user where root runs the tests, else by the own user, who is no root either.

    The interpreter may lie in a home that only root may enter (pyenv): the command has mounts of its own, where all may.
    """
    if os.geteuid() != 0:
        return [*command]
    base = Path(sys.base_prefix)
    closed = next((one for one in [*reversed(base.parents), base] if not one.stat().st_mode & 0o001), None)
    if not REPOSITORY.stat().st_mode & 0o001 or (closed is not None and REPOSITORY.is_relative_to(closed)):
        pytest.skip(f"only root may enter {REPOSITORY}")
    opened = f"""
        at=$(mktemp -d) && mount --bind {base} $at && mount -t tmpfs -o mode=755 none {closed} &&
        mkdir -p {base} && mount --bind $at {base} || exit 99"""
    leave = f'exec setpriv --reuid={STRANGER} --regid={STRANGER} --clear-groups --bounding-set=-all --inh-caps=-all "$@"'
    return ["unshare", "--mount", "sh", "-c", f"{opened if closed else ''}\n{leave}", "sh", *command]
