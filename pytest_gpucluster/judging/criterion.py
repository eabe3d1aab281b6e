"""The ``criterion`` fixture: one entry of thresholds.yaml at one place, waiting for its value."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NoReturn

from pytest_gpucluster.errors import Blame, CriterionFailedError, DoesNotApplyError, MeasurementError, Part
from pytest_gpucluster.judging import failure_text
from pytest_gpucluster.judging.failure_text import format_number, require_possible, unit_beside
from pytest_gpucluster.judging.finding import Finding
from pytest_gpucluster.judging.noise import FEWEST, Repeats, Settled, hidden_by_median, samples_of, settle, stalls_of
from pytest_gpucluster.judging.siblings import Compared
from pytest_gpucluster.judging.verdict import FAILED, NOISY, PASSED, Record
from pytest_gpucluster.places import Place
from pytest_gpucluster.text import shortened, shortlist, text_of
from pytest_gpucluster.thresholds.limit import Limit
from pytest_gpucluster.thresholds.resolve import Threshold

PART = re.compile(r"(node\d+|(node\d+-)?[gc]pu\d+)\Z")
"""A text that names a part, whole or in short; a host may be called so too."""
RANKING = (PASSED, NOISY, FAILED)
NAMES = ("id", "hostname", "uuid", "serial", "pci", "rank", "gpu")
"""The ways in which values may call places. The hostname is the node's, ``gpu`` the number of a GPU on the only node."""
MOST_REMARKS = 8
"""Of one criterion at one place: a soak has thousands of values, and a cluster a thousand places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """A value as it is judged.

    ``doubt`` says why it cannot be judged; None if it can. ``is_final``: more repeats could not clear the doubt. ``limit`` is
    the entry's, or wider where the spread of siblings explains more. ``confirmed``: it has repeats, and every one of them
    misses the limit. ``remark``: what the value does not show of its repeats. ``disturbed_by``: who else kept the host busy.
    """

    value: float
    limit: Limit
    doubt: str | None = None
    is_final: bool = True
    confirmed: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)
    remark: str | None = None
    disturbed_by: str | None = None

    @property
    def is_within(self) -> bool:
        """Whether the value is within the limit."""
        return self.limit.holds(self.value)


@dataclass(slots=True, kw_only=True)
class Criterion:
    """Compares measured values with the entry's limit, and remembers the worst one.

    Attributes:
        selection: makes pytest's arguments that select this test at its place, which is bound by then.
        judged: the record of the worst value so far; None before a value was judged.
        expected: the GPUs and nodes that values by place must cover; empty if they are not known.
        first_error: the first error of a measurement; a later valid value does not clear it.
        left_out: the error by which it said that it does not apply here.
        remarks: what the values so far do not show, each once and in order, with its place where they are by place.
        names: the expected places by the names that the last values by place call them.
    """

    threshold: Threshold
    limit: Limit
    place: Place | None
    selection: Callable[[Place | None], Sequence[str]] = lambda _place: ()
    judged: Record | None = None
    expected: tuple[Place, ...] = ()
    first_error: MeasurementError | None = None
    left_out: DoesNotApplyError | None = None
    remarks: dict[str, None] = field(default_factory=dict)
    names: Mapping[Any, Place] = field(default_factory=dict)

    def does_not_apply(self, where: str) -> NoReturn:
        """Skip the criterion: what its entry needs (a program, root, counts of errors, hardware) is not there ``where``.

        Raises:
            DoesNotApplyError: always; an entry without that key does not come here.
            MeasurementError: the entry needs none of them, so it may not leave.
        """
        needs = self.threshold.needs
        no_counts = f"needs counts of errors (EDAC, AER), which the kernel does not show {where}"
        reasons = (
            (needs.program, f"needs {needs.program}, which is not installed {where}", f"no {needs.program}"),
            (needs.root, f"needs to run as root {where}; root would see: {self.threshold.criterion}", "not root"),
            (needs.error_counts, no_counts, "no counts of errors"),
            (needs.hardware, f"needs {needs.hardware}, not there {where}", f"no {needs.hardware}"),
        )
        for is_needed, text, cause in reasons:
            if is_needed:
                self.left_out = DoesNotApplyError(text, cause=cause)
                raise self.left_out
        raise MeasurementError(f"{self.threshold.key}: a criterion may not leave by itself", blame=Blame(part="software"))

    def require(
        self,
        value: float | Repeats | Compared | Mapping[Any, float | Repeats],
        *,
        evidence: Mapping[str, Any] | None = None,
        remark: str | None = None,
    ) -> None:
        """Judge one value, or values by place (the worst decides).

        Args:
            value: a finite number in the entry's unit; bool, text, None, NaN, infinity and an empty mapping never pass, nor
                do values by place that leave out a place the criterion is about, or come from another one.
                :class:`Repeats` (``results.repeated(...)``) are judged by their median; if they do not agree well enough,
                further rounds are measured, until the interval of the median decides. :class:`Compared` is the distance to
                siblings: it may be as far as the limit, or as their own spread explains, and is left open where they disagree.
            evidence: what else was seen while measuring (clocks, event reasons), shown in a failure.
            remark: what a value within the limit does not show, such as a comparison without anything to compare with.

        Raises:
            MeasurementError: the value is not a finite number, or a place has none: nothing was measured. Or it is better
                than hardware can be (:func:`require_possible`). Or (kind ``noisy``) the siblings disagree, or the limit lies
                inside the interval of the median after all rounds. Where others kept the host busy while the value was
                measured, that and a value outside the limit are errors that name them (kind ``not_idle``).
            CriterionFailedError: outside the limit, and the entry is not advisory.
        """
        self._require(value, Finding(evidence=evidence or {}, remark=remark))

    def judge(self, finding: Finding, *, among: Iterable[Place] = ()) -> None:
        """Judge what is known, then raise what is unknown: an unknown part never makes a bad one pass, and is never green.

        Args:
            finding: what a judge of hardware found at this place.
            among: the GPUs of the place, if the finding is about each of them. Some bad ones are blamed in place of the node;
                if all of them are bad, the fault is the node's.

        Raises:
            CriterionFailedError: what is known is outside the limit, and the entry is not advisory.
            MeasurementError: something is unknown, and what is known is within the limit; or as :meth:`require`.
        """
        siblings = tuple(among)
        value = finding.judged
        if value is not None and (not finding.unknown or _is_outside(value, self.limit)):
            shown = replace(finding, evidence={**({"found": finding.facts} if finding.bad else {}), **finding.evidence})
            self._require(value, shown, blamed=finding.culprits(siblings))
        if finding.unknown:
            raise finding.error(self.place, siblings)

    def _require(self, value: Any, finding: Finding, *, blamed: tuple[Place, ...] = ()) -> None:
        """Judge one value, or values by place, that belong to a finding; ``blamed``: the places to blame in place of ours.

        A value that is no measurement, and what else stopped this, stays on record, whatever the test does then.
        """
        try:
            self._decide(value, finding, blamed)
        except Exception as error:
            if not isinstance(error, CriterionFailedError) and getattr(error, "kind", None) != "noisy":
                made = MeasurementError(f"{self.threshold.key} was not judged: {error!r}", blame=Blame(part="software"))
                self.first_error = self.first_error or (error if isinstance(error, MeasurementError) else made)
            raise

    def _decide(self, value: Any, finding: Finding, blamed: tuple[Place, ...]) -> None:
        by_place = isinstance(value, Mapping)
        self.names = _names(value, self.expected) if by_place else {}
        foreign = _foreign(value, self.expected, self.names) if by_place else {}
        gap = _coverage_error(self, value, foreign) if by_place else None
        values = {name: one for name, one in value.items() if name not in foreign} if by_place else {self.place: value}
        self.first_error = self.first_error or gap
        readings = {place: self._reading(one, place) for place, one in values.items()}
        clear = {place: reading for place, reading in readings.items() if reading.doubt is None}
        doubtful = {place: reading for place, reading in readings.items() if reading.doubt is not None}
        is_bad = any(not one.is_within for one in clear.values())
        if clear and (is_bad or not (doubtful or gap)):
            self._judge(clear, finding, blamed, is_final=all(reading.is_final for reading in readings.values()))
            own = [f"{_at(place)}: {one.remark}" if by_place else one.remark for place, one in clear.items() if one.remark]
            self.remarks.update(dict.fromkeys(filter(None, (finding.remark, *own))))
            more = [f"{len(self.remarks) - MOST_REMARKS} more"] if len(self.remarks) > MOST_REMARKS else []
            if self.judged is not None and self.remarks:
                self.judged = replace(self.judged, remark="; ".join([*islice(self.remarks, MOST_REMARKS), *more]))
        elif gap is not None:
            raise gap
        else:
            self._leave_open(doubtful, finding)

    # The values, and whether they are whole.

    def _reading(self, measured: Any, place: Any) -> _Reading:
        """A number as it is; repeats with the doubt about them, measured on while there is one."""
        if isinstance(measured, Compared):  # the limit grows with the siblings' spread, unless they disagree
            most, doubt = self.limit.value, measured.doubt
            limit = replace(self.limit, value=max(most, measured.allowed_percent) if doubt is None else most)
            return _Reading(value=self._number(measured.shortfall.percent, place), limit=limit, doubt=doubt)
        if not isinstance(measured, Repeats):
            return _Reading(value=self._number(measured, place), limit=self.limit)
        self._number(measured.value, place)
        allowed = self.threshold.noise
        return self._settled_reading(settle(measured, limit=self.limit, allowed=allowed, stalls=self.threshold.stalls), place)

    def _settled_reading(self, settled: Settled, place: Any) -> _Reading:
        """The median of all rounds; where that holds and more repeats stalled than the entry allows, their share."""
        first, unit, evidence = settled.rounds[0], self.limit.unit, {}
        value, samples, doubt = self._number(settled.value, place), samples_of(settled.rounds), settled.doubt
        disturbed_by = next((one.disturbed_by for one in settled.rounds if one.disturbed_by is not None), None)
        if len(settled.rounds) > 1:
            evidence = {f"first measured {unit}": float(first.value), "measured again because": settled.why}
            evidence |= {"rounds": len(settled.rounds), "repeats": len(samples)}
            number = format_number(float(first.value))
            doubt = doubt and f"{doubt}; measured first: {number}{unit_beside(unit, number)}, {settled.why}"
        reading = _Reading(
            value=value,
            limit=self.limit,
            doubt=doubt,
            is_final=settled.is_final,
            confirmed=len(samples) >= FEWEST and not any(map(self.limit.holds, samples)),
            evidence=evidence,
            remark=hidden_by_median(samples, limit=self.limit, allowed=self.threshold.noise, stalls=self.threshold.stalls),
            disturbed_by=disturbed_by,
        )
        allowed = self.threshold.stalls
        if allowed is None or doubt is not None or len(samples) < FEWEST or not self.limit.holds(value):
            return reading
        share = stalls_of(samples, is_floor=self.limit.is_floor).share
        if share <= allowed:
            return reading
        limit = Limit(kind="max", value=100 * allowed, unit="%", basis="repeats that took twice as long as the median")
        shown = {f"median {unit}": value, "repeats": reading.remark, **evidence}
        return _Reading(value=100 * share, limit=limit, is_final=settled.is_final, evidence=shown, disturbed_by=disturbed_by)

    def _number(self, value: Any, place: Any) -> float:
        where = f" at {place}" if place is not None else ""
        if isinstance(value, bool) or not isinstance(value, (float, int, numbers.Real)):
            what = f"{text_of(value, repr)} is {type(value).__name__}, not a number in {self.limit.unit}"
            raise MeasurementError(f"{self.threshold.key}{where}: {what}")
        try:
            number = float(value)
        except Exception:  # noqa: BLE001 -- too large, or a class whose values are no numbers after all
            number = math.inf
        if not math.isfinite(number):
            raise MeasurementError(f"{self.threshold.key}{where}: a value that is not finite, so nothing was measured")
        require_possible(number, self.limit.bound, what=f"{self.threshold.key}{where}")
        return number

    # The judgement.

    def _worst(self, readings: Mapping[Any, _Reading]) -> Any:
        """The name of the worst value, of those outside their limit if there are any; the lowest where higher is better.

        One that nobody disturbed comes before one that somebody did.
        """
        sign = -1 if self.limit.is_floor else 1

        def badness(name: Any) -> tuple[bool, bool, float]:
            reading = readings[name]
            is_bad = not reading.is_within
            return is_bad and reading.disturbed_by is None, is_bad, sign * reading.value

        return max(readings, key=badness)

    def _judge(self, readings: Mapping[Any, _Reading], finding: Finding, blamed: tuple[Place, ...], *, is_final: bool) -> None:
        """Pass or fail by the worst reading.

        Raises:
            CriterionFailedError: outside the limit, and the entry is not advisory.
        """
        worst = self._worst(readings)
        reading, places = readings[worst], self._places_of(worst)
        facts = _bounded({**finding.evidence, **reading.evidence})
        if reading.is_within:
            self._keep(self._record(PASSED, reading, facts))
            return
        who = reading.disturbed_by or finding.disturbed_by
        self._raise_not_idle(who, reading, places, facts)
        names, advice = finding.names, finding.advice
        at = failure_text.Located(blamed or places, names, is_path=not blamed)
        message = failure_text.describe_failure(self.threshold, reading.limit, reading.value, at=at, evidence=facts)
        message = f"{message}\n{failure_text.next_step(self.selection(self.place), is_noisy=False, advice=advice)}"
        failed = self._missed(FAILED, reading, facts, message, is_final=is_final)
        among = tuple(place.id for place in finding.among)
        culprits = () if among and not blamed else tuple(place.id for place in at.places)
        failed = replace(
            failed,
            cause=", ".join(names) if among else None,
            culprits=culprits,
            among=among,
            behind={name: tuple(node.id for node in nodes) for name, nodes in finding.behind.items()},
            blames=finding.kind or _part_of(places),
            confirmed=reading.confirmed,
            advice=advice,
        )
        self._keep(failed)
        if not self._is_advisory:
            raise CriterionFailedError(message)

    def _leave_open(self, readings: Mapping[Any, _Reading], finding: Finding) -> None:
        """Too close to call by the worst reading: neither passed nor failed, and never a coin-flip.

        Raises:
            MeasurementError: if the entry is not advisory: kind ``not_idle`` where others kept the host busy, or ``noisy``.
        """
        worst = self._worst(readings)
        reading, places = readings[worst], self._places_of(worst)
        facts, who = _bounded({**finding.evidence, **reading.evidence}), reading.disturbed_by or finding.disturbed_by
        self._raise_not_idle(who, reading, places, facts)
        why = f"{reading.doubt}; host not idle: {who}" if who is not None else str(reading.doubt)
        message = failure_text.describe_noise(self.threshold, reading.limit, reading.value, places=places, why=why)
        message = f"{message}\n{failure_text.next_step(self.selection(self.place), is_noisy=True)}"
        is_final = all(one.is_final for one in readings.values())
        self._keep(self._missed(NOISY, reading, facts, message, is_final=is_final))
        if not self._is_advisory:
            raise MeasurementError(message, kind="noisy")

    def _raise_not_idle(self, who: str | None, reading: _Reading, places: tuple[Place, ...], facts: Mapping[str, Any]) -> None:
        """Raise who kept the host busy, if others did: what does not hold beside them says nothing of a part."""
        if who is None or self._is_advisory:
            return
        say = failure_text.format_miss if reading.doubt is None else failure_text.format_asked
        what = say(reading.limit, reading.value)
        facts = facts if reading.doubt is None else {**facts, "too close to call": reading.doubt}
        advice = "end what keeps the host busy, or wait for its job"
        message = failure_text.describe_disturbed(self.threshold, what, places=places, who=who, evidence=facts)
        step = failure_text.next_step(self.selection(self.place), is_noisy=False, advice=advice)
        hosts = tuple(dict.fromkeys(place.of_node for place in places))
        blame = Blame(part="host", cause="host not idle", advice=advice)
        error = MeasurementError(f"{message}\n{step}", culprits=hosts, kind="not_idle", blame=blame)
        self.first_error = self.first_error or error
        raise error

    @property
    def _is_advisory(self) -> bool:
        return self.threshold.severity == "advisory"

    def _places_of(self, name: Any) -> tuple[Place, ...]:
        """The place, or the two places of a pair, that a value belongs to; a whole number is too little to blame a part."""
        found = () if any(isinstance(part, numbers.Integral) for part in _parts(name)) else _places_in(name, self.names)
        return found or _places_in(self.place, {})

    # The record.

    def _record(self, outcome: str, reading: _Reading, evidence: Mapping[str, Any]) -> Record:
        return Record(
            criterion=self.threshold.key,
            place=self.place.id if self.place is not None else None,
            outcome=outcome,
            value=reading.value,
            limit=reading.limit,
            margin_percent=reading.limit.margin_percent(reading.value),
            evidence=evidence,
        )

    def _missed(self, outcome: str, reading: _Reading, evidence: Mapping[str, Any], reason: str, *, is_final: bool) -> Record:
        """The record of a value that is not within the limit, or too close to it; passed where the entry is advisory."""
        advisory = self._is_advisory
        record = self._record(PASSED if advisory else outcome, reading, evidence)
        return replace(record, reason=reason, advisory=advisory, waivable=is_final and not advisory)

    def _keep(self, record: Record) -> None:
        """Keep the worse of this judgement and the one on record: once failed stays failed."""
        sign = -1 if self.limit.is_floor else 1

        def badness(one: Record) -> tuple[int, bool, float]:
            return RANKING.index(one.outcome), one.advisory, sign * (one.value or 0.0)

        if self.judged is None or badness(record) > badness(self.judged):
            self.judged = record


def _bounded(evidence: Mapping[str, Any]) -> dict[str, Any]:
    return {name: shortened(one) if isinstance(one, str) else one for name, one in evidence.items()}


def _names(values: Mapping[Any, Any], expected: Sequence[Place]) -> dict[Any, Place]:
    """The expected places by the names that values call them: all in one way, else each by any text.

    Of several ways that fit, the one which leaves out the fewest places: hosts may be called ``node1``, as other places are.
    """
    parts = {part.id if isinstance(part, Place) else part for name in values for part in _parts(name)}
    found: list[dict[Any, Place]] = []
    for way in NAMES:
        named = [place for place in expected if way == "id" or (place.gpu is None) is (way == "hostname")]
        found.append({name: place for place in named if (name := getattr(place, way)) is not None})
    fitting = [names for names in found if parts <= names.keys() and not any(isinstance(part, bool) for part in parts)]
    if fitting:
        return max(fitting, key=lambda names: len({names[part].id for part in parts}))
    return {name: place for names in reversed(found) for name, place in names.items() if isinstance(name, str)}


def _foreign(values: Mapping[Any, Any], expected: Sequence[Place], names: Mapping[Any, Place]) -> dict[Any, str]:
    """The names of values, places or names of places, that are none of the expected ones, and what they are called.

    So is a pair of one place with itself, one without an expected place, and one that leaves several expected places.
    """
    ids, found, hosts = {place.id for place in expected}, {}, {place.hostname for place in expected}
    for name in values if expected else ():
        known = ids.intersection(place.id for place in _places_in(name, names))
        places = [
            _at(part)
            for part in _parts(name)
            if isinstance(part, Place) or part in names or (part not in hosts and PART.match(_at(part)))
        ]
        if places and (len({*places}) < len(places) or not known or (len(ids) > 1 and len(known) < len(places))):
            found[name] = " to ".join(places)
    return found


def _coverage_error(criterion: Criterion, values: Mapping[Any, Any], foreign: Mapping[Any, str]) -> MeasurementError | None:
    """Why the values are not those of all places that this criterion covers; None if they are, or name no places."""
    key = criterion.threshold.key
    if not values:
        return MeasurementError(f"{key}: no values at all were measured")
    found = {place for name in values for place in _places_in(name, criterion.names)}
    if not (found or foreign) or not criterion.expected:
        return None
    kinds = {place.gpu is not None for place in found}
    expected = [place for place in criterion.expected if (place.gpu is not None) in kinds]
    missing = tuple(place for place in expected if place not in found)
    if missing:
        number = f"{len(expected) - len(missing)} of {len(expected)} expected places have one"
        sizes = all(isinstance(part, numbers.Integral) for name in values for part in _parts(name))
        hint = "; whole numbers are taken for ranks, so name sizes and the like by a text" if sizes else ""
        text = f"{key}: no value for {', '.join(place.id for place in missing)}: {number}{hint}"
        return MeasurementError(text, culprits=missing, blame=Blame(part="software", cause="no value"))
    if not foreign:
        return None
    here = f"at {criterion.place}" if criterion.place is not None else "here"
    required = shortlist([place.id for place in criterion.expected], most=8)
    text = f"a value for {', '.join(foreign.values())}, which is not required {here}; required: {required}"
    return MeasurementError(f"{key}: {text}")


def _is_outside(value: Any, limit: Limit) -> bool:
    """Whether a value, or one of several, is a number outside the limit, whatever else is unknown."""
    if isinstance(value, Mapping):
        return any(_is_outside(one, limit) for one in value.values())
    number = getattr(value, "value", value)
    return isinstance(number, numbers.Real) and not limit.holds(number)


def _parts(name: Any) -> tuple[Any, ...]:
    return name if isinstance(name, tuple) else (name,)


def _places_in(name: Any, names: Mapping[Any, Place]) -> tuple[Place, ...]:
    """The places that a value is named by: one, the two of a pair, or none."""
    found = (part if isinstance(part, Place) else names.get(part) for part in _parts(name))
    return tuple(place for place in found if place is not None)


def _at(name: Any) -> str:
    return name.id if isinstance(name, Place) else text_of(name)


def _part_of(places: tuple[Place, ...]) -> Part | None:
    """The part that a value outside its limit belongs to; a value of the whole cluster belongs to none."""
    if len(places) > 1:
        return "link"
    return None if not places else "node" if places[0].gpu is None else "gpu"
