"""One acceptance run inside a pytest session: pairs tests with criteria, turns reports into outcomes, says the verdict."""

from __future__ import annotations

import functools
import itertools
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.config.settings import Settings, reaches
from pytest_gpucluster.controller.controller import LAST_CALL_S
from pytest_gpucluster.errors import ConfigurationError, MeasurementError
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.forecast import SUBJECTS
from pytest_gpucluster.judging.plan import places_covered_by, rule_against
from pytest_gpucluster.judging.verdict import ACCEPTED, ERROR, FAILED, MISSING, NOISY, NOT_SELECTED, Record, Verdict
from pytest_gpucluster.places import Place
from pytest_gpucluster.plugin import pairing, soak_reports
from pytest_gpucluster.plugin.distributed import run_distributed_test
from pytest_gpucluster.plugin.junit import finish_junit
from pytest_gpucluster.plugin.late_errors import write_torchrun_error_file
from pytest_gpucluster.plugin.outcome import Told, outcome_of, show_waived
from pytest_gpucluster.plugin.terminal import Terminal
from pytest_gpucluster.reporting.junit import properties_of
from pytest_gpucluster.session import Session

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from pytest_gpucluster.cluster.soak import Soak
    from pytest_gpucluster.config.torchrun import Launch

PAIR = pytest.StashKey[pairing.Pair]()
CRITERION = pytest.StashKey[Criterion]()
RULE = pytest.StashKey[str]()
NO_LIMIT = pytest.StashKey[str]()
RECORD = pytest.StashKey[Record]()
LOOKING = ("collectonly", "showfixtures", "show_fixtures_per_test", "cacheshow", "setupplan")
PATIENCE_S = 4.0
"""What runs when a SIGTERM comes (collection, a test's own loop) is interrupted after this; calls end at once."""
BAD = (FAILED, ERROR, NOISY, MISSING)
CAME_TO_ITS_END = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class Run:
    """The plugin object of a run; its methods are hooks, and what the fixtures ask for."""

    def __init__(self, config: pytest.Config, settings: Settings, launch: Launch | None) -> None:
        """Check everything; start nothing.

        Raises:
            ConfigurationError: see :class:`Session`.
        """
        self._config = config
        self.session = Session(
            settings, launch, rootdir=config.rootpath, start=config.invocation_params.dir, wanted=self._wanted_places
        )
        self.verdict: Verdict | None = None
        self.exit_code = int(pytest.ExitCode.USAGE_ERROR)
        self._items: list[pytest.Item] = []
        self._fixtures: list[str] = []
        self._current: pytest.Item | None = None
        self._closed = False
        self._trouble: str | None = None
        self._impatience: threading.Timer | None = None
        self._is_finishing = False
        self._terminal = Terminal(config, self.session)
        self.session.controller.on_progress = self._terminal.progress
        if config.option.capture == "no":
            self.session.controller.on_output = self._terminal.output

    # What fixtures ask for.

    def recipe(self, key: str) -> dict[str, Any]:
        """The recipe of an entry as keyword arguments for ``cluster.run``, its deadline included."""
        if key not in self.session.criteria:
            raise ConfigurationError(f"recipe({key!r}): {self.session.thresholds.path} has no such criterion")
        threshold = self.session.criteria[key]
        deadline = {} if threshold.deadline_s is None else {"deadline_s": threshold.deadline_s}
        return {**threshold.recipe, **deadline}

    def criterion_of(self, item: pytest.Item) -> Criterion:
        """The criterion that this test judges, at its place as it is bound now."""
        found = item.stash[CRITERION]
        if found.place is not None:
            found.place = self.session.places()[found.place.id]
        return found

    def _wanted_places(self) -> frozenset[Place] | None:
        """The places that the selected tests want from the fixture being set up; None: all."""
        if self._fixtures:
            wanting = [item for item in self._items if self._fixtures[-1] in getattr(item, "fixturenames", ())]
        else:
            wanting = [self._current] if self._current is not None else []
        places = {item.stash[PAIR].place if PAIR in item.stash else None for item in wanting}
        return None if None in places or not places else frozenset(place for place in places if place is not None)

    @functools.cached_property
    def soak(self) -> Soak:
        """The soak that the selected tests take part in; see :func:`plugin_soak.start`."""
        judging = {item.stash[PAIR].key: item.stash[CRITERION] for item in self._items if CRITERION in item.stash}
        return soak_reports.start(self.session, self._terminal, judging)

    # Collection.

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Pair every test with its entry; leave out what lies above the level; a soak comes last, after all that is quick."""
        try:
            pairs = {item: self._pair(item) for item in items}
        except ConfigurationError as error:
            raise pytest.UsageError(str(error)) from None
        refuse_reruns(config, items)
        above = [item for item, pair in pairs.items() if pair.judges and self._is_above(pair.criterion)]
        if above:
            config.hook.pytest_deselected(items=above)
            items[:] = [item for item in items if item not in above]
        items[:] = by_criterion(items, pairs)
        items.sort(key=lambda item: pairs[item].judges and self.session.criteria[pairs[item].criterion].level == "soak")

    def _is_above(self, key: str) -> bool:
        return not reaches(self.session.settings.level, self.session.criteria[key].level)

    def _pair(self, item: pytest.Item) -> pairing.Pair:
        names = getattr(item, "fixturenames", ())
        parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        place = next((parameters[name] for name in ("place", "node") if isinstance(parameters.get(name), Place)), None)
        original = getattr(item, "originalname", None) or item.name
        key = pairing.criterion_key(item.name, original, place)
        judges = "criterion" in names
        if item.get_closest_marker("distributed") is not None:
            arguments = getattr(getattr(item, "_fixtureinfo", None), "argnames", ())
            pairing.require_test_arguments(arguments, parameters, nodeid=item.nodeid)
        if judges:
            self._bind_criterion(item, key, place)
        elif key in self.session.criteria:
            key = item.nodeid
        item.stash[PAIR] = pair = pairing.Pair(criterion=key, place=place, judges=judges)
        return pair

    def _bind_criterion(self, item: pytest.Item, key: str, place: Place | None) -> None:
        session, facts = self.session, self.session.inventory.facts
        pairing.require_entry(key, session.criteria, nodeid=item.nodeid, file=str(session.thresholds.path))
        threshold = session.criteria[key]
        pairing.require_place(key, threshold.per, place, nodeid=item.nodeid)
        rule = rule_against(threshold, session.inventory)
        if rule is not None:
            item.stash[RULE] = rule
            return
        gpus = {"gpu": 1, "node": facts["gpus_per_node"], "cluster": facts["world_size"]}[threshold.per]
        try:
            limit = threshold.limit(gpus=gpus, cluster=facts)
        except ConfigurationError as error:
            item.stash[NO_LIMIT] = str(error)
            return
        item.stash[CRITERION] = Criterion(
            threshold=threshold,
            limit=limit,
            place=place,
            note=self._terminal.remark,
            expected=places_covered_by(place, session.inventory),
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The expected set is fixed here, before anything runs."""
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            return  # pytest calls this on its way out too; what is missing is told at the end
        if not all(PAIR in item.stash for item in session.items):
            return  # pairing was refused: pytest is on its way out with a usage error
        self._items = list(session.items)
        self.expect(expected_of(self._items))

    def expect(self, keys: Mapping[str, tuple[str, str | None]]) -> None:
        """Fix the expected set: criterion and place id of each test that will judge, by nodeid."""
        for nodeid, (criterion, place) in keys.items():
            self.session.plan.expect(criterion, place, nodeid=nodeid)
        self.session.fix_plan()
        if self.session.recorder.is_open:
            self._terminal.announce(self.session, self.session.forecast(subjects_of(self._items)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tests that nobody saw cannot have been expected, so what hides them forbids an acceptance."""
        if report.outcome != "passed":
            why = "could not be collected" if report.outcome == "failed" else "skipped itself"
            self.session.objections.append(f"{report.nodeid} {why}")

    # Running.

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Start the agents while pytest collects."""
        del session
        if not self._only_looks():
            self._open()

    def start_late(self) -> None:
        """The same, when a test's fixtures were the first sign that this is a run."""
        if not self._only_looks():
            self._open()

    def _only_looks(self) -> bool:
        """Whether this command runs no test: --collect-only, --fixtures, --cache-show and their like."""
        return any(getattr(self._config.option, name, None) for name in LOOKING)

    def _open(self) -> None:
        if hasattr(self._config, "workerinput"):
            return  # a worker of pytest-xdist: agents, results and reports are its controller's
        try:
            junit = getattr(self._config.option, "xmlpath", None)
            self.session.open(junit=self._config.invocation_params.dir / junit if junit else None)
        except ConfigurationError as error:
            raise pytest.UsageError(str(error)) from None
        if not getattr(self._config.option, "numprocesses", None):  # where tests of all places mix, pytest's dots are clearer
            self._terminal.take_over()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: Any) -> None:
        if self._is_finishing:
            return
        if self.session.terminated is not None:
            raise KeyboardInterrupt  # said twice, or long ago: whatever runs now has had its chance
        self.session.controller.terminate("SIGTERM")
        self.session.terminated = self.session.controller.terminated
        patience_s = PATIENCE_S if self.session.terminated is not None else LAST_CALL_S + 1.0
        again = functools.partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGTERM)
        self._impatience = threading.Timer(patience_s, again)
        self._impatience.daemon = True
        self._impatience.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Keep the session at hand, so that a signal can stop it between two tests; the self-test comes before the first."""
        self._session = session
        if self.session.settings.selftest and self.session.recorder.is_open and session.items:
            from pytest_gpucluster.plugin.selftest import run_selftest  # noqa: PLC0415 -- loads torch

            run_selftest(self.session, self._terminal)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Remember which test runs; stop between tests once the run was told to end."""
        self._current = item
        self._terminal.begin(item.stash[PAIR])
        try:
            return (yield)
        finally:
            self._current = None
            if self.session.terminated is not None:
                self._session.shouldstop = f"terminated by {self.session.terminated}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A criterion that the profile's rules exclude is skipped, with the rule as the reason."""
        if RULE in item.stash:
            pytest.skip(item.stash[RULE])
        if NO_LIMIT in item.stash:
            raise MeasurementError(f"not judged: {item.stash[NO_LIMIT]}", kind="refused")
        if self.session.terminated is not None:
            raise MeasurementError(f"not run: terminated by {self.session.terminated}", kind="missing")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Know for which fixture ``cluster.run`` is called."""
        self._fixtures.append(fixturedef.argname)
        try:
            return (yield)
        finally:
            self._fixtures.pop()

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """The body of a distributed test runs in the workers."""
        if pyfuncitem.get_closest_marker("distributed") is None:
            return None
        run_distributed_test(pyfuncitem, self.session)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Make pytest's report say what is true: could not measure is ERROR, never judged is ERROR."""
        report = yield
        told = Told(
            pair=item.stash[PAIR],
            rule=item.stash.get(RULE, None),
            criterion=item.stash.get(CRITERION, None),
            earlier=item.stash.get(RECORD, None),
            kept=self._found_before(item),
            unmeasured=self._unmeasured(item),
        )
        record = outcome_of(report, call, told)
        if record is not None:
            record = self.session.waive(record)
            if record.waiver is not None:
                show_waived(report, record.reason or "waived")
            item.stash[RECORD] = record
            self._add_properties(item, record)
            self.session.recorder.record_outcome(record)
            report.user_properties = list(item.user_properties)
        if call.when == "teardown" and RECORD in item.stash:
            self._terminal.done(item.stash[RECORD])
        return report

    def _found_before(self, item: pytest.Item) -> Record | None:
        """What is bad on record already: a round of a soak found it, or another try of the same test."""
        found = self.session.plan.record(*item.stash[PAIR].key)
        return found if found is not None and found.outcome in BAD else None

    def _unmeasured(self, item: pytest.Item) -> str | None:
        """What the soak that this test judges by owes; None where nothing, or where it has none."""
        if CRITERION not in item.stash:
            return None
        pair, soak = item.stash[PAIR], self.__dict__.get("soak")  # not begun by asking
        if soak is None or not (soak.has_work(pair.criterion) or "soak" in getattr(item, "fixturenames", ())):
            return None
        found: str | None = soak.unmeasured(pair.criterion, pair.place)
        return found

    def take(self, record: Record) -> None:
        """Take the outcome that a worker of pytest-xdist came to."""
        self.session.recorder.record_outcome(record)
        if record.advisory:
            self._terminal.remark(record.reason or "")

    def _add_properties(self, item: pytest.Item, record: Record) -> None:
        """Tell all reporters of pytest what the JUnit file says of the test."""
        known = {name for name, _ in item.user_properties}
        facts = properties_of(record, self.session.places().get(record.place or ""))
        item.user_properties += [(name, fact) for name, fact in facts if name not in known]

    # The end.

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Close the plan, decide, write; pytest's own reporters follow."""
        if self.session.recorder.is_open:
            self._finish(session)
        result = yield
        self.exit_code = int(session.exitstatus)
        return result

    def _finish(self, session: pytest.Session) -> None:
        self._is_finishing = True  # from here on a signal can only do harm
        if self._impatience is not None:
            self._impatience.cancel()
        self._terminal.close_line()
        outcome, why = self._why_unfinished(session)
        unrun = [*self.session.plan_unseen(why=why), *self.session.recorder.close_pending(outcome=outcome, why=why)]
        if not unrun and (session.shouldstop or session.exitstatus not in CAME_TO_ITS_END):
            self.session.objections.append(f"cut short after the last outcome: {why.removeprefix('not run: ')}")
        self.verdict = self.session.decide()
        finish_junit(self._config, self.session.recorder.report(self.verdict))
        self._trouble = self.session.recorder.finish(self.verdict)
        session.exitstatus = self._exit_status(session)
        if session.exitstatus != 0:
            write_torchrun_error_file(self.verdict.line)

    def note_trouble(self, told: str) -> None:
        """Something of this run's results is not on disk."""
        self._trouble = f"{self._trouble}; {told}" if self._trouble else told

    def _why_unfinished(self, session: pytest.Session) -> tuple[str, str]:
        if self.session.terminated is not None:
            return MISSING, f"not run: terminated by {self.session.terminated}"
        if session.shouldfail or (session.shouldstop and session.exitstatus != pytest.ExitCode.INTERRUPTED):
            return NOT_SELECTED, f"not run: {session.shouldfail or session.shouldstop}"
        if session.shouldstop:
            return NOT_SELECTED, f"not run: {session.shouldstop}"
        if session.exitstatus == pytest.ExitCode.INTERRUPTED:
            return MISSING, "not run: the run was interrupted"
        return MISSING, "not run: the session ended early"

    def _exit_status(self, session: pytest.Session) -> int:
        """Keep pytest's own status, but never 0 when something is not as it should be."""
        assert self.verdict is not None
        insensitive = self.session.selftest is not None and bool(self.session.selftest["objections"])
        bad = any(self.verdict.counts[outcome] for outcome in BAD) or self._trouble is not None or insensitive
        gated = self.session.settings.gate and self.verdict.word != ACCEPTED
        if int(session.exitstatus) == 0 and (bad or gated):
            return int(pytest.ExitCode.TESTS_FAILED)
        return int(session.exitstatus)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The table, what failed where, and the verdict line last."""
        if self.verdict is not None:
            self._terminal.summary(terminalreporter, self.session, self.verdict, trouble=self._trouble)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Reports are on disk: the agents may go."""
        self.close()

    def close(self) -> None:
        """End everything this run started; safe to call again."""
        if not self._closed:
            self._closed = True
            if self.session.recorder.is_open:
                self.session.close(self.exit_code)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots in normal mode: one line per criterion tells more."""
        return self._terminal.status(report)


def expected_of(items: Sequence[pytest.Item]) -> dict[str, tuple[str, str | None]]:
    """Criterion and place id that each test owes, by nodeid.

    Raises:
        pytest.UsageError: two tests judge the same.
    """
    owners: dict[tuple[str, str | None], str] = {}
    for item in items:
        pair = item.stash[PAIR]
        if pair.key in owners:
            raise pytest.UsageError(f"{item.nodeid} and {owners[pair.key]} both judge {pair.criterion!r}; rename one of them")
        owners[pair.key] = item.nodeid
    return {nodeid: key for key, nodeid in owners.items()}


def subjects_of(items: Sequence[pytest.Item]) -> dict[str, str]:
    """The subject of each criterion: the first of our marks on its test."""
    marked = {item.stash[PAIR].criterion: [name for name in SUBJECTS if item.get_closest_marker(name)] for item in items}
    return {criterion: names[0] for criterion, names in marked.items() if names}


def by_criterion(items: Sequence[pytest.Item], pairs: Mapping[pytest.Item, pairing.Pair]) -> list[pytest.Item]:
    """The same order, but one criterion after the other where a test judges several, not place after place."""
    ordered: list[pytest.Item] = []
    for _, run in itertools.groupby(items, key=lambda item: (item.parent, getattr(item, "originalname", item.name))):
        of_one_test = list(run)
        criteria = list(dict.fromkeys(pairs[item].criterion for item in of_one_test))
        ordered += sorted(of_one_test, key=lambda item: criteria.index(pairs[item].criterion))
    return ordered


def refuse_reruns(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What failed once has failed; pytest-rerunfailures would try until it is green, and report each try as a testcase."""
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    asked = getattr(config.option, "reruns", None) or config.inicfg.get("reruns")
    marked = next((item.nodeid for item in items if item.get_closest_marker("flaky") is not None), None)
    if asked or marked:
        told = f"{marked} is marked flaky" if marked else "--reruns is set"
        raise pytest.UsageError(
            f"{told}: a criterion is judged once, and pytest-rerunfailures would repeat it until it is green; leave it out, or "
            "say -p no:rerunfailures"
        )
