"""How long the host takes to launch a kernel: what a slow, throttled or badly set host adds to every small operation."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from pytest_gpucluster.measurements import progress, timing


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLatency:
    """Times of the host in microseconds, each a median.

    ``launch_us`` is the time of one launch of many without waiting, ``round_trip_us`` that of a launch and the wait for its
    end. Both include torch's own part, some 2 us. ``repeats_us`` are the spans behind ``launch_us``.
    """

    launch_us: float
    round_trip_us: float
    repeats_us: list[float]
    device: str


def launch_latency(*, launches: int, repeats: int) -> LaunchLatency:
    """Launch a kernel on one element ``launches`` times in a row, ``repeats`` times; then wait for each.

    Raises:
        ValueError: nothing to repeat.
        ArithmeticError: a launch was lost.
    """
    if launches < 1 or repeats < 1:
        raise ValueError(f"{launches} launches, {repeats} times, are nothing to measure")
    counter = torch.zeros(1, dtype=torch.int64, device=timing.current_device())
    spans_us = [_row_us(counter, launches) for _ in range(repeats + 1)][1:]  # the first one loads the kernel
    progress.report("round trips", 0.5)
    trips_us = [_row_us(counter, 1) for _ in range(launches)]
    if (total := int(counter.item())) != (repeats + 2) * launches:
        raise ArithmeticError(f"{(repeats + 2) * launches} launches added up to {total}")
    return LaunchLatency(
        launch_us=statistics.median(spans_us),
        round_trip_us=statistics.median(trips_us),
        repeats_us=spans_us,
        device=timing.device_name(),
    )


def _row_us(counter: torch.Tensor, launches: int) -> float:
    """Microseconds of one launch; a single one is waited for within its time, several are not."""
    timing.synchronize()
    start_s = time.perf_counter()
    for _ in range(launches):
        counter.add_(1)
    if launches == 1:
        timing.synchronize()
    return round(1e6 * (time.perf_counter() - start_s) / launches, 4)
