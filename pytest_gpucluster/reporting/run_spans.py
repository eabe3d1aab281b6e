"""The readings that are judged over a run, as a soak's journal keeps them: the run that follows judges them too. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

import msgspec

from pytest_gpucluster.judging.finding import Finding
from pytest_gpucluster.judging.verdict import MISSING, PENDING, Record
from pytest_gpucluster.protocol.plain_data import from_plain

Kind: TypeAlias = Literal["watched", "between"]
UNSETTLED = (PENDING, MISSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a reader gave at one moment.

    Attributes:
        at_s: in seconds since 1970.
        values: plain data by place id.
        missing: the ids of the places that could not be read.
        clock: the boot of the host that read, and the seconds since then; None where a journal does not have them.
    """

    at_s: float
    values: Mapping[str, Any]
    missing: tuple[str, ...] = ()
    clock: tuple[str, float] | None = None

    def seconds_to(self, later: Snapshot) -> float:
        """The time between two readings, by a clock that nobody sets; by the time of day over boots and hosts."""
        if self.clock is not None and later.clock is not None and self.clock[0] == later.clock[0]:
            return later.clock[1] - self.clock[1]
        return later.at_s - self.at_s

    def at(self, kept: Collection[str]) -> Snapshot:
        """The same of these places only."""
        return replace(self, values={place: value for place, value in self.values.items() if place in kept})


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Two readings by one reader.

    Attributes:
        kind: ``watched``: a run watched all the time; ``between``: between two runs, and nobody watched.
        first: the reading at its begin.
        last: the reading at its end.
        seconds: the time for a limit by time. Of the time between two runs: with the part before it, as seconds are too short.
        is_needed: whether it is a part of the soak that goes on: what is unknown of it is then unknown of the soak.
    """

    kind: Kind
    first: Snapshot
    last: Snapshot
    seconds: float
    is_needed: bool = True


Spans: TypeAlias = "Mapping[str, tuple[Span, ...]]"
"""By reader, in the order of time."""


@dataclass(slots=True)
class SnapshotRecord:
    """Makes the facts of each reading: the values at first, then what changed."""

    _latest: dict[str, str] = field(default_factory=dict)
    """The values of each reader, as JSON: a tenth of what they take as dicts, and few are read again."""

    def facts(self, reader: str, reading: Snapshot) -> dict[str, Any]:
        """What the journal gets of a reading."""
        before = self._latest.get(reader)
        self._latest[reader] = json.dumps(reading.values)
        values = {"values": reading.values} if before is None else {"changes": changes(json.loads(before), reading.values)}
        clock = {} if reading.clock is None else {"clock": reading.clock}
        return {"reader": reader, "read_s": reading.at_s, "missing": reading.missing, **clock, **values}


def changes(before: Any, now: Any) -> dict[str, Any] | None:
    """What makes ``now`` of ``before``, both plain data; None if they are equal."""
    if before == now:
        return None
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        return {"in": {key: change for key in now if (change := changes(before[key], now[key])) is not None}}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        found = ((str(number), changes(*pair)) for number, pair in enumerate(zip(before, now, strict=True)))
        return {"at": {number: change for number, change in found if change is not None}}
    return {"is": now}


def changed(before: Any, change: Mapping[str, Any] | None) -> Any:
    """The value of which :func:`changes` made ``change``."""
    if change is None:
        return before
    if "is" in change:
        return change["is"]
    if "at" in change:
        return [changed(item, change["at"].get(str(number))) for number, item in enumerate(before)]
    return {**before, **{key: changed(before[key], one) for key, one in change["in"].items()}}


def spans_facts(spans: Spans) -> dict[str, Any]:
    """Spans for the journal."""
    return {reader: [asdict(one) for one in of_reader] for reader, of_reader in spans.items()}


def read_spans(events: Iterable[Mapping[str, Any]], records: Iterable[Record] | None) -> dict[str, tuple[Span, ...]]:
    """What a run had read and not judged, the spans of the runs before it first.

    Args:
        events: of that run, or of its soak.
        records: of that run. A reader is left out where each criterion that judges it has an outcome. None: no reader is.

    Raises:
        AttributeError, LookupError, TypeError, ValueError: these are no such events.
    """
    found: dict[str, list[Span]] = {}
    own: dict[str, tuple[Snapshot, Snapshot]] = {}
    judges: dict[str, Collection[str]] = {}
    for event in events:
        if event["event"] == "soak_earlier":
            found = msgspec.convert(event["spans"], dict[str, list[Span]])
            judges, own = event["judges"], {}  # what this run had read before stands among the spans
        elif event["event"] == "soak_reading":
            first, last = own.get(event["reader"], (None, None))
            reading = _reading(event, last)
            own[event["reader"]] = (first or reading, reading)
    for reader, (first, last) in own.items():
        watched = Span(kind="watched", first=first, last=last, seconds=first.seconds_to(last))
        found.setdefault(reader, []).append(watched)
    if records is None:
        return {reader: tuple(spans) for reader, spans in found.items()}
    open_ones = {record.criterion for record in records if record.outcome in UNSETTLED}
    return {reader: tuple(spans) for reader, spans in found.items() if not judges.get(reader) or open_ones & {*judges[reader]}}


def _reading(event: Mapping[str, Any], before: Snapshot | None) -> Snapshot:
    values = event["values"] if "values" in event or before is None else changed(before.values, event["changes"])
    facts = {"at_s": event["read_s"], "values": values, "missing": event["missing"], "clock": event.get("clock")}
    return msgspec.convert(facts, Snapshot)


def with_latest_known(spans: Spans) -> Spans:
    """The same spans, where a place that a reading could not reach has there what the reading before gave of it.

    So a node that was lost, and has come back, is judged from its last reading to the next one.
    """
    return {reader: tuple(_carried(of_reader)) for reader, of_reader in spans.items()}


def _carried(spans: Iterable[Span]) -> Iterator[Span]:
    known: dict[str, Any] = {}
    for span in spans:
        first = replace(span.first, values={**known, **span.first.values})
        last = replace(span.last, values={**first.values, **span.last.values})
        known = {**last.values}
        yield replace(span, first=first, last=last)


def with_now(spans: Spans, now: Mapping[str, Snapshot], *, kept: Collection[str], goes_on: bool) -> Spans:
    """The spans of earlier runs, and the one from their last reading to the first one of this run.

    Args:
        spans: of the earlier runs.
        now: this run's first readings, by reader.
        kept: the ids of the places where the hardware is the same; the others are left out.
        goes_on: whether this run goes on with the soak of which they are parts.
    """
    found: dict[str, tuple[Span, ...]] = {}
    for reader, before in spans.items():
        every, last = [*before], before[-1]
        if reader in now and last.kind == "watched":
            seconds = last.first.seconds_to(now[reader])
            every.append(Span(kind="between", first=last.last, last=now[reader], seconds=seconds))
        found[reader] = tuple(
            replace(one, first=one.first.at(kept), last=one.last.at(kept), is_needed=one.is_needed and goes_on) for one in every
        )
    return found


def why_not_joined(
    spans: Spans, now: Mapping[str, Snapshot], between: Mapping[str, Callable[[Any, Any], Finding]]
) -> str | None:
    """Why what came since the earlier run cannot be judged, so that its soak does not go on; None if it can be.

    Args:
        spans: of the earlier runs.
        now: this run's first readings, by reader.
        between: by reader, the judge of the time between two runs, where it needs one.
    """
    for reader, reading in now.items():
        name = reader.partition(" ")[0].rpartition(".")[2]
        last = spans[reader][-1] if reader in spans else None
        if last is None or last.kind != "watched":
            return f"{name} was not read in it"
        absent = sorted({*last.first.missing, *last.last.missing, *reading.missing} | {*reading.values} - {*last.last.values})
        if absent:
            return f"{name} was not read at {absent[0]}"
        for place, value in reading.values.items() if reader in between else ():
            finding = between[reader](from_plain(last.last.values[place]), from_plain(value))
            if finding.unknown and not finding.bad:
                return f"what came to {place} since then is not known ({finding.doubts[0]})"
    return None
