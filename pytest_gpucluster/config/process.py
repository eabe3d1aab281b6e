"""The limit of open files: the process that hosts the store of a run needs one for each connection to it.

Python's garbage collector, off or seldom for a while.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.text import counted

SPARE_FILES = 64
"""What a process that hosts the store has open besides: torchrun about 20, pytest with its plugins less than 50."""


def require_open_files(num_connections: int, *, num_ranks: int, pid: int = 0) -> None:
    """Raise the soft limit of open files of a process (0: this one) to the hard one, if it is too low to host a store.

    ``num_connections`` are those of so many ranks. More may come: of a node whose agents cannot share what they read.

    A store at its limit says nothing: ranks that come later time out. Of a process that does not show its limit nothing is
    known, and nothing is refused.

    Raises:
        ConfigurationError: the limit is too low and cannot be raised from here.
    """
    needed = num_connections + SPARE_FILES
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    except OSError:
        return
    if _allows(soft, needed):
        return
    with suppress(OSError):
        if _allows(hard, needed):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
            return
    raise ConfigurationError(
        f"the process that hosts the store needs {counted(needed, 'open file')} "
        f"for the {counted(num_connections, 'connection')} of {num_ranks} ranks"
        f", and may have {soft} (hard limit {hard}): raise the limit on node 0 before the start (ulimit -n {needed})"
    )


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed


SELDOM = (5_000, 10, 10)
"""After so many new objects, so many searches among them, and so many among those that stayed; Python's own are 700, 10, 10."""


@contextmanager
def collector_off() -> Iterator[None]:
    """What is made meanwhile stays until the end: looking for garbage in it again and again is a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def collect_seldom() -> Callable[[], None]:
    """What is there stays until the end, and so does most of what is made from now on. Returns what undoes the second."""
    gc.freeze()
    before = gc.get_threshold()
    if before[0]:  # 0: a host program has switched it off
        gc.set_threshold(*SELDOM)
    return partial(gc.set_threshold, *before)
