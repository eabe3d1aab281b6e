"""What was planted, whom the run named, and what that lets it state. Pure: trials in, words and plain data out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOW, WRONG, DEAD, HUNG = "slow", "wrong", "dead", "hung"
NAMES = {SLOW: "a slow GPU", WRONG: "a wrong bit", DEAD: "a dead rank", HUNG: "a hung rank"}
PASSED, ERROR, SKIPPED = "passed", "error", "skipped"
SHOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One plant (or a clean repeat: ``victim`` None), and whom the run named. Places are ids.

    ``what`` groups trials that are counted together (``5 % slow``), ``where`` tells them apart (``bf16``). ``should_name`` is
    what finding it means: the victim; both of two places that differ; nobody in a clean repeat. ``fault``: what was wrong
    beside the names. ``told``: how it was found (``in 0.4 s``). ``criterion``: the entry of the thresholds that looks for it;
    None: every call does. ``unjudged``: why a miss would mean nothing, None where it counts.
    """

    kind: str
    what: str
    where: str = ""
    victim: str | None
    should_name: tuple[str, ...]
    named: tuple[str, ...]
    fault: str | None = None
    told: str | None = None
    measured: dict[str, float] = field(default_factory=dict)
    criterion: str | None = None
    unjudged: str | None = None

    @property
    def found(self) -> bool:
        """Whether exactly those were named that should be, and nothing else was wrong."""
        return self.fault is None and set(self.named) == set(self.should_name)

    @property
    def miss(self) -> str:
        """What was seen instead, in words."""
        at = self.victim if self.victim is not None else self.what
        named = f"{', '.join(self.named) or 'nobody'} named"
        return f"{at}{f' in {self.where}' if self.where else ''}: {self.fault or named}"

    @property
    def facts(self) -> dict[str, Any]:
        """As results.json has it."""
        return {
            "kind": self.kind,
            "what": self.what,
            "where": self.where,
            "victim": self.victim,
            "named": list(self.named),
            "found": self.found,
            "judged": self.unjudged is None,
            "fault": self.fault,
            "measured": self.measured,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshown:
    """A kind of fault (or a part of its trials) that could not be planted, and why.

    ``objects``: it should have been possible here. Otherwise it is in the nature of this cluster (two places, no such kernel).
    """

    kind: str
    why: str
    objects: bool = False

    @property
    def words(self) -> str:
        """For people."""
        told = "could not be tried to the end" if self.objects else "cannot be shown"
        return f"{NAMES[self.kind]} {told}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """All trials of one plant together; ``is_looked_for``: this run is about to judge the criterion that would find it."""

    what: str
    trials: tuple[Trial, ...]
    is_looked_for: bool

    @property
    def found(self) -> int:
        """How many were found."""
        return sum(trial.found for trial in self.trials)

    @property
    def misses(self) -> list[Trial]:
        """Those that were not and should have been."""
        return [trial for trial in self.trials if trial.unjudged is None and not trial.found]

    @property
    def words(self) -> str:
        """``5 % slow in copy 5 of 5``; ``a dead rank in 0.4 s``."""
        only = self.trials[0]
        how = only.told if len(self.trials) == 1 and only.found and only.told else f"{self.found} of {len(self.trials)}"
        marks = [*(["not judged"] if self.unjudged else []), *([] if self.is_looked_for else ["not looked for"])]
        return f"{self.what} {how}" + (f" ({', '.join(marks)})" if marks else "")

    @property
    def unjudged(self) -> str | None:
        """Why a miss means nothing."""
        return next((trial.unjudged for trial in self.trials if trial.unjudged is not None), None)

    @property
    def remarks(self) -> list[tuple[str, str]]:
        """What has to be known to read :attr:`words` right: the word that stands there, and what it means."""
        pair = next((trial.should_name for trial in self.trials if len(trial.should_name) > 1), ())
        return [
            *([("not judged", self.unjudged)] if self.unjudged else []),
            *([] if self.is_looked_for else [("not looked for", f"no test of this run judges {self.trials[0].criterion}")]),
            *(
                [("two places", f"{' and '.join(pair)} differ, and nobody can say which is wrong: both are named")]
                if pair
                else []
            ),
        ]

    @property
    def objection(self) -> str | None:
        """Which plants were missed, in words; None if none was."""
        if not self.misses:
            return None
        return f"the self-test missed {len(self.misses)} of {len(self.trials)} plants of {self.what} ({_some(self.misses)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The certificate: what this run finds, and what speaks against relying on it.

    ``selected`` are the criteria that this run is about to judge; ``stopped`` tells why the self-test did not come to its end.
    """

    trials: tuple[Trial, ...] = ()
    unshown: tuple[Unshown, ...] = ()
    stopped: str | None = None
    selected: frozenset[str] = frozenset()
    seconds: float
    seed: int
    places: int
    rehearsal: bool

    @property
    def findings(self) -> list[Finding]:
        """The plants, those of one name together, in the order of their first."""
        together: dict[str, list[Trial]] = {}
        for trial in self.trials:
            if trial.victim is not None:
                together.setdefault(trial.what, []).append(trial)
        return [
            Finding(what=what, trials=tuple(some), is_looked_for=some[0].criterion in {None, *self.selected})
            for what, some in together.items()
        ]

    @property
    def clean(self) -> list[Trial]:
        """The repeats without a plant, as far as they are judged."""
        return [trial for trial in self.trials if trial.victim is None and trial.unjudged is None]

    @property
    def alarms(self) -> list[Trial]:
        """Those of them in which somebody was named."""
        return [trial for trial in self.clean if not trial.found]

    @property
    def objections(self) -> list[str]:
        """Why nothing may be accepted on this certificate: plants missed, healthy places named, plants not made."""
        missed = [finding.objection for finding in self.findings if finding.objection is not None]
        alarmed = (
            f"in the self-test {len(self.alarms)} of {len(self.clean)} clean repeats named somebody ({_some(self.alarms)})"
        )
        unplanted = [f"in the self-test {one.words}" for one in self.unshown if one.objects]
        stopped = [f"the self-test did not come to its end: {self.stopped}"] if self.stopped is not None else []
        return [*missed, *([alarmed] if self.alarms else []), *unplanted, *stopped]

    @property
    def outcome(self) -> str:
        """Of the testcase: ``error`` with an objection; ``skipped`` where a kind of fault could not be shown or judged."""
        if self.objections:
            return ERROR
        judged = {finding.trials[0].kind for finding in self.findings if finding.unjudged is None}
        return PASSED if judged == set(NAMES) and not self.unshown else SKIPPED

    @property
    def statement(self) -> str:
        """One sentence: what this run finds."""
        told = ", ".join(finding.words for finding in self.findings) or "nothing that was planted, as nothing was"
        clean = f"; {len(self.alarms) or 'no'} false alarms in {len(self.clean)} clean repeats" if self.clean else ""
        unshown = "".join(f"; {one.words}" for one in self.unshown)
        return f"this {'rehearsal' if self.rehearsal else 'run'} finds: {told}{clean}{unshown}"

    @property
    def remarks(self) -> list[str]:
        """Each once, with the plants that it is about."""
        about: dict[tuple[str, str], list[str]] = {}
        for finding in self.findings:
            for remark in finding.remarks:
                about.setdefault(remark, []).append(finding.what)
        return [f"{word} ({', '.join(whats)}): {meaning}" for (word, meaning), whats in about.items()]

    @property
    def facts(self) -> dict[str, Any]:
        """As results.json has it, and the journal."""
        return {
            "outcome": self.outcome,
            "statement": self.statement,
            "remarks": self.remarks,
            "objections": self.objections,
            "findings": [
                {"what": finding.what, "planted": len(finding.trials), "found": finding.found, "words": finding.words}
                for finding in self.findings
            ],
            "unshown": [{"kind": one.kind, "why": one.why} for one in self.unshown],
            "clean_repeats": len(self.clean),
            "false_alarms": len(self.alarms),
            "places": self.places,
            "seconds": round(self.seconds, 3),
            "seed": self.seed,
            "trials": [trial.facts for trial in self.trials],
        }


def _some(trials: Sequence[Trial]) -> str:
    more = f"; and {len(trials) - SHOWN} more" if len(trials) > SHOWN else ""
    return "; ".join(trial.miss for trial in trials[:SHOWN]) + more
