"""The end of a run: close the plan, decide, write the reports, choose the exit status."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.judging.verdict import ACCEPTED, MISSING, NOT_SELECTED, Verdict
from pytest_gpucluster.plugin.junit import finish_junit, with_fit_hostname
from pytest_gpucluster.plugin.outcome import BAD

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from pytest_gpucluster.plugin.terminal import Terminal
    from pytest_gpucluster.plugin.termination import Termination
    from pytest_gpucluster.session import Session

CAME_TO_ITS_END = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class End:
    """A pytest plugin with the hooks of the end of a session."""

    def __init__(
        self, config: pytest.Config, session: Session, terminal: Terminal, termination: Termination, begin: Callable[[], None]
    ) -> None:
        """Decide nothing yet. ``begin`` takes the results directory of a run that ends while it collects."""
        self._config = config
        self._session = session
        self._terminal = terminal
        self._termination = termination
        self._begin = begin
        self._stopped_by: str | None = None
        self._disk_errors: list[str] = []
        self.verdict: Verdict | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether the verdict is ACCEPTED, the reports are on disk, and no self-test objects."""
        return self.verdict is not None and self.verdict.word == ACCEPTED and not self._is_insufficient

    @property
    def _is_insufficient(self) -> bool:
        insensitive = self._session.selftest is not None and bool(self._session.selftest["objections"])
        return bool(self._disk_errors) or insensitive

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Remember what stopped the session: Ctrl-C, or ``pytest.exit``, which may choose any exit status."""
        self._stopped_by = (
            "pytest.exit was called" if isinstance(excinfo.value, pytest.exit.Exception) else "the run was interrupted"
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Close the plan, decide, write; pytest's own reporters follow."""
        if session.exitstatus != pytest.ExitCode.USAGE_ERROR:
            self._begin()
        if self._session.recorder.is_open:
            self._finish(session)
        with with_fit_hostname():
            return (yield)

    def _finish(self, session: pytest.Session) -> None:
        self._termination.ignore()
        self._terminal.live.close()
        outcome, why = self._why_unfinished(session)
        unrun = [*self._session.record_unplanned(why=why), *self._session.recorder.close_pending(outcome=outcome, why=why)]
        if not unrun and (self._stopped_by or session.shouldstop or session.exitstatus not in CAME_TO_ITS_END):
            self._session.objections.append(f"cut short after the last outcome: {why.removeprefix('not run: ')}")
        self.verdict = self._session.decide()
        error = self._session.recorder.finish(self.verdict)
        self._disk_errors += [error] if error is not None else []
        finish_junit(self._config, self._session.recorder.report(self.verdict))
        session.exitstatus = self._exit_status(session)

    def add_disk_error(self, error: str) -> None:
        """Show that a part of this run's results is not on disk. Called by :class:`ReportErrorGuard`."""
        self._disk_errors.append(error)

    def _why_unfinished(self, session: pytest.Session) -> tuple[str, str]:
        """The outcome of tests that did not run, and the reason."""
        if self._termination.signal is not None:
            return MISSING, f"not run: terminated by {self._termination.signal}"
        if session.shouldfail or session.shouldstop:
            return NOT_SELECTED, f"not run: {session.shouldfail or session.shouldstop}"
        if self._stopped_by is not None or session.exitstatus == pytest.ExitCode.INTERRUPTED:
            return MISSING, f"not run: {self._stopped_by or 'the run was interrupted'}"
        return MISSING, "not run: the session ended early"

    def _exit_status(self, session: pytest.Session) -> int:
        """Keep pytest's own status, but never 0 when something is not as it should be."""
        assert self.verdict is not None
        bad = any(self.verdict.counts[outcome] for outcome in BAD) or self._is_insufficient
        gated = self._session.setup.settings.gate and self.verdict.word != ACCEPTED
        if int(session.exitstatus) == 0 and (bad or gated):
            return int(pytest.ExitCode.TESTS_FAILED)
        return int(session.exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the table and what failed where."""
        if self.verdict is not None:
            self._terminal.summary(terminalreporter, self._session, disk_errors=self._disk_errors)

    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_terminal_summary")
    def pytest_show_verdict(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, object, object]:
        """Show the verdict after the sections of pytest and of all other plugins."""
        try:
            return (yield)
        finally:
            if self.verdict is not None:
                self._terminal.conclude(terminalreporter, self._session, self.verdict)
