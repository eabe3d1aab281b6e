"""Whether repeats of a measurement can be judged, and when to measure on. Pure: numbers in, a value and its doubt out.

The judged quantity is the median. One round of repeats is judged if it agrees with itself (:func:`doubt`). If it does
not, further rounds are measured, and the interval of the median of all their repeats decides (:func:`doubt_of_median`). A wide
spread is no doubt by itself: it makes us measure on, and it is shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.text import counted, text_of
from pytest_gpucluster.thresholds.limit import Limit, is_finite

FEWEST = 3
MORE = 12
"""A doubtful value is measured in at most this many further rounds."""
BUDGET, BUDGET_S = 4.5, 30.0
"""No round begins once the further ones have taken this many times as long as the first, and this many seconds."""
CONFIRMED = 3
"""A miss that one disturbance could explain has to be measured in this many rounds, if the budget allows; in all that it
allows where more than a tenth of the repeats hold."""
CONFIDENCE = 0.99
"""Of the interval of the median."""
ROUNDED = 1e-3
"""Repeats are rounded for the report: a value may lie outside all of them by this share."""
ENOUGH = 8
"""Fewer repeats have no interval of that confidence."""
NEAR = 2
"""One disturbance could explain a miss by less than this many times the ``noise``."""
STALLED = 0.5
"""A repeat stalled if its rate is below this share of the median; a time, if the median is below this share of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """A value and the repeats that it is the middle of, in one unit. ``again`` measures one more round in the same way.

    ``took_s``: how long this round took, in seconds; 0 where nobody knows. ``disturbed_by``: who else kept the host busy
    meanwhile; None where nobody did, or nobody looked.
    """

    value: float
    samples: Sequence[float]
    again: Callable[[], Repeats] | None = None
    took_s: float = 0.0
    disturbed_by: str | None = None

    def __post_init__(self) -> None:
        """Refuse repeats of which the value cannot be the middle.

        Raises:
            MeasurementError: there is no repeat, one is no finite number, or the value lies outside all of them.
        """
        wrong = [sample for sample in self.samples if not is_finite(sample)]
        if wrong:
            raise MeasurementError(f"a repeat is {text_of(wrong[0], repr)}, not a finite number")
        if len(self.samples) == 0:
            raise MeasurementError(f"{text_of(self.value, repr)} has no repeats: nothing shows that it was measured")
        low, high = min(self.samples), max(self.samples)
        slack = ROUNDED * max(abs(low), abs(high))
        if is_finite(self.value) and not low - slack <= self.value <= high + slack:
            shown = f"{low:.6g} to {high:.6g}"
            raise MeasurementError(f"{self.value:.6g} is not the middle of its repeats, {shown}: the measurement is wrong")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """10th percentile, median and 90th percentile of repeats."""

    low: float
    median: float
    high: float
    count: int

    @property
    def relative(self) -> float:
        """(90th - 10th percentile) / median; infinite when the median is 0 and the repeats differ."""
        width = self.high - self.low
        if width == 0:
            return 0.0
        return width / abs(self.median) if self.median else math.inf

    def comes_near(self, limit: float) -> bool:
        """Whether ``limit`` lies inside the spread, or outside by at most the spread itself."""
        width = self.high - self.low
        return self.low - width <= limit <= self.high + width


def spread_of(samples: Sequence[float]) -> Spread:
    """The spread of at least one repeat."""
    deciles = statistics.quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else samples
    lowest, median, highest = min(samples), statistics.median(samples), max(samples)
    # Interpolation rounds: between equal samples it may leave them by a last digit.
    low, high = min(max(deciles[0], lowest), median), max(min(deciles[-1], highest), median)
    return Spread(low=low, median=median, high=high, count=len(samples))


def interval_of_median(samples: Sequence[float]) -> tuple[float, float]:
    """The interval that has the median with :data:`CONFIDENCE`, by order statistics: it assumes no distribution.

    Fewer than :data:`ENOUGH` repeats cannot have that confidence; then it is all of them.
    """
    ordered, count = sorted(samples), len(samples)
    left_out, tail = 0, 0.0
    for outside in range((count + 1) // 2):
        tail += math.comb(count, outside) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        left_out = outside
    return ordered[left_out], ordered[count - 1 - left_out]


def doubt(repeats: Repeats, *, limit: Limit, allowed: float | None) -> str | None:
    """Why one round of repeats is not enough to judge; None if it is.

    The limit lies inside their spread (10th to 90th percentile); or they disagree by more than ``allowed`` and come near the
    limit, which is within their own spread of it.

    Args:
        repeats: fewer than :data:`FEWEST` have no meaningful spread and are judged as they are.
        limit: the limit of the value.
        allowed: the entry's ``noise``, a relative spread from the 10th to the 90th percentile. None allows any.
    """
    if allowed is None or len(repeats.samples) < FEWEST:
        return None
    seen = spread_of(repeats.samples)
    if seen.relative > allowed and seen.comes_near(limit.value):
        return f"{seen.count} repeats spread over {100 * seen.relative:.1f} %, and {100 * allowed:g} % are allowed"
    if seen.low < limit.value < seen.high:
        return f"the limit lies inside the 10th to 90th percentile of {seen.count} repeats, {seen.low:.6g} to {seen.high:.6g}"
    return None


def doubt_of_median(rounds: Sequence[Repeats], *, limit: Limit) -> str | None:
    """Why the median of all rounds cannot be judged; None if it can.

    The interval of the median has to lie on one side of the limit. A disturbance makes a part slower, never faster, and it
    comes in bursts, of which the interval knows nothing. So a miss also has to be that of most rounds by themselves.
    """
    samples = samples_of(rounds)
    low, high = interval_of_median(samples)
    if limit.holds(low) != limit.holds(high):
        name = f"the {100 * CONFIDENCE:g} % interval of the median of" if len(samples) >= ENOUGH else "the range of"
        return f"the limit lies inside {name} {counted(len(samples), 'repeat')}, {low:.6g} to {high:.6g}"
    missing = sum(not limit.holds(statistics.median(one.samples)) for one in rounds)
    if not limit.holds(low) and 2 * missing <= len(rounds):
        return f"{len(samples)} repeats miss the limit, but by its own median only {missing} of {len(rounds)} rounds does"
    return None


def samples_of(rounds: Sequence[Repeats]) -> list[float]:
    """The repeats of all rounds."""
    return [sample for one in rounds for sample in one.samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Repeats that took more than twice as long as the median one: how many of how many, and the worst of them."""

    stalled: int
    count: int
    worst: float

    @property
    def share(self) -> float:
        """Of the repeats, 0 to 1."""
        return self.stalled / self.count


def stalls_of(samples: Sequence[float], *, is_floor: bool) -> Stalls:
    """The stalls among repeats; ``is_floor``: they are rates, of which higher is better, and else times."""
    median = statistics.median(samples)
    stalled = [one for one in samples if (one < STALLED * median if is_floor else STALLED * one > median)]
    return Stalls(stalled=len(stalled), count=len(samples), worst=(min if is_floor else max)(samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What all rounds of a measurement show of one value.

    ``why``: why it was measured in further rounds, None if it was not. ``doubt``: why it cannot be judged all the same.
    ``is_final``: further rounds could not clear the doubt.
    """

    value: float
    rounds: tuple[Repeats, ...]
    why: str | None = None
    doubt: str | None = None
    is_final: bool = True


def settle(first: Repeats, *, limit: Limit, allowed: float | None, stalls: float | None = None) -> Settled:
    """Measure on until the median can be judged, or the budget of rounds and seconds is used.

    Args:
        first: the first round.
        limit: the limit of the median.
        allowed: the entry's ``noise``; None: the value is judged as it is.
        stalls: the share of repeats that may stall; more of them are measured on too.
    """
    rounds, unclear = [first], doubt(first, limit=limit, allowed=allowed)
    why = reason = unclear or _near_miss(first, limit, allowed) or _many_stalls([first], limit, stalls)
    while reason is not None and _may_go_on(rounds):
        assert rounds[-1].again is not None
        rounds.append(rounds[-1].again())
        if len(rounds[-1].samples) < len(first.samples):
            repeats = counted(len(rounds[-1].samples), "repeat")
            short = f"measured again with {repeats}, fewer than the {len(first.samples)} before"
            return Settled(value=rounds[-1].value, rounds=tuple(rounds), why=why, doubt=short, is_final=False)
        unclear = doubt_of_median(rounds, limit=limit)
        reason = unclear or _unconfirmed(rounds, limit, allowed) or _many_stalls(rounds, limit, stalls)
    if len(rounds) == 1 and unclear is not None and len(first.samples) >= ENOUGH:
        unclear = doubt_of_median(rounds, limit=limit)
    is_plain = len(rounds) == 1 and (why is None or unclear is not None)
    return Settled(
        value=first.value if is_plain else statistics.median(samples_of(rounds)),
        rounds=tuple(rounds),
        why=why,
        doubt=unclear,
        is_final=len(rounds) > 1 or unclear is None,
    )


def _may_go_on(rounds: Sequence[Repeats]) -> bool:
    """Whether one more round can be had within the budget."""
    spent_s, budget_s = sum(one.took_s for one in rounds[1:]), max(BUDGET_S, BUDGET * rounds[0].took_s)
    return rounds[-1].again is not None and len(rounds) <= MORE and spent_s <= budget_s


def _unconfirmed(rounds: Sequence[Repeats], limit: Limit, allowed: float | None) -> str | None:
    """A miss in too few rounds, or of a part that reaches the limit now and then; None if it holds or is confirmed."""
    seen = spread_of(samples_of(rounds))
    if limit.holds(seen.median):
        return None
    best = seen.high if limit.is_floor else seen.low
    is_disturbed = allowed is not None and seen.relative > allowed and limit.holds(best)
    return f"a miss in {counted(len(rounds), 'round')}" if is_disturbed or len(rounds) < CONFIRMED else None


def _near_miss(first: Repeats, limit: Limit, allowed: float | None) -> str | None:
    """A miss that one disturbance could explain; None if it is none."""
    if allowed is None or len(first.samples) < FEWEST or limit.holds(first.value):
        return None
    if abs(first.value - limit.value) > NEAR * allowed * abs(first.value):
        return None
    return f"{len(first.samples)} repeats miss the limit by less than {NEAR} times the {100 * allowed:g} % that are allowed"


def _many_stalls(rounds: Sequence[Repeats], limit: Limit, stalls: float | None) -> str | None:
    """More stalls than the entry allows; None if there are not, or too few repeats to say so."""
    samples = samples_of(rounds)
    if stalls is None or len(samples) < FEWEST:
        return None
    found = stalls_of(samples, is_floor=limit.is_floor)
    if found.share <= stalls:
        return None
    return f"{found.stalled} of {found.count} repeats stalled, and {100 * stalls:g} % may"


def hidden_by_median(samples: Sequence[float], *, limit: Limit, allowed: float | None, stalls: float | None) -> str | None:
    """What the median of repeats does not show: stalls, and a spread wider than ``allowed``; None without either.

    Nothing is said of an entry with neither ``noise`` nor ``stalls``, nor of too few repeats.
    """
    if len(samples) < FEWEST or (allowed is None and stalls is None):
        return None
    found, seen, spread = [], stalls_of(samples, is_floor=limit.is_floor), spread_of(samples)
    if seen.stalled:
        worst = f"the worst {format_number(float(seen.worst))} {limit.unit}"
        found.append(f"{seen.stalled} of {seen.count} repeats took more than twice as long as the median, {worst}")
    if allowed is not None and spread.relative > allowed:
        found.append(f"{spread.count} repeats spread over {100 * spread.relative:.1f} %, and {100 * allowed:g} % are usual")
    return "; ".join(found) or None
