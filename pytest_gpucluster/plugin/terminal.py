"""Prints what a run shows: a line per criterion, live progress, and at the end a table and the verdict."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from pytest_gpucluster.judging import causes, failure_text, forecast
from pytest_gpucluster.judging.culprits import find_culprits
from pytest_gpucluster.judging.verdict import (
    FAILED,
    PASSED,
    REJECTED,
    SHOWN_LIMITS,
    SKIPPED,
    WORDS,
    Record,
    Verdict,
    counted_as,
)
from pytest_gpucluster.reporting.table import criteria_table
from pytest_gpucluster.text import hung, lines, one_line
from pytest_gpucluster.thresholds.file import REMOVED

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from pytest_gpucluster.plugin.pairing import Pair
    from pytest_gpucluster.session import Session

PLAIN_INTERVAL_S = 5.0
PLAIN_LINES = 100
"""A run that takes longer than 500 s and has no terminal writes about so many progress lines."""
BAR_WIDTH, NARROW_BAR_WIDTH, NARROW_WIDTH = 20, 10, 110
NAME_WIDTH = 34
MAX_REMARKS = 10
"""How many lines about what has no effect stand before the first test; results.json has all."""
PLAIN_WIDTH = 132


class Terminal:
    """Writes through pytest's own terminal reporter; silent where that is switched off."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        """Nothing is shown before :meth:`take_over`."""
        self._config = config
        self._session = session
        self._lines = False
        self._criterion: str | None = None
        self._records: list[Record] = []
        self._remarks: list[str] = []
        self._forecast: forecast.Forecast | None = None
        self._done: Counter[str] = Counter()
        self._work: str | None = None
        self._began_s = self._last_s = time.monotonic()
        self._transient = False

    @property
    def _reporter(self) -> Any:
        return self._config.pluginmanager.get_plugin("terminalreporter")

    def take_over(self) -> None:
        """At normal verbosity our lines replace pytest's dots."""
        reporter = self._reporter
        if reporter is not None and self._config.get_verbosity() == 0:
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
        self._write(
            f"gpucluster: {facts['nodes']} node(s) x {facts['gpus_per_node']} {unit} expected; profile "
            f"{setup.profile.name}, level {setup.settings.level}, limits from {setup.thresholds.path.name}"
        )
        if not session.controller.is_signed:
            self._write("gpucluster: messages between ranks are not signed; set GPUCLUSTER_SECRET on every node to sign them")
        if setup.rehearsal:
            self._write("gpucluster: REHEARSAL on the CPU: it tries the procedure and accepts nothing")
        for remark in setup.remarks[:MAX_REMARKS]:
            self._write(f"gpucluster: {remark}")
        if len(setup.remarks) > MAX_REMARKS:
            self._write(f"gpucluster: ... and {len(setup.remarks) - MAX_REMARKS} more such lines in results.json")
        if self._config.get_verbosity() >= 0:
            where = f"{facts['world_size']} {unit}"
            for line in forecast.lines(level=setup.settings.level, where=where):
                self._write(f"gpucluster: {line}")

    def say(self, text: str, **markup: bool) -> None:
        """Print one line."""
        self._write(text, **markup)

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

    def remark(self, text: str) -> None:
        """Keep a line for the end: an advisory limit was missed, which is no failure."""
        self._remarks.append(text)

    def progress(self, rank: int, step: str, fraction: float | None) -> None:
        """Show how far the run is and what one rank does now: in place on a terminal, a line every few seconds elsewhere."""
        share = f" {100 * fraction:3.0f} %" if fraction is not None else ""
        doing = one_line(f"{self._work or self._criterion or 'starting':<{NAME_WIDTH}} rank {rank}: {step}{share}")
        if self._draw(doing) or self._reporter is None or self._config.get_verbosity() < 0:
            return
        if time.monotonic() - self._last_s > self._interval_s:
            self._last_s = time.monotonic()
            now = self._progress()
            with self._uncaptured():
                self._reporter.write_line(f"{doing}; {now.percent} % of all, {now.left}" if now is not None else doing)

    def _draw(self, doing: str) -> bool:
        """Rewrite the terminal's last line; False without a terminal, or where pytest prints its own lines."""
        reporter = self._reporter
        if reporter is None or not reporter.isatty or not self._lines:
            return False
        with self._uncaptured():
            width = reporter._tw.fullwidth  # noqa: SLF001 -- pytest's own width
            reporter.rewrite(in_one_line(self._progress(), doing, width=width), erase=True)
            self._transient = True
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
            self._write(f"[{where}] {line}")

    def summary(
        self, reporter: pytest.TerminalReporter, session: Session, verdict: Verdict, *, disk_errors: Sequence[str]
    ) -> None:
        """Print the table, failures over all places, remarks and the verdict."""
        self.close_line()
        records = list(session.plan)
        reporter.section("gpucluster")
        for line in session.setup.waivers.lines:
            reporter.write_line(one_line(line), bold=True)
        width = reporter._tw.fullwidth if reporter.isatty else PLAIN_WIDTH  # noqa: SLF001 -- pytest's own width
        reporter.write(criteria_table(records, width=width, color=reporter.hasmarkup))
        for criterion in dict.fromkeys(row.criterion for row in records if counted_as(row) == FAILED and row.limit):
            rows = [record for record in records if record.criterion == criterion]
            threshold, device = session.setup.criteria.get(criterion), session.setup.inventory.device
            for line in failure_text.describe_together(rows, session.places(), device=device, threshold=threshold):
                reporter.write_line(one_line(line))
        self._write_causes(reporter, session, records)
        for remark in self._remarks:
            reporter.write_line(hung(f"advisory: {remark}"))
        for line in causes.describe_remarks(records):
            reporter.write_line(one_line(line))
        changed = session.setup.changed_entries
        if changed:
            shown = [f"{key} ({', '.join(words)})" for key, words in changed.items() if words != [REMOVED]]
            removed = [key for key, words in changed.items() if words == [REMOVED]]
            more = f" and {len(removed) - SHOWN_LIMITS} more" if len(removed) > SHOWN_LIMITS else ""
            shown += [f"removed: {', '.join(removed[:SHOWN_LIMITS])}{more}"] if removed else []
            reporter.write_line(one_line(f"limits changed from the packaged ones: {'; '.join(shown)}"))
        if disk_errors:
            reporter.write_line(one_line(f"results are incomplete on disk: {'; '.join(disk_errors)}"), red=True)
        timings = session.timings()
        reporter.write_line(
            f"{timings['total_s']:.1f} s: {timings['startup_s']:.1f} start-up, {timings['measuring_s']:.1f} measuring, "
            f"{timings['other_s']:.1f} other; results in {one_line(str(session.setup.settings.results_dir))}"
        )
        reporter.write_line(f"verdict {verdict.line}", bold=True, green=verdict.is_acceptance, red=verdict.word == REJECTED)

    def _write_causes(self, reporter: pytest.TerminalReporter, session: Session, records: Sequence[Record]) -> None:
        """Print what is to blame, each cause once. With ``-v`` pytest's own sections have the whole texts."""
        places = session.places()
        whole = self._config.get_verbosity() <= 0 and self._config.option.tbstyle != "no"
        lines = causes.describe_causes(find_culprits(records, places), records, places, whole=whole)
        if lines:
            reporter.write_line("culprits and causes:", bold=True)
        for line in lines:
            reporter.write_line(line)

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
        self._write(f"{records[0].criterion:<{NAME_WIDTH}} {', '.join(counts):<22} {shown}{limit}", red=not good)

    def _write(self, text: str, **markup: bool) -> None:
        reporter = self._reporter
        if reporter is None:
            return
        with self._uncaptured():
            if self._transient:
                reporter.rewrite("", erase=True)
                reporter.rewrite("")  # back to the first column
                self._transient = False
            reporter.ensure_newline()
            reporter.write_line(one_line(text), **markup)

    def _uncaptured(self) -> Any:
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        return capture.global_and_fixture_disabled()


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
