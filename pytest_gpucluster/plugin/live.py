"""What a run shows while it runs: the plan, a line per criterion, the progress."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from pytest_gpucluster.judging import failure_text, forecast
from pytest_gpucluster.judging.verdict import PASSED, SIMULATED, SKIPPED, WORDS, Record, counted_as
from pytest_gpucluster.text import lines, one_line

if TYPE_CHECKING:
    import pytest

    from pytest_gpucluster.plugin.pairing import Pair
    from pytest_gpucluster.plugin.screen import Screen
    from pytest_gpucluster.session import Session

PLAIN_INTERVAL_S = 5.0
PLAIN_LINES = 100
"""A run that takes longer than 500 s and has no terminal writes about so many progress lines."""
BAR_WIDTH, NARROW_BAR_WIDTH, NARROW_WIDTH = 20, 10, 110
NAME_WIDTH = 34
MAX_REMARKS = 10
"""How many lines about what has no effect stand before the first test; results.json has all."""


class Live:
    """A pytest plugin that shows where the run stands."""

    def __init__(self, screen: Screen, session: Session) -> None:
        """Nothing is shown before :meth:`take_over`."""
        self._screen = screen
        self._session = session
        self._lines = False
        self._criterion: str | None = None
        self._records: list[Record] = []
        self._forecast: forecast.Forecast | None = None
        self._done: Counter[str] = Counter()
        self._work: str | None = None
        self._began_s = self._last_s = time.monotonic()

    def take_over(self) -> None:
        """At normal verbosity our lines replace pytest's dots."""
        reporter = self._screen.reporter
        if reporter is not None and self._screen.verbosity == 0:
            self._lines = True
            reporter.showfspath = False
            reporter._show_progress_info = False  # noqa: SLF001 -- there is no public switch at run time

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Give pytest no letter to show where the line of a criterion shows the outcome."""
        if not self._lines:
            return None
        if report.when in ("setup", "teardown") and report.outcome == "passed":
            return ("", "", "")
        if report.outcome == "failed" and report.when != "call":
            return ("error", "", "ERROR")
        return (report.outcome, "", report.outcome.upper())

    def announce(self, session: Session, forecast: forecast.Forecast) -> None:
        """Print what will be measured, against which limits, and about how long that takes."""
        self._forecast = forecast
        setup, facts = session.setup, session.setup.inventory.facts
        unit = "ranks on the CPU" if setup.rehearsal else "GPUs"
        self._screen.write(
            f"gpucluster: {facts['nodes']} node(s) x {facts['gpus_per_node']} {unit} expected; profile "
            f"{setup.profile.name}, level {setup.settings.level}, limits from {setup.thresholds.path.name}"
        )
        if not session.controller.is_signed:
            self._screen.write(
                "gpucluster: messages between ranks are not signed; set GPUCLUSTER_SECRET on every node to sign them"
            )
        if setup.rehearsal:
            self._screen.write("gpucluster: REHEARSAL on the CPU: it tries the procedure and accepts nothing")
        if setup.simulation is not None:
            self._screen.write(f"gpucluster: {SIMULATED}: it shows what a run prints and accepts nothing")
        for remark in setup.remarks[:MAX_REMARKS]:
            self._screen.write(f"gpucluster: {remark}")
        if len(setup.remarks) > MAX_REMARKS:
            self._screen.write(f"gpucluster: ... and {len(setup.remarks) - MAX_REMARKS} more such lines in results.json")
        if self._screen.verbosity >= 0:
            where = f"{facts['world_size']} {unit}"
            for line in forecast.lines(level=setup.settings.level, where=where):
                self._screen.write(f"gpucluster: {line}")

    def say(self, text: str, **markup: bool) -> None:
        """Print one line."""
        self._screen.write(text, **markup)

    def begin(self, pair: Pair) -> None:
        """Called when a test begins; a new criterion closes the line of the one before."""
        if pair.criterion != self._criterion:
            self.close_line()
            self._criterion, self._work = pair.criterion, None
            self._began_s = self._last_s = time.monotonic()
            self._draw(pair.criterion)

    def work_on(self, work: str) -> None:
        """Name ``work`` instead of the criterion in the progress line, until the next criterion begins."""
        self._work = work

    def done(self, record: Record) -> None:
        """Called when a test has its outcome."""
        self._records.append(record)
        self._done[record.criterion] += 1

    def progress(self, rank: int, step: str, fraction: float | None) -> None:
        """Show how far the run is and what one rank does now: in place on a terminal, a line every few seconds elsewhere."""
        share = f" {100 * fraction:3.0f} %" if fraction is not None else ""
        doing = one_line(f"{self._work or self._criterion or 'starting':<{NAME_WIDTH}} rank {rank}: {step}{share}")
        if self._draw(doing) or self._screen.reporter is None or self._screen.verbosity < 0:
            return
        if time.monotonic() - self._last_s > self._interval_s:
            self._last_s = time.monotonic()
            now = self._progress()
            self._screen.write(f"{doing}; {now.percent} % of all, {now.left}" if now is not None else doing)

    def _draw(self, doing: str) -> bool:
        """Rewrite the terminal's last line; False without a terminal, or where pytest prints its own lines."""
        if not self._screen.is_terminal or not self._lines:
            return False
        self._screen.rewrite(in_one_line(self._progress(), doing, width=self._screen.width))
        return True

    def _progress(self) -> forecast.Progress | None:
        """Where the run stands; None before the plan is fixed."""
        if self._forecast is None:
            return None
        now_s = time.monotonic()
        return forecast.progress(
            self._forecast,
            self._done,
            current=self._criterion,
            in_current_s=now_s - self._began_s,
            elapsed_s=now_s - self._session.setup.started_s,
        )

    @property
    def _interval_s(self) -> float:
        return max(PLAIN_INTERVAL_S, self._forecast.total_s / PLAIN_LINES if self._forecast is not None else 0.0)

    def output(self, rank: int, text: str) -> None:
        """Print what a rank printed in a call, each line behind its place; called after the call, with ``-s``."""
        places = self._session.places().values()
        where = next((place.id for place in places if place.rank == rank), f"rank {rank}")
        for line in lines(text):
            self._screen.write(f"[{where}] {line}")

    def close_line(self) -> None:
        """Print the line of the criterion that has ended."""
        if not self._lines or not self._records:
            self._records = []
            return
        records, self._records = self._records, []
        values = [record.value for record in records if record.value is not None]
        counts = [f"{number} {WORDS[word]}" for word, number in Counter(counted_as(record) for record in records).items()]
        shown = f"{failure_text.summarize(values)} {records[0].unit}" if values else ""
        limit = f"  ({records[0].limit.text})" if values and records[0].limit else ""
        good = all(record.outcome in (PASSED, SKIPPED) for record in records)
        self._screen.write(f"{records[0].criterion:<{NAME_WIDTH}} {', '.join(counts):<22} {shown}{limit}", red=not good)


def in_one_line(now: forecast.Progress | None, doing: str, *, width: int) -> str:
    """A bar and what runs now, cut to one line of a terminal: a longer line could not be rewritten."""
    columns = () if now is None else (BarColumn(NARROW_BAR_WIDTH if width < NARROW_WIDTH else BAR_WIDTH), TextColumn(now.text))
    doing_column = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    console = Console(width=width - 1, color_system=None)
    line = RichProgress(*columns, doing_column, console=console, expand=True)
    line.add_task(one_line(" ".join(doing.split())), completed=now.percent if now is not None else 0)
    with console.capture() as shown:
        console.print(line)
    return shown.get().rstrip()
