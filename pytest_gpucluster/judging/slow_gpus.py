"""Which GPU spoils a collective in a node: the one that is slow with every other one, by the rates of all pairs. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.forecast import counted
from pytest_gpucluster.judging.numbers import format_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.measurements.pair_matrix import PairMatrix

SLOW_SHARE = 0.8
"""A pair below this part of the median of all pairs is slow: a guess, as far below as limits in a node lie."""
FEWEST_GPUS = 3
"""Of two GPUs that are slow together, either may be to blame."""
SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGpus:
    """What the pairs of a node show.

    Attributes:
        gpus: those that are slow with every other one, as source, as target, or as both.
        pairs: the other slow pairs, source and target.
        usual_gb_s: the median of all pairs of all nodes.
        slowest_gb_s: the slowest pair of this node.
    """

    gpus: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    usual_gb_s: float
    slowest_gb_s: float

    @property
    def text(self) -> str:
        """What it shows, in words."""
        usual = f"{format_number(self.usual_gb_s)} GB/s is the median of all pairs"
        slowest = f"the slowest pair {format_number(self.slowest_gb_s)}"
        if self.gpus:
            return f"slow with every other GPU: {', '.join(self.gpus)} ({slowest}; {usual})"
        if self.pairs:
            shown = ", ".join(f"{source} -> {target}" for source, target in self.pairs[:SHOWN])
            more = f" and {len(self.pairs) - SHOWN} more" if len(self.pairs) > SHOWN else ""
            return f"{counted(len(self.pairs), 'slow pair')}: {shown}{more} ({slowest}; {usual})"
        return f"each pair of its GPUs is as fast as others ({slowest}; {usual}): look at NVLink SHARP, if the node has it"


def slow_gpus(names: Sequence[str], matrix: PairMatrix, usual_gb_s: float) -> SlowGpus:
    """Look for the GPUs of a node that are slow with all others.

    Args:
        names: the GPUs of the node, in the order of the ranks.
        matrix: what each sends to each other one.
        usual_gb_s: what a pair usually reaches, by :func:`usual_pair_gb_s`.

    Raises:
        ValueError: fewer than three GPUs.
    """
    if len(names) < FEWEST_GPUS:
        raise ValueError(f"{len(names)} GPUs: expected at least {FEWEST_GPUS}")
    rates = _rates(names, matrix)
    slow = {pair for pair, gb_s in rates.items() if gb_s < SLOW_SHARE * usual_gb_s}
    guilty = [name for name in names if _is_slow_with_all(name, names, slow)]
    found = guilty if len(guilty) < len(names) else []  # all of them: the node is slow, and none of its GPUs stands out
    left = tuple(sorted(pair for pair in slow if not {*pair} & {*found}))
    return SlowGpus(gpus=tuple(found), pairs=left, usual_gb_s=usual_gb_s, slowest_gb_s=min(rates.values()))


def usual_pair_gb_s(matrices: Mapping[object, PairMatrix]) -> float:
    """The median of every ordered pair of all nodes."""
    return statistics.median(gb_s for matrix in matrices.values() for row in matrix.gb_s for gb_s in row if gb_s is not None)


def _rates(names: Sequence[str], matrix: PairMatrix) -> dict[tuple[str, str], float]:
    return {
        (source, target): gb_s
        for row, source in enumerate(names)
        for column, target in enumerate(names)
        if (gb_s := matrix.gb_s[row][column]) is not None
    }


def _is_slow_with_all(name: str, names: Sequence[str], slow: set[tuple[str, str]]) -> bool:
    """Whether every pair of a GPU is slow, in one direction or in both. Two bad GPUs are slow with each other anyway."""
    others = [other for other in names if other != name]
    return all((name, other) in slow for other in others) or all((other, name) in slow for other in others)
