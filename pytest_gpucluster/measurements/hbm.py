"""Bandwidth of the current device's memory: copy and triad over arrays far larger than any cache.

Bytes counted are bytes moved: a copy reads one array and writes one (2x), a triad ``a = b + s c`` reads two and writes
one (3x). A GPU writes whole lines, so there is no write-allocate traffic to add (as STREAM and BabelStream count).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_gpucluster.measurements import progress, timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.measurements.timing import Timing

SCALAR = 3.0
CACHE_MULTIPLE = 4
"""An array smaller than this many times the L2 cache would be measured in the cache."""
CHUNK = 1 << 26
"""Elements verified at once, to keep the temporary memory small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HbmBandwidth:
    """Memory bandwidth in TB/s (10^12 bytes moved a second); ``tb_s`` is the better of copy and triad.

    Each figure is the median of its samples; ``size_bytes`` is that of one array.
    """

    tb_s: float
    copy_tb_s: float
    triad_tb_s: float
    samples_copy_tb_s: list[float]
    samples_triad_tb_s: list[float]
    size_bytes: int
    device: str

    @property
    def repeats_tb_s(self) -> list[float]:
        """The samples of the judged kind, the better one."""
        return self.samples_copy_tb_s if self.copy_tb_s >= self.triad_tb_s else self.samples_triad_tb_s


def hbm_bandwidth(*, size_bytes: int, iterations: int, warmup: int) -> HbmBandwidth:
    """Copy and triad of float32 arrays of ``size_bytes`` each.

    Args:
        size_bytes: bytes of one array; three are held.
        iterations: timed runs of each kind, one event pair each, all queued.
        warmup: untimed runs of each kind before.

    Raises:
        ValueError: the arrays would fit a GPU's cache, or are smaller than one number.
        MemoryError: three arrays are larger than the free memory.
        ArithmeticError: the device copied or computed something wrong.
    """
    _require_size(size_bytes)
    a, b, c = (torch.zeros(size_bytes // 4, device=timing.current_device()) for _ in range(3))
    for index, array in enumerate((b, c)):
        # Whole numbers below 2^10: every sum below is exact, so a result is right or wrong, never close.
        array.random_(0, 1024, generator=torch.Generator(a.device).manual_seed(index))
    progress.report("copy", 0.0)
    copy = _timed(lambda: a.copy_(b), iterations, warmup)
    _verify("copy", a, lambda part: b[part])
    progress.report("triad", 0.5)
    triad = _timed(lambda: torch.add(b, c, alpha=SCALAR, out=a), iterations, warmup)
    _verify("triad", a, lambda part: b[part] + SCALAR * c[part])
    progress.report("triad", 1.0)
    return HbmBandwidth(
        tb_s=max(_tb_s(2 * a.nbytes, copy.median_s), _tb_s(3 * a.nbytes, triad.median_s)),
        copy_tb_s=_tb_s(2 * a.nbytes, copy.median_s),
        triad_tb_s=_tb_s(3 * a.nbytes, triad.median_s),
        samples_copy_tb_s=[round(_tb_s(2 * a.nbytes, seconds), 6) for seconds in copy.samples_s],
        samples_triad_tb_s=[round(_tb_s(3 * a.nbytes, seconds), 6) for seconds in triad.samples_s],
        size_bytes=a.nbytes,
        device=timing.device_name(),
    )


def _tb_s(moved_bytes: int, seconds: float) -> float:
    return moved_bytes / seconds / 1e12


def _timed(call: Callable[[], object], iterations: int, warmup: int) -> Timing:
    for _ in range(warmup):
        call()
    return timing.time_each(call, iterations=iterations)


def _require_size(size_bytes: int) -> None:
    if size_bytes < 4:
        raise ValueError(f"size_bytes must hold at least one float32, not {size_bytes}")
    cache_bytes = _cache_bytes()
    if size_bytes < CACHE_MULTIPLE * cache_bytes:
        raise ValueError(f"arrays of {size_bytes} bytes would be measured in the {cache_bytes} bytes of L2 cache")
    needed_bytes = 3 * size_bytes + 9 * min(CHUNK, size_bytes // 4)
    free_bytes = _free_bytes()
    if needed_bytes > free_bytes:
        raise MemoryError(
            f"three arrays of {size_bytes / 2**30:.2f} GiB need {needed_bytes / 2**30:.2f} GiB, "
            f"{free_bytes / 2**30:.2f} GiB are free on {timing.device_name()}"
        )


def _cache_bytes() -> int:
    """The GPU's L2 cache; 0 on a CPU, whose numbers are a rehearsal and mean nothing."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def _free_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _verify(what: str, result: torch.Tensor, expected: Callable[[slice], torch.Tensor]) -> None:
    """Compare every element on the device, a chunk at a time."""
    for start in range(0, result.numel(), CHUNK):
        part = slice(start, min(start + CHUNK, result.numel()))
        wrong = int((result[part] != expected(part)).sum())
        if wrong:
            raise ArithmeticError(f"{what}: {wrong} of the elements {part.start} to {part.stop - 1} are wrong")
