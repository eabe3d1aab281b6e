"""Measurements with a planted fault, for the self-test only; no criterion uses this module.

The fault is an argument of one call and lies in that call's own closures. It ends when the function returns or its worker
dies. All the rest is real: the product, the copy, the timer and the process group are those of the criteria.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from pytest_gpucluster.measurements import gemm, progress, timing

HANG_S = 600.0
"""How long a hung rank sleeps; its call's deadline is far shorter."""
CALIBRATION_CYCLES = 2_000_000
"""About 1 ms of spinning, from which the clock's rate is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedRates:
    """One rate for each repeat, in TFLOPS or TB/s, and the delay in us that this rank added to each operation of the repeat.

    A delay of 0 plants nothing. ``own_us`` is the operation's own time, measured before the repeats.
    """

    rates: list[float]
    own_us: float
    delay_us: list[float]
    device: str


class Operation(NamedTuple):
    """The timed call, and its rate in TFLOPS or TB/s if one call takes a second."""

    call: Callable[[], object]
    work: float


def _bf16(size: int) -> Operation:
    """The product that ``bf16_tflops`` times, of order ``size``."""
    return Operation(gemm.bf16_product(size), 2 * size**3 / 1e12)


def _fp32(size: int) -> Operation:
    """The product that ``fp32_tflops`` times: full precision, never TF32."""
    return Operation(gemm.product_of(size, gemm.KINDS["float32"]), 2 * size**3 / 1e12)


def _copy(size: int) -> Operation:
    """The copy that ``hbm_bandwidth`` times, of an array of ``size`` bytes: read once, written once."""
    source, target = (torch.zeros(size // 4, device=timing.current_device()) for _ in range(2))
    return Operation(lambda: target.copy_(source), 2 * source.nbytes / 1e12)


OPERATIONS: Mapping[str, Callable[[int], Operation]] = {"bf16": _bf16, "fp32": _fp32, "copy": _copy}


def rates_with_delays(  # noqa: PLR0913 -- a recipe, all by keyword
    *, operation: str, size: int, iterations: int, warmup_s: float, rest_s: float, plants: Sequence[Mapping[str, float]]
) -> PlantedRates:
    """Time ``operation`` once for each of ``plants``, after a rest and a warm-up; the rate is the median's.

    Args:
        operation: one of :data:`OPERATIONS`.
        size: order of the product, or bytes of the array.
        iterations: timed operations a repeat, each between its own two events.
        warmup_s: seconds of back-to-back operations before each repeat.
        rest_s: seconds without work before that.
        plants: one a repeat: ``delay_percent`` of the operation's own time that ``rank`` waits inside each timed window, on the
            device; an empty one plants nothing.
    """
    timed = OPERATIONS[operation](size)

    def median_s(call: Callable[[], object]) -> float:
        time.sleep(rest_s)
        timing.keep_busy(timed.call, seconds=warmup_s)
        return timing.time_each(call, iterations=iterations).median_s

    own_s = median_s(timed.call)
    wait_s = waiting()
    rates, delays_us = [], []
    for number, plant in enumerate(plants):
        progress.report(f"{operation}, repeat {number + 1} of {len(plants)}", number / len(plants))
        delay_s = own_s * plant["delay_percent"] / 100 if plant and is_here(int(plant["rank"])) else 0.0
        rates.append(timed.work / median_s(slowed(timed.call, wait_s, delay_s)))
        delays_us.append(delay_s * 1e6)
    return PlantedRates(rates=rates, own_us=own_s * 1e6, delay_us=delays_us, device=timing.device_name())


def is_here(rank: int) -> bool:
    """Whether this worker is that rank of the run."""
    return os.environ["RANK"] == str(rank)


def slowed(call: Callable[[], object], wait_s: Callable[[float], object], delay_s: float) -> Callable[[], object]:
    """``call``, and then a wait of ``delay_s`` on the device; the call itself where that is 0."""
    if delay_s == 0:
        return call

    def slower() -> None:
        call()
        wait_s(delay_s)

    return slower


def waiting() -> Callable[[float], object]:
    """A function that waits for a number of seconds: on a GPU by a kernel that spins between the timer's events."""
    if not torch.cuda.is_available():
        return time.sleep
    spin: Callable[[int], None] = torch.cuda._sleep  # noqa: SLF001 -- torch's only kernel that waits
    cycles_per_s = CALIBRATION_CYCLES / timing.time_each(lambda: spin(CALIBRATION_CYCLES), iterations=3).median_s
    return lambda seconds: spin(round(seconds * cycles_per_s))


# Collectives over all ranks.


def add_up() -> float:
    """The number of ranks, counted by a collective."""
    return _sum(1.0)


def die_among_sums(*, victim: int, after_s: float, give_up_s: float) -> int:
    """Sum without pause; rank ``victim`` is killed by SIGKILL ``after_s`` seconds after the first sum.

    Returns the number of sums if the call still runs after ``give_up_s``: the fault had no effect.
    """
    add_up()
    if is_here(victim):
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    end_s = time.monotonic() + give_up_s
    sums = 1
    while _sum(float(time.monotonic() > end_s)) == 0:
        sums += 1
    return sums


def miss_the_sum(*, victim: int) -> float:
    """Sum twice; rank ``victim`` never comes to the second sum."""
    add_up()
    if is_here(victim):
        time.sleep(HANG_S)
    return add_up()


def _sum(number: float) -> float:
    total = torch.full((1,), number, device=timing.current_device())
    dist.all_reduce(total)
    return total.item()
