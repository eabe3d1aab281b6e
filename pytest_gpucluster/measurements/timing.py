"""Time of a callable on the current device: CUDA events on a GPU, the host's monotonic clock on a CPU.

Queueing and waiting are separate (:func:`queue_each`). So a measurement can queue its next case before it waits for
the current one, and the GPU never idles, cools or raises its clocks in between.

A :class:`Budget` makes a measurement over a slow link shorter, and not the run longer. All ranks of a group have to do the
same. So they agree: what counts is the clock of the slowest rank, exchanged by a collective. By their own clocks one rank
would stop where another one goes on, and that one would wait for ever.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from pytest_gpucluster.errors import GpuMemoryError
from pytest_gpucluster.text import counted

IN_FLIGHT = 8
"""Launches kept queued while a GPU is kept busy: enough never to run dry, few enough to stop in time."""
AT_THE_END = 2
"""Launches after the timed ones: what arrives is verified, and NCCL tells its choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds each of the timed calls took."""

    samples_s: list[float]

    @property
    def median_s(self) -> float:
        """The middle sample in seconds."""
        return statistics.median(self.samples_s)


def rounded(rate: float) -> float:
    """Six significant digits: by decimals, the rate of a small case on a busy CPU would become 0."""
    return float(f"{rate:.6g}")


def memory_error(text: str) -> MemoryError:
    """The error of too little memory on the current device: a GPU's is not the host's."""
    return GpuMemoryError(text) if torch.cuda.is_available() else MemoryError(text)


def current_device() -> torch.device:
    """The GPU this process has set, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_name() -> str:
    """Name of the current device: ``"NVIDIA H200"``, or ``"cpu"``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def gpu_uuid() -> str | None:
    """UUID of the current GPU as NVML spells it (``GPU-...``); None on a CPU, and for a rank for which torch has no GPU."""
    if not torch.cuda.is_available() or int(os.environ.get("LOCAL_RANK", "0")) >= torch.cuda.device_count():
        return None
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def gpu_uuids() -> list[str]:
    """UUIDs of all GPUs that torch shows, in its order."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(num_gpus)]


def synchronize() -> None:
    """Wait until the current GPU has finished all queued work; a CPU has none."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def keep_busy(call: Callable[[], object], *, seconds: float) -> int:
    """Run ``call`` back to back for ``seconds`` and return how often it ran.

    The first call loads and chooses kernels; its time does not count. On a GPU the last few launches are still queued
    on return, so that the next work follows without a gap.
    """
    call()
    synchronize()
    on_gpu = torch.cuda.is_available()
    launched = 1
    queued: deque[torch.cuda.Event] = deque()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        call()
        launched += 1
        if on_gpu:
            queued.append(_recorded_event())
            if len(queued) > IN_FLIGHT:
                queued.popleft().synchronize()
    return launched


def queue_each(
    call: Callable[[], object], *, iterations: int, meanwhile: Callable[[], None] = lambda: None
) -> Callable[[], Timing]:
    """Queue ``iterations`` calls, each between its own two events; the returned function waits and reads them.

    On a CPU the calls run at once and the returned function only returns their times. The returned function also calls
    ``meanwhile`` once: on a GPU when all calls are queued and the first has begun, so that it delays none of them.

    Raises:
        ValueError: ``iterations`` is below 1.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, not {iterations}")
    if torch.cuda.is_available():
        return _queue_events(call, iterations, meanwhile)
    samples_s = []
    for _ in range(iterations):
        start_s = time.perf_counter()
        call()
        samples_s.append(time.perf_counter() - start_s)

    def hand_over() -> Timing:
        meanwhile()
        return Timing(samples_s=samples_s)

    return hand_over


def time_each(call: Callable[[], object], *, iterations: int, meanwhile: Callable[[], None] = lambda: None) -> Timing:
    """Time each of ``iterations`` back-to-back calls with one wait at the end; ``meanwhile`` is called as they run."""
    return queue_each(call, iterations=iterations, meanwhile=meanwhile)()


def time_span(call: Callable[[], object], *, launches: int, meanwhile: Callable[[], None] = lambda: None) -> float:
    """Seconds per call of ``launches`` back-to-back calls between two events, gaps included.

    ``meanwhile`` is called as they run.
    """

    def span() -> None:
        for _ in range(launches):
            call()

    return time_each(span, iterations=1, meanwhile=meanwhile).samples_s[0] / launches


def host_seconds(call: Callable[[], object]) -> float:
    """Seconds of one call by the host's clock, until the GPU has finished it."""
    synchronize()
    start_s = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start_s


class Launches(NamedTuple):
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

    def words_beside(self, full: Launches, budget_s: float) -> str | None:
        """What became of ``full`` within so many seconds; None if nothing fell."""
        if self == full:
            return None
        now, before = (f"{counted(one.spans, 'span')} of {counted(one.each, 'launch', 'launches')}" for one in (self, full))
        return f"timed {now} instead of {before}, within {budget_s:.3g} s"


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
    rows = gather(torch.tensor(own_s, dtype=torch.float64, device=current_device()))
    return [max(column) for column in zip(*(one.tolist() for one in rows), strict=True)]


def gather(row: torch.Tensor) -> list[torch.Tensor]:
    """The rows of all ranks; every rank calls this."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return rows


def affordable(full: Launches, *, left_s: float, one_s: float) -> Launches:
    """As many launches of ``one_s`` as fit into ``left_s``: all, else shorter spans, else spans of one launch, and fewer.

    One span of one launch is left in any case. Launches that are so slow hide what queueing one costs.
    """
    room = left_s / one_s - AT_THE_END if one_s > 0 else math.inf
    if full.total <= room:
        return full
    for each in range(full.each - 1, 1, -1):
        fewer = Launches(warmup=1, spans=full.spans, each=each, singles=min(full.singles, each))
        if fewer.total <= room:
            return fewer
    spans = min(full.spans, max(1, math.floor((room - 1) / 2)))
    return Launches(warmup=1, spans=spans, each=1, singles=0)


def warm_up(call: Callable[[], object], full: Launches, budget: Budget) -> Launches:
    """Launch untimed, and return what the ranks agree to time within the budget; the first launch shows how long one takes."""
    if budget.seconds is None:
        agreed = full
    else:
        left_s, one_s = budget.left_s(host_seconds(call))
        agreed = affordable(full, left_s=left_s, one_s=one_s)
    for _ in range(agreed.warmup - (budget.seconds is not None)):
        call()
    return agreed


def _recorded_event(*, timing: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _queue_events(call: Callable[[], object], iterations: int, meanwhile: Callable[[], None]) -> Callable[[], Timing]:
    pairs = []
    for _ in range(iterations):
        start = _recorded_event(timing=True)
        call()
        pairs.append((start, _recorded_event(timing=True)))

    def read() -> Timing:
        pairs[0][0].synchronize()
        meanwhile()
        pairs[-1][1].synchronize()
        return Timing(samples_s=[start.elapsed_time(end) / 1000 for start, end in pairs])

    return read
