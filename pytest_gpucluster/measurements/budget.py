"""How long a measurement may take: a slow link makes it shorter, and not the run longer.

All ranks of a group have to do the same. So they agree: what counts is the clock of the slowest rank, exchanged by a
collective. By their own clocks one rank would stop where another one goes on, and that one would wait for ever.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pytest_gpucluster.measurements import timing

if TYPE_CHECKING:
    from collections.abc import Callable

AT_THE_END = 2
"""Launches after the timed ones: what arrives is verified, and NCCL tells its choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """How often a collective is launched: ``warmup`` times untimed, then in ``spans`` of ``each`` back-to-back launches.

    With ``singles`` as many are timed one by one after each span. One more launch lines the ranks up before either.
    """

    warmup: int
    spans: int
    each: int
    singles: int

    @property
    def total(self) -> int:
        """All launches, untimed ones included."""
        return self.warmup + self.spans * (self.each + 1) + (self.spans * (self.singles + 1) if self.singles else 0)

    def words_beside(self, asked: Launches, budget_s: float) -> str | None:
        """What became of ``asked`` within so many seconds; None if nothing fell."""
        if self == asked:
            return None
        now, before = (f"{_counted(one.spans, 'span')} of {_counted(one.each, 'launch', 'es')}" for one in (self, asked))
        return f"timed {now} instead of {before}, within {budget_s:.3g} s"


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


class Budget:
    """Seconds from now on; None: as many as it takes.

    Every rank of the default group makes it, as it calls :meth:`left_s`: the ranks first wait for each other, so that what
    it takes to connect them is not counted.
    """

    def __init__(self, seconds: float | None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` gives seconds."""
        self.seconds = seconds
        self._clock = clock
        if seconds is not None:
            slowest(0.0)
        self._start_s = clock()

    def left_s(self, *measured_s: float) -> list[float]:
        """The seconds left, then the greatest of each of ``measured_s``: the slowest rank's, and the same on every rank.

        Every rank of the default group has to call this, if there is one. Without a budget nothing is exchanged.
        """
        if self.seconds is None:
            return [math.inf, *measured_s]
        spent_s, *others_s = slowest(self._clock() - self._start_s, *measured_s)
        return [self.seconds - spent_s, *others_s]


def slowest(*own_s: float) -> list[float]:
    """The greatest of each over all ranks of the default group; this process's own where there is no group."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return [*own_s]
    row = torch.tensor(own_s, dtype=torch.float64, device=timing.current_device())
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [max(column) for column in zip(*(one.tolist() for one in rows), strict=True)]


def affordable(asked: Launches, *, left_s: float, one_s: float) -> Launches:
    """As many launches of ``one_s`` as fit into ``left_s``: all, else shorter spans, else spans of one launch, and fewer.

    One span of one launch is left in any case. Launches that are so slow hide what queueing one costs.
    """
    room = left_s / one_s - AT_THE_END if one_s > 0 else math.inf
    if asked.total <= room:
        return asked
    for each in range(asked.each - 1, 1, -1):
        fewer = Launches(warmup=1, spans=asked.spans, each=each, singles=min(asked.singles, each))
        if fewer.total <= room:
            return fewer
    spans = min(asked.spans, max(1, math.floor((room - 1) / 2)))
    return Launches(warmup=1, spans=spans, each=1, singles=0)


def warm_up(call: Callable[[], object], asked: Launches, budget: Budget) -> Launches:
    """Launch untimed, and return what the ranks agree to time within the budget; the first launch shows how long one takes."""
    if budget.seconds is None:
        agreed = asked
    else:
        left_s, one_s = budget.left_s(timing.host_seconds(call))
        agreed = affordable(asked, left_s=left_s, one_s=one_s)
    for _ in range(agreed.warmup - (budget.seconds is not None)):
        call()
    return agreed
