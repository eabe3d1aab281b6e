"""Which GPU is slower than its siblings, and by how much. Pure: rates in, shortfalls out.

Each member is compared with the median of the *others*, so that it does not pull the median towards itself, and with their
spread: 1.4826 times the median absolute deviation, which is sigma for normal data. Up to half of the siblings may be
anything without moving either. Three siblings can be alike by chance, so the spread has a floor. The lowest of many healthy
GPUs lies further below than the lowest of eight, so the bound in sigmas grows with their number.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Member = TypeVar("Member", bound=Hashable)

MAD_TO_SIGMA = 1.4826  # for normal data; Rousseeuw and Croux 1993
OUTLIER_SIGMAS = 3.5  # Iglewicz and Hoaglin 1993
FALSE_NAMES = 1 / 200
"""How often a healthy GPU may be named, however many there are: in one of 200 runs of a criterion."""
FEWEST_SIBLINGS = 2
"""With one sibling, nothing shows which of the two is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """How one member compares with its siblings.

    ``percent``: how far it lies below their median, in per cent of it; negative for one that is faster. ``score``: the same in
    robust sigmas of the siblings. ``median`` and ``mad`` (median absolute deviation) are theirs, in the unit of the values.
    ``explained_percent``: how far below the median their own spread explains a healthy member to lie: 3.5 sigmas,
    or :func:`sigmas_of_lowest` where that is more.
    """

    percent: float
    score: float
    siblings: int
    median: float
    mad: float
    explained_percent: float

    @property
    def is_judged(self) -> bool:
        """Whether there are enough siblings to say which GPU is slow."""
        return self.siblings >= FEWEST_SIBLINGS

    def is_named(self, limit_percent: float) -> bool:
        """Whether this member is slow beyond doubt: further below than the limit and than its siblings' spread explains."""
        return self.is_judged and self.percent > max(limit_percent, self.explained_percent)


def sigmas_of_lowest(number: int) -> float:
    """How many sigmas below its siblings the lowest of so many healthy GPUs lies in all but one of 200 runs, if normal."""
    return -statistics.NormalDist().inv_cdf(FALSE_NAMES / number)


def shortfalls(
    values: Mapping[Member, float], *, floor_spread: float, group_of: Mapping[Member, str] | None = None
) -> dict[Member, Shortfall]:
    """Compare every member with its siblings.

    Args:
        values: the rate of each measured member; higher is better.
        floor_spread: the relative spread (one sigma, 0.01 is 1 %) that healthy siblings have in any case.
        group_of: the group of each member, such as the GPU's model. May know more members. None: all are siblings.

    Returns:
        The shortfall of each member that has a sibling.

    Raises:
        ValueError: a rate that is not a finite number above 0, a spread that is not between 0 and 1, or a member without a
            group.
    """
    if not 0 < floor_spread < 1:
        raise ValueError(f"floor_spread must lie between 0 and 1, not {floor_spread}")
    groups: dict[str, dict[Member, float]] = {}
    for member, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{member}: {value} is not a rate")
        if group_of is not None and member not in group_of:
            raise ValueError(f"{member} has a rate and no group")
        groups.setdefault("" if group_of is None else group_of[member], {})[member] = value
    found = [_within(group, floor_spread) for group in groups.values() if len(group) > 1]
    return {member: shortfall for group in found for member, shortfall in group.items()}


def _within(values: Mapping[Member, float], floor_spread: float) -> dict[Member, Shortfall]:
    """Compare every member with the others of one group: n log n, as leaving one out gives at most three medians."""
    ordered = sorted(values.values())
    deviations: dict[float, list[float]] = {}
    found = {}
    most_sigmas = max(OUTLIER_SIGMAS, sigmas_of_lowest(len(values)))
    for member, value in values.items():
        median = _middle_without(ordered, value)
        if median not in deviations:
            deviations[median] = sorted(abs(one - median) for one in ordered)
        mad = _middle_without(deviations[median], abs(value - median))
        own_spread = MAD_TO_SIGMA * (mad / median)
        spread = max(own_spread, floor_spread)
        below = 1 - value / median
        found[member] = Shortfall(
            percent=100 * below,
            score=below / spread,
            siblings=len(values) - 1,
            median=median,
            mad=mad,
            explained_percent=100 * max(most_sigmas * own_spread, OUTLIER_SIGMAS * floor_spread),
        )
    return found


def _middle_without(ordered: Sequence[float], left_out: float) -> float:
    """The median of ``ordered`` without one occurrence of ``left_out``; never overflows."""
    gone = bisect.bisect_left(ordered, left_out)

    def at(index: int) -> float:
        return ordered[index + (index >= gone)]

    low, high = at((len(ordered) - 2) // 2), at((len(ordered) - 1) // 2)
    return low + (high - low) / 2
