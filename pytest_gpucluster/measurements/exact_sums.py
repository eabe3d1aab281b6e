"""Sums over all ranks that are exact in every element: what each rank puts in, and what has to come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from pytest_gpucluster.measurements import timing

if TYPE_CHECKING:
    from collections.abc import Mapping

EXACT: Mapping[str, int] = {
    "float32": 2**24,
    "float64": 2**53,
    "bfloat16": 2**8,
    "float16": 2**11,
    "int32": 2**31 - 1,
}
"""Accepted dtypes and the whole number up to which each counts without a gap."""

LONGEST_PERIOD = 251
"""The test pattern repeats after a prime number of elements, so that shifted or swapped chunks do not match."""

CHUNK = 1 << 26
"""Elements verified at once, to keep the temporary memory small."""


def buffer(size_bytes: int, dtype: str, ranks: int) -> torch.Tensor:
    """An uninitialised buffer of ``size_bytes``, rounded down to whole elements, on the current device.

    Raises:
        ValueError: an unknown dtype, fewer than two ranks, too many for an exact sum, less than one element.
    """
    if dtype not in EXACT:
        raise ValueError(f"unknown dtype {dtype!r}; valid: {', '.join(EXACT)}")
    if not 2 <= ranks <= EXACT[dtype]:
        raise ValueError(f"an exact {dtype} sum needs 2 to {EXACT[dtype]} ranks, there are {ranks}")
    kind: torch.dtype = getattr(torch, dtype)
    if size_bytes < kind.itemsize:
        raise ValueError(f"size_bytes must hold at least one {dtype}, not {size_bytes}")
    return torch.empty(size_bytes // kind.itemsize, dtype=kind, device=timing.current_device())


def patterns(ranks: int, rank: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One period of what ``rank`` puts in, and of the sum: whole numbers below the dtype's first gap."""
    exact = EXACT[str(like.dtype).removeprefix("torch.")]
    period = min(LONGEST_PERIOD, exact // ranks + 1)
    steps = torch.arange(period, device=like.device)
    total = sum(((steps + other) % period for other in range(ranks)), torch.zeros_like(steps))
    return ((steps + rank) % period).to(like.dtype), total.to(like.dtype)


def wrong_elements(whole: torch.Tensor, ranks: int) -> int:
    """All-reduce a known pattern; number of elements of the result that are not exactly right on this rank."""
    own, total = patterns(ranks, dist.get_rank(), whole)
    step = CHUNK // len(own) * len(own)  # whole periods
    for start in range(0, whole.numel(), step):
        part = whole[start : start + step]
        part.copy_(_repeated(own, part.numel()))
    dist.all_reduce(whole)
    wrong = 0
    for start in range(0, whole.numel(), step):
        part = whole[start : start + step]
        wrong += int((part != _repeated(total, part.numel())).sum())
    return wrong


def _repeated(pattern: torch.Tensor, elements: int) -> torch.Tensor:
    return pattern.repeat(-(-elements // len(pattern)))[:elements]
