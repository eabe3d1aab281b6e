"""Bandwidth of the current device's memory: copy, triad, read and write over arrays far larger than any cache.

Bytes counted are bytes moved: a copy reads one array and writes one (2x), a triad ``a = b + s c`` reads two and writes
one (3x), a read is one exact sum of an array (1x), a write is one fill (1x). A GPU writes whole lines, so there is no
write-allocate traffic to add (as STREAM and BabelStream count).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pytest_gpucluster.inventory.telemetry import Snapshots, Telemetry, evidence
from pytest_gpucluster.measurements import progress, timing
from pytest_gpucluster.measurements.timing import Timing
from pytest_gpucluster.protocol.functions import Simulated, simulated_by

SCALAR = 3.0
FILL = 7.0
"""The value that a write fills in; not 0, for which the device may use another kind of memset."""
CACHE_MULTIPLE = 4
"""An array smaller than this many times the L2 cache would be measured in the cache."""
CHUNK = 1 << 26
"""Elements verified at once, to keep the temporary memory small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HbmBandwidth:
    """Memory bandwidth in TB/s (10^12 bytes moved a second); ``tb_s`` is the better of copy and triad.

    Each figure is the median of its samples; ``size_bytes`` is that of one array. ``read_tb_s`` and ``write_tb_s``
    show which direction makes a copy slow. ``telemetry`` is by kind, one reading while the kind was timed.
    """

    tb_s: float
    copy_tb_s: float
    triad_tb_s: float
    read_tb_s: float
    write_tb_s: float
    samples_copy_tb_s: list[float]
    samples_triad_tb_s: list[float]
    samples_read_tb_s: list[float]
    samples_write_tb_s: list[float]
    size_bytes: int
    device: str
    telemetry: dict[str, Telemetry | None] = field(default_factory=dict)

    @property
    def judged(self) -> str:
        """The better kind."""
        return "copy" if self.copy_tb_s >= self.triad_tb_s else "triad"

    @property
    def repeats_tb_s(self) -> list[float]:
        """The samples of the judged kind."""
        return self.samples_copy_tb_s if self.judged == "copy" else self.samples_triad_tb_s

    @property
    def evidence(self) -> dict[str, Any]:
        """Clock, power, temperature and event reasons while the judged kind was timed, for the report."""
        return evidence(self.telemetry.get(self.judged))


def _simulated(call: Simulated) -> HbmBandwidth:
    """The triad is the better kind."""
    rate, number = call.rate("hbm"), call.kwargs["iterations"]
    medians = {"copy": 0.98 * rate, "triad": rate, "read": 0.97 * rate, "write": 0.96 * rate}
    rates = {kind: (tb_s, call.repeats(tb_s, number)) for kind, tb_s in medians.items()}
    telemetry = dict.fromkeys(rates, call.telemetry())
    return _bandwidth(rates, size_bytes=call.kwargs["size_bytes"], device=call.device, telemetry=telemetry)


@simulated_by(_simulated)
def hbm_bandwidth(*, size_bytes: int, iterations: int, warmup: int) -> HbmBandwidth:
    """Copy, triad, read and write of arrays of ``size_bytes`` each (rounded down to 8 bytes).

    Args:
        size_bytes: bytes of one array; three are held.
        iterations: timed runs of each kind, one event pair each, all queued.
        warmup: untimed runs of each kind before.

    Raises:
        ValueError: the arrays would fit a GPU's cache, or are smaller than 8 bytes.
        MemoryError: three arrays are larger than the free memory.
        ArithmeticError: the device copied, computed, read or wrote something wrong.
    """
    _require_size(size_bytes)
    a, b, c = (torch.zeros(size_bytes // 8 * 2, device=timing.current_device()) for _ in range(3))
    for index, array in enumerate((b, c)):
        # Whole numbers below 2^10: every sum below is exact, so a result is right or wrong, never close.
        array.random_(0, 1024, generator=torch.Generator(a.device).manual_seed(index))
    with Snapshots(timing.gpu_uuid()) as snapshots:
        progress.report("copy", 0.0)
        copy = _timed(lambda: a.copy_(b), iterations, warmup, snapshots.of("copy"))
        verify("copy", a, lambda part: b[part])
        progress.report("triad", 0.25)
        triad = _timed(lambda: torch.add(b, c, alpha=SCALAR, out=a), iterations, warmup, snapshots.of("triad"))
        verify("triad", a, lambda part: b[part] + SCALAR * c[part])
        progress.report("read", 0.5)
        read = _time_read(a, iterations, warmup, snapshots.of("read"))
        progress.report("write", 0.75)
        write = _timed(lambda: a.fill_(FILL), iterations, warmup, snapshots.of("write"))
        verify("write", a, lambda part: torch.full_like(a[part], FILL))
        progress.report("write", 1.0)
    moved = {"copy": (2, copy), "triad": (3, triad), "read": (1, read), "write": (1, write)}
    rates = {kind: _rates(arrays * a.nbytes, timed) for kind, (arrays, timed) in moved.items()}
    telemetry = {kind: snapshots.summary(kind) for kind in moved}
    return _bandwidth(rates, size_bytes=a.nbytes, device=timing.device_name(), telemetry=telemetry)


def free_and_total_bytes() -> tuple[int, int]:
    """Free and total memory of the current device; of this machine on a CPU."""
    if torch.cuda.is_available():
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return int(free_bytes), int(total_bytes)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes


def _bandwidth(rates: Mapping[str, tuple[float, list[float]]], **more: Any) -> HbmBandwidth:
    """The result; ``rates`` holds the median and the samples of each kind, in TB/s."""
    medians: dict[str, Any] = {f"{kind}_tb_s": median for kind, (median, _) in rates.items()}
    samples: dict[str, Any] = {f"samples_{kind}_tb_s": each for kind, (_, each) in rates.items()}
    return HbmBandwidth(tb_s=max(rates["copy"][0], rates["triad"][0]), **medians, **samples, **more)


def _rates(moved_bytes: int, timed: Timing) -> tuple[float, list[float]]:
    """The median and the samples of one kind, in TB/s."""
    median, *samples = (moved_bytes / seconds / 1e12 for seconds in (timed.median_s, *timed.samples_s))
    return median, [timing.rounded(one) for one in samples]


def _time_read(array: torch.Tensor, iterations: int, warmup: int, snapshot: Callable[[], None]) -> Timing:
    """Time the sum of an array that is first filled with the whole numbers from 1, whose sum is known in closed form.

    64-bit integers, because their sum is exact in any order (modulo 2^64, from 32 GiB on).

    Raises:
        ArithmeticError: the sum is not that: an element was not read, or read wrong.
    """
    words = array.view(torch.int64)
    torch.arange(1, words.numel() + 1, out=words)
    total = torch.zeros((1,), dtype=torch.int64, device=array.device)
    timed = _timed(lambda: torch.sum(words, dim=0, keepdim=True, out=total), iterations, warmup, snapshot)
    expected = words.numel() * (words.numel() + 1) // 2
    if (int(total.item()) - expected) % 2**64:
        raise ArithmeticError(f"read: the sum of {words.numel()} numbers is {total.item()}, not {expected}")
    return timed


def _timed(call: Callable[[], object], iterations: int, warmup: int, snapshot: Callable[[], None]) -> Timing:
    for _ in range(warmup):
        call()
    return timing.time_each(call, iterations=iterations, meanwhile=snapshot)


def _require_size(size_bytes: int) -> None:
    if size_bytes < 8:
        raise ValueError(f"size_bytes must be at least 8, not {size_bytes}")
    cache_bytes = _cache_bytes()
    if size_bytes < CACHE_MULTIPLE * cache_bytes:
        raise ValueError(f"arrays of {size_bytes} bytes would be measured in the {cache_bytes} bytes of L2 cache")
    needed_bytes = 3 * size_bytes + 9 * min(CHUNK, size_bytes // 4)
    free_bytes, _ = free_and_total_bytes()
    if needed_bytes > free_bytes:
        raise timing.memory_error(
            f"three arrays of {size_bytes / 2**30:.2f} GiB need {needed_bytes / 2**30:.2f} GiB, "
            f"{free_bytes / 2**30:.2f} GiB are free on {timing.device_name()}"
        )


def _cache_bytes() -> int:
    """The GPU's L2 cache; 0 on a CPU, whose numbers are a rehearsal and mean nothing."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def verify(what: str, result: torch.Tensor, expected: Callable[[slice], torch.Tensor], *, chunk: int = CHUNK) -> None:
    """Compare every element where it lies, ``chunk`` of them at a time.

    Raises:
        ArithmeticError: some are not as ``expected``; with their number in the first such chunk.
    """
    for start in range(0, result.numel(), chunk):
        part = slice(start, min(start + chunk, result.numel()))
        right = expected(part)
        if not torch.equal(result[part], right):
            wrong = int((result[part] != right).sum())
            raise ArithmeticError(f"{what}: {wrong} of the elements {part.start} to {part.stop - 1} are wrong")
