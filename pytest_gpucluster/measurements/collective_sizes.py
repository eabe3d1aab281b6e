"""One collective at several sizes and dtypes, for the report: what nccl-tests prints as a table. What arrives is verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpucluster.measurements import collective_cases, collectives, timing
from pytest_gpucluster.measurements.collectives import CollectiveTiming
from pytest_gpucluster.measurements.timing import Budget

DTYPES = ("float32", "bfloat16")
SHARE = 0.5
"""Of the seconds left, what one size may take in all dtypes: what is slow is launched less often before a size is left out."""
FEWEST_LAUNCHES = 7
"""Of one size in one dtype: two verify it, one warms up, one tells NCCL's choice, and three make the shortest span."""
FLAT_BYTES = 1 << 20
"""Smaller messages take about as long as this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSizes:
    """One collective by dtype and size.

    Each of ``rows`` has ``dtype``, ``bytes``, ``us``, ``p50_us``, ``p99_us``, ``algbw_gb_s``, ``busbw_gb_s``,
    ``slowest_rank``, ``algorithm`` and ``protocol``, as in
    :class:`~pytest_gpucluster.measurements.collectives.CollectiveTiming`, and ``shortened`` where repeats fell. ``left_out``
    are the dtypes that cannot count so many ranks exactly, ``left_out_bytes`` the sizes that ``budget_s`` had no time for.
    """

    rows: list[dict[str, Any]]
    left_out: list[str]
    left_out_bytes: list[int] = field(default_factory=list)
    budget_s: float | None = None


def by_size(  # noqa: PLR0913 - the recipe of a threshold, all by keyword
    operation: str,
    *,
    sizes_bytes: Sequence[int],
    dtypes: Sequence[str] = DTYPES,
    iterations: int = 10,
    warmup: int = 2,
    budget_s: float | None = None,
) -> CollectiveSizes:
    """Time a collective at each size in each dtype, over all ranks of the default group.

    Args:
        operation: one of :data:`collective_cases.CASES`.
        sizes_bytes: bytes of the larger of what a rank sends and receives, at least one element for each rank it counts for.
        dtypes: those to time, where so many ranks are counted exactly.
        iterations: timed launches of each; small messages have twice as many, so that their spans are long.
        warmup: untimed launches before.
        budget_s: seconds for all of it. Where they do not suffice, all ranks launch less often, and leave out the largest
            sizes. The smallest size is measured in any case.

    Raises:
        ValueError: an unknown operation or dtype, fewer than two ranks.
        ArithmeticError: wrong elements arrived, with their size and dtype, naming the ranks; raised on every rank.
    """
    ranks, budget = dist.get_world_size(), Budget(budget_s)
    counted = [dtype for dtype in dtypes if ranks <= collective_cases.EXACT.get(dtype, ranks)]
    least = {dtype: _least_bytes(operation, dtype, ranks) for dtype in counted}
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    sizes = sorted({*sizes_bytes})
    while sizes and counted:
        left_s = budget.left_s()[0]
        if budget_s is not None and rows and len(counted) * FEWEST_LAUNCHES * _launch_s(rows, sizes[0]) > left_s:
            break
        size_bytes, share_s = sizes.pop(0), None if budget_s is None else SHARE * max(0.0, left_s) / len(counted)
        for dtype in counted:
            possible = max(size_bytes, least[dtype])
            if (dtype, possible) not in rows:
                times = iterations if possible >= collectives.SMALL_BYTES else 2 * iterations
                named = {"iterations": times, "warmup": warmup, "budget_s": share_s}
                rows[dtype, possible] = _verified(operation, size_bytes=possible, dtype=dtype, **named)
    left_out = [dtype for dtype in dtypes if dtype not in counted]
    return CollectiveSizes(
        rows=[row for dtype in counted for (of, _), row in rows.items() if of == dtype],
        left_out=left_out,
        left_out_bytes=sizes if counted else [],
        budget_s=budget_s,
    )


def _launch_s(rows: Mapping[tuple[str, int], Mapping[str, Any]], size_bytes: int) -> float:
    """Seconds of one launch at a size, by those of the largest one before: the same on every rank, as the rows are."""
    largest = max(rows.values(), key=lambda row: row["bytes"])
    growth: float = max(1.0, size_bytes / max(largest["bytes"], FLAT_BYTES))
    return float(largest["p50_us"]) / 1e6 * growth


def _verified(operation: str, *, size_bytes: int, dtype: str, **named: Any) -> dict[str, Any]:
    try:
        return _row(collectives.collective(operation, size_bytes=size_bytes, dtype=dtype, **named))
    except ArithmeticError as error:
        raise ArithmeticError(f"{error}, at {size_bytes} bytes of {dtype}") from error


def _least_bytes(operation: str, dtype: str, ranks: int) -> int:
    """One element, or one for each rank where each has a part of its own."""
    kind: torch.dtype | None = getattr(torch, dtype, None)
    parts = 1 if operation in collective_cases.WHOLE else ranks
    return parts * (kind.itemsize if kind is not None else 1)


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
        **({"shortened": timed.shortened} if timed.shortened else {}),
    }
