"""The screen of a run: lines through pytest's terminal reporter, and one line at the end that is rewritten in place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.reporting.lines import folded
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    import pytest

PLAIN_WIDTH = 100
"""Columns of a log."""


class Screen:
    """Writes through pytest's own terminal reporter; silent where that is switched off."""

    def __init__(self, config: pytest.Config) -> None:
        """Nothing is written yet."""
        self._config = config
        self._transient = False

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
    def has_color(self) -> bool:
        """Whether pytest colours its lines."""
        return self.reporter is not None and bool(self.reporter.hasmarkup)

    @property
    def width(self) -> int:
        """Columns: of the terminal, as pytest counts them. Without a terminal ``COLUMNS``, or 100 where that is not set."""
        if self.reporter is None or not (self.is_terminal or os.environ.get("COLUMNS")):
            return PLAIN_WIDTH
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
