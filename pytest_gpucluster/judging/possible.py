"""Values that no hardware can give: then the measurement is wrong, and nothing is known of the hardware. Pure.

A clock or a size that is wrong by ten makes every GPU ten times as fast, also one that is slow by five. So such a value is
never judged, and nothing else is compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import Blame, MeasurementError
from pytest_gpucluster.judging.failure_text import format_number

if TYPE_CHECKING:
    from pytest_gpucluster.thresholds.limit import Bound

TOO_MUCH = "more than the hardware can: the measurement is wrong"
TOO_LITTLE = "less than the hardware needs: the measurement is wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Possible:
    """What the values of an entry can be, for a test that compares or divides them; ``bound`` is None where nobody knows."""

    key: str
    bound: Bound | None = None

    def error(self, value: float, *, where: object) -> MeasurementError | None:
        """Why a value is none, where no hardware could give it; ``where`` is what it was measured at."""
        return impossible(value, self.bound, what=f"{self.key} at {where}")

    def require(self, value: float, *, where: object) -> None:
        """Raise that error."""
        require_possible(value, self.bound, what=f"{self.key} at {where}")


def require_possible(value: float, bound: Bound | None, *, what: str) -> None:
    """Refuse a value that is better than hardware can be; ``what`` says whose value it is, and where.

    Raises:
        MeasurementError: nothing is known of the hardware, and no place is to blame.
    """
    error = impossible(value, bound, what=what)
    if error is not None:
        raise error


def impossible(value: float, bound: Bound | None, *, what: str) -> MeasurementError | None:
    """The error of a value that is better than hardware can be; None for any other value.

    Args:
        value: in the unit of the bound.
        bound: the best value that is possible; None where nobody knows it, and then any is.
        what: whose value it is, and where.
    """
    if bound is None or bound.allows(value):
        return None
    why, most = (TOO_MUCH, "at most") if bound.is_most else (TOO_LITTLE, "at least")
    best = f"{most} {format_number(bound.value)} {bound.unit} is possible, {bound.by}"
    text = f"{what}: {format_number(value)} {bound.unit} is {why} ({best})"
    return MeasurementError(text, blame=Blame(part="software", cause=why))
