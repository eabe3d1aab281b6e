"""The ``criterion`` fixture: one entry of thresholds.yaml at one place, waiting for its value."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpucluster import messages
from pytest_gpucluster.cluster import Place
from pytest_gpucluster.errors import CriterionFailedError, MeasurementError
from pytest_gpucluster.verdict import FAILED, PASSED, Record

if TYPE_CHECKING:
    from pytest_gpucluster.thresholds import Limit, Threshold


@dataclass(slots=True, kw_only=True)
class Criterion:
    """Compares measured values with the entry's limit, and remembers the worst it saw."""

    threshold: Threshold
    limit: Limit
    place: Place | None
    note: Callable[[str], None] = lambda _remark: None
    judged: Record | None = None
    message: str | None = None

    def require(self, value: float | Mapping[Any, float], *, evidence: Mapping[str, Any] | None = None) -> None:
        """Judge one value, or values by place (the worst decides).

        Args:
            value: a finite number in the entry's unit; bool, text, None, NaN, infinity and an empty mapping never pass.
            evidence: what else was seen while measuring (clocks, event reasons), shown in a failure.

        Raises:
            MeasurementError: the value is not a finite number: nothing was measured.
            CriterionFailedError: outside the limit, and the entry is not advisory.
        """
        named = value if isinstance(value, Mapping) else {self.place: value}
        if not named:
            raise MeasurementError(f"{self.threshold.key}: no values at all were measured")
        measured = {place: self._number(number, place) for place, number in named.items()}
        worst = (min if self.limit.is_floor else max)(measured, key=lambda place: measured[place])
        self._judge(measured[worst], self._where(worst), dict(evidence or {}))

    def _where(self, worst: Any) -> tuple[Place, ...]:
        """The place, or the two of a pair, that the worst value belongs to."""
        named = worst if isinstance(worst, tuple) else (worst,)
        places = tuple(place for place in named if isinstance(place, Place))
        return places or ((self.place,) if self.place is not None else ())

    def _number(self, value: Any, place: Any) -> float:
        where = f" at {place}" if place is not None else ""
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise MeasurementError(
                f"{self.threshold.key}{where}: {value!r} is {type(value).__name__}, not a number in {self.limit.unit}"
            )
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise MeasurementError(f"{self.threshold.key}{where}: a value that is not finite, so nothing was measured")
        return number

    def _is_worse(self, record: Record) -> bool:
        """Whether a later judgement takes the place of the one on record: once failed stays failed, the worst is kept."""
        before = self.judged
        if before is None or before.outcome != record.outcome:
            return before is None or before.outcome == PASSED
        assert before.value is not None
        assert record.value is not None
        worse = record.value < before.value if self.limit.is_floor else record.value > before.value
        return worse and before.outcome == PASSED

    def _judge(self, value: float, where: tuple[Place, ...], evidence: dict[str, Any]) -> None:
        holds = self.limit.holds(value)
        advisory = self.threshold.severity == "advisory"
        message = None
        if not holds:
            message = messages.describe_failure(self.threshold, self.limit, value, places=where, evidence=evidence)
        record = Record(
            criterion=self.threshold.key,
            place=self.place.id if self.place is not None else None,
            outcome=PASSED if holds or advisory else FAILED,
            value=value,
            unit=self.limit.unit,
            limit=self.limit.text,
            reason=message if not advisory else message and f"advisory: {message}",
            margin_percent=self.limit.margin_percent(value),
            culprits=() if holds else tuple(place.id for place in where),
            evidence=evidence,
        )
        if self.judged is None or self._is_worse(record):
            self.judged, self.message = record, message
        if message is not None and advisory:
            self.note(message)
        elif message is not None:
            raise CriterionFailedError(message)
