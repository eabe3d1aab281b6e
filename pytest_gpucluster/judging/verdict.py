"""From outcomes to the verdict. Pure: no sequence of outcomes with anything expected but not passed yields ACCEPTED."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.errors import Part
from pytest_gpucluster.text import counted, first_line, one_line, shortlist
from pytest_gpucluster.thresholds.limit import Limit

PASSED, FAILED, ERROR, NOISY = "passed", "failed", "error", "noisy"
SKIPPED, MISSING, NOT_SELECTED = "skipped", "missing", "not_selected"
PENDING = "pending"  # expected, without an outcome yet; never in a verdict
OUTCOMES = (PASSED, FAILED, ERROR, NOISY, SKIPPED, MISSING, NOT_SELECTED)
WAIVED = "waived"  # in counts only: failed or noisy, and covered by a waiver
WAIVABLE = (FAILED, NOISY)
UNMEASURED = (ERROR, NOISY, MISSING)
BAD = (FAILED, *UNMEASURED)
OPEN = (*UNMEASURED, NOT_SELECTED)
SEVERITY = (PENDING, PASSED, SKIPPED, NOT_SELECTED, WAIVED, NOISY, MISSING, ERROR, FAILED)

ACCEPTED, WITH_WAIVERS = "ACCEPTED", "ACCEPTED_WITH_WAIVERS"
REJECTED, INCOMPLETE, REHEARSED = "REJECTED", "INCOMPLETE", "REHEARSED"
SIMULATED = "SIMULATED fleet, no GPU was measured"
VERDICTS = (ACCEPTED, WITH_WAIVERS, REJECTED, INCOMPLETE, REHEARSED)

SHOWN_LIMITS = 3
WORDS = {
    WAIVED: "waived",
    PASSED: "passed",
    FAILED: "failed",
    ERROR: "not measured",
    NOISY: "too close to call",
    SKIPPED: "do not apply",
    MISSING: "missing",
    NOT_SELECTED: "not selected",
}


@dataclass(frozen=True, kw_only=True)  # without slots: msgspec fills those five times more slowly
class Record:
    """What became of one expected (criterion, place). Journals are read by these names and types.

    Attributes:
        place: the id of the place; None for a criterion of the whole cluster.
        value: what was measured, in the unit of ``limit``.
        advisory: the value misses an advisory limit, so it passed with ``reason`` as a remark.
        margin_percent: how far inside (above 0) or outside (below 0) its limit the value is.
        culprits: the ids of the places that are to blame.
        waiver: who answers for the failure.
        blames: the kind of part that is to blame. Decided where the failure is made; None where nothing says so.
        cause: what happened, in one line without a place; the same for all that one cause took along.
        among: the ids of places of which any may be to blame, where no culprit can be named; of a failure, those that share
            the part ``cause``, which is to blame, beside ``culprits``.
        behind: by the name of such a part, those of ``among`` that share it; empty in older journals, and for one part.
        confirmed: the failure was measured repeatedly, and every repeat missed the limit.
        remark: what a passed outcome could not show.
        waivable: everything was measured, and a value is to blame. Decided where the outcome is made, never later.
        started: pytest started the test, so that it is in the JUnit file also if it counts as not selected.
        headline: the reason in one line, where that is not the first line of ``reason``.
        teardown: how the teardown failed after another failure or error.
        advice: what the part that is to blame asks for; None: what is usual for its kind.
        is_disturbed: another process, or the load of the host, caused the error: a second look may do without.
        part: in which part of the run this was found, from 1; a run that is gone on with has several.
    """

    criterion: str
    place: str | None
    outcome: str
    value: int | float | None = None
    limit: Limit | None = None
    reason: str | None = None
    advisory: bool = False
    margin_percent: float | None = None
    culprits: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    waiver: Mapping[str, Any] | None = None
    blames: Part | None = None
    cause: str | None = None
    among: tuple[str, ...] = ()
    behind: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    confirmed: bool = False
    remark: str | None = None
    waivable: bool = False
    started: bool = False
    headline: str | None = None
    teardown: str | None = None
    advice: str | None = None
    is_disturbed: bool = False
    part: int = 1

    @property
    def unit(self) -> str | None:
        """The unit of the value."""
        return self.limit.unit if self.limit is not None else None

    @property
    def limit_text(self) -> str | None:
        """The limit in words: ``> 700 TFLOPS``."""
        return self.limit.text if self.limit is not None else None

    @property
    def text(self) -> str | None:
        """The reason as people read it: a missed advisory limit says that it is one."""
        return f"advisory: {self.reason}" if self.advisory else self.reason

    @property
    def message(self) -> str:
        """The reason in one line; the outcome where there is none."""
        return first_line(self.headline or self.text or "") or self.outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What decides besides the outcomes: a rehearsal is never an acceptance, nor is a level that is too low.

    Attributes:
        level_reached: the level of the run is at least the one that the profile asks for.
        objections: facts that forbid an acceptance whatever was measured: more GPUs than expected, a debugging mode.
        changed_limits: criteria that are not judged by the limit of the packaged file.
        changed_terms: what the run asks of the whole cluster differently than promised: fewer nodes, a lower level.
        remarks: facts that forbid nothing and that a reader of the verdict must know.
        shape: the cluster that the verdict is about, in words.
        simulated: the values come from a model of a fleet, so nothing can be accepted.
        own_tests_only: nobody asks for an acceptance: a user's own files alone were given, without the gate.
    """

    rehearsal: bool
    level_reached: bool
    objections: Sequence[str] = ()
    changed_limits: Sequence[str] = ()
    changed_terms: Sequence[str] = ()
    remarks: Sequence[str] = ()
    shape: str = ""
    simulated: bool = False
    own_tests_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict in one word, and why it is not ACCEPTED: by the counts, and by the objections, which no count says.

    ``objections`` are those of ``terms``, and what the records say against an acceptance beside their counts.
    """

    word: str
    counts: Mapping[str, int]
    objections: tuple[str, ...]
    terms: Terms
    advisory_misses: int
    without_limit: int

    @property
    def is_acceptance(self) -> bool:
        """Whether the cluster is accepted, with or without waivers."""
        return self.word in (ACCEPTED, WITH_WAIVERS)

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong: an acceptance or a rehearsal."""
        return self.is_acceptance or self.word == REHEARSED

    @property
    def is_not_asked_for(self) -> bool:
        """Whether all that is open was never given: a user's own files alone, of which each test has a good outcome."""
        is_open = any(self.counts[outcome] for outcome in OPEN if outcome != NOT_SELECTED)
        return self.terms.own_tests_only and self.word == INCOMPLETE and self.counts[PASSED] > 0 and not is_open

    @property
    def line(self) -> str:
        """One line for people: word, simulation, counts, shape, objections, changed limits and terms, remarks."""
        counts = [count_of(outcome, number) for outcome, number in self.counts.items() if number]
        counts += [count_misses(self.advisory_misses)] if self.advisory_misses else []
        counts += [f"{counted(self.without_limit, 'criterion', 'criteria')} without a limit"] if self.without_limit else []
        shown = ", ".join(counts)
        why = f" ({'; '.join(self.objections)})" if self.objections else ""
        remarks = "".join(f"; {remark}" for remark in self.terms.remarks)
        found = (shown or "nothing was expected") + (f" on {self.terms.shape}" if self.terms.shape else "")
        simulated = f"{SIMULATED}: " if self.terms.simulated else ""
        limits, terms = self.terms.changed_limits, self.terms.changed_terms
        changed = f"; limits changed: {shortlist(limits, most=SHOWN_LIMITS)}" if limits else ""
        changed += f"; terms changed: {', '.join(terms)}" if terms else ""
        return one_line(f"{self.word.replace('_', ' ')}: {simulated}{found}{why}{changed}{remarks}")


def decide(records: Iterable[Record], terms: Terms) -> Verdict:
    """The verdict over the records of all expected (criterion, place).

    Raises:
        ValueError: a record has an unknown outcome, such as pending.
    """
    rows = list(records)
    outcomes = Counter(counted_as(record) for record in rows)
    counts = {outcome: outcomes[outcome] for outcome in (WAIVED, *OUTCOMES)}
    unknown = set(outcomes) - set(counts)
    if unknown:
        raise ValueError(f"no such outcome: {', '.join(sorted(unknown))}")
    # Why tests did not run that no part took along: Ctrl-C, SIGTERM, a controller that died. The first one stands for all.
    why = dict.fromkeys(row.message for row in rows if row.outcome == MISSING and row.blames is None and row.reason is not None)
    objections = [shortlist([*why], most=1)] if why else []
    objections += [] if counts[PASSED] else ["nothing was measured and passed"]
    objections += [] if terms.level_reached or terms.rehearsal else ["the level is lower than the profile asks for"]
    objections += terms.objections
    if counts[FAILED]:
        word = REJECTED
    elif objections or any(counts[outcome] for outcome in OPEN):
        word = INCOMPLETE
    elif terms.rehearsal or terms.simulated:
        word = REHEARSED
    else:
        word = WITH_WAIVERS if counts[WAIVED] else ACCEPTED
    return Verdict(
        word=word,
        counts=counts,
        objections=tuple(objections),
        terms=terms,
        advisory_misses=sum(record.advisory for record in rows),
        without_limit=0 if terms.rehearsal else len({record.criterion for record in rows if is_only_measured(record)}),
    )


def is_only_measured(record: Record) -> bool:
    """Whether a value is there, and nobody knows a number to judge it by."""
    return record.outcome == PASSED and record.limit is not None and record.limit.is_none


def counted_as(record: Record) -> str:
    """The word under which an outcome is counted: its own, or ``waived``."""
    return WAIVED if record.waiver is not None and may_be_waived(record) else record.outcome


def count_of(outcome: str, number: int) -> str:
    """How many have this outcome, in words: ``3 failed``, ``1 does not apply``."""
    words = "does not apply" if outcome == SKIPPED and number == 1 else WORDS.get(outcome, outcome)
    return f"{number} {words}"


def count_misses(number: int) -> str:
    """How many advisory limits were missed, in words."""
    return counted(number, "advisory miss", "advisory misses")


def may_be_waived(record: Record) -> bool:
    """Whether a waiver may cover the record: it was measured completely, and its value is bad or too close to call."""
    return record.waivable and record.outcome in WAIVABLE


def worse(one: Record, other: Record) -> Record:
    """The record with the worse outcome; the first if both are equally bad."""
    return other if SEVERITY.index(other.outcome) > SEVERITY.index(one.outcome) else one
