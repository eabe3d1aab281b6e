"""The SM clock as a kernel counts it: cycles of one SM over nanoseconds, while the other SMs multiply.

NVML tells the clock that the chip is set to. While its power limiter acts, an H200 skips cycles and NVML does not show
it: NVML reads 1485 MHz where an SM counts 1330 (H100: 1335 and 1328; 2026-11-22, docs/results). A share of the peak at
NVML's clock compares NVML's readings. A share of the peak at the counted clock compares the chips.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_gpucluster.measurements import timing

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT_NS = 20e6
"""How long one count takes. The load has to last longer, so that the SM is counted under load only."""

# clock64 counts cycles of the SM that runs the thread; %globaltimer counts nanoseconds (PTX ISA, special registers).
KERNEL = r"""
template <typename T> T counted_mhz(T wait_ns) {
  unsigned long long began_ns, now_ns;
  long long first = clock64();
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began_ns));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now_ns));
  } while (now_ns - began_ns < (unsigned long long)wait_ns);
  return (T)(clock64() - first) * 1000 / (T)(now_ns - began_ns);
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The clock that an SM counted under a load, and the rate of that load in calls per second.

    Both are the median of ``bursts``. Each burst was counted once.
    """

    clock_mhz: float
    calls_per_s: float
    bursts: int


def count_under(call: Callable[[], object], *, seconds: float, burst_s: float = 0.1) -> Counted:
    """Run ``call`` in bursts of about ``burst_s`` for ``seconds``; count the SM clock once in each burst.

    The count runs in a stream of its own. One block of one warp takes 1 % of the rate of large products (H200).

    Args:
        call: queues work on the current GPU, always the same.
        seconds: how long, at least one burst.
        burst_s: longer than :data:`COUNT_NS`.

    Raises:
        RuntimeError: there is no GPU, or this torch cannot compile the kernel.
    """
    counter: Any = torch.cuda.jiterator._create_jit_fn(KERNEL)  # noqa: SLF001 -- documented under this name
    wait_ns = torch.full((1,), COUNT_NS, dtype=torch.float64, device="cuda")
    counter(wait_ns)  # compiles it
    launches = max(1, round(burst_s / timing.time_span(call, launches=3)))
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    clocks_mhz: list[float] = []
    rates: list[float] = []
    end_s = time.monotonic() + seconds
    while not rates or time.monotonic() < end_s:
        wait = timing.queue_each(lambda: _repeat(call, launches), iterations=1)
        with torch.cuda.stream(beside):
            count = counter(wait_ns)
        rates.append(launches / wait().samples_s[0])
        beside.synchronize()
        clocks_mhz.append(float(count.item()))
    return Counted(clock_mhz=statistics.median(clocks_mhz), calls_per_s=statistics.median(rates), bursts=len(rates))


def _repeat(call: Callable[[], object], launches: int) -> None:
    for _ in range(launches):
        call()
