"""The end of a session, hook by hook: why it ended, the verdict and the reports, the screen, SIGTERM."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.controller.call import LAST_CALL_S
from pytest_gpucluster.judging.verdict import ACCEPTED, BAD, MISSING, NOT_SELECTED, PASSED, WAIVED, Verdict
from pytest_gpucluster.page.outputs import Wanted, Written, write_outputs
from pytest_gpucluster.plugin.junit import finish_junit, with_fit_hostname, written_whole
from pytest_gpucluster.plugin.outcome import judged_late
from pytest_gpucluster.plugin.stash_keys import CRITERION, RECORD
from pytest_gpucluster.plugin.terminal import Terminal
from pytest_gpucluster.plugin.verdict_item import report_verdict
from pytest_gpucluster.reporting.junit import verdict_testcase
from pytest_gpucluster.session import Session
from pytest_gpucluster.text import first_line

CAME_TO_ITS_END = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
PATIENCE_S = 4.0
"""After so many seconds a SIGTERM interrupts what is not a call: collection, or a loop of a test's own."""
REPORTING_S = 10.0
"""For so many seconds a Ctrl-C is too late: whoever presses it twice wants to leave, and has the reports all the same."""


class End:
    """A pytest plugin with the hooks of the end of a session."""

    def __init__(
        self, config: pytest.Config, session: Session, terminal: Terminal, termination: Termination, begin: Callable[[], None]
    ) -> None:
        """``begin`` takes the results directory of a run that ends while it collects."""
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
    def is_bad(self) -> bool:
        """Whether something failed or was not measured, a report is not on disk, or a self-test objects."""
        return self.verdict is not None and (self._is_insufficient or any(self.verdict.counts[outcome] for outcome in BAD))

    @property
    def _is_insufficient(self) -> bool:
        selftest = self._session.state.selftest
        return bool(self._disk_errors) or (selftest is not None and bool(selftest["objections"]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Remember what stopped the session: Ctrl-C, or ``pytest.exit``, which may choose any exit status."""
        self._termination.ignore()
        is_exit = isinstance(excinfo.value, pytest.exit.Exception)
        self._stopped_by = "pytest.exit was called" if is_exit else "the run was interrupted"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Close the plan, decide, write; pytest's own reporters follow, and all of the screen."""
        if session.exitstatus != pytest.ExitCode.USAGE_ERROR:
            self._begin()
        if self._session.recorder.is_open:
            self._finish(session)
        with with_fit_hostname():
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True, specname="pytest_sessionfinish")
    def pytest_write_reports(self, session: pytest.Session) -> Generator[None, object, object]:
        """Show a report that could not be written beside the verdict; such a run is no success.

        The innermost wrapper: reporters write inside it. pytest's terminal is a wrapper further out, and an error that
        reached it would leave the screen without a verdict.
        """
        try:
            with written_whole(session.config):
                return (yield)
        except OSError as error:
            if self.verdict is None:
                raise
            self._disk_errors.append(f"{error.filename or 'a report'} could not be written: {error.strerror}")
            session.exitstatus = int(session.exitstatus) or int(pytest.ExitCode.TESTS_FAILED)
            return None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, object, object]:
        """Around the sections of pytest and of all other plugins: what ours shows is not shown twice; the verdict is last."""
        self._terminal.hidden.hide(terminalreporter)
        try:
            return (yield)
        finally:
            self._terminal.hidden.restore(terminalreporter)
            if self.verdict is not None:
                self._terminal.conclude(self.verdict, is_whole=not self._disk_errors)

    @pytest.hookimpl(tryfirst=True, specname="pytest_terminal_summary")
    def pytest_show_short_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Called after pytest's sections and before its short summary, which names every test where ``-r`` asks for that."""
        self._terminal.hidden.restore_for_short_summary(terminalreporter)

    @pytest.hookimpl(trylast=True, specname="pytest_terminal_summary")
    def pytest_show_table(self) -> None:
        """Show the table and what failed where."""
        if self.verdict is not None:
            self._terminal.summary(disk_errors=self._disk_errors)

    def _finish(self, session: pytest.Session) -> None:
        gc.freeze()  # all outcomes stay until the end; pytest looks five times for garbage among them
        self._termination.ignore()
        self._terminal.live.close()
        outcome, cause = self._why_unfinished(session)
        why = f"not run: {cause}"
        if outcome == MISSING:
            self._session.skip_pending_by_rule()
        unrun = [*self._session.record_unplanned(why=why), *self._session.recorder.close_pending(outcome=outcome, why=why)]
        for item in session.items:
            late = judged_late(item.stash.get(CRITERION, None), item.stash.get(RECORD, None))
            if late is not None:
                self._session.state.objections.append(f"{item.nodeid} was judged after it had ended: {first_line(late)}")
        if not unrun and (self._stopped_by or session.shouldstop or session.exitstatus not in CAME_TO_ITS_END):
            self._session.state.objections.append(f"cut short after the last outcome: {cause}")
            self._session.state.own_tests_only = False
        self._session.state.end()
        self.verdict = self._session.decide()
        error = self._session.recorder.finish(self.verdict)
        self._disk_errors += [error] if error is not None else []
        report = self._session.recorder.report(self.verdict)
        report_verdict(session, verdict_testcase(report))
        finish_junit(self._config, report)
        if error is None and self._session.recorder.is_open:
            self._terminal.said = write_outputs(self._session.setup.settings.results_dir, self._wanted)
        session.exitstatus = self._exit_status(session)

    @property
    def _wanted(self) -> Wanted:
        setup = self._session.setup
        start = self._config.invocation_params.dir
        known = {key: Written(file=in_checkout(entry.file, start), line=entry.line) for key, entry in setup.criteria.items()}
        reports = {name: getattr(setup.settings, name) for name in ("summary", "metrics", "termination")}
        return Wanted(**reports, environment=os.environ, written=known)

    def _why_unfinished(self, session: pytest.Session) -> tuple[str, str]:
        """The outcome of tests that did not run, and what ended the session before them."""
        if self._termination.signal is not None:
            return MISSING, f"terminated by {self._termination.signal}"
        if session.shouldfail or session.shouldstop:
            return NOT_SELECTED, str(session.shouldfail or session.shouldstop)
        if self._stopped_by is not None or session.exitstatus == pytest.ExitCode.INTERRUPTED:
            return MISSING, self._stopped_by or "the run was interrupted"
        came_to_its_end = session.exitstatus in CAME_TO_ITS_END
        return MISSING, "a hook of another plugin took its place" if came_to_its_end else "the session ended early"

    def _exit_status(self, session: pytest.Session) -> int:
        """Keep pytest's own status, but never 0 when something is not as it should be."""
        assert self.verdict is not None
        if int(session.exitstatus) != 0:
            return int(session.exitstatus)
        if self.is_bad or (self._session.setup.settings.gate and self.verdict.word != ACCEPTED):
            return int(pytest.ExitCode.TESTS_FAILED)
        has_measured = any(self.verdict.counts[outcome] for outcome in (PASSED, WAIVED))  # else every test skipped
        return int(pytest.ExitCode.OK if has_measured else pytest.ExitCode.NO_TESTS_COLLECTED)


def in_checkout(file: str, start: Path) -> str:
    """A file as GitHub's annotations name it: from the folder of the checkout; its name alone where it is elsewhere."""
    root = Path(os.environ.get("GITHUB_WORKSPACE", start))
    path = start / file
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


class Termination:
    """Handles SIGTERM for one run."""

    def __init__(self, session: Session) -> None:
        """Handle nothing before :meth:`install`."""
        self._session = session
        self.signal: str | None = None
        self._timer: threading.Timer | None = None
        self._is_ignored = False

    def install(self) -> None:
        """Handle SIGTERM from now on, where this thread may."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def ignore(self) -> None:
        """Ignore SIGTERM from now on, and Ctrl-C while reports are written: a second one could only damage them.

        Python gives up its handlers when it exits, and a signal would take the exit code away: both are ignored then.
        """
        self._is_ignored = True
        if self._timer is not None:
            self._timer.cancel()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            atexit.register(signal.signal, number, signal.SIG_IGN)
        if callable(before := signal.getsignal(signal.SIGINT)):  # a shell starts what is in the background without one
            ends_s = time.monotonic() + REPORTING_S
            signal.signal(signal.SIGINT, lambda *facts: before(*facts) if time.monotonic() > ends_s else None)

    def _on_sigterm(self, *_: Any) -> None:
        """Called in the main thread when SIGTERM comes, and again by the timer if the run has not ended by then.

        Raises:
            KeyboardInterrupt: the run was terminated before and still goes on.
        """
        if self._is_ignored:
            return
        if self.signal is not None:
            raise KeyboardInterrupt
        self._session.controller.terminate("SIGTERM")
        self.signal = self._session.controller.terminated
        patience_s = PATIENCE_S if self.signal is not None else LAST_CALL_S + 1.0
        again = functools.partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGTERM)
        self._timer = threading.Timer(patience_s, again)
        self._timer.daemon = True
        self._timer.start()
