"""Python's garbage collector, off or seldom for a while."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

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
