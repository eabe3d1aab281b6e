"""Another user of this host, without rights: a process that root starts and that gives up its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
