"""Report of a self-test: what was planted, which places the run named, and what that proves. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.text import counted

SLOW, WRONG, DEAD, HUNG = "slow", "wrong", "dead", "hung"
NAMES = {SLOW: "a slow GPU", WRONG: "a wrong bit", DEAD: "a dead rank", HUNG: "a hung rank"}
PASSED, ERROR, SKIPPED = "passed", "error", "skipped"
NOT_JUDGED, NOT_LOOKED_FOR, TWO_PLACES = "not judged", "not looked for", "two places"
SHOWN_TRIALS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One planted fault, or one clean repeat (``victim`` None), and the places that the run named. Places are ids.

    Trials of one ``what`` (``5 % slow in copy``) are counted together; ``where`` (``bf16``) distinguishes them. ``expected``
    are the places that the run should name: the victim; both of two places that differ; none in a clean repeat.
    ``fault`` is what else was wrong, ``how`` says how the victim was found (``in 0.4 s``). ``criterion`` is the entry of the
    thresholds that looks for the fault; None: every call does. ``not_judged`` is why a miss would mean nothing; None: it
    counts.
    """

    kind: str
    what: str
    where: str = ""
    victim: str | None
    expected: tuple[str, ...]
    named: tuple[str, ...]
    fault: str | None = None
    how: str | None = None
    measured: dict[str, float] = field(default_factory=dict)
    criterion: str | None = None
    not_judged: str | None = None

    @property
    def is_found(self) -> bool:
        """Whether the run named exactly the expected places and nothing else was wrong."""
        return self.fault is None and set(self.named) == set(self.expected)

    @property
    def miss(self) -> str:
        """The victim and what the run reported instead, in words."""
        victim = self.victim if self.victim is not None else self.what
        named = f"{', '.join(self.named) or 'nobody'} named"
        return f"{victim}{f' in {self.where}' if self.where else ''}: {self.fault or named}"

    @property
    def facts(self) -> dict[str, Any]:
        """The trial as results.json holds it."""
        return {
            "kind": self.kind,
            "what": self.what,
            "where": self.where,
            "victim": self.victim,
            "named": list(self.named),
            "found": self.is_found,
            "judged": self.not_judged is None,
            "fault": self.fault,
            "measured": self.measured,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPlanted:
    """A kind of fault, or some of its trials, that could not be planted, and why.

    ``is_error``: it should have been possible here. Otherwise this cluster cannot show it (two places, no such kernel).
    """

    kind: str
    why: str
    is_error: bool = False

    @property
    def text(self) -> str:
        """One line for people."""
        return f"{NAMES[self.kind]} {'could not be tried to the end' if self.is_error else 'cannot be shown'}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestReport:
    """What this run detects, and the objections to relying on it.

    ``selected`` are the criteria that this run will judge; ``stopped`` says why the self-test did not come to its end.
    """

    trials: tuple[Trial, ...] = ()
    not_planted: tuple[NotPlanted, ...] = ()
    stopped: str | None = None
    selected: frozenset[str] = frozenset()
    seconds: float
    seed: int
    places: int
    rehearsal: bool

    @property
    def planted(self) -> dict[str, list[Trial]]:
        """The trials with a planted fault by ``what``, in the order of the first of each."""
        return grouped((trial.what, trial) for trial in self.trials if trial.victim is not None)

    @property
    def clean(self) -> list[Trial]:
        """The judged repeats without a planted fault."""
        return [trial for trial in self.trials if trial.victim is None and trial.not_judged is None]

    @property
    def false_alarms(self) -> list[Trial]:
        """The clean repeats in which the run named a place."""
        return [trial for trial in self.clean if not trial.is_found]

    @property
    def objections(self) -> list[str]:
        """Reasons to accept nothing on this report: faults missed, healthy places named, faults not planted."""
        objections = []
        for what, trials in self.planted.items():
            missed = [trial for trial in trials if trial.not_judged is None and not trial.is_found]
            if missed:
                objections.append(f"the self-test missed {len(missed)} of {len(trials)} plants of {what} ({_first(missed)})")
        if alarms := self.false_alarms:
            those = f"{len(alarms)} of {len(self.clean)} clean repeats"
            objections.append(f"in the self-test {those} named somebody ({_first(alarms)})")
        objections += [f"in the self-test {one.text}" for one in self.not_planted if one.is_error]
        if self.stopped is not None:
            objections.append(f"the self-test did not come to its end: {self.stopped}")
        return objections

    @property
    def outcome(self) -> str:
        """Outcome of the testcase: ``error`` with an objection; ``skipped`` if a kind of fault was not shown or judged."""
        if self.objections:
            return ERROR
        judged = {trials[0].kind for trials in self.planted.values() if all(trial.not_judged is None for trial in trials)}
        return PASSED if judged == set(NAMES) and not self.not_planted else SKIPPED

    @property
    def statement(self) -> str:
        """One sentence: what this run finds."""
        results = ", ".join(self._result(what) for what in self.planted) or "nothing that was planted, as nothing was"
        alarms = counted(len(self.false_alarms), "false alarm") if self.false_alarms else "no false alarms"
        clean = f"; {alarms} in {counted(len(self.clean), 'clean repeat')}" if self.clean else ""
        not_planted = "".join(f"; {one.text}" for one in self.not_planted)
        return f"this {'rehearsal' if self.rehearsal else 'run'} finds: {results}{clean}{not_planted}"

    @property
    def remarks(self) -> list[str]:
        """What each mark in the statement means, with the faults that carry it."""
        carriers = grouped((remark, what) for what in self.planted for remark in self._remarks(what))
        return [f"{mark} ({', '.join(whats)}): {meaning}" for (mark, meaning), whats in carriers.items()]

    @property
    def facts(self) -> dict[str, Any]:
        """The report as results.json and the journal hold it."""
        return {
            "outcome": self.outcome,
            "statement": self.statement,
            "remarks": self.remarks,
            "objections": self.objections,
            "findings": [
                {"what": what, "planted": len(trials), "found": _count_found(trials), "words": self._result(what)}
                for what, trials in self.planted.items()
            ],
            "unshown": [{"kind": one.kind, "why": one.why} for one in self.not_planted],
            "clean_repeats": len(self.clean),
            "false_alarms": len(self.false_alarms),
            "places": self.places,
            "seconds": round(self.seconds, 3),
            "seed": self.seed,
            "trials": [trial.facts for trial in self.trials],
        }

    def _result(self, what: str) -> str:
        """``5 % slow in copy 5 of 5``; ``a dead rank in 0.4 s``."""
        trials = self.planted[what]
        only = trials[0]
        how = only.how if len(trials) == 1 and only.is_found and only.how else f"{_count_found(trials)} of {len(trials)}"
        marks = [mark for mark, _ in self._remarks(what) if mark != TWO_PLACES]
        return f"{what} {how}" + (f" ({', '.join(marks)})" if marks else "")

    def _remarks(self, what: str) -> list[tuple[str, str]]:
        """Marks that a reader of the result has to know, each with its meaning."""
        trials = self.planted[what]
        remarks = [(NOT_JUDGED, trial.not_judged) for trial in trials if trial.not_judged is not None][:1]
        if trials[0].criterion not in {None, *self.selected}:
            remarks.append((NOT_LOOKED_FOR, f"no test of this run judges {trials[0].criterion}"))
        pair = next((trial.expected for trial in trials if len(trial.expected) > 1), ())
        if pair:
            remarks.append((TWO_PLACES, f"{' and '.join(pair)} differ, and nobody can say which is wrong: both are named"))
        return remarks


def _count_found(trials: Sequence[Trial]) -> int:
    return sum(trial.is_found for trial in trials)


def _first(trials: Sequence[Trial]) -> str:
    """The first misses, and how many more there are."""
    more = f"; and {len(trials) - SHOWN_TRIALS} more" if len(trials) > SHOWN_TRIALS else ""
    return "; ".join(trial.miss for trial in trials[:SHOWN_TRIALS]) + more
