"""What the next steps need, made while the GPU works: rows, and their batches in page-locked memory.

It is made in threads. They share the interpreter lock with the training thread, which gives it away at every launch of a
kernel. By default it would wait 5 ms each time to get it back; so the threads pass it on sooner.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SWITCH_S = 0.0002
"""How long a thread may keep the interpreter lock while another one wants it."""

Made = TypeVar("Made")
Value = TypeVar("Value")


@dataclass(slots=True)
class Loader(Generic[Made]):
    """``take(step)`` returns what ``make`` makes of a step, and has the next ``ahead`` steps made in the background."""

    make: Callable[[int], Made]
    pool: ThreadPoolExecutor | None
    ahead: int
    last: int
    side: ThreadPoolExecutor | None = None
    _coming: dict[int, Future[Made]] = field(default_factory=dict)

    def take(self, step: int) -> Made:
        """The result of ``make(step)``; raises its exceptions."""
        if self.pool is None:
            return self.make(step)
        for later in range(step, min(step + self.ahead + 1, self.last)):
            if later not in self._coming:
                self._coming[later] = self.pool.submit(self.make, later)
        return self._coming.pop(step).result()

    def beside(self, work: Callable[[], Value]) -> Callable[[], Value]:
        """A function that returns the result of ``work``, which runs in a thread meanwhile; without threads when asked."""
        return work if self.side is None else self.side.submit(work).result


@contextmanager
def loading(
    make: Callable[[int], Made], *, workers: int, ahead: int, last: int, begin: Callable[[], None] = lambda: None
) -> Iterator[Loader[Made]]:
    """A loader of the steps before ``last`` with ``workers`` threads, which end with the block; 0 makes steps on demand.

    ``begin`` is called once in each thread.
    """
    if workers == 0:
        yield Loader(make, None, 0, last)
        return
    before_s = sys.getswitchinterval()
    with (
        ThreadPoolExecutor(workers, thread_name_prefix="rows", initializer=begin) as pool,
        ThreadPoolExecutor(1, thread_name_prefix="checks", initializer=begin) as side,  # waits for no rows
    ):
        sys.setswitchinterval(SWITCH_S)
        try:
            yield Loader(make, pool, ahead, last, side)
        finally:
            sys.setswitchinterval(before_s)
            pool.shutdown(wait=False, cancel_futures=True)
