"""The rows of the next steps, made while the GPU works.

Rows are made in threads. They share the interpreter lock with the training thread, which mostly waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_smoke.data.batches import Row

Maker = Callable[[int], "list[Row]"]


@dataclass(slots=True)
class Loader:
    """``take(step)`` returns the rows of a step, and has the rows of the next ``ahead`` steps made in the background."""

    make: Maker
    pool: ThreadPoolExecutor | None
    ahead: int
    last: int
    _coming: dict[int, Future[list[Row]]] = field(default_factory=dict)

    def take(self, step: int) -> list[Row]:
        """The result of ``make(step)``; raises its exceptions."""
        if self.pool is None:
            return self.make(step)
        for later in range(step, min(step + self.ahead + 1, self.last)):
            if later not in self._coming:
                self._coming[later] = self.pool.submit(self.make, later)
        return self._coming.pop(step).result()


@contextmanager
def loading(make: Maker, *, workers: int, ahead: int, last: int) -> Iterator[Loader]:
    """A loader of the steps before ``last`` with ``workers`` threads, which end with the block; 0 makes rows on demand."""
    if workers == 0:
        yield Loader(make, None, 0, last)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="rows") as pool:
        try:
            yield Loader(make, pool, ahead, last)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
