"""A soak inside a run: which tests take part, and what is told, kept and written after each round."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.cluster.soak import Kept, Soak, Turn
from pytest_gpucluster.errors import ConfigurationError, CriterionFailedError, MeasurementError
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.judging.verdict import ERROR, FAILED, PENDING, Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.judging.criterion import Criterion
    from pytest_gpucluster.judging.plan import Key
    from pytest_gpucluster.plugin.terminal import Terminal
    from pytest_gpucluster.session import Session


def start(session: Session, terminal: Terminal, criteria: Mapping[Key, Criterion]) -> Soak:
    """The soak of this run; ``criteria`` are those of the selected tests, by criterion and place id.

    Raises:
        ConfigurationError: the run's level is not soak.
        MeasurementError: no rank can be reached.
    """
    if session.setup.settings.soak_s is None:
        raise ConfigurationError(
            "the soak fixture lasts as long as --gpucluster-level soak:8h says: give the entry level: soak"
        )
    places = session.cluster.places
    wanted: dict[str, list[Any]] = {}
    for place in places:
        for key, place_id in criteria:
            if place_id == place.id:
                wanted.setdefault(key, []).append(place)
    watch = Reports(session, terminal, criteria)
    return Soak(duration_s=session.setup.settings.soak_s, places=places, wanted=wanted, watch=watch)


class Reports:
    """Says a line after each round, writes it into the journal, and brings the reports up to date."""

    def __init__(self, session: Session, terminal: Terminal, criteria: Mapping[Key, Criterion]) -> None:
        """``criteria``: those of the selected tests."""
        self._session = session
        self._terminal = terminal
        self._criteria = criteria

    def turn(self, turn: Turn) -> None:
        """The progress line names it."""
        self._terminal.work_on(f"round {turn.round}: {turn.criterion}")

    def seen(self, kept: Sequence[Kept]) -> None:
        """What is bad is on record at once: the round may never be over."""
        for one in kept:
            criterion = self._criteria.get((one.criterion, one.place.id))
            if criterion is not None:
                self._note(one, criterion)

    def round_over(self, soak: Soak) -> None:
        """What is bad is on record from now on, whatever later rounds show; what is good so far is told."""
        judged = [(kept, self._criteria[key]) for kept in soak if (key := (kept.criterion, kept.place.id)) in self._criteria]
        for kept, criterion in judged:
            self._note(kept, criterion)
        worst = worst_of(judged)
        lost = [
            f"{kept.place}: {kept.error}" for kept, _ in judged if kept.error is not None and kept.latest_round == soak.round
        ]
        self._session.recorder.record_soak_round(
            round=soak.round, elapsed_s=round(soak.elapsed_s, 3), duration_s=soak.duration_s, worst=worst, lost=lost
        )
        told = [f"{key} {format_number(one['value'])} {one['unit']}{_where(one)}" for key, one in worst.items()]
        self._terminal.say(f"soak {soak.line}; worst so far: {', '.join(told) or 'nothing was measured'}")
        for line in lost:
            self._terminal.say(f"  {line.splitlines()[0]}", red=True)

    def _note(self, kept: Kept, criterion: Criterion) -> None:
        """A first failure or error is settled at once; a value so far waits for the end, and is in the reports meanwhile.

        Nobody can answer for it yet: a waiver is for a soak that was measured to its end.
        """
        before = self._session.plan.record(kept.criterion, kept.place.id)
        if before is None or before.outcome in (FAILED, ERROR):
            return
        record = replace(_provisional(kept, criterion), waivable=False)
        if record.outcome in (FAILED, ERROR):
            self._session.recorder.record_outcome(record)
        else:
            told = f"{kept.rounds} rounds of its soak so far"
            self._session.plan.set_outcome(replace(record, outcome=PENDING, reason=told, advisory=False))


def worst_of(judged: list[tuple[Kept, Criterion]]) -> dict[str, dict[str, Any]]:
    """The worst value of all places by criterion, with its place and round."""
    found: dict[str, tuple[Kept, Criterion]] = {}
    for kept, criterion in judged:
        if kept.value is None:
            continue
        other = found.get(kept.criterion, (None, None))[0]
        if other is None or other.value is None or _is_worse(kept.value, other.value, kept):
            found[kept.criterion] = (kept, criterion)
    return {
        key: {"value": kept.value, "unit": criterion.limit.unit, "place": kept.place.id, "round": kept.worst_round}
        for key, (kept, criterion) in found.items()
    }


def _is_worse(value: float, other: float, kept: Kept) -> bool:
    return value < other if kept.keep == "lowest" else value > other


def _where(worst: Mapping[str, Any]) -> str:
    return f" ({worst['place']}, round {worst['round']})" if worst["value"] else ""


def _provisional(kept: Kept, criterion: Criterion) -> Record:
    """How it would be judged if the soak ended here."""
    trial = replace(criterion, place=kept.place, judged=None, first_error=None, note=_unheard)
    reason: MeasurementError | None = None
    with contextlib.suppress(CriterionFailedError):
        try:
            kept.judge(trial)
        except MeasurementError as error:
            reason = error
    if reason is None and trial.judged is not None:
        return trial.judged
    return Record(
        criterion=kept.criterion,
        place=kept.place.id,
        outcome=ERROR if reason is not None else PENDING,
        limit=criterion.limit,
        reason=str(reason) if reason is not None else None,
        culprits=tuple(place.id for place in reason.culprits) if reason is not None else (),
    )


def _unheard(_remark: str) -> None:
    """The test itself will remark it, once."""
