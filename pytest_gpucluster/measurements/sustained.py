"""Lasting rate of a GPU's matrix units: products back to back, in slices of about a second.

In the first second the clock boosts; then the power limiter decides (docs/decisions/0007). So the last half of the slices
is judged, with the clock, power and temperature of that half. After it one SM counts its own clock under the same products:
cycles over nanoseconds. The rate over the peak at that clock separates a slow chip from a chip at its power limit.

NVML tells the clock that the chip is set to. While its power limiter acts, an H200 skips cycles and NVML does not show
it: NVML reads 1485 MHz where an SM counts 1330 (H100: 1335 and 1328; 2026-11-22, docs/results). A share of the peak at
NVML's clock compares NVML's readings. A share of the peak at the counted clock compares the chips.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pytest_gpucluster.inventory.telemetry import Sampler, Telemetry, evidence
from pytest_gpucluster.measurements import gemm, progress, timing
from pytest_gpucluster.protocol.functions import Simulated, simulated_by

COUNTED_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """Dense matrix product rate under lasting load; 1 TFLOPS is 10^12 FLOP/s.

    ``tflops`` is the median of the last half of ``slices_tflops`` (``repeats_tflops``). ``telemetry`` covers that half,
    sampled at 10 Hz; its event reasons cover the whole load. It is None without NVML; on a GPU ``nvml_error`` says why.
    ``counted_clock_mhz`` is the SM clock that the GPU counted right after the judged half, under the same products;
    ``counted_tflops`` is their rate meanwhile. ``peak_at_clock_tflops`` is the peak at that clock, and
    ``of_peak_at_clock_ratio`` is ``counted_tflops`` over it. All four are None on a CPU and without a peak at a known
    clock; on a GPU ``clock_error`` says why.
    """

    tflops: float
    seconds: float
    slices_tflops: list[float]
    counted_clock_mhz: float | None
    counted_tflops: float | None
    clock_error: str | None
    peak_at_clock_tflops: float | None
    of_peak_at_clock_ratio: float | None
    nvml_error: str | None
    device: str
    telemetry: Telemetry | None

    @property
    def evidence(self) -> dict[str, Any]:
        """NVML's clock, power, temperature and event reasons, and the clock that the GPU counted, for the report."""
        counted = {} if self.counted_clock_mhz is None else {"counted SM MHz": self.counted_clock_mhz}
        return {**evidence(self.telemetry), **counted}

    @property
    def repeats_tflops(self) -> list[float]:
        """The judged slices."""
        return self.slices_tflops[_half(len(self.slices_tflops)) :]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Number of products in a number of seconds; ``ended_s`` by ``time.monotonic``."""

    products: int
    seconds: float
    ended_s: float


SIMULATED_PEAK_MHZ = 1830.0


def _simulated(call: Simulated) -> Sustained:
    """Products back to back; the clock is what is left by the power limit, or by the heat."""
    rate, ratio = call.rate("sustained"), call.rate("at_clock")
    peak_tflops = rate / ratio
    clock_mhz = peak_tflops / call.spec.bf16_tflops * SIMULATED_PEAK_MHZ
    hot = call.has("throttled")
    seconds, slice_s = call.kwargs.get("seconds", 20.0), call.kwargs.get("slice_s", 1.0)
    num_slices = max(2, round(seconds / slice_s))
    return Sustained(
        tflops=rate,
        seconds=seconds,
        slices_tflops=[*call.repeats(1.02 * rate, num_slices // 2), *call.repeats(rate, num_slices - num_slices // 2)],
        counted_clock_mhz=clock_mhz,
        counted_tflops=rate,
        clock_error=None,
        peak_at_clock_tflops=peak_tflops,
        of_peak_at_clock_ratio=ratio,
        nvml_error=None,
        device=call.device,
        telemetry=call.telemetry(clock_mhz=clock_mhz, power_w=540.0 if hot else 692.0, hot=hot),
    )


@simulated_by(_simulated)
def sustained(  # noqa: PLR0913 - the recipe of a threshold, all by keyword
    *,
    dtype: str = "bfloat16",
    size: int = 8192,
    seconds: float = 20.0,
    slice_s: float = 1.0,
    peak_tflops: float | None = None,
    peak_clock_mhz: float | None = None,
) -> Sustained:
    """Square products of order ``size`` back to back for at least ``seconds``.

    Args:
        dtype: one of :data:`~pytest_gpucluster.measurements.gemm.KINDS`.
        size: matrix order n; 2 n^3 FLOP a product.
        seconds: how long, at least two slices.
        slice_s: how long a slice is, about: a whole number of products.
        peak_tflops: the dense peak of the GPU in this dtype.
        peak_clock_mhz: the SM clock at which it would have that peak, which is SMs x FLOP per clock and SM x this clock.
            This is not the boost clock: an H200's 989 TFLOPS are 132 x 4096 x 1830 MHz, and it boosts to 1980 MHz.

    Raises:
        ValueError: an unknown dtype, with the valid ones, a number out of its range, or one of the two peaks alone.
        ArithmeticError: the last product lies outside the dtype's rounding error of a float64 reference.
    """
    _require_sense(dtype, size, seconds, slice_s, (peak_tflops, peak_clock_mhz))
    kind = gemm.KINDS[dtype]
    with gemm.at_precision(kind.precision):
        product = gemm.product_of(size, kind)
        product()  # loads and chooses its kernel before anything is timed or watched
        timing.synchronize()
        with Sampler(timing.gpu_uuid()) as sampler:
            slices = _load(product, seconds=seconds, slice_s=slice_s)
            telemetry = sampler.summary(since_s=slices[_half(len(slices)) - 1].ended_s)
        counted, clock_error = _count(product) if peak_tflops is not None else (None, None)
        gemm.check(product, kind)
    rates = [2 * size**3 * part.products / part.seconds / 1e12 for part in slices]
    tflops = statistics.median(rates[_half(len(rates)) :])
    if sampler.error is not None:
        telemetry = None  # NVML failed: its samples may all be from before the judged half
    clock_mhz = counted.clock_mhz if counted else None
    counted_tflops = 2 * size**3 * counted.calls_per_s / 1e12 if counted else None
    peak = peak_at_clock_tflops(peak_tflops=peak_tflops, peak_clock_mhz=peak_clock_mhz, clock_mhz=clock_mhz)
    return Sustained(
        tflops=tflops,
        seconds=sum(part.seconds for part in slices),
        slices_tflops=[timing.rounded(rate) for rate in rates],
        counted_clock_mhz=clock_mhz,
        counted_tflops=counted_tflops,
        clock_error=clock_error,
        peak_at_clock_tflops=peak,
        of_peak_at_clock_ratio=counted_tflops / peak if counted_tflops and peak else None,
        nvml_error=sampler.error,
        device=timing.device_name(),
        telemetry=telemetry,
    )


def _count(product: Callable[[], None]) -> tuple[Counted | None, str | None]:
    """The clock that the GPU counts under more of the same products; None on a CPU, and with the reason where it cannot."""
    if not torch.cuda.is_available():
        return None, None
    try:
        return count_under(product, seconds=COUNTED_S), None
    except RuntimeError as error:
        return None, f"the SM clock could not be counted: {error}"


def peak_at_clock_tflops(*, peak_tflops: float | None, peak_clock_mhz: float | None, clock_mhz: float | None) -> float | None:
    """The peak at this SM clock of a GPU with ``peak_tflops`` at ``peak_clock_mhz``; None if an argument is None."""
    if peak_tflops is None or peak_clock_mhz is None or clock_mhz is None:
        return None
    return peak_tflops * clock_mhz / peak_clock_mhz


def _require_sense(dtype: str, size: int, seconds: float, slice_s: float, peak_at: tuple[float | None, float | None]) -> None:
    gemm.require_known(dtype)
    if size < 1 or not 0 < 2 * slice_s <= seconds < math.inf:
        raise ValueError(f"size >= 1, slice_s > 0 and at least two slices: not {size}, {slice_s}, {seconds}")
    if (peak_at[0] is None) != (peak_at[1] is None) or any(number is not None and number <= 0 for number in peak_at):
        raise ValueError(f"peak_tflops and peak_clock_mhz, above 0, belong together: not {peak_at[0]} and {peak_at[1]}")


def _half(slices: int) -> int:
    """The first slice of the judged half."""
    return slices // 2


def _load(product: Callable[[], None], *, seconds: float, slice_s: float) -> list[_Slice]:
    """Run at least two slices, for at least ``seconds``.

    Between two slices the GPU waits about ten microseconds for its next product: too short to cool or to boost.
    """
    slices: list[_Slice] = []
    covered_s = 0.0
    while covered_s < seconds or len(slices) < 2:
        slices.append(_run_slice(product, slice_s))
        covered_s += slices[-1].seconds
        progress.report(f"{covered_s:.1f} of {seconds:g} s", min(1.0, covered_s / seconds))
    progress.report("checking the product", 1.0)
    return slices


def _run_slice(product: Callable[[], None], slice_s: float) -> _Slice:
    launched: list[int] = []
    timed = timing.time_each(lambda: launched.append(timing.keep_busy(product, seconds=slice_s)), iterations=1)
    return _Slice(products=launched[0], seconds=timed.samples_s[0], ended_s=time.monotonic())


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
