"""The screen of a run: lines through pytest's terminal reporter, and one line at the end that is rewritten in place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from pytest_gpucluster.reporting.lines import folded
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpucluster.judging import forecast

PLAIN_WIDTH = 100
"""Columns of a log."""
BAR_WIDTH, NARROW_BAR_WIDTH, NARROW_WIDTH = 30, 10, 110


class Screen:
    """A pytest plugin that writes through pytest's own terminal reporter; silent where that is switched off."""

    def __init__(self, config: pytest.Config) -> None:
        """``config`` has the reporter, and what the user asks of it."""
        self._config = config
        self._transient = False
        self.is_on = False
        """Whether our lines stand in place of pytest's dots."""

    def take_over(self) -> None:
        """Up to normal verbosity our lines replace pytest's dots from here on."""
        reporter = self.reporter
        if reporter is not None and self.verbosity <= 0:
            self.is_on = True
            reporter.showfspath = False
            reporter._show_progress_info = False  # noqa: SLF001 -- there is no public switch at run time

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Give pytest no letter to show where the bar shows the progress."""
        if not self.is_on:
            return None
        if report.when in ("setup", "teardown") and report.outcome == "passed":
            return ("", "", "")
        if report.outcome == "failed" and report.when != "call":
            return ("error", "", "ERROR")
        return (report.outcome, "", report.outcome.upper())

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self) -> None:
        """Keep no report of a set-up or teardown that passed: two a test, which only ``--durations`` reads at the end."""
        if self.reporter is not None and self._config.option.durations is None:
            self.reporter.stats.get("", []).clear()

    @property
    def reporter(self) -> Any:
        """Pytest's terminal reporter, None where it is switched off."""
        return self._config.pluginmanager.get_plugin("terminalreporter")

    @property
    def verbosity(self) -> int:
        """-1 with ``-q``, 1 with ``-v``."""
        return self._config.get_verbosity()

    @property
    def is_terminal(self) -> bool:
        """Whether a line can be rewritten in place."""
        return self.reporter is not None and bool(self.reporter.isatty)

    @property
    def has_bar(self) -> bool:
        """Whether a bar is shown: on a terminal, neither with ``-q`` nor with ``-v``."""
        return self.is_on and self.is_terminal and self.verbosity == 0

    @property
    def has_color(self) -> bool:
        """Whether pytest colours its lines."""
        return self.reporter is not None and bool(self.reporter.hasmarkup)

    @property
    def width(self) -> int:
        """Columns: of the terminal, as pytest counts them. Without a terminal ``COLUMNS``, or 100 where that is not set.

        While a test is captured, standard output is a file, which would be 80 columns wide.
        """
        if self.reporter is None or not (self.is_terminal or os.environ.get("COLUMNS")):
            return PLAIN_WIDTH
        with self._uncaptured():
            return int(self.reporter._tw.fullwidth)  # noqa: SLF001 -- pytest's own width

    def fit(self, text: str) -> list[str]:
        """The text in lines that fit the terminal. One line in a log: scripts and people search it."""
        line = one_line(text)
        return folded(line, width=self.width) if self.is_terminal else [line]

    def write(self, text: str, **markup: bool) -> None:
        """Write one line, folded where it is too wide for the terminal, in place of a transient one."""
        reporter = self.reporter
        if reporter is None:
            return
        with self._uncaptured():
            if self._transient:
                self._erase()
            reporter.ensure_newline()
            for line in self.fit(text):
                reporter.write_line(line, **markup)

    def print(self, lines: Iterable[str]) -> None:
        """Write whole lines as they are, at the end of the run."""
        self.reporter.ensure_newline()
        for line in lines:
            self.reporter.write_line(line)

    def rewrite(self, text: str) -> None:
        """Write a transient line, of the same width each time, in place of the one before. Only on a terminal."""
        with self._uncaptured():
            self.reporter.rewrite(text)
            self.reporter.flush()
            self._transient = True

    def clear(self) -> None:
        """Erase the transient line."""
        if self._transient:
            with self._uncaptured():
                self._erase()

    def _erase(self) -> None:
        self.reporter.rewrite("", erase=True)
        self.reporter.rewrite("")  # back to the first column
        self._transient = False

    def _uncaptured(self) -> Any:
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        return capture.global_and_fixture_disabled()


def bar_line(now: forecast.Progress, doing: str, *, bad: int, width: int, color: bool) -> str:
    """Bar, share, times, how many outcomes are bad, and what runs now; one column narrower than ``width``, filled with blanks.

    A longer line could not be rewritten.
    """
    columns = [
        BarColumn(NARROW_BAR_WIDTH if width < NARROW_WIDTH else BAR_WIDTH, complete_style="green", finished_style="green"),
        TextColumn(now.text, markup=False, table_column=Column(no_wrap=True)),
        *([TextColumn(f"{bad} bad", style="red", markup=False, table_column=Column(no_wrap=True))] if bad else []),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
    ]
    console = Console(width=width - 1, color_system="standard" if color else None, force_terminal=color, legacy_windows=False)
    line = Progress(*columns, console=console, expand=True)
    line.add_task(one_line(" ".join(doing.split())), completed=now.percent)
    with console.capture() as shown:
        console.print(line)
    return shown.get().rstrip("\n")
