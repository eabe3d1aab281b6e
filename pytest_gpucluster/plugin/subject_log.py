"""The lines of a log, one for each subject (health, compute, ...) when its last test is done."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.forecast import clock, counted
from pytest_gpucluster.judging.verdict import PASSED, WAIVED, WORDS, counted_as

if TYPE_CHECKING:
    from pytest_gpucluster.judging.forecast import Forecast
    from pytest_gpucluster.judging.verdict import Record

MINUTE_S = 60.0


@dataclass(slots=True)
class Tally:
    """One subject: how many criteria and tests it has, what became of those that are done, and how long they took."""

    name: str
    criteria: int = 0
    tests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Number of tests with an outcome."""
        return sum(self.outcomes.values())

    @property
    def line(self) -> str:
        """``compute     3 criteria    23 passed, 1 failed    52.0 s``."""
        counts = ", ".join(f"{self.outcomes[word]} {WORDS[word]}" for word in WORDS if self.outcomes[word])
        missing = f" of {counted(self.tests, 'check')}, cut short" if self.done < self.tests else ""
        took = f"{self.seconds:.1f} s" if self.seconds < MINUTE_S else clock(self.seconds)
        return f"{self.name:<9} {counted(self.criteria, 'criterion', 'criteria'):>12}   {counts}{missing}   {took}"

    @property
    def is_good(self) -> bool:
        """Whether everything so far passed or is waived."""
        return set(self.outcomes) <= {PASSED, WAIVED}


class SubjectLog:
    """Counts outcomes by subject, in constant time for each test."""

    def __init__(self, plan: Forecast) -> None:
        """No test is done."""
        self._tallies: dict[str, Tally] = {}
        self._by_criterion: dict[str, Tally] = {}
        for step in plan.steps:
            tally = self._tallies.setdefault(step.subject, Tally(step.subject))
            tally.criteria += 1
            tally.tests += step.tests
            self._by_criterion[step.criterion] = tally
        self._current: Tally | None = None
        self._since_s = 0.0

    def begin(self, criterion: str, now_s: float) -> None:
        """Called when the first test of a criterion begins."""
        self._add_time(now_s)
        self._current = self._by_criterion.get(criterion)

    def finish(self, record: Record, now_s: float) -> str | None:
        """Count one test; the line of its subject if that was the last one."""
        tally = self._by_criterion.get(record.criterion)
        if tally is None:
            return None
        tally.outcomes[counted_as(record)] += 1
        if tally.done != tally.tests:
            return None
        self._add_time(now_s)
        return tally.line

    def unfinished(self) -> list[str]:
        """The lines of the subjects that began and did not end."""
        return [tally.line for tally in self._tallies.values() if 0 < tally.done < tally.tests]

    def _add_time(self, now_s: float) -> None:
        if self._current is not None:
            self._current.seconds += now_s - self._since_s
        self._since_s = now_s
