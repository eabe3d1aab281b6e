"""The clock of the rates: wall time over everything that a user waits for, by windows of steps.

Rows, batching, copies, clipping, the optimiser, saving and the waits between windows lie inside. Compiling, capturing and
the checks, which are no training, lie outside.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steps ``first`` to ``last`` - 1 on this rank: ``tokens`` without padding, ``positions`` with it.

    ``began_s`` and ``ended_s`` are of ``time.monotonic``. ``seconds`` is the time between, less what lay outside.
    """

    first: int
    last: int
    tokens: int
    positions: int
    seconds: float
    began_s: float
    ended_s: float

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.seconds / (self.last - self.first)


ENOUGH_WINDOWS = 8
"""So many timed windows tell how far they lie apart."""


@dataclass(slots=True)
class Clock:
    """Runs from ``start`` on. Each ``close`` makes a Window of the time since the last one.

    ``ahead`` is the number of steps for which rows may lie ready: rows made while layers were compiled. ``enough_s``: what is
    trained for its rate alone ends early where its steps take longer in all; None for what has to learn.
    """

    ahead: int = 0
    enough_s: float | None = None
    windows: list[Window] = field(default_factory=list)
    _since_s: float = 0.0
    _outside_s: float = 0.0

    def start(self, *, ahead: int) -> None:
        """Begin the first window now."""
        self.ahead, self._since_s, self._outside_s = ahead, time.monotonic(), 0.0

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Let the time of the block count for no window."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._outside_s += time.monotonic() - begin

    def close(self, steps: range, *, tokens: int, positions: int) -> Window:
        """End the window of ``steps``, whose work the device has finished, and begin the next one."""
        now = time.monotonic()
        window = Window(
            first=steps.start,
            last=steps.stop,
            tokens=tokens,
            positions=positions,
            seconds=now - self._since_s - self._outside_s,
            began_s=self._since_s,
            ended_s=now,
        )
        self.windows.append(window)
        self._since_s, self._outside_s = now, 0.0
        return window

    def is_enough(self, trained_s: float) -> bool:
        """Whether there are :data:`ENOUGH_WINDOWS` timed windows after ``trained_s``, which is the same on every rank."""
        return self.enough_s is not None and trained_s > self.enough_s and len(self.timed()) >= ENOUGH_WINDOWS

    def timed(self) -> Sequence[Window]:
        """The windows that a rate is made of.

        The first is left out, and those whose rows may have been made before it ended: they would hide a slow loader.
        A run too short for that leaves out the first alone, if there is another.
        """
        if len(self.windows) < 2:
            return self.windows
        settled = [window for window in self.windows[1:] if window.first >= self.windows[0].last + self.ahead]
        return settled or self.windows[1:]
