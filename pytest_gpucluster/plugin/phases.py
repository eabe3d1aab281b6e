"""What happens to one test: every hook of a test, in the order in which pytest calls them.

pytest calls the plugin first that was registered last. A run registers this one after the plugins of the command line and
the conftest files given there, so its wrappers are outside theirs. Nothing relies on that: a conftest file that pytest finds
later, in a folder, comes outside again. So the outcome follows from what the test itself did: its value, what its function
raised, how often it ran. The report that pytest and others make of it is corrected to agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from _pytest._code.code import TerminalRepr  # no public way

from pytest_gpucluster.cluster.results import Results, note_end, read_where_one_ended
from pytest_gpucluster.cluster.soak import Soak
from pytest_gpucluster.errors import Blame, ConfigurationError, CriterionFailedError, MeasurementError
from pytest_gpucluster.judging.plan import Plan, Rule
from pytest_gpucluster.judging.second_chance import AGAIN, is_due, with_first_look
from pytest_gpucluster.judging.verdict import BAD, ERROR, FAILED, PASSED, Record
from pytest_gpucluster.places import Place
from pytest_gpucluster.plugin import attempts
from pytest_gpucluster.plugin.collection import Collection
from pytest_gpucluster.plugin.end import Termination
from pytest_gpucluster.plugin.outcome import ItemContext, judged_late, make_fit, outcome_of, show_waived
from pytest_gpucluster.plugin.pairing import is_distributed
from pytest_gpucluster.plugin.stash_keys import CRITERION, FIRST_LOOK, IN_BODY, NO_LIMIT, PAIR, RECORD, RULE, WAITS
from pytest_gpucluster.plugin.terminal import Terminal
from pytest_gpucluster.plugin.whole_run import soak_reports
from pytest_gpucluster.plugin.whole_run.run_readings import Readings
from pytest_gpucluster.reporting.junit import properties_of
from pytest_gpucluster.session import Session
from pytest_gpucluster.text import first_line


@dataclass(slots=True)
class _Own:
    """What was measured for the running test alone, and, ``late``, by fixtures of several tests at their end.

    No later test can read the second, so it is that of the test that ends then, whatever its place.
    """

    is_ending: bool = False
    made: list[Results] = field(default_factory=list)
    late: list[Results] = field(default_factory=list)

    def is_at_shared_end(self, running: Any) -> bool:
        """Whether fixtures of several tests end: pytest first takes the class or file of the running test from its stack."""
        return self.is_ending and running.parent not in running.session._setupstate.stack  # noqa: SLF001


class Phases:
    """A pytest plugin with the hooks of one test.

    ::

        pytest_runtest_protocol            begins and ends a test
            pytest_runtest_setup           a rule of the profile leaves it out here; the first readings
                pytest_fixture_setup       whose places are measured
            pytest_runtest_makereport      report of the set-up
            pytest_runtest_call
                pytest_pyfunc_call         a distributed test runs in the workers
            pytest_runtest_makereport      report of the call: its outcome
            pytest_runtest_teardown        what fixtures measure there
            pytest_runtest_makereport      report of the teardown, which can make the outcome worse
    """

    def __init__(
        self, session: Session, terminal: Terminal, collection: Collection, termination: Termination, readings: Readings
    ) -> None:
        """What happens to a test depends on these.

        Args:
            session: the run.
            terminal: shows what goes on.
            collection: has the selected tests.
            termination: ends the run between two tests.
            readings: are taken before the first test.
        """
        self._session = session
        self._terminal = terminal
        self._collection = collection
        self._termination = termination
        self._readings = readings
        self.running: Any = None
        """The test that begins, runs or ends; None between two tests."""
        self._fixtures: list[Any] = []
        self._own = _Own()
        self.of_fixtures: dict[str, list[Results]] = {}
        """What was measured by the fixtures that are kept for several tests."""
        self._soak: Soak | None = None
        self.properties: frozenset[tuple[str, object]] = frozenset()
        """Those that the run has given the running test."""
        self.send: Callable[[pytest.TestReport, Record, Rule | None], None] | None = None
        """Puts a new outcome into its report, which crosses to the controller: in a worker of pytest-xdist only."""

    def soak(self) -> Soak:
        """The soak that the selected tests take part in, begun by the first call; see :func:`soak_reports.start`."""
        if self._soak is None:
            items = self._collection.tests.items
            judging = {item.stash[PAIR].key: item.stash[CRITERION] for item in items if CRITERION in item.stash}
            self._soak = soak_reports.start(self._session, self._terminal, judging, self._readings)
        return self._soak

    def wanted_places(self) -> frozenset[Place] | None:
        """The places of the running test, or of all tests that use the fixture being set up; None: every place."""
        if self._own.is_at_shared_end(self.running):
            return None
        if self._fixtures:
            places = self._collection.tests.places_that_use(self._fixtures[-1].argname)
        else:
            places = frozenset() if self.running is None else frozenset([self.running.stash[PAIR].place])
        return None if None in places or not places else frozenset(place for place in places if place is not None)

    def note_results(self, made: Results) -> None:
        """Remember what was measured for the running test alone, or by a fixture that other tests use too."""
        shared = next((one for one in reversed(self._fixtures) if one.scope != "function"), None)
        if shared is None:
            (self._own.late if self._own.is_at_shared_end(self.running) else self._own.made).append(made)
        else:
            self.of_fixtures.setdefault(shared.argname, []).append(made)

    def _hollow(self, item: pytest.Item) -> MeasurementError | None:
        """Why a pass shows nothing: the function did not run, or left an error of its own measurements unread.

        A test of one place answers for that place; what it measures elsewhere may be for others. Of what a fixture measured
        that several tests share, somebody must have read something; and when the last of them at this place is over, all.
        """
        hidden = attempts.hidden_by_a_hook(item)
        if hidden is not None:
            return MeasurementError(f"{item.stash[PAIR].criterion} did not pass: its function {hidden}")
        unread = [*self._own.made]
        # the request has those too that the test asked for while it ran
        for name in getattr(getattr(item, "_request", None) or item, "fixturenames", ()):
            made = self.of_fixtures.get(name, [])
            if made and (self._collection.tests.is_last(item, name) or not any(one.is_read for one in made)):
                unread += made
        pair = item.stash[PAIR]
        return _unread_error(unread, pair.criterion, of=pair.place)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Show that a test begins; after it, stop the session if the run was terminated meanwhile."""
        attempts.count(item, "protocol")
        self.running = item
        self.properties = frozenset()
        self._own = _Own()
        self._terminal.live.begin(item.stash[PAIR])
        try:
            with attempts.counted(item, "runtest"):
                return (yield)
        finally:
            self.running, self._own = None, _Own()
            self._collection.earlier.write_new_readings(self._readings)
            if self._termination.signal is not None:
                item.session.shouldstop = f"terminated by {self._termination.signal}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a criterion that the profile's rules exclude; do not begin a test once the run was terminated.

        Before the first test that is not skipped, everything is read that is compared with a reading at the end.
        """
        if RULE in item.stash:
            pytest.skip(item.stash[RULE].text)
        if NO_LIMIT in item.stash:
            raise MeasurementError(f"not judged: {item.stash[NO_LIMIT]}", kind="refused", blame=Blame(part="settings"))
        if self._termination.signal is not None:
            raise MeasurementError(f"not run: terminated by {self._termination.signal}", kind="missing")
        self._readings.take_first()
        self._collection.earlier.write_readings(self._readings)
        self._own = _Own()  # the readings are for others

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Remember which fixture is being set up: a measurement in it is for all tests that use the fixture."""
        self._fixtures.append(fixturedef)
        if fixturedef.scope != "function":  # of another one of this name, or of another parameter
            self.of_fixtures.pop(fixturedef.argname, None)
        try:
            return (yield)
        finally:
            self._fixtures.pop()

    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        """What a fixture measured and tests read in part, where none of them was the last one.

        They asked for it while they ran, or later tests use another one of this name: of their class, file or parameter.
        """
        name, tests = fixturedef.argname, self._collection.tests
        made = self.of_fixtures.get(name, [])
        if any(one.is_read for one in made) and (not tests.places_that_use(name) or tests.is_used_later(fixturedef)):
            read_where_one_ended(made)
            self._own.late += self.of_fixtures.pop(name)
            unread = None if self._own.is_ending else _unread_error(made, f"fixture {name}", of=None, told=("missing",))
            if unread is not None:  # the next test is being set up, and has no part in it
                self._session.state.objections.append(first_line(str(unread)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Mark the time in which reports are of parts of the test: blocks of ``subtests.test()``."""
        attempts.count(item, "hook of the call")
        item.stash[IN_BODY] = True
        try:
            return (yield)
        finally:
            item.stash[IN_BODY] = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """What the teardown of a fixture measures is the test's to read too.

        Raises:
            MeasurementError: nobody read an error of it.
        """
        pair, own = item.stash[PAIR], _Own(is_ending=True)
        self._own = own
        done = yield
        # a place that is absent has its own outcomes
        late = _unread_error(own.late, pair.criterion, of=None, told=("missing",))
        error = _unread_error(own.made, pair.criterion, of=pair.place) or late
        if error is not None:
            raise error
        return done

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """Count calls of this hook, and of the test's function inside it. What earlier runs had read is judged first."""
        attempts.count(pyfuncitem, "hook of the function")
        unknown = self._readings.judge_earlier(pyfuncitem, self._session.state.places())
        with attempts.counted(pyfuncitem, "obj"):
            made = yield
        self._readings.remark_on(pyfuncitem)
        if unknown is not None:
            raise unknown
        return made

    @pytest.hookimpl(tryfirst=True, specname="pytest_pyfunc_call")
    def pytest_run_in_workers(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run the body of a distributed test in the workers. Called inside the hook above; None leaves others to pytest."""
        if not is_distributed(pyfuncitem):
            return None
        attempts.counting(attempts.run_distributed_test, pyfuncitem, "obj")(pyfuncitem, self._session)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Have pytest and all others make the report, correct it, and record the outcome."""
        is_of_part = item.stash.get(IN_BODY, False)
        if not is_of_part:  # one test has any number of parts
            attempts.count(item, call.when)
        has_ended = call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception)
        for name in _asked_late(item):
            note_end(self.of_fixtures.get(name, ()), by_exception=has_ended)
        report = yield
        record, shown = None, report.longrepr
        if is_of_part:
            self._take_part(item, call, copy.copy(report))
        else:
            record = self._take(item, call, report)
        if call.when == "teardown" and RECORD in item.stash and not waits(item):
            self._terminal.live.done(item.stash[RECORD])
        if isinstance(shown, TerminalRepr) and isinstance(report.longrepr, str) and shows_tracebacks(item.config):
            report.sections.append(("Traceback", str(shown)))
        make_fit(report)  # last: whatever was put into the report is shown
        if record is not None and self.send is not None:
            self.send(report, record, item.stash.get(RULE, None))
        return report

    @pytest.hookimpl(tryfirst=True, specname="pytest_runtest_makereport")
    def pytest_make_own_report(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport | None:
        """Make the report of our own errors, failures and skips. Called inside the hook above; None leaves others to pytest.

        pytest would make a traceback, which takes 20 to 50 ms, and which only ``-vv`` and ``--pdb`` show. An absent node has
        thousands of them.
        """
        if call.excinfo is None or call.when == "teardown":
            return None
        error = call.excinfo.value
        if not _is_own(error, item) or shows_tracebacks(item.config):
            return None
        ended_well = copy.copy(call)
        ended_well.excinfo = None
        report = pytest.TestReport.from_item_and_call(item, ended_well)
        report.outcome, report.longrepr = "failed", str(error)
        return report

    def _take(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> Record | None:
        """Correct the report of a phase and record the outcome; None if this phase settles nothing.

        A test that could not measure, or did not judge, is an ERROR, whatever pytest made of it.
        """
        times, late = attempts.attempts_of(item), judged_late(item.stash.get(CRITERION, None), item.stash.get(RECORD, None))
        is_good = call.excinfo is None and report.outcome == "passed" and times == 1
        if call.when != "call" and is_good and late is None:
            return None  # two phases of nearly every test
        test = ItemContext(
            pair=item.stash[PAIR],
            rule=item.stash.get(RULE, None),
            criterion=item.stash.get(CRITERION, None),
            earlier=item.stash.get(RECORD, None),
            kept=_found_before(self._session.plan, item),
            unmeasured=self._unmeasured(item),
            attempts=times,
            hollow=self._hollow(item) if call.when == "call" else None,
        )
        record = outcome_of(report, call, test)
        if record is None:
            return None
        first = item.stash.get(FIRST_LOOK, None)
        if first is not None and AGAIN not in record.evidence:
            record = with_first_look(record, first)
            if record.outcome != PASSED and isinstance(report.longrepr, str):
                report.longrepr = record.reason
        record = self._session.waive(record)
        if record.waiver is not None:
            show_waived(report, record.reason or "waived")
        record = item.stash[RECORD] = self._session.recorder.record_outcome(record)
        self._add_properties(item, record)
        report.user_properties = list(item.user_properties)
        return record

    def _take_part(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Record a block of ``subtests.test()`` that did not come to its end: the test cannot be better than that."""
        if call.excinfo is None:
            return
        kept, criterion = _found_before(self._session.plan, item), item.stash.get(CRITERION, None)
        part = ItemContext(pair=item.stash[PAIR], rule=None, criterion=criterion, earlier=None, kept=kept)
        record = outcome_of(report, call, part)
        if record is not None:
            outcome = record.outcome if record.outcome in BAD else ERROR
            self._session.recorder.record_outcome(replace(record, outcome=outcome, waivable=False))

    def is_of_soak(self, item: pytest.Item) -> bool:
        """Whether the rounds of a soak judge this test too."""
        uses = "soak" in getattr(item, "fixturenames", ())
        return uses or (self._soak is not None and self._soak.has_work(item.stash[PAIR].criterion))

    def _unmeasured(self, item: pytest.Item) -> str | None:
        """What the soak of this test did not measure; None if it measured everything, or if the test has no soak."""
        if self._soak is None or CRITERION not in item.stash or not self.is_of_soak(item):
            return None
        return self._soak.unmeasured(item.stash[PAIR].criterion, item.stash[PAIR].place)

    def _add_properties(self, item: pytest.Item, record: Record) -> None:
        """Give all reporters of pytest the properties that the JUnit file has of this test."""
        known = {name for name, _ in item.user_properties}
        facts = properties_of(record, self._session.state.places().get(record.place or ""))
        added: list[tuple[str, object]] = [one for one in facts if one[0] not in known]
        item.user_properties += added
        self.properties = self.properties.union(added)


def _found_before(plan: Plan, item: pytest.Item) -> Record | None:
    """The bad outcome on record before this phase: of a round of a soak, or of another try of the same test.

    That of the first look is none: the second one decides.
    """
    found = plan.record(*item.stash[PAIR].key)
    is_bad = found is not None and found.outcome in BAD and found is not item.stash.get(FIRST_LOOK, None)
    return found if is_bad else None


def waits(item: pytest.Item) -> bool:
    """Whether the outcome of a test is left for a second look."""
    return item.stash.get(WAITS, False) and RECORD in item.stash and is_due(item.stash[RECORD])


def _is_own(error: BaseException, item: pytest.Item) -> bool:
    """Whether the text of an error says all: ours, a failure by value, or a criterion that does not apply by its own rule."""
    if isinstance(error, (MeasurementError, ConfigurationError)):
        return True
    criterion = item.stash.get(CRITERION, None)
    if criterion is None or item.stash.get(IN_BODY, False):
        return False
    if isinstance(error, CriterionFailedError):
        return criterion.judged is not None and criterion.judged.outcome == FAILED
    return error is criterion.left_out and criterion.judged is None and criterion.first_error is None


def shows_tracebacks(config: pytest.Config) -> bool:
    """Whether a traceback is shown also where the value says all: ``-vv``, and ``--pdb``."""
    return bool(config.getoption("usepdb", default=False) or config.get_verbosity() > 1)


def _asked_late(item: pytest.Item) -> set[str]:
    """The fixtures that the test asked for while it ran, besides those that it names; nearly always none."""
    asked = getattr(getattr(item, "_request", None), "_fixture_defs", ())
    return {*asked}.difference(getattr(item, "fixturenames", ()))


def _unread_error(
    made: Iterable[Results], criterion: str, *, of: Place | None, told: Container[str] = ()
) -> MeasurementError | None:
    """The first error in these results that nobody read, of no kind that is told, and of a place or any; None without one."""
    unread = ((at, error) for one in made for at, error in one.unread.items())
    error = next((error for at, error in unread if error.kind not in told and _concerns(at, of)), None)
    if error is None:
        return None
    text = f"{criterion}: a measurement failed, and its test did not read what it gave: {error}"
    return MeasurementError(text, culprits=error.culprits, kind=error.kind, blame=error.blame)


def _concerns(measured: Any, of_test: Place | None) -> bool:
    """Whether a place, or a pair of them, is of the place of a test, where it has one."""
    if of_test is None or isinstance(measured, tuple):
        return of_test is None or any(_concerns(place, of_test) for place in measured)
    return bool(measured.node == of_test.node and (of_test.gpu is None or measured.gpu in (None, of_test.gpu)))
