"""A soak inside a run: which tests take part, and what the terminal, the journal and the reports get after each round."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_gpucluster.cluster.soak import CLUSTER, NOTHING_EARLIER, Earlier, Soak, SoakRecord, SoakResult, Turn, read_back
from pytest_gpucluster.errors import ConfigurationError, CriterionFailedError, MeasurementError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.failure_text import format_number, impossible
from pytest_gpucluster.judging.forecast import in_words
from pytest_gpucluster.judging.plan import Key
from pytest_gpucluster.judging.verdict import ERROR, FAILED, PENDING, Record
from pytest_gpucluster.places import Place
from pytest_gpucluster.plugin.outcome import blamed
from pytest_gpucluster.plugin.terminal import Terminal
from pytest_gpucluster.plugin.whole_run.run_readings import Readings
from pytest_gpucluster.reporting import run_spans
from pytest_gpucluster.reporting.run_spans import Snapshot, Spans
from pytest_gpucluster.reporting.unfinished_run import InterruptedSoak
from pytest_gpucluster.session import Session
from pytest_gpucluster.text import counted

EACH = 20
"""Between two rounds, what is judged over the run is read at most 5 % of the time."""


def start(session: Session, terminal: Terminal, criteria: Mapping[Key, Criterion], readings: Readings) -> Soak:
    """The soak of this run; ``criteria`` are those of the selected tests, by criterion and place id.

    ``readings`` are of what is judged over the run: each round is recorded with them.

    Raises:
        ConfigurationError: the run's level is not soak.
        MeasurementError: no rank can be reached.
    """
    if session.setup.settings.soak_s is None:
        raise ConfigurationError(
            "the soak fixture lasts as long as --gpucluster-level soak:8h says: give the entry level: soak"
        )
    places = session.cluster.places
    known: tuple[Any, ...] = (*places, *session.cluster.nodes, CLUSTER)
    wanted = grouped((key, place) for place in known for key, place_id in criteria if place_id == _id_of(place))
    watch = Reports(session, terminal, criteria, readings)
    return Soak(duration_s=session.setup.settings.soak_s, places=places, wanted=wanted, watch=watch)


def _earlier(session: Session, terminal: Terminal, criteria: Mapping[Key, Criterion], readings: Readings) -> Earlier | None:
    """What the soak had measured before it was cut short, if this run goes on with it. Says so, or why not.

    What is judged over the run is in the journal before the soak is said to go on.
    """
    cut = session.recorder.cut_soak
    if cut is None:
        _keep_spans(session, readings, {})
        return None
    away_s, places, firsts = cut.away_s(time.time()), session.state.places(), readings.firsts()
    earlier, why_not = None, cut.why_not or cut.why_not_here(places) or _why_not_joined(cut, firsts, readings)
    if why_not is None:
        earlier, why_not = _read_back(cut, [*session.cluster.places, *session.cluster.nodes], criteria)
    kept = cut.same_parts(places)
    _keep_spans(session, readings, run_spans.with_now(cut.spans, firsts, kept=kept, goes_on=earlier is not None))
    if earlier is None:
        if session.unfinished is not None:
            session.recorder.write("soak_anew")  # what this journal has of the earlier soak is none of the new one's
        judged = "; what it had read of GPUs and hosts is judged by this run too" if cut.spans else ""
        terminal.live.say(f"gpucluster: a new soak begins, as {why_not}; {cut.words} is left as it is{judged}")
        return None
    session.recorder.record_soak_resumed(cut, away_s=away_s)
    terminal.live.say(f"gpucluster: goes on with {cut.words}; nothing was watched for {in_words(away_s)}")
    return earlier


def _why_not_joined(cut: InterruptedSoak, firsts: Mapping[str, Snapshot], readings: Readings) -> str | None:
    """Why what came since the cut is not known; None if it is."""
    try:
        return run_spans.why_not_joined(cut.spans, firsts, readings.between)
    except (AttributeError, LookupError, TypeError, ValueError):
        return "its journal is damaged"


def _keep_spans(session: Session, readings: Readings, spans: Spans) -> None:
    """Take over what earlier runs had read, and write it and this run's first readings into the journal."""
    if session.unfinished is None:
        write_readings(session, readings, spans)


def write_readings(session: Session, readings: Readings, spans: Spans) -> None:
    """Take over what earlier parts had read, and write it and this run's first readings into the journal."""
    judges = {reader: sorted(keys) for reader, keys in readings.judges.items()}
    readings.take_earlier(spans)
    if spans or judges:
        session.recorder.write("soak_earlier", spans=run_spans.spans_facts(spans), judges=judges)
    for facts in readings.facts(readings.firsts()):
        session.recorder.write("soak_reading", **facts)


def _read_back(
    cut: InterruptedSoak, places: Sequence[Place], criteria: Mapping[Key, Criterion]
) -> tuple[Earlier | None, str | None]:
    """The soak as it was, or why it cannot be had: the selected tests must all have taken part in it."""
    try:
        earlier = read_back(cut.turns, places=places, num_whole_rounds=cut.num_whole_rounds, elapsed_s=cut.elapsed_s)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None, "its journal is damaged"
    for (key, place), criterion in criteria.items():
        if criterion.threshold.level == "soak" and (key, place or CLUSTER.id) not in earlier.kept:
            return None, f"{key} at {place or 'the cluster'} took no part in it"
    return earlier, None


class Reports:
    """Reports a soak while it runs: its worst values in the log, an event in the journal, the reports up to date."""

    def __init__(self, session: Session, terminal: Terminal, criteria: Mapping[Key, Criterion], readings: Readings) -> None:
        """``criteria`` are those of the selected tests, by criterion and place id; ``readings`` are taken after each round."""
        self._readings = readings
        self._session = session
        self._terminal = terminal
        self._criteria = criteria
        self._shown: list[str] = []
        self._facts = SoakRecord()
        self._earlier: Earlier | None = None
        self._read_s, self._reading_s = time.monotonic(), 0.0

    def begin(self, soak: Soak, works: Collection[str]) -> None:
        """Go on with a soak that was cut short, if all that is measured now took part in it; it is looked for once in a run."""
        measured = {key: criterion for key, criterion in self._criteria.items() if key[0] in works}
        if self._earlier is None:
            self._earlier = _earlier(self._session, self._terminal, measured, self._readings) or NOTHING_EARLIER
        took_part = all((key, place or CLUSTER.id) in self._earlier.kept for key, place in measured)
        soak.go_on_with(self._earlier if took_part else NOTHING_EARLIER)

    def turn(self, turn: Turn) -> None:
        """Name the round and the criterion in the progress line. Called before each measurement."""
        self._terminal.live.work_on(f"round {turn.round}: {turn.criterion}")

    def seen(self, kept: Sequence[SoakResult]) -> None:
        """Record the values after each measurement: the round may never end. One that is too good is an error of its place.

        The worst round is judged in the end, and would hide it.
        """
        judged = self._judged(kept)
        for one, criterion in judged:
            what = f"{one.criterion} at {one.place}"
            error = impossible(one.first_and_last[1], criterion.limit.bound, what=what) if one.error is None else None
            if error is not None:
                one.rounds -= 1  # it is no good one
                one.fail(one.latest_round, error)
        self._session.recorder.write("soak_turn", **self._facts.facts(kept))
        if self._reading_s and time.monotonic() - self._read_s > EACH * self._reading_s:
            self._read()
        for one, criterion in judged:
            self._record(one, criterion)

    def _judged(self, kept: Iterable[SoakResult]) -> list[tuple[SoakResult, Criterion]]:
        """What selected tests judge, each with its criterion."""
        keys = ((one, (one.criterion, _id_of(one.place))) for one in kept)
        return [(one, self._criteria[key]) for one, key in keys if key in self._criteria]

    def round_over(self, soak: Soak) -> None:
        """Record the values of the round, write it into the journal, and show the worst values so far, if they have changed."""
        judged = self._judged(soak)
        for kept, criterion in judged:
            self._record(kept, criterion)
        worst = worst_of(judged)
        failed = [kept for kept, _ in judged if kept.error is not None and kept.latest_round == soak.round]
        lost = [f"{kept.place}: {kept.error}" for kept in failed]
        self._read()
        self._session.recorder.record_soak_round(
            round=soak.round, elapsed_s=round(soak.rounds_s, 3), duration_s=soak.duration_s, worst=worst, lost=lost
        )
        shown = [f"{key} {format_number(one['value'])} {one['unit']}{_where(one)}" for key, one in worst.items()]
        if shown != self._shown or self._terminal.live.is_line_due:
            self._shown = shown
            self._terminal.live.say_in_log(f"soak {soak.line}; worst so far: {', '.join(shown) or 'nothing was measured'}")

    def _read(self) -> None:
        """Record what is judged over the run: a round counts only with it, and a kill between two readings loses little."""
        if self._readings.judges:
            began_s = time.monotonic()
            for facts in self._readings.facts(self._readings.now()):
                self._session.recorder.write("soak_reading", **facts)
            self._read_s = time.monotonic()
            self._reading_s = self._read_s - began_s

    def _record(self, kept: SoakResult, criterion: Criterion) -> None:
        """Record a first failure or error for good; keep any other value as pending, so that the reports show it.

        No waiver can cover the failure yet: a waiver is for a soak that was measured to its end.
        """
        before = self._session.plan.record(kept.criterion, _id_of(kept.place))
        if before is None or before.outcome in (FAILED, ERROR):
            return
        record = replace(_provisional(kept, criterion), waivable=False)
        if record.outcome in (FAILED, ERROR):
            self._session.recorder.record_outcome(record)
            self._terminal.live.show_failure(record)
        else:
            reason = f"{counted(kept.rounds, 'round')} of its soak so far"
            self._session.plan.set_outcome(replace(record, outcome=PENDING, reason=reason, advisory=False))


def worst_of(judged: list[tuple[SoakResult, Criterion]]) -> dict[str, dict[str, Any]]:
    """The worst value of all places by criterion, with its place and round."""
    found: dict[str, dict[str, Any]] = {}
    measured = grouped((kept.criterion, (kept, criterion)) for kept, criterion in judged if kept.value is not None)
    for key, results in measured.items():
        extreme = min if results[0][0].keep == "lowest" else max
        worst, criterion = extreme(results, key=lambda result: result[0].value or 0.0)
        unit = criterion.limit.unit
        found[key] = {"value": worst.value, "unit": unit, "place": worst.place.id, "round": worst.worst_round}
    return found


def _where(worst: Mapping[str, Any]) -> str:
    return f" ({worst['place']}, round {worst['round']})" if worst["value"] else ""


def _provisional(kept: SoakResult, criterion: Criterion) -> Record:
    """The record as it would be if the soak ended now."""
    trial = replace(criterion, place=kept.own_place, judged=None, first_error=None, remarks={})
    record = Record(criterion=kept.criterion, place=_id_of(kept.place), outcome=PENDING, limit=criterion.limit)
    try:
        kept.judge(trial)
    except MeasurementError as error:
        return blamed(replace(record, outcome=ERROR, reason=str(error)), error)
    except CriterionFailedError:
        pass
    return trial.judged or record


def _id_of(place: Place) -> str | None:
    """The place of a record: None for a value that all nodes share."""
    return None if place == CLUSTER else place.id
