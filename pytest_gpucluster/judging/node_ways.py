"""Which GPU's way out of a slow node is slow: each of its GPUs by itself, beside the same between good nodes. Pure."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.forecast import counted
from pytest_gpucluster.judging.numbers import format_number

if TYPE_CHECKING:
    from collections.abc import Mapping

GOOD_SHARE = 0.8
"""A way below this part of the median between good nodes is slow: a guess, as far below as limits between nodes lie."""


def slow_ways(node: Mapping[str, float | None], good: Mapping[str, float | None]) -> tuple[str, ...]:
    """The GPUs of a node whose way is slow; none where nothing between good nodes was measured.

    Args:
        node: by GPU of the node, what it and the same GPU of a good node reach, higher is better; None: not measured.
        good: the same of two good nodes.
    """
    usual = _median(good)
    return tuple(name for name, value in _known(node).items() if usual is not None and value < GOOD_SHARE * usual)


def describe_ways(node: Mapping[str, float | None], good: Mapping[str, float | None], *, unit: str) -> str:
    """What the GPUs of a node reach by themselves, in words."""
    known, usual = _known(node), _median(good)
    if usual is None or not known:
        return "its GPUs by themselves: not measured"
    between = f"{format_number(usual)} {unit} between good nodes"
    slow = slow_ways(node, good)
    if not slow:
        return f"each of its GPUs by itself is as fast as elsewhere ({format_number(min(known.values()))}; {between})"
    if len(slow) == len(known):
        return (
            f"each of its {counted(len(known), 'GPU')} is slow by itself (best {format_number(max(known.values()))}; {between})"
        )
    rates = ", ".join(f"{name} {format_number(known[name])}" for name in slow)
    return f"by itself only the way of {rates} is slow ({between})"


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _median(values: Mapping[str, float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known.values()) if known else None
