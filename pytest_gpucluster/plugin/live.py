"""What a run shows between its header and its table: a bar on a terminal, a few lines in a log, and each failure at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.identity import NOT_INSTALLED, version_of
from pytest_gpucluster.judging import forecast
from pytest_gpucluster.plugin import header
from pytest_gpucluster.plugin.bar import bar_line
from pytest_gpucluster.plugin.early_failures import EarlyFailures
from pytest_gpucluster.plugin.subject_log import SubjectLog
from pytest_gpucluster.session import UNSIGNED
from pytest_gpucluster.text import lines, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from pytest_gpucluster.judging.verdict import Record
    from pytest_gpucluster.plugin.pairing import Pair
    from pytest_gpucluster.plugin.screen import Screen
    from pytest_gpucluster.session import Session

DRAW_S = 0.1
LOG_S, LOG_LINES = 10.0, 100
"""A log has a progress line every 10 s at most, and about 100 of them in a run that takes longer than 1000 s."""
MAX_REMARKS = 10
"""How many lines about what has no effect stand before the first test; results.json has all."""


class Live:
    """A pytest plugin that shows where the run stands. Each call takes the same time, however many tests there are."""

    def __init__(self, screen: Screen, session: Session, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is shown before :meth:`take_over`."""
        self._screen = screen
        self._session = session
        self._clock = clock
        self._is_on = False
        self._meter = forecast.Meter(forecast.Forecast(steps=()))
        self._subjects = SubjectLog(forecast.Forecast(steps=()))
        self._failures = EarlyFailures()
        self._doing = self._work = self._criterion = ""
        self._shown_s = clock()
        self._has_joined = False

    def take_over(self) -> None:
        """Up to normal verbosity our lines replace pytest's dots."""
        reporter = self._screen.reporter
        if reporter is not None and self._screen.verbosity <= 0:
            self._is_on = True
            reporter.showfspath = False
            reporter._show_progress_info = False  # noqa: SLF001 -- there is no public switch at run time

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Give pytest no letter to show where the bar shows the progress."""
        if not self._is_on:
            return None
        if report.when in ("setup", "teardown") and report.outcome == "passed":
            return ("", "", "")
        if report.outcome == "failed" and report.when != "call":
            return ("error", "", "ERROR")
        return (report.outcome, "", report.outcome.upper())

    # Lines that stay.

    def announce(self, session: Session, plan: forecast.Forecast) -> None:
        """Print what will be measured, against which limits, and about how long that takes."""
        self._meter, self._subjects = forecast.Meter(plan), SubjectLog(plan)
        setup, width = session.setup, self._screen.width
        version = version_of("pytest-gpucluster")
        version = "from a checkout" if version == NOT_INSTALLED else version
        colour = {"yellow": header.accepts_nothing(setup)}
        for line in header.run_lines(setup, version=version, width=width):
            self.say(line, bold=True, **colour)
        if not session.controller.is_signed:
            self.say(f"gpucluster: {UNSIGNED}: set GPUCLUSTER_SECRET on every node")
        for remark in setup.remarks[:MAX_REMARKS]:
            self.say(f"gpucluster: {remark}")
        if len(setup.remarks) > MAX_REMARKS:
            self.say(f"gpucluster: ... and {len(setup.remarks) - MAX_REMARKS} more such lines in results.json")
        cut = session.recorder.cut_soak
        if cut is not None and cut.why_not is None:
            self.say(f"gpucluster: will go on with {cut.words}, if the hardware is the same; its files: {cut.folder}")
        if self._screen.verbosity >= 0:
            for line in header.plan_lines(plan, width=width):
                self.say(line)

    def say(self, text: str, **markup: bool) -> None:
        """Print one line."""
        self._screen.write(text, **markup)

    @property
    def is_line_due(self) -> bool:
        """Whether a log has had no line for a while."""
        return self._clock() - self._shown_s >= max(LOG_S, self._meter.planned_s / LOG_LINES)

    def say_in_log(self, text: str) -> None:
        """Print one line where no bar is shown, and not with ``-q``."""
        if not self._has_bar and self._screen.verbosity >= 0:
            self.say(text)
            self._shown_s = self._clock()

    def output(self, rank: int, text: str) -> None:
        """Print what a rank printed in a call, each line behind its place; called after the call, with ``-s``."""
        binding = self._session.binding
        place = binding.by_rank.get(rank) if binding is not None else None
        where = place.id if place is not None else f"rank {rank}"
        for line in lines(text):
            self.say(f"[{where}] {line}")

    # The course of the run.

    def begin(self, pair: Pair) -> None:
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
        if self._has_bar and self._clock() - self._shown_s >= DRAW_S:
            self._draw()
        elif self.is_line_due:
            self.say_in_log(f"{header.INDENT}{self._meter.progress(self._elapsed_s).text}  {self._work_now}")

    def tell(self, record: Record) -> None:
        """Show a failure at once, in one line; after many, only count."""
        line = self._failures.line_of(record, self._session.places())
        if line is not None and self._is_on and self._screen.verbosity == 0:
            self.say(line, red=True)

    def done(self, record: Record) -> None:
        """Called when a test has its outcome."""
        self._show_joined()
        self._meter.finish(record.criterion)
        self.tell(record)
        line = self._subjects.finish(record, self._clock())
        if line is not None and self._is_on:
            self.say_in_log(line)

    def close(self) -> None:
        """Print how far the subjects came that have not ended, and erase the bar. Called at the end of the run."""
        for line in self._subjects.unfinished() if self._is_on else ():
            self.say_in_log(line)
        self._screen.clear()

    def _show_joined(self) -> None:
        """Print what has joined, once that is known."""
        binding = self._session.binding if not self._has_joined else None
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
        if not self._has_bar:
            return
        self._shown_s = self._clock()
        now = self._meter.progress(self._elapsed_s)
        self._screen.rewrite(
            bar_line(now, self._work_now, bad=self._failures.number, width=self._screen.width, color=self._screen.has_color)
        )

    @property
    def _has_bar(self) -> bool:
        return self._is_on and self._screen.is_terminal and self._screen.verbosity == 0

    @property
    def _elapsed_s(self) -> float:
        return self._clock() - self._session.setup.started_s
