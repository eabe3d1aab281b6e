"""Which values of two runs differ by more than they scatter. Pure statistics, with the corrections for many parts.

The change of a value is relative, and above 0 where it is better. What all parts of a criterion have in common (a new driver,
a warmer room) is their median, which is removed and reported by itself. How much the rest scatters says how far a value may
move by chance: siblings give the spread of both runs, their repeats included. One limit for all is set so that a pair of runs
without any change has an alarm in :data:`FALSE_ALARMS` of all cases, however many parts and criteria there are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.failure_text import COUNTED
from pytest_gpucluster.records.matching import PartKey

FALSE_ALARMS = 0.005
"""The share of pairs without a change that may have an alarm, by the model. Real tails are wider: 1 % is what is promised."""
ENOUGH, FEW = 32, 8
"""So many siblings give the spread by themselves; fewer than :data:`FEW` give none."""
LEAST_CHANGE = 0.01
"""No smaller loss of one part is named, however little its siblings scatter."""
USUAL_NOISE = 0.025
"""The relative spread of repeats where the entry does not say ``noise``."""
LEAST_SHIFT, BAD_SHIFT = 0.01, 0.05
"""From here on a change of all parts together is shown; from here on it counts as worse."""
LEAST_SIGMA = 1e-4
RECALL_QUANTILE, RECALL_SIGMAS = 0.98, 2.33
"""99 % of all parts lost no more by chance than what 98 % of the distances reach, which are 2.33 sigmas of normal ones."""
FOR_TAILS = 1000
"""So many deviations say how wide their tails are."""
NORMAL_TAILS = 1.60
"""The farthest 1 % of normal deviations lie 1.57 times as far as the farthest 10 %."""
FREEDOMS = (3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 14.0, 20.0, 30.0, 60.0)
NEAR_QUANTILE, ITS_SIGMAS = 0.95, 1.96
MAD_SIGMAS = 1.4826
FAMILIES = {
    "TFLOPS": "products and training",
    "TOPS": "products and training",
    "tokens/s/GPU": "products and training",
    "TB/s": "memory bandwidth",
    "GB/s": "bandwidth of links",
}
"""Units of criteria that measure the same parts of a GPU: they lose together."""
COUNTS = (*COUNTED, "count")
"""Units of values that are judged by their outcome alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The two values of one part in one criterion. ``change`` is relative, above 0 where it is better."""

    part: PartKey
    before: float
    after: float
    change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change beyond noise.

    Attributes:
        criterion: or the name of a family, of which ``members`` are the criteria.
        part: None where all parts changed together.
        change: relative, without what all parts have in common; below 0 is worse.
        allowed: so much may come from noise.
    """

    criterion: str
    part: PartKey | None
    change: float
    allowed: float
    before: float | None = None
    after: float | None = None
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedValue:
    """What is known of a criterion: its unit, whether higher is better, and the noise that its entry allows."""

    unit: str
    is_floor: bool
    noise: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scatter:
    """The pairs of one criterion, with what they have in common and how far the rest scatters."""

    name: str
    known: JudgedValue
    pairs: Sequence[Pair]
    shift: float
    sigma: float

    @property
    def noise(self) -> float:
        """What the entry allows its repeats, or what is usual."""
        return max(self.known.noise or USUAL_NOISE, USUAL_NOISE)

    @property
    def luck(self) -> float:
        """So much better than they were 99 % of the parts may look by chance."""
        if len(self.pairs) < FEW:
            return self.noise
        distances = sorted(abs(pair.change - self.shift) for pair in self.pairs)
        seen = distances[int(RECALL_QUANTILE * (len(distances) - 1))] if len(distances) >= ENOUGH else 0.0
        return max(seen, RECALL_SIGMAS * self.sigma)

    def allowed(self, sigmas: float) -> float:
        """The largest change that is not named. A spread of few siblings is itself uncertain: it counts for more."""
        if len(self.pairs) < FEW:
            return 2 * self.noise
        least = LEAST_CHANGE if len(self.pairs) >= ENOUGH else 2 * self.noise
        return max(sigmas * (1 + 8 / len(self.pairs)) * self.sigma, least)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tests:
    """All that is tested together, and how many sigmas each kind of test allows."""

    scatters: Sequence[_Scatter]
    families: Sequence[_Scatter]
    sigmas: float
    joint_sigmas: float

    def members_of(self, family: _Scatter) -> list[_Scatter]:
        """The criteria of a family."""
        kind = family.pairs[0].part[0]
        alike = (one for one in self.scatters if len(one.pairs) >= ENOUGH and one.pairs[0].part[0] == kind)
        return [one for one in alike if FAMILIES.get(one.known.unit) == family.name]


def relative_change(before: float, after: float, *, criterion: JudgedValue, limit: float | None) -> float | None:
    """The change of a value, relative to what it was; above 0 where it is better.

    Of percents it is their difference. What should be small is compared with its limit, so that a change from 1 to 2 ms is
    little where 100 ms are allowed. None for counts, and where there is nothing to compare with.
    """
    sign = 1 if criterion.is_floor else -1
    if criterion.unit in COUNTS:
        return None
    if criterion.unit == "%":
        return sign * (after - before) / 100
    reference = abs(before) if criterion.is_floor else max(abs(before), abs(limit or 0.0))
    return sign * (after - before) / reference if reference > 0 else None


def find_changes(pairs: Mapping[str, Sequence[Pair]], criteria: Mapping[str, JudgedValue]) -> list[Change]:
    """All that changed beyond noise, better or worse: single parts, parts over a family of criteria, all parts together."""
    tests = _tests(pairs, criteria)
    single = [change for one in tests.scatters for change in _beyond(one, tests.sigmas)]
    named = {(change.part, FAMILIES.get(criteria[change.criterion].unit), change.change < 0) for change in single}
    joint = [change for one in tests.families for change in _beyond_together(one, tests)]
    more = [one for one in joint if (one.part, one.criterion, one.change < 0) not in named]
    return [*(change for one in tests.scatters for change in _shifts(one)), *single, *more]


def smallest_losses(pairs: Mapping[str, Sequence[Pair]], criteria: Mapping[str, JudgedValue]) -> dict[str, float]:
    """The smallest loss of one part that is named in 99 of 100 cases, for each rate, as a share of its value.

    It is what noise may be, and as much again as the part may look better by chance. Fewer than :data:`FEW` siblings show no
    spread; then it is three times the noise that the entry allows.
    """
    tests = _tests(pairs, criteria)
    rates = (one for one in tests.scatters if one.known.is_floor and one.known.unit in FAMILIES)
    return {one.name: one.allowed(tests.sigmas) + one.luck for one in rates}


def _tests(pairs: Mapping[str, Sequence[Pair]], criteria: Mapping[str, JudgedValue]) -> _Tests:
    scatters = [_scatter(name, criteria[name], some) for name, some in pairs.items() if some]
    families = list(_families(scatters))
    number = sum(len(one.pairs) for one in (*scatters, *families) if len(one.pairs) >= FEW)
    share = FALSE_ALARMS / max(number, 20)
    sigmas, joint_sigmas = (most_by_chance(share, freedom=_freedom(some)) for some in (scatters, families))
    return _Tests(scatters=scatters, families=families, sigmas=sigmas, joint_sigmas=joint_sigmas)


def most_by_chance(share: float, *, freedom: float) -> float:
    """The deviation in sigmas that this share of all values exceeds on one side, by Student's distribution.

    ``freedom``: its degrees of freedom, infinite for a normal one. By Hill's approximation (Algorithm 396 of the CACM, 1970).
    """
    p = 2 * share
    if math.isinf(freedom):
        return statistics.NormalDist().inv_cdf(1 - share)
    a = 1 / (freedom - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * freedom
    y = (d * p) ** (2 / freedom)
    if y > 0.05 + a:
        x = statistics.NormalDist().inv_cdf(share)
        c += 0.3 * (freedom - 4.5) * (x + 0.6) if freedom < 5 else 0
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = x**2
        y = math.expm1(a * ((((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x) ** 2)
    else:
        inner = ((freedom + 6) / (freedom * y) - 0.089 * d - 0.822) * (freedom + 2) * 3
        y = ((1 / inner + 0.5 / (freedom + 4)) * y - 1) * (freedom + 1) / (freedom + 2) + 1 / y
    return math.sqrt(freedom * y)


def _freedom(scatters: Iterable[_Scatter]) -> float:
    """How wide the tails are of all deviations together, as degrees of freedom of Student's distribution.

    By how far the farthest 1 % lie from the farthest 10 %.
    """
    all_of_them = sorted(
        abs(pair.change - one.shift) / one.sigma
        for one in scatters
        if len(one.pairs) >= ENOUGH and one.sigma > LEAST_SIGMA
        for pair in one.pairs
    )
    if len(all_of_them) < FOR_TAILS:
        return math.inf
    near, far = (all_of_them[int(share * (len(all_of_them) - 1))] for share in (0.90, 0.99))
    ratio = far / near if near > 0 else math.inf
    likely = [one for one in FREEDOMS if ratio <= most_by_chance(0.005, freedom=one) / most_by_chance(0.05, freedom=one)]
    return max(likely, default=FREEDOMS[0]) if ratio > NORMAL_TAILS else math.inf


def _scatter(name: str, known: JudgedValue, pairs: Sequence[Pair]) -> _Scatter:
    if len(pairs) < FEW:
        return _Scatter(name=name, known=known, pairs=pairs, shift=0.0, sigma=0.0)
    shift = statistics.median(pair.change for pair in pairs)
    distances = sorted(abs(pair.change - shift) for pair in pairs)
    sigma = MAD_SIGMAS * statistics.median(distances)
    if len(pairs) >= ENOUGH:
        sigma = max(sigma, distances[int(NEAR_QUANTILE * (len(distances) - 1))] / ITS_SIGMAS)
    return _Scatter(name=name, known=known, pairs=pairs, shift=shift, sigma=max(sigma, LEAST_SIGMA))


def _beyond(one: _Scatter, sigmas: float) -> Iterable[Change]:
    allowed = one.allowed(sigmas)
    for pair in one.pairs:
        own = pair.change - one.shift
        if abs(own) > allowed:
            yield Change(criterion=one.name, part=pair.part, change=own, allowed=allowed, before=pair.before, after=pair.after)


def _shifts(one: _Scatter) -> Iterable[Change]:
    """The change of all parts together; ``allowed`` is how much of it is not yet worse."""
    if len(one.pairs) >= FEW and abs(one.shift) >= LEAST_SHIFT:
        bad = max(BAD_SHIFT, 2 * (one.known.noise or 0.0))
        before, after = (statistics.median(values) for values in zip(*((p.before, p.after) for p in one.pairs), strict=True))
        yield Change(criterion=one.name, part=None, change=one.shift, allowed=bad, before=before, after=after)


def _families(scatters: Iterable[_Scatter]) -> Iterable[_Scatter]:
    """The mean change of each part, in spreads, over all criteria of a family that have it."""
    wide = (one for one in scatters if one.known.unit in FAMILIES and len(one.pairs) >= ENOUGH)
    by_family = grouped(((FAMILIES[one.known.unit], one.pairs[0].part[0]), one) for one in wide)
    for (family, _), members in by_family.items():
        if len(members) > 1:
            scores = grouped((pair.part, (pair.change - one.shift) / one.sigma) for one in members for pair in one.pairs)
            whole = {part: some for part, some in scores.items() if len(some) == len(members)}
            pairs = [Pair(part=part, before=0, after=0, change=statistics.fmean(some)) for part, some in whole.items()]
            if len(pairs) >= ENOUGH:
                yield _scatter(family, members[0].known, pairs)


def _beyond_together(family: _Scatter, tests: _Tests) -> Iterable[Change]:
    """A change that all members share is their mean in spreads, times the harmonic mean of these spreads."""
    members = tests.members_of(family)
    sigma = 1 / statistics.fmean(1 / one.sigma for one in members)
    names = tuple(one.name for one in members)
    allowed = tests.joint_sigmas * (1 + 8 / len(family.pairs)) * family.sigma
    for pair in family.pairs:
        own = pair.change * sigma
        if abs(pair.change - family.shift) > allowed and abs(own) >= LEAST_CHANGE:
            yield Change(criterion=family.name, part=pair.part, change=own, allowed=LEAST_CHANGE, members=names)
