"""What a run shows between its header and its table: a bar on a terminal, a few lines in a log, and each failure at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pytest_gpucluster.inventory.identity import NOT_INSTALLED, version_of
from pytest_gpucluster.judging import forecast
from pytest_gpucluster.judging.failure_text import format_asked, format_miss
from pytest_gpucluster.judging.plan import Key
from pytest_gpucluster.judging.verdict import ERROR, FAILED, NOISY, WORDS, Record, count_of, counted_as
from pytest_gpucluster.places import Place
from pytest_gpucluster.plugin import header
from pytest_gpucluster.plugin.header import Screen, bar_line
from pytest_gpucluster.plugin.pairing import Pairing
from pytest_gpucluster.reporting.table import duration
from pytest_gpucluster.session import UNSIGNED, RunState
from pytest_gpucluster.text import counted, lines, one_line

DRAW_S = 0.1
LOG_S, LOG_LINES = 10.0, 100
"""A log has a progress line every 10 s at most, and about 100 of them in a run that takes longer than 1000 s."""
MAX_REMARKS = 10
"""How many lines about what has no effect stand before the first test; results.json has all."""
SHOWN_FAILURES = 20
LONGEST_REASON = 200
"""Characters of a line about a failure."""


class Live:
    """Shows where the run stands. Each call takes the same time, however many tests there are."""

    def __init__(self, screen: Screen, state: RunState, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives seconds."""
        self._screen = screen
        self.log = screen.log
        self._state = state
        self._clock = clock
        self._meter = forecast.Meter(forecast.Forecast(steps=()))
        self._subjects = SubjectLog(forecast.Forecast(steps=()))
        self._failures = LiveFailures()
        self._doing = self._work = self._criterion = ""
        self._shown_s = clock()
        self._has_joined = False

    # Lines that stay.

    def announce(self, plan: forecast.Forecast) -> None:
        """Print what will be measured, against which limits, and about how long that takes."""
        self._meter, self._subjects = forecast.Meter(plan), SubjectLog(plan)
        setup, width = self._state.setup, self._screen.width
        version = version_of("pytest-gpucluster")
        version = "from a checkout" if version == NOT_INSTALLED else version
        colour = {"yellow": header.accepts_nothing(setup)}
        for line in header.run_lines(setup, version=version, width=width):
            self.say(line, bold=True, **colour)
        if not self._state.controller.is_signed:
            self.say(f"gpucluster: {UNSIGNED}: set GPUCLUSTER_SECRET on every node")
        for remark in setup.remarks[:MAX_REMARKS]:
            self.say(f"gpucluster: {remark}")
        if len(setup.remarks) > MAX_REMARKS:
            self.say(f"gpucluster: ... and {len(setup.remarks) - MAX_REMARKS} more such lines in results.json")
        cut = self._state.recorder.cut_soak
        if cut is not None and cut.why_not is None:
            self.say(f"gpucluster: will go on with {cut.words}, if the hardware is the same; its files: {cut.folder}")
        if self._screen.verbosity >= 0:
            for line in header.plan_lines(plan, width=width):
                self.say(line)

    def say(self, text: str, **markup: bool) -> None:
        """Print one line."""
        self._screen.write(text, **markup)

    @property
    def planned_s(self) -> float:
        """How long the whole run is planned to take, in seconds."""
        return self._meter.planned_s

    @property
    def is_line_due(self) -> bool:
        """Whether a log has had no line for a while."""
        return self._clock() - self._shown_s >= max(LOG_S, self._meter.planned_s / LOG_LINES)

    def say_in_log(self, text: str) -> None:
        """Print one line where no bar is shown, and not with ``-q``."""
        if not self._screen.has_bar and self._screen.verbosity >= 0:
            self.say(text)
            self._shown_s = self._clock()

    def output(self, rank: int, text: str) -> None:
        """Print what a rank printed in a call, each line after its place; called after the call, with ``-s``."""
        binding = self._state.binding
        place = binding.by_rank.get(rank) if binding is not None else None
        where = place.id if place is not None else f"rank {rank}"
        for line in lines(text):
            self.say(f"[{where}] {line}")

    # The course of the run.

    def begin(self, pair: Pairing) -> None:
        """Called when a test begins."""
        if pair.criterion != self._criterion:
            self._criterion = self._work = self._doing = pair.criterion
            self._meter.begin(pair.criterion, self._elapsed_s)
            self._subjects.begin(pair.criterion, self._clock())
            self._draw()

    def work_on(self, work: str) -> None:
        """Name ``work`` instead of the criterion, until the next criterion begins."""
        self._work = self._doing = work
        self.tick()

    def progress(self, rank: int, step: str, fraction: float | None) -> None:
        """Name what one rank does now. Its own share of a call is not shown: a run has one percentage."""
        del fraction
        self._doing = one_line(f"{self._work}: rank {rank}: {step}")
        self.tick()

    def tick(self) -> None:
        """Called several times a second while ranks are waited for: the clock goes on also where nobody reports."""
        self._show_joined()
        if self._screen.has_bar and self._clock() - self._shown_s >= DRAW_S:
            self._draw()
        elif self.is_line_due:
            self.say_in_log(f"{header.INDENT}{self._meter.progress(self._elapsed_s).text}  {self._work_now}")

    def show_failure(self, record: Record) -> None:
        """Show a failure at once, in one line; after many, only count."""
        line = self._failures.line_of(record, self._state.places())
        if line is not None and self._screen.is_on and self._screen.verbosity == 0:
            self.say(line, red=True)

    def done(self, record: Record) -> None:
        """Called when a test has its outcome."""
        self._show_joined()
        self._meter.finish(record.criterion)
        self.show_failure(record)
        line = self._subjects.finish(record, self._clock())
        if line is not None and self._screen.is_on:
            self.say_in_log(line)

    def close(self) -> None:
        """Print how far the subjects came that have not ended, and erase the bar. Called at the end of the run."""
        for line in self._subjects.unfinished() if self._screen.is_on else ():
            self.say_in_log(line)
        self._screen.clear()

    def _show_joined(self) -> None:
        """Print what has joined, once that is known."""
        binding = self._state.binding if not self._has_joined else None
        if binding is None:
            return
        self._has_joined = True
        self._meter.joined(self._elapsed_s)
        if self._screen.verbosity >= 0:
            for line in header.joined_lines(binding, width=self._screen.width):
                self.say(line)

    @property
    def _work_now(self) -> str:
        return self._doing if self._has_joined else "waiting for the ranks to join"

    def _draw(self) -> None:
        if not self._screen.has_bar:
            return
        self._shown_s = self._clock()
        now = self._meter.progress(self._elapsed_s)
        self._screen.rewrite(
            bar_line(now, self._work_now, bad=self._failures.number, width=self._screen.width, color=self._screen.has_color)
        )

    @property
    def _elapsed_s(self) -> float:
        return self._clock() - self._state.setup.started_s


class LiveFailures:
    """Counts what is bad, and makes a line of the first failure of each place: more of them have one cause nearly always.

    Absent places are not shown: the header names them.
    """

    def __init__(self) -> None:
        """Count from 0."""
        self._seen: set[Key] = set()
        self._explained: set[tuple[str, str]] = set()
        self._shown = 0

    @property
    def number(self) -> int:
        """How many outcomes are bad: failed, not measured or too close to call."""
        return len(self._seen)

    def line_of(self, record: Record, places: Mapping[str, Place]) -> str | None:
        """The line of a bad outcome; None if it is good, was shown, has a cause that was shown, or is one of too many."""
        key = (record.criterion, record.place)
        if counted_as(record) not in (FAILED, ERROR, NOISY) or key in self._seen:
            return None
        self._seen.add(key)
        once = {ERROR: record.cause or record.message, FAILED: record.place}.get(record.outcome)
        if once is not None:
            if (record.outcome, once) in self._explained:
                return None
            self._explained.add((record.outcome, once))
        self._shown += 1
        if self._shown > SHOWN_FAILURES:
            rest = f"{SHOWN_FAILURES} are shown; from here on they are counted, and all are below"
            return rest if self._shown == SHOWN_FAILURES + 1 else None
        return describe(record, places.get(record.place or ""))


def describe(record: Record, place: Place | None) -> str:
    """Outcome, criterion, place, and the value with its limit or the reason."""
    where = place.named if place is not None else record.place or "the cluster"
    text = one_line(f"{WORDS[record.outcome]}: {record.criterion} at {where}: {_what_is_bad(record)}")
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


def _what_is_bad(record: Record) -> str:
    """A value that misses its limit, a value that could not be judged, or the reason."""
    limit, value = record.limit, record.value
    if limit is not None and value is not None:
        if record.outcome == NOISY:
            return format_asked(limit, value)
        if record.outcome == FAILED and not limit.holds(value):
            return format_miss(limit, value)
    return record.message


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
        counts = ", ".join(count_of(word, self.outcomes[word]) for word in WORDS if self.outcomes[word])
        missing = f" of {counted(self.tests, 'check')}, cut short" if self.done < self.tests else ""
        criteria = counted(self.criteria, "criterion", "criteria")
        return f"{self.name:<9} {criteria:>12}   {counts}{missing}   {duration(self.seconds)}"


class SubjectLog:
    """Counts outcomes by subject, in constant time for each test."""

    def __init__(self, plan: forecast.Forecast) -> None:
        """``plan`` has the subject of each criterion."""
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
