"""How often a smaller group is measured, so that a search ends within its time. Pure.

A node that fell back to sockets makes an all-reduce of 8 GiB take 10 s: eight repeats of it would take all the time there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ITERATIONS = 8
"""Of each smaller group at most: a search has a minute, and is after nodes that are clearly too slow."""
FEWEST_ITERATIONS = 2
GROUP_S = 3.0
"""Seconds beyond which a group gets fewer iterations, if it is as slow as the collective that missed its limit."""
SLOW_WARMUP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a smaller group is measured with.

    Attributes:
        size_bytes: of the all-reduce.
        iterations: that are timed.
        warmup: iterations before these.
        dtype: that of the recipe.
    """

    size_bytes: int
    iterations: int
    warmup: int
    dtype: str


def effort_of(recipe: Mapping[str, Any], *, nodes: int, gpus: int, busbw_gb_s: float) -> Effort:
    """What fits into :data:`GROUP_S`, :data:`FEWEST_ITERATIONS` at least. The size stays: the limit holds for no smaller one.

    Args:
        recipe: of the all-reduce that missed its limit.
        nodes: of the largest group, which decide about the size as in the all-reduce itself.
        gpus: of the largest group.
        busbw_gb_s: the bus bandwidth that is expected of a bad group, in 10^9 bytes a second.
    """
    is_large = nodes >= recipe.get("large_from_nodes", math.inf)
    size_bytes = recipe["large_size_bytes" if is_large else "size_bytes"]
    fitting = GROUP_S * busbw_gb_s * 1e9 / (size_bytes * 2 * (gpus - 1) / gpus)  # nccl-tests' factor of an all-reduce
    iterations, warmup = min(ITERATIONS, recipe["iterations"]), recipe["warmup"]
    if fitting < iterations + warmup:
        warmup = min(SLOW_WARMUP, warmup)
        iterations = min(iterations, max(FEWEST_ITERATIONS, int(fitting) - warmup))
    return Effort(size_bytes=size_bytes, iterations=iterations, warmup=warmup, dtype=recipe["dtype"])
