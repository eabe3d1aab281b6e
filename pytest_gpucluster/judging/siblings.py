"""Which GPU is slower than its siblings, and by how much. Pure: rates in, shortfalls out.

Each member is compared with the median of the *others*, so that it does not pull the median towards itself, and with their
spread: 1.4826 times the median absolute deviation, which is sigma for normal data. Up to half of the siblings may be anything
without moving either. Three siblings can be alike by chance, so the spread has a floor. The lowest of many healthy GPUs lies
further below than the lowest of eight, so the bound in sigmas grows with their number. A run compares several quantities, and
may name a healthy GPU in none of them: :data:`FALSE_NAMES` is for all of them together.

Where many are slow, or each differs from the next, their own spread hides them. So the spread of the siblings that are not
named is compared with that of healthy ones: among the GPUs of each host, and among the means of the hosts. The bound is a
quantile of the chi distribution, for two GPUs as for a thousand. If siblings differ by far more, or half of them are slower
than the others, nobody is named, and nobody passes.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.agreement import is_majority
from pytest_gpucluster.judging.noise import FEWEST, spread_of

Member = TypeVar("Member", bound=Hashable)

MAD_TO_SIGMA = 1.4826  # for normal data; Rousseeuw and Croux 1993
OUTLIER_SIGMAS = 3.5  # Iglewicz and Hoaglin 1993
FALSE_NAMES = 1 / 3500
"""How often a run may name a healthy GPU, over all that it compares, where healthy ones differ as the recipes say: one run in
1000 is asked for, and most of it is left for what the formula of :meth:`Healthy.lowest_percent` neglects."""
COMPARED = 8
"""Quantities that a run compares: the entries ``straggler[...]``. Each has an equal share (Bonferroni), alike or not."""
FALSE_NAMES_BY_SPREAD = 1 / 200
"""The same where the siblings differ by more than healthy ones, and their own spread is the measure: a run of a criterion."""
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


def sigmas_of_lowest(number: int, *, share: float = FALSE_NAMES_BY_SPREAD) -> float:
    """How many sigmas below the mean the lowest of so many lies in all but this share of the runs, if they are normal."""
    return -statistics.NormalDist().inv_cdf(share / number)


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
        ValueError: a rate that is not a finite number above 0, or a spread that is not between 0 and 1.
    """
    if not 0 < floor_spread < 1:
        raise ValueError(f"floor_spread must lie between 0 and 1, not {floor_spread}")
    for member, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{member}: {value} is not a rate")
    groups = grouped((group_of and group_of[member], (member, value)) for member, value in values.items())
    found = [_within(dict(group), floor_spread) for group in groups.values() if len(group) > 1]
    return {member: shortfall for group in found for member, shortfall in group.items()}


def _within(values: Mapping[Member, float], floor_spread: float) -> dict[Member, Shortfall]:
    """Compare every member with the others of one group: n log n, as leaving one out gives at most three medians."""
    ordered = sorted(values.values())
    deviations: dict[float, list[float]] = {}
    found = {}
    most_sigmas = max(OUTLIER_SIGMAS, sigmas_of_lowest(len(values)))
    for member, value in values.items():
        median = middle_without(ordered, value)
        if median not in deviations:
            deviations[median] = sorted(abs(one - median) for one in ordered)
        mad = middle_without(deviations[median], abs(value - median))
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


def middle_without(ordered: Sequence[float], left_out: float) -> float:
    """The median of ``ordered`` without one occurrence of ``left_out``; never overflows."""
    gone = bisect.bisect_left(ordered, left_out)

    def at(index: int) -> float:
        return ordered[index + (index >= gone)]

    low, high = at((len(ordered) - 2) // 2), at((len(ordered) - 1) // 2)
    return low + (high - low) / 2


FALSE_ALARMS = 5e-5
"""How often healthy siblings may be called unlike: in one of 20,000 runs of a criterion."""
FAR_MORE = 2.0
"""The least factor that is far more, however many siblings there are: healthy spreads are known of a few hosts only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings(Generic[Member]):
    """The rate of each measured member (higher is better), its model and its host. Members of one model are siblings."""

    rates: Mapping[Member, float]
    models: Mapping[Member, str]
    hosts: Mapping[Member, Hashable]

    def by_host(self, members: Iterable[Member]) -> list[list[float]]:
        """The rates of these members, host by host."""
        return list(grouped((self.hosts[member], self.rates[member]) for member in members).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """How healthy siblings differ, as relative sigmas (0.01 is 1 %): the GPUs of a host, and the means of hosts."""

    floor_spread: float
    between_hosts: float = 0.0

    def most_apart_percent(self, num_hosts: int) -> float:
        """How far two healthy siblings without others may lie apart, on so many hosts."""
        sigma = self.floor_spread if num_hosts == 1 else math.hypot(self.floor_spread, self.between_hosts)
        return 100 * math.sqrt(2) * sigma * _factor(1, tests=1)

    def lowest_percent(self, number: int, num_hosts: int) -> float:
        """How far below its siblings the lowest of so many healthy GPUs may lie, in per cent.

        It is beyond that in a :data:`COMPARED` part of :data:`FALSE_NAMES` at most: the probabilities of all GPUs add up to no
        more. Each GPU, and each host, is compared with a median, which varies too: with one sibling as much as the GPU itself.
        Of two hosts the GPUs of the slower one lie below together, so the hosts count and not their GPUs. Checked by
        simulation from 1 x 2 to 128 x 8 (docs/decisions/0011).
        """
        share = FALSE_NAMES / COMPARED
        within = self.floor_spread * _beside_median(number) * sigmas_of_lowest(number, share=share)
        if num_hosts == 1:
            return 100 * within
        lows = sigmas_of_lowest(num_hosts if num_hosts == 2 else number, share=share)
        return 100 * math.hypot(within, self.between_hosts * _beside_median(num_hosts) * lows)

    def objection(self, hosts: Sequence[Sequence[float]]) -> str | None:
        """Why GPUs with these rates, host by host, cannot all be healthy; None if they can."""
        several = [rates for rates in hosts if len(rates) > 1]
        tests = len(several) + (len(hosts) > 1)
        for rates in several:
            if why := _unlike(rates, self.floor_spread, tests, "siblings of one host"):
                return why
        if len(hosts) < 2:
            return None
        sigma = math.hypot(self.between_hosts, self.floor_spread / math.sqrt(min(map(len, hosts))))
        return _unlike([statistics.fmean(rates) for rates in hosts], sigma, tests, "the means of the hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """How one member compares with its siblings, to be judged.

    ``allowed_percent`` is how far below their median their own spread explains a healthy member to lie. ``doubt`` says how
    the siblings disagree, where they do and this member is not named.
    """

    shortfall: Shortfall
    allowed_percent: float
    doubt: str | None

    @property
    def evidence(self) -> dict[str, Any]:
        """What the value was compared with, by the names that a report shows."""
        return {
            "median of siblings": self.shortfall.median,
            "their MAD": self.shortfall.mad,
            "robust sigmas": self.shortfall.score,
            "siblings": self.shortfall.siblings,
        }


def with_repeats(compared: Compared, samples: Sequence[float], *, limit_percent: float) -> Compared:
    """Leave a member open that lies too far below, and whose own repeats spread by more than the limit.

    Something disturbed it then, and its median says by how much: that is no difference between parts. A part that is slow by
    itself is slow in each repeat.
    """
    is_outside = compared.shortfall.percent > max(limit_percent, compared.allowed_percent)
    if compared.doubt is not None or not is_outside or len(samples) < FEWEST:
        return compared
    spread_percent = 100 * spread_of(samples).relative
    if spread_percent <= limit_percent:
        return compared
    return replace(compared, doubt=f"its {len(samples)} repeats spread over {spread_percent:.1f} %, more than the limit")


def _beside_median(number: int) -> float:
    """The sigma of one of so many normal values less the median of the others, in sigmas of a value.

    The median of k has the variance pi / 2k for many (Kenney and Keeping 1962), and 1 for one; what joins both is at most 3 %
    off (simulated).
    """
    others = number - 1
    return math.sqrt(1 + math.pi / (2 * others + math.pi - 2 + (others % 2 == 0)))


def compare(siblings: Siblings[Member], healthy: Healthy, *, limit_percent: float) -> dict[Member, Compared]:
    """Compare every member with its siblings; a member without a sibling has no entry.

    Args:
        siblings: what was measured.
        healthy: how healthy siblings differ.
        limit_percent: how far below the median of its siblings a member may lie in any case.

    Raises:
        ValueError: a rate that is not a finite number above 0, a spread that is not between 0 and 1, or a member without a
            model.
    """
    found = shortfalls(siblings.rates, floor_spread=healthy.floor_spread, group_of=siblings.models)
    compared: dict[Member, Compared] = {}
    for members in grouped((siblings.models[member], member) for member in found).values():
        compared.update(_compare_group(siblings, {member: found[member] for member in members}, healthy, limit_percent))
    return compared


def _compare_group(
    siblings: Siblings[Member], group: Mapping[Member, Shortfall], healthy: Healthy, limit_percent: float
) -> dict[Member, Compared]:
    """Compare the members of one model. The means of a few hosts may be alike by chance, so healthy ones count too."""
    hosts = siblings.by_host(group)
    if len(group) == 2:
        allowed_percent = healthy.most_apart_percent(len(hosts))
        apart_percent = max(short.percent for short in group.values())
        why = f"one of two is slow: they differ by {apart_percent:.1f} %, healthy ones by at most {allowed_percent:.1f} %"
        doubt = why if apart_percent > max(limit_percent, allowed_percent) else None
        return {one: Compared(shortfall=short, allowed_percent=allowed_percent, doubt=doubt) for one, short in group.items()}
    least = healthy.lowest_percent(len(group), len(hosts))
    group = {one: replace(short, explained_percent=max(short.explained_percent, least)) for one, short in group.items()}
    slow = {member for member, short in group.items() if short.is_named(limit_percent)}
    has_majority = is_majority(len(group) - len(slow), len(group))
    named = slow if has_majority else set()
    rest = [member for member in group if member not in named]
    is_far = any(abs(group[member].percent) > limit_percent for member in rest)
    doubt = healthy.objection(siblings.by_host(rest)) if is_far else None
    if not has_majority:
        doubt = f"nobody can be named: {len(slow)} of {len(group)} siblings are slower, and the others are no majority"
    doubts = {member: None if member in named else doubt for member in group}
    allowed = {member: short.explained_percent for member, short in group.items()}
    return {one: Compared(shortfall=group[one], allowed_percent=allowed[one], doubt=doubts[one]) for one in group}


def _unlike(rates: Sequence[float], sigma: float, tests: int, what: str) -> str | None:
    """How much these rates differ, if healthy ones with this sigma do so in too few runs; None otherwise."""
    spread, healthy = statistics.stdev(rates) / statistics.fmean(rates), sigma * _factor(len(rates) - 1, tests=tests)
    if spread <= healthy:
        return None
    most = f"healthy ones by at most {100 * healthy:.1f} %"
    return f"nobody can be named: {what} differ by {100 * spread:.1f} % (standard deviation), {most}"


def _factor(free: int, *, tests: int) -> float:
    """The bound of a standard deviation with ``free`` degrees of freedom, in healthy sigmas, where a run makes so many tests.

    The quantile of the chi-square distribution is Wilson and Hilferty's (1931), 3 % too high for two values and exact for many.
    """
    part = 2 / (9 * free)
    quantile = statistics.NormalDist().inv_cdf(1 - FALSE_ALARMS / tests)
    return max(FAR_MORE, math.pow(1 - part + quantile * math.sqrt(part), 1.5))
