"""Whether repeats of a measurement are steady enough to be judged. Pure: numbers in, a reason for doubt out."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.text import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpucluster.thresholds.limit import Limit

FEWEST = 3
MORE = 3
"""A doubtful value is measured again with this many times the repeats. If still in doubt, its outcome is noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """A value and the repeats that it is the middle of, in one unit. ``again`` measures with more repeats."""

    value: float
    samples: Sequence[float]
    again: Callable[[], Repeats] | None = None

    def __post_init__(self) -> None:
        """Refuse repeats that are not numbers.

        Raises:
            MeasurementError: a repeat is no finite number.
        """
        wrong = [sample for sample in self.samples if not is_finite(sample)]
        if wrong:
            raise MeasurementError(f"a repeat is {text_of(wrong[0], repr)}, not a finite number")


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
    return Spread(  # interpolation rounds: between equal samples it may leave them by a last digit
        low=min(max(deciles[0], lowest), median),
        median=median,
        high=max(min(deciles[-1], highest), median),
        count=len(samples),
    )


def doubt(repeats: Repeats, *, limit: Limit, allowed: float | None) -> str | None:
    """Why these repeats must not be judged; None if they may be.

    The rule: repeats are in doubt if the limit lies inside their spread (10th to 90th percentile), or if they disagree by
    more than ``allowed`` and come near the limit. Near is a distance of at most their own spread. Repeats that all miss
    the limit by more than that have failed, and repeats that all clear it by more than that have passed, however much
    they disagree.

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


def is_finite(sample: object) -> bool:
    """Whether it is a finite number; neither True nor an integer beyond all floats is one."""
    try:
        return isinstance(sample, (int, float)) and not isinstance(sample, bool) and math.isfinite(sample)
    except OverflowError:
        return False
