"""One collective at several sizes and dtypes, for the report: what nccl-tests prints as a table. What arrives is verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pytest_gpucluster.measurements import collective_cases, collectives, exact_sums, timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpucluster.measurements.collectives import CollectiveTiming

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSizes:
    """One collective by dtype and size.

    Each of ``rows`` has ``dtype``, ``bytes``, ``us``, ``p50_us``, ``p99_us``, ``algbw_gb_s``, ``busbw_gb_s``,
    ``slowest_rank``, ``algorithm`` and ``protocol``, as in
    :class:`~pytest_gpucluster.measurements.collectives.CollectiveTiming`. ``left_out`` are the dtypes that cannot count so
    many ranks exactly.
    """

    operation: str
    rows: list[dict[str, Any]]
    left_out: list[str]
    world_size: int


def by_size(
    operation: str, *, sizes_bytes: Sequence[int], dtypes: Sequence[str] = DTYPES, iterations: int = 10, warmup: int = 2
) -> CollectiveSizes:
    """Time a collective at each size in each dtype, over all ranks of the default group.

    Args:
        operation: ``all_reduce``, or one of :data:`collective_cases.CASES`.
        sizes_bytes: bytes of the larger of what a rank sends and receives, at least one element for each rank it counts for.
        dtypes: those to time, where so many ranks are counted exactly.
        iterations: timed launches of each.
        warmup: untimed launches before.

    Raises:
        ValueError: an unknown operation or dtype, fewer than two ranks.
        ArithmeticError: wrong elements arrived, with their size and dtype, naming the ranks; raised on every rank.
    """
    ranks = dist.get_world_size()
    exact = exact_sums.EXACT if operation == "all_reduce" else collective_cases.EXACT
    counted = [dtype for dtype in dtypes if ranks <= exact.get(dtype, ranks)]
    rows = []
    for dtype in counted:
        for size_bytes in _possible(sizes_bytes, least=_least_bytes(operation, dtype, ranks)):
            try:
                timed = _timed(operation, size_bytes=size_bytes, iterations=iterations, warmup=warmup, dtype=dtype)
            except ArithmeticError as error:
                raise ArithmeticError(f"{error}, at {size_bytes} bytes of {dtype}") from error
            rows.append(_row(timed))
    left_out = [dtype for dtype in dtypes if dtype not in counted]
    return CollectiveSizes(operation=operation, rows=rows, left_out=left_out, world_size=ranks)


def _timed(operation: str, **named: Any) -> CollectiveTiming:
    if operation == "all_reduce":
        return collectives.all_reduce(**named)
    return collectives.collective(operation, **named)


def _least_bytes(operation: str, dtype: str, ranks: int) -> int:
    """One element, or one for each rank where each has a part of its own."""
    kind: torch.dtype | None = getattr(torch, dtype, None)
    parts = 1 if operation in ("all_reduce", *collective_cases.WHOLE) else ranks
    return parts * (kind.itemsize if kind is not None else 1)


def _possible(sizes_bytes: Sequence[int], *, least: int) -> list[int]:
    """The sizes, none below ``least`` and none twice."""
    return list(dict.fromkeys(max(size_bytes, least) for size_bytes in sizes_bytes))


def _row(timed: CollectiveTiming) -> dict[str, Any]:
    return {
        "dtype": timed.dtype,
        "bytes": timed.size_bytes,
        "us": round(timed.time_us, 3),
        "p50_us": round(timed.p50_us, 3),
        "p99_us": round(timed.p99_us, 3),
        "algbw_gb_s": timing.rounded(timed.algbw_gb_s),
        "busbw_gb_s": timing.rounded(timed.busbw_gb_s),
        "slowest_rank": timed.slowest_rank,
        "algorithm": timed.algorithm,
        "protocol": timed.protocol,
    }
