"""The ``criterion`` fixture: one entry of thresholds.yaml at one place, waiting for its value."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import CriterionFailedError, MeasurementError
from pytest_gpucluster.judging import failure_text
from pytest_gpucluster.judging.noise import Repeats, doubt
from pytest_gpucluster.judging.verdict import FAILED, NOISY, PASSED, Record
from pytest_gpucluster.places import Place

if TYPE_CHECKING:
    from pytest_gpucluster.thresholds.limit import Limit
    from pytest_gpucluster.thresholds.resolve import Threshold


RANKING = (PASSED, NOISY, FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settled:
    """A value as it is judged, and the doubt that is left about it; ``is_final``: no more repeats could have settled it."""

    value: float
    doubt: str | None = None
    is_final: bool = True
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Criterion:
    """Compares measured values with the entry's limit, and remembers the worst it saw.

    ``expected``: the GPUs and nodes that values by place must cover (empty: not known). ``unfit``: the first value that was
    none, which no later one makes up for.
    """

    threshold: Threshold
    limit: Limit
    place: Place | None
    note: Callable[[str], None] = lambda _remark: None
    judged: Record | None = None
    message: str | None = None
    expected: tuple[Place, ...] = ()
    unfit: MeasurementError | None = None

    def require(
        self, value: float | Repeats | Mapping[Any, float | Repeats], *, evidence: Mapping[str, Any] | None = None
    ) -> None:
        """Judge one value, or values by place (the worst decides).

        Args:
            value: a finite number in the entry's unit; bool, text, None, NaN, infinity and an empty mapping never pass, nor
                do values by place that leave out a place the criterion is about, or come from another one.
                :class:`Repeats` (``results.repeated(...)``) are judged only if they agree well enough; if they do not,
                they are measured again, with three times as many.
            evidence: what else was seen while measuring (clocks, event reasons), shown in a failure.

        Raises:
            MeasurementError: the value is not a finite number, or a place has none: nothing was measured. Or (kind
                ``noisy``) the repeats disagree, or the limit lies among them, also the second time.
            CriterionFailedError: outside the limit, and the entry is not advisory.
        """
        named = value if isinstance(value, Mapping) else {self.place: value}
        lacking = self._lacking(named) if isinstance(value, Mapping) else None
        self.unfit = self.unfit or lacking
        judged = self._measured(named)
        worst_of = min if self.limit.is_floor else max
        clear = {place: found.value for place, found in judged.items() if found.doubt is None}
        facts = dict(evidence or {})
        if clear:
            worst = worst_of(clear, key=lambda place: clear[place])
            if not self.limit.holds(clear[worst]) or (len(clear) == len(judged) and lacking is None):
                is_final = all(found.is_final for found in judged.values())
                self._judge(clear[worst], self._where(worst), {**facts, **judged[worst].evidence}, is_final=is_final)
                return
        if lacking is not None:
            raise lacking
        doubtful = {place: found for place, found in judged.items() if found.doubt is not None}
        worst = worst_of(doubtful, key=lambda place: doubtful[place].value)
        is_final = all(found.is_final for found in doubtful.values())
        self._leave_open(replace(doubtful[worst], is_final=is_final), self._where(worst), facts)

    def _measured(self, named: Mapping[Any, Any]) -> dict[Any, _Settled]:
        """The values as they are judged; that one is not fit to be judged is remembered, whatever the test does then."""
        try:
            return {place: self._settled(one, place) for place, one in named.items()}
        except MeasurementError as error:
            self.unfit = self.unfit or error
            raise

    def _lacking(self, named: Mapping[Any, Any]) -> MeasurementError | None:
        """Values by place (or pair of places) must be those of the places that this criterion is about, all of them."""
        if not named:
            return MeasurementError(f"{self.threshold.key}: no values at all were measured")
        by_id = {place.id: place for place in self.expected}
        names = [by_id.get(name, name) if isinstance(name, str) else name for name in named]
        found = {
            place for name in names for place in (name if isinstance(name, tuple) else (name,)) if isinstance(place, Place)
        }
        if not found or not self.expected:
            return None
        is_gpu = {place.gpu is not None for place in found}
        owed = [place for place in self.expected if (place.gpu is not None) in is_gpu]
        lacking = tuple(place for place in owed if place not in found)
        if lacking:
            told = ", ".join(place.id for place in lacking)
            number = f"{len(owed) - len(lacking)} of {len(owed)} expected places have one"
            return MeasurementError(f"{self.threshold.key}: no value for {told}: {number}", culprits=lacking)
        foreign = [name for name in names if isinstance(name, Place) and name not in owed]
        if foreign:
            told = ", ".join(place.id for place in foreign)
            here = f"at {self.place}" if self.place is not None else "here"
            return MeasurementError(f"{self.threshold.key}: a value for {told}, which is not asked {here}")
        return None

    def _settled(self, measured: Any, place: Any) -> _Settled:
        """A value, measured again if its repeats leave a doubt, and what doubt is left then."""
        if not isinstance(measured, Repeats):
            return _Settled(value=self._number(measured, place))
        first = self._number(measured.value, place)
        why = doubt(measured, limit=self.limit, allowed=self.threshold.noise)
        if why is None:
            return _Settled(value=first)
        if measured.again is None:
            return _Settled(value=first, doubt=why, is_final=False)
        second = measured.again()
        value = self._number(second.value, place)
        fewer = len(second.samples) < len(measured.samples)
        lacking = f"measured again with {len(second.samples)} repeats, fewer than the {len(measured.samples)} before"
        still = lacking if fewer else doubt(second, limit=self.limit, allowed=self.threshold.noise)
        evidence = {f"first measured {self.limit.unit}": first, "measured again because": why}
        told = f"{still}; measured first: {failure_text.format_number(first)} {self.limit.unit}, {why}" if still else None
        return _Settled(value=value, doubt=told, evidence=evidence, is_final=not fewer)

    def _leave_open(self, found: _Settled, where: tuple[Place, ...], evidence: dict[str, Any]) -> None:
        """Too close to call: neither passed nor failed, and never a coin-flip."""
        told = failure_text.describe_noise(self.threshold, self.limit, found.value, places=where, why=found.doubt or "")
        advisory = self.threshold.severity == "advisory"
        record = self._record(PASSED if advisory else NOISY, found.value, {**evidence, **found.evidence})
        waivable = found.is_final and not advisory
        self._keep(replace(record, reason=told, advisory=advisory, waivable=waivable), told)
        if advisory:
            self.note(told)
        else:
            raise MeasurementError(told, kind="noisy")

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
        if before is None:
            return True
        if before.outcome != record.outcome:
            return RANKING.index(record.outcome) > RANKING.index(before.outcome)
        assert before.value is not None
        assert record.value is not None
        worse = record.value < before.value if self.limit.is_floor else record.value > before.value
        return worse and before.outcome == PASSED

    def _keep(self, record: Record, message: str | None) -> None:
        if self._is_worse(record):
            self.judged, self.message = record, message

    def _record(self, outcome: str, value: float, evidence: Mapping[str, Any]) -> Record:
        return Record(
            criterion=self.threshold.key,
            place=self.place.id if self.place is not None else None,
            outcome=outcome,
            value=value,
            limit=self.limit,
            margin_percent=self.limit.margin_percent(value),
            evidence=evidence,
        )

    def _judge(self, value: float, where: tuple[Place, ...], evidence: dict[str, Any], *, is_final: bool) -> None:
        holds = self.limit.holds(value)
        advisory = self.threshold.severity == "advisory"
        message = None
        if not holds:
            message = failure_text.describe_failure(self.threshold, self.limit, value, places=where, evidence=evidence)
        record = replace(
            self._record(PASSED if holds or advisory else FAILED, value, evidence),
            reason=message,
            advisory=advisory and not holds,
            culprits=() if holds else tuple(place.id for place in where),
            waivable=is_final and not (holds or advisory),
        )
        self._keep(record, message)
        if message is not None and advisory:
            self.note(message)
        elif message is not None:
            raise CriterionFailedError(message)
