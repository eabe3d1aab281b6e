"""Collection: pairs each test with its criterion, leaves out what lies above the level, and fixes the expected set."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import pytest

from pytest_gpucluster.config.process import collect_seldom, collector_off
from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.config.settings import reaches
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.host import read_available_gib
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.forecast import SUBJECTS, Forecast, Suite, memory_remark
from pytest_gpucluster.judging.plan import places_covered_by, rule_against
from pytest_gpucluster.judging.selection import Selector
from pytest_gpucluster.judging.verdict import SHOWN_LIMITS
from pytest_gpucluster.places import Place
from pytest_gpucluster.plugin import pairing
from pytest_gpucluster.plugin.junit import leave_out_junit
from pytest_gpucluster.plugin.outcome import make_fit
from pytest_gpucluster.plugin.pairing import PACKAGED, AllTests
from pytest_gpucluster.plugin.stash_keys import CRITERION, NO_LIMIT, PAIR, RULE
from pytest_gpucluster.plugin.terminal import Terminal
from pytest_gpucluster.plugin.verdict_item import VerdictItem, add_verdict
from pytest_gpucluster.plugin.whole_run.earlier_parts import EarlierParts, digests_of
from pytest_gpucluster.plugin.whole_run.run_readings import SelectedTests
from pytest_gpucluster.reporting.files import KEPT_RUNS
from pytest_gpucluster.session import Session
from pytest_gpucluster.text import shortlist
from pytest_gpucluster.thresholds.limit import Limit
from pytest_gpucluster.thresholds.released import is_released_test
from pytest_gpucluster.thresholds.resolve import Threshold

LOGGING = ("log_level", "log_cli", "log_cli_level", "log_file", "log_file_level")
"""Options and ini values of pytest with which somebody looks at log records."""


OF_PYTEST = ("filterwarnings", "parametrize", "skip", "skipif", "tryfirst", "trylast", "usefixtures", "xfail")
"""Marks that say how pytest runs a test, and nothing of what it is about."""
REFUSED = {
    "rerunfailures": ("reruns", "flaky", "a criterion is judged once, and this plugin would repeat it until it is green"),
    "pytest_forked": ("forked", "forked", "pytest-forked runs each test in a process of its own, which reaches no rank"),
}
"""Plugins by their name, each with its option, its mark, and why it does not go together with a run."""
_WORDS_OF_EXPRESSION = ("and", "or", "not", "True", "False", "None")


class Collection:
    """A pytest plugin with the hooks of collection."""

    def __init__(
        self,
        session: Session,
        terminal: Terminal,
        all_tests: AllTests,
        begin: Callable[[Iterable[str]], None],
        places_of_parts: Callable[[], frozenset[str]],
    ) -> None:
        """What collection needs of a run.

        Args:
            session: the run.
            terminal: shows the forecast, and later what criteria remark.
            all_tests: every test of the given paths.
            begin: called with their files, as in node ids, when all tests are accepted.
            places_of_parts: asks for the ids of the places that ``--gpucluster-only`` names.
        """
        self._session = session
        self._all_tests = all_tests
        self._terminal = terminal
        self._begin = begin
        self._places_of_parts = places_of_parts
        self._is_partial = False
        self._shared: dict[str, tuple[Limit | str, Callable[[Place | None], Sequence[str]]]] = {}
        self._ordered: list[pytest.Item] = []
        self.earlier = EarlierParts(session)
        self.tests = SelectedTests()
        """The tests that will run."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        """Leave the JUnit file of an earlier run as it is where the tests are refused.

        Raises:
            pytest.UsageError: they are refused; raised elsewhere.
        """
        try:
            with collector_off():
                return (yield)
        except pytest.UsageError:
            leave_out_junit(session.config)
            raise

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Pair every test with its entry and order them: health first, one criterion after the other, the whole run last."""
        pairs = pairing.pairs_of([*self._all_tests.tests(), *items], entries=self._session.setup.criteria)
        for item, pair in pairs.items():
            item.stash[PAIR] = pair
        with pairing.as_usage_error():
            for item in items:
                self._accept(item)
        refuse_others(config, items)
        if not items:
            refuse_unknown_mark(config, self._all_tests.tests())
        deselect(config, items, [item for item in items if self._is_left_out(item, pairs[item])])
        if items and self._session.setup.settings.only:
            chosen = self._places_of_parts()
            deselect(config, items, [item for item in items if item.stash[PAIR].key[1] not in chosen])
        self._session.state.changed_terms += self._judged_by_others(items)
        deselect(config, items, self.earlier.leave_out_kept(items))
        self._in_order(items)

    def _judged_by_others(self, items: Sequence[pytest.Item]) -> list[str]:
        """A term that names the packaged criteria that own tests or fixtures of a user, or edited ones, judge by any number."""
        packaged = self._session.setup.thresholds.packaged.content.criteria
        own = [item for item in items if not (PACKAGED in item.path.parts and is_released_test(item.path))]
        others = [item.stash[PAIR] for item in (*own, *filter(pairing.has_replaced_fixture, items))]
        keys = dict.fromkeys(pair.criterion for pair in others if pair.judges and pair.criterion in packaged)
        text = "judged by tests or fixtures of your own, not the packaged ones"
        return [f"{text}: {shortlist([*keys], most=SHOWN_LIMITS)}"] if keys else []

    def _in_order(self, items: list[pytest.Item]) -> None:
        soaking = {key for key, threshold in self._session.setup.criteria.items() if threshold.level == "soak"}
        items[:] = in_run_order(items, {item: item.stash[PAIR] for item in items}, soaking=soaking)
        self._ordered = [*items]

    def _is_left_out(self, item: pytest.Item, pair: pairing.Pairing) -> bool:
        """Whether a test is above the level, or may do more than read in an audit."""
        setup = self._session.setup
        is_above = pair.judges and not reaches(setup.settings.level, setup.criteria[pair.criterion].level)
        return is_above or (setup.settings.audit and not only_reads(item))

    def _accept(self, item: pytest.Item) -> None:
        """Refuse a selected test that cannot run as it is written; give one that judges its criterion."""
        pair = item.stash[PAIR]
        if pairing.is_distributed(item):
            if getattr(item, "cls", None) is not None:
                raise ConfigurationError(f"{item.nodeid}: a distributed test is a function of its file, and no method")
            arguments = getattr(getattr(item, "_fixtureinfo", None), "argnames", ())
            pairing.require_test_arguments(arguments, pairing.parameters_of(item), nodeid=item.nodeid)
        if pair.judges:
            self._bind_criterion(item, pair.criterion, pair.place)

    def _bind_criterion(self, item: pytest.Item, key: str, place: Place | None) -> None:
        setup = self._session.setup
        pairing.require_entry(key, setup.criteria, nodeid=item.nodeid, file=str(setup.thresholds.path))
        threshold = setup.criteria[key]
        pairing.require_place(key, threshold.per, place, nodeid=item.nodeid)
        rule = rule_against(threshold, setup.inventory)
        if rule is not None:
            item.stash[RULE] = rule
            return
        if key not in self._shared:
            self._shared[key] = _limit_of(threshold, setup.inventory.facts), partial(self._tests_at, key)
        limit, selection = self._shared[key]
        if isinstance(limit, str):
            item.stash[NO_LIMIT] = limit
            return
        expected = places_covered_by(place, setup.inventory)
        item.stash[CRITERION] = Criterion(threshold=threshold, limit=limit, place=place, selection=selection, expected=expected)

    def _tests_at(self, criterion: str, place: Place | None) -> Sequence[str]:
        """The arguments of pytest that select a criterion at a place."""
        return self._tests.arguments([(criterion, place.id if place is not None else None)], place)

    @cached_property
    def _tests(self) -> Selector:
        return Selector(self._session.plan.nodeids())

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Fix the expected set, before any test runs; the verdict becomes the last item, after what was chosen.

        What judges the whole run stays last, also where a plugin shuffled the tests since.
        """
        if session.items != self._ordered and all(PAIR in item.stash for item in session.items):
            self._in_order(session.items)
        self.tests = SelectedTests(item for item in session.items if PAIR in item.stash)  # those that were refused have none
        if isinstance(sys.exc_info()[1], (KeyboardInterrupt, pytest.UsageError)):
            return  # pytest calls this on its way out too; after Ctrl-C, the end of the run reports what is missing
        added = next((item.nodeid for item in session.items if PAIR not in item.stash), None)
        if added is not None and not self.tests.items and sys.exc_info()[1] is not None:
            return  # a hook of another plugin raised before the tests were paired: its error is shown
        if added is not None:
            text = f"a hook of another plugin or conftest.py added {added} after the tests were paired with their criteria"
            raise pytest.UsageError(f"{text}; let it add tests in pytest_collection_modifyitems, before other hooks")
        self.expect(expected_of(session.items), subjects=subjects_of(self._all_tests.tests()))
        if self._session.recorder.is_open:
            add_verdict(session)
        leave_out_logging(session.config, session.items)
        share_locations(session.items)
        session.config.add_cleanup(collect_seldom())  # nothing of what was collected ends before the run

    def criteria(self) -> list[str]:
        """The criteria that a selected test judges and no rule excludes."""
        return list(dict.fromkeys(item.stash[PAIR].criterion for item in self.tests.that_apply))

    def forecast(self) -> Forecast:
        """What the selected tests are, and about how long they take."""
        tests = self._all_tests.tests()
        suite = Suite(subjects=subjects_of(tests), fixtures=fixtures_of(tests, self._session.setup.criteria))
        return self._session.forecast(suite)

    def compares(self) -> bool:
        """Whether a selected test compares places with each other: the mark ``compares``."""
        return any(item.get_closest_marker("compares") is not None for item in self.tests.items)

    def expect(self, keys: Mapping[str, tuple[str, str | None]], *, subjects: Mapping[str, str]) -> None:
        """Begin, and fix the expected set: criterion and place id of each test, by nodeid; subjects by criterion."""
        self._begin(dict.fromkeys(nodeid.partition("::")[0] for nodeid in keys))
        self._terminal.subjects = subjects
        for nodeid, (criterion, place) in keys.items():
            self._session.plan.expect(criterion, place, nodeid=nodeid)
        self.earlier.fill(self._all_tests.tests())
        self._leave_out_plain_tests()
        self._session.state.own_tests_only = not (self._all_tests.are_packaged() or self._is_partial)
        self._session.fix_plan()
        if self._session.recorder.is_open:
            files, cut = digests_of(self.tests.items), self._session.recorder.cut_soak
            self._session.recorder.write("test_files", files=files)
            if cut is not None:
                named = {item.stash[PAIR].key: item.nodeid for item in self.tests.items}
                known = {key: (nodeid, files.get(nodeid.partition("::")[0])) for key, nodeid in named.items()}
                self._session.recorder.cut_soak = cut.beside(known)
            if removed := self._session.removed_runs:
                kept = f"previous/ keeps {KEPT_RUNS} earlier runs"
                self._terminal.live.say(f"gpucluster: {kept}; older than those, removed: {', '.join(removed)}")
            if self.earlier.line is not None:
                self._terminal.live.say(f"gpucluster: {self.earlier.line}")
            self._terminal.live.announce(self.forecast())
            available_gib = read_available_gib()
            if isinstance(available_gib, float) and (remark := memory_remark(len(keys), available_gib=available_gib)):
                self._terminal.live.say(f"gpucluster: {remark}")
            for text in dict.fromkeys(item.stash[NO_LIMIT] for item in self.tests.items if NO_LIMIT in item.stash):
                self._terminal.live.say(f"gpucluster: will be an ERROR: {text}")

    def _leave_out_plain_tests(self) -> None:
        """Add the given tests that are not selected. Those that judge are in the plan by their entries."""
        plan = self._session.plan
        for item in self._all_tests.tests():
            pair = item.stash.get(PAIR, None)
            if pair is not None and not pair.judges:
                plan.leave_out(pair.key, why="not among the tests that were selected", nodeid=item.nodeid)
        for nodeid in self._all_tests.unread_files():
            plan.leave_out((nodeid, None), why="its tests were not collected", nodeid=nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Object to an acceptance when a file or class could not be collected: its tests could not be expected."""
        make_fit(report)
        if report.outcome != "passed":
            why = "could not be collected" if report.outcome == "failed" else "skipped itself"
            self._session.state.objections.append(f"{report.nodeid} {why}")
            self._is_partial = True


def _limit_of(threshold: Threshold, facts: Mapping[str, int]) -> Limit | str:
    """The limit of a criterion, the same at each of its places; why there is none."""
    gpus = {"gpu": 1, "node": facts["gpus_per_node"], "cluster": facts["world_size"]}[threshold.per]
    try:
        return threshold.limit(gpus=gpus, cluster=facts)
    except ConfigurationError as error:
        return str(error)


def expected_of(items: Sequence[pytest.Item]) -> dict[str, tuple[str, str | None]]:
    """The criterion and place id that each test will judge, by nodeid.

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


def only_reads(item: pytest.Item) -> bool:
    """Whether a test has the mark ``reads``; the nearest one counts: of the test, then of its class and its file."""
    mark = item.get_closest_marker("reads")
    return mark is not None and bool(mark.kwargs.get("only", True)) and not pairing.is_distributed(item)


def deselect(config: pytest.Config, items: list[pytest.Item], left_out: Sequence[pytest.Item]) -> None:
    """Take these out of the list, in place, and tell pytest. Sets: a list of thousands would take its square."""
    if left_out:
        out = {*left_out}
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in out]


def subjects_of(items: Iterable[pytest.Item]) -> dict[str, str]:
    """The subject of each criterion: the first of our marks on its test."""
    ones = {item.stash[PAIR].criterion: item for item in items if PAIR in item.stash}  # one test of each
    marked = {criterion: [name for name in SUBJECTS if one.get_closest_marker(name)] for criterion, one in ones.items()}
    return {criterion: names[0] for criterion, names in marked.items() if names}


def fixtures_of(items: Iterable[pytest.Item], criteria: Container[str]) -> dict[str, frozenset[str]]:
    """The fixtures that measure for each criterion: those of the session that are not ours.

    A test with the name of another criterion as a parameter judges what is measured for that one.
    """
    found: dict[str, frozenset[str]] = {}
    others: dict[str, list[str]] = {}
    for item in items:
        pair, info = item.stash.get(PAIR, None), getattr(item, "_fixtureinfo", None)
        if pair is None or not pair.judges or pair.criterion in found or info is None:
            continue
        found[pair.criterion] = _measuring(info.argnames, info.name2fixturedefs)
        named = pairing.parameters_of(item).values()
        others[pair.criterion] = [name for name in named if isinstance(name, str) and name in criteria]
    return {key: own.union(*(found.get(other, own) for other in others[key])) for key, own in found.items()}


def _measuring(names: Iterable[str], definitions: Mapping[str, Sequence[Any]]) -> frozenset[str]:
    """The fixtures of the session that are neither ours nor pytest's, of these names and of all that they take."""
    seen: dict[str, Any] = {}
    left = [*names]
    while left:
        name = left.pop()
        known = definitions.get(name)
        if known and name not in seen and not pairing.is_own_fixture(known):
            seen[name] = known[-1]
            left += known[-1].argnames
    of_tests = {name: one for name, one in seen.items() if not one.func.__module__.startswith("_pytest.")}
    return frozenset(name for name, one in of_tests.items() if one.scope == "session")


def in_run_order(
    items: Sequence[pytest.Item], pairs: Mapping[pytest.Item, pairing.Pairing], *, soaking: Container[str]
) -> list[pytest.Item]:
    """Health first, so that a broken part is seen before anything long; then as they were collected, and a soak.

    Last is what judges the whole run: the marks ``at_end`` and ``over_run``.
    """
    last = {item for item in items if pairs[item].judges and pairs[item].criterion in soaking}

    def turn(item: pytest.Item) -> tuple[bool, bool, bool]:
        at_end, over_run, health = (item.get_closest_marker(name) is not None for name in ("at_end", "over_run", "health"))
        return at_end or over_run, item in last, not health

    return sorted(by_criterion(items, pairs), key=turn)


def by_criterion(items: Sequence[pytest.Item], pairs: Mapping[pytest.Item, pairing.Pairing]) -> list[pytest.Item]:
    """The items in the same order; where a test judges several criteria, one criterion after the other, not place by place."""
    ordered: list[pytest.Item] = []
    for _, run in itertools.groupby(items, key=lambda item: (item.parent, getattr(item, "originalname", item.name))):
        of_one_test = list(run)
        criteria = list(dict.fromkeys(pairs[item].criterion for item in of_one_test))
        ordered += sorted(of_one_test, key=lambda item: criteria.index(pairs[item].criterion))
    return ordered


def leave_out_logging(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Unregister what catches log records around each phase of each test, a tenth of the run's own time.

    The packaged suite logs nothing. With other tests, ``caplog``, or any option or ini value of logging, it stays.
    """
    asked = (getattr(config.option, name, None) or config.getini(name) for name in LOGGING)
    others = [item for item in items if not (isinstance(item, VerdictItem) or PACKAGED in item.path.parts)]
    uses_logs = any("caplog" in getattr(item, "fixturenames", ()) for item in items)
    plugin = config.pluginmanager.get_plugin("logging-plugin")
    if plugin is not None and not (others or uses_logs or any(asked)):
        config.pluginmanager.unregister(plugin)


def share_locations(items: Iterable[pytest.Item]) -> None:
    """Find the file and the line of each function once: pytest asks the file system for them at each place."""
    found: dict[Any, tuple[str, int | None, str]] = {}
    for item in items:
        if type(item) is pytest.Function:  # another kind may say something else
            file, line, _ = found.get(item.function) or found.setdefault(item.function, item.location)
            item.location = file, line, item.getmodpath()


def refuse_others(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse the plugins of :data:`REFUSED`, where their option, ini value or mark is set.

    Raises:
        pytest.UsageError: a test would be run by one of them.
    """
    for plugin, (option, mark, why) in REFUSED.items():
        if not config.pluginmanager.hasplugin(plugin):
            continue
        is_set = getattr(config.option, option, None) or config.inicfg.get(option)
        marked = next((item.nodeid for item in items if item.get_closest_marker(mark) is not None), None)
        if is_set or marked:
            cause = f"{marked} is marked {mark}" if marked else f"--{option} is set"
            raise pytest.UsageError(f"{cause}: {why}; leave it out, or say -p no:{plugin}")


def refuse_unknown_mark(config: pytest.Config, tests: Sequence[pytest.Item]) -> None:
    """Refuse ``-m`` that selected no test where it names a mark that nobody has or registered; name those that exist.

    In a worker of pytest-xdist a usage error would only crash the worker.

    Raises:
        pytest.UsageError: there is no such mark.
    """
    expression = config.option.markexpr
    if not expression or not tests or hasattr(config, "workerinput"):
        return
    carried = dict.fromkeys(mark.name for test in tests for mark in test.iter_markers() if mark.name not in OF_PYTEST)
    registered = {line.partition(":")[0].partition("(")[0].strip() for line in config.getini("markers")}
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "''", expression)
    named = [word for word in re.findall(r"[^\W\d][\w.-]*(?!\s*=)\b", plain) if word not in _WORDS_OF_EXPRESSION]
    unknown = [word for word in dict.fromkeys(named) if word not in carried and word not in registered]
    if unknown:
        hints = "".join(did_you_mean(word, list(carried)) for word in unknown)
        has = f"marks of these tests: {', '.join(sorted(carried))}" if carried else "these tests have no marks"
        raise pytest.UsageError(f"-m {expression!r} selects no test: there is no mark {', '.join(unknown)}; {has}.{hints}")
