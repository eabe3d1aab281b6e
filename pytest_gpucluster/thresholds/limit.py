"""One number to compare a value with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pytest_gpucluster.thresholds.layers import Kind  # noqa: TC001 -- whoever reads a journal asks for the fields' types

SIGNS: dict[Kind, str] = {"above": ">", "below": "<", "min": ">=", "max": "<="}
NO_CEILING = 1_000_000
"""What ``below`` says of a value for which nobody knows a limit, as ``above: 0`` does of a rate."""
_MISSED: dict[Kind, str] = {"above": "not above", "below": "not below", "min": "below", "max": "above"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The best value that hardware can give: the most of what should be high, the least of what should be low.

    ``by``: what says so, in words.
    """

    value: float
    unit: str
    is_most: bool
    by: str

    def allows(self, value: float) -> bool:
        """Whether hardware could give this value."""
        return value <= self.value if self.is_most else value >= self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One number to compare with. ``above`` and ``below`` are strict, ``min`` and ``max`` inclusive.

    ``basis``: where several limits are written, which one this is, in words. ``bound``: the best value that is possible;
    None where nobody knows it.
    """

    kind: Kind
    value: int | float
    unit: str
    basis: str | None = None
    bound: Bound | None = field(default=None, compare=False)

    @property
    def is_floor(self) -> bool:
        """Whether higher is better."""
        return self.kind in {"above", "min"}

    @property
    def is_none(self) -> bool:
        """Whether any value will do, above zero or below :data:`NO_CEILING`: it is shown, and nobody knows a number to ask."""
        return (self.kind, self.value) in (("above", 0), ("below", NO_CEILING))

    @property
    def text(self) -> str:
        """``> 700 TFLOPS``."""
        return f"{SIGNS[self.kind]} {_number(self.value)} {self.unit}"

    @property
    def missed_word(self) -> str:
        """How a value outside the limit stands to it: ``not above``."""
        return _MISSED[self.kind]

    def holds(self, value: object) -> bool:
        """Whether a value is within the limit. Anything but a finite int or float is not."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
            return False
        return {
            "above": value > self.value,
            "below": value < self.value,
            "min": value >= self.value,
            "max": value <= self.value,
        }[self.kind]

    def margin_percent(self, value: float) -> float | None:
        """How far inside the limit (above 0) or outside (below 0) a value is, in percent of the limit.

        None when the limit is 0, the value is not finite, or the distance is beyond every number.
        """
        if self.value == 0 or not _is_finite(value):
            return None
        distance = value - self.value if self.is_floor else self.value - value
        percent = distance / abs(self.value) * 100.0
        return percent if _is_finite(percent) else None


def _is_finite(value: float) -> bool:
    """Whether a number can be compared: no NaN, no infinity, and no int beyond every float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
