"""The phases of one test: set-up, the test itself, teardown; from pytest's reports to the outcome of the run."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.errors import Blame, MeasurementError
from pytest_gpucluster.judging.verdict import ERROR
from pytest_gpucluster.plugin import soak_reports
from pytest_gpucluster.plugin.attempts import attempts_of, hidden_by_a_hook
from pytest_gpucluster.plugin.distributed import run_distributed_test
from pytest_gpucluster.plugin.outcome import BAD, ItemContext, outcome_of, show_waived
from pytest_gpucluster.plugin.report_text import make_fit
from pytest_gpucluster.plugin.stash_keys import CRITERION, IN_BODY, NO_LIMIT, PAIR, RECORD, RULE
from pytest_gpucluster.reporting.junit import properties_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_gpucluster.cluster.soak import Soak
    from pytest_gpucluster.judging.verdict import Record
    from pytest_gpucluster.plugin.selection import Selection
    from pytest_gpucluster.plugin.terminal import Terminal
    from pytest_gpucluster.plugin.termination import Termination
    from pytest_gpucluster.session import Session


class Phases:
    """A pytest plugin with the hooks of one test."""

    def __init__(self, session: Session, terminal: Terminal, selection: Selection, termination: Termination) -> None:
        """``selection`` has the tests that take part in a soak; ``termination`` ends the run between two tests."""
        self._session = session
        self._terminal = terminal
        self._selection = selection
        self._termination = termination
        self._soak: Soak | None = None

    def soak(self) -> Soak:
        """The soak that the selected tests take part in, begun by the first call; see :func:`soak_reports.start`."""
        if self._soak is None:
            items = self._selection.items
            judging = {item.stash[PAIR].key: item.stash[CRITERION] for item in items if CRITERION in item.stash}
            self._soak = soak_reports.start(self._session, self._terminal, judging)
        return self._soak

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Show that a test begins; after it, stop the session if the run was terminated meanwhile."""
        self._terminal.live.begin(item.stash[PAIR])
        try:
            return (yield)
        finally:
            if self._termination.signal is not None:
                item.session.shouldstop = f"terminated by {self._termination.signal}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a criterion that the profile's rules exclude; do not begin a test once the run was terminated."""
        if RULE in item.stash:
            pytest.skip(item.stash[RULE].text)
        if NO_LIMIT in item.stash:
            raise MeasurementError(f"not judged: {item.stash[NO_LIMIT]}", kind="refused", blame=Blame(part="settings"))
        if self._termination.signal is not None:
            raise MeasurementError(f"not run: terminated by {self._termination.signal}", kind="missing")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run the body of a distributed test in the workers."""
        if pyfuncitem.get_closest_marker("distributed") is None:
            return None
        run_distributed_test(pyfuncitem, self._session)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Mark the time in which reports are of parts of the test."""
        item.stash[IN_BODY] = True
        try:
            return (yield)
        finally:
            item.stash[IN_BODY] = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Correct pytest's report: a test that could not measure, or did not judge, is an ERROR. Record the outcome."""
        report = yield
        if item.stash.get(IN_BODY, False):
            self._take_part(item, call, copy.copy(report))
            make_fit(report)
            return report
        test = ItemContext(
            pair=item.stash[PAIR],
            rule=item.stash.get(RULE, None),
            criterion=item.stash.get(CRITERION, None),
            earlier=item.stash.get(RECORD, None),
            kept=self._found_before(item),
            unmeasured=self._unmeasured(item),
            attempts=attempts_of(item),
            hidden=hidden_by_a_hook(item) if call.when == "call" else None,
        )
        record = outcome_of(report, call, test)
        if record is not None:
            record = self._session.waive(record)
            if record.waiver is not None:
                show_waived(report, record.reason or "waived")
            item.stash[RECORD] = record
            self._add_properties(item, record)
            self._session.recorder.record_outcome(record)
            report.user_properties = list(item.user_properties)
        if call.when == "teardown" and RECORD in item.stash:
            self._terminal.live.done(item.stash[RECORD])
        make_fit(report)
        return report

    def _take_part(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Record a block of ``subtests.test()`` that did not come to its end: the test cannot be better than that."""
        if call.excinfo is None:
            return
        kept, criterion = self._found_before(item), item.stash.get(CRITERION, None)
        part = ItemContext(pair=item.stash[PAIR], rule=None, criterion=criterion, earlier=None, kept=kept)
        record = outcome_of(report, call, part)
        if record is not None:
            outcome = record.outcome if record.outcome in BAD else ERROR
            self._session.recorder.record_outcome(replace(record, outcome=outcome, waivable=False))

    def _found_before(self, item: pytest.Item) -> Record | None:
        """The bad outcome on record before this phase: of a round of a soak, or of another try of the same test."""
        found = self._session.plan.record(*item.stash[PAIR].key)
        return found if found is not None and found.outcome in BAD else None

    def _unmeasured(self, item: pytest.Item) -> str | None:
        """What the soak of this test did not measure; None if it measured everything, or if the test has no soak."""
        if CRITERION not in item.stash:
            return None
        pair, soak = item.stash[PAIR], self._soak
        if soak is None or not (soak.has_work(pair.criterion) or "soak" in getattr(item, "fixturenames", ())):
            return None
        found: str | None = soak.unmeasured(pair.criterion, pair.place)
        return found

    def _add_properties(self, item: pytest.Item, record: Record) -> None:
        """Give all reporters of pytest the properties that the JUnit file has of this test."""
        known = {name for name, _ in item.user_properties}
        facts = properties_of(record, self._session.places().get(record.place or ""))
        item.user_properties += [(name, fact) for name, fact in facts if name not in known]
