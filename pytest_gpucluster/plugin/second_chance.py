"""The second look: a test whose outcome is undecided waits until the others have run, is run once more, and is reported then.

pytest and its reporters see one test with one outcome, because the reports of the first look are kept back. Before what judges
the whole run (the marks ``at_end`` and ``over_run``) the waiting tests are put into pytest's list once more; where another loop
has a list of its own (a worker of pytest-xdist), they run after it. Fixtures of functions are made anew, as for any test. Of
those that are kept for several tests, the ones that measured are ended and made anew; others stay as they are.
"""

from __future__ import annotations

import time
import unittest
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import pytest
from _pytest.runner import call_and_report  # no public way

from pytest_gpucluster.judging import second_chance
from pytest_gpucluster.judging.forecast import in_words
from pytest_gpucluster.plugin import attempts
from pytest_gpucluster.plugin.end import Termination
from pytest_gpucluster.plugin.live import Live
from pytest_gpucluster.plugin.pairing import shows_fixtures, uses_us
from pytest_gpucluster.plugin.phases import Phases, waits
from pytest_gpucluster.plugin.stash_keys import CRITERION, FIRST_LOOK, PAIR, RECORD, RULE, WAITS

WHOLE_RUN = ("at_end", "over_run")
"""Marks of tests that judge the whole run: second looks are a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A test that waits: the reports of its first look, which pytest has not seen; the fixtures that it used then.

    ``properties`` are those of the test before it.
    """

    reports: list[pytest.TestReport]
    fixtures: frozenset[Any]
    properties: list[tuple[str, object]]


class SecondChance:
    """A pytest plugin that runs tests in place of pytest's own protocol, where they may have to wait for a second look."""

    def __init__(self, phases: Phases, live: Live, termination: Termination, look_again: Callable[[], None]) -> None:
        """What a second look needs.

        Args:
            phases: knows which fixtures have measured.
            live: shows that it begins; has the planned time.
            termination: no second look begins once the run is being ended.
            look_again: asks again who uses the GPUs that were not idle at the start.
        """
        self._phases = phases
        self._live = live
        self._termination = termination
        self._look_again = look_again
        self._waiting: dict[pytest.Item, _Waiting] = {}
        self._stale: frozenset[Any] = frozenset()
        self._began_s: float | None = None
        self._border: pytest.Item | None = None
        self.point_at: Callable[[pytest.Item], None] = lambda _item: None
        """Called before a test that runs or is reported after the loop: a worker of pytest-xdist says which one it is."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """After the loop, run what still waits; where the session ends early, report the first look."""
        try:
            result = yield
            queue = list(self._waiting)
            for item, following in zip_longest(queue, queue[1:]):
                self.point_at(item)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail or session.shouldstop:
                    break
            return result
        finally:
            for item in list(self._waiting):
                self.point_at(item)
                self._report_first(item, self._waiting.pop(item))

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test whose outcome may wait, or that has waited; None leaves any other test to pytest.

        Unless it seems to be the last one, and others wait: then fixtures have to stay.
        """
        waited = self._waiting.pop(item, None)
        may_wait = waited is None and self._may_wait(item)
        if waited is None and not may_wait and (nextitem is not None or not self._waiting):
            return None
        hook = item.ihook  # pytest looks for conftest files each time that it is asked for
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        if waited is None:
            item.stash[WAITS] = may_wait
            self._run(item, nextitem)
        elif self._is_over:
            self._report_first(item, waited)
        else:
            self._begin(item, waited)
            self._run(item, nextitem)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """End the fixtures whose measurement is taken again. An error of one is that of the test, as in any set-up."""
        stale, self._stale = self._stale, frozenset()
        for fixture in stale:
            fixture.finish(item._request)  # type: ignore[attr-defined]  # noqa: SLF001 -- as pytest does

    def _may_wait(self, item: pytest.Item) -> bool:
        """Whether a second look at this test is of use: it measures, in no soak, and judges no whole run.

        A test that is no plain function is run by pytest, and so are all where somebody debugs tests or their fixtures.
        """
        is_plain = isinstance(item, pytest.Function) and not issubclass(item.cls or object, unittest.TestCase)
        is_judged = PAIR in item.stash and RULE not in item.stash and FIRST_LOOK not in item.stash
        is_debugged = item.config.getoption("usepdb", default=False) or shows_fixtures(item.config)
        if is_debugged or not (is_plain and is_judged and uses_us(item)):
            return False
        return not (_judges_run(item) or self._phases.is_of_soak(item))

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Pytest's ``runtestprotocol``, whose reports are kept back while they may have to wait."""
        properties, has_request = list(item.user_properties), hasattr(item, "_request")
        if has_request and not getattr(item, "_request", None):
            item._initrequest()  # type: ignore[attr-defined]  # noqa: SLF001 -- as pytest does where a test is run again
        try:
            reports = [call_and_report(item, "setup", log=False)]
            if reports[0].passed:
                reports.append(call_and_report(item, "call", log=False))
            is_left = waits(item)
            fixtures = _used(item) if is_left else frozenset()
            if not is_left:
                self._live.log(item, reports)
            is_over = item.session.shouldfail or item.session.shouldstop
            following = None if is_over else self._following(item, nextitem, is_left=is_left)
            reports.append(call_and_report(item, "teardown", log=False, nextitem=following))
        finally:
            if has_request:
                item._request = False  # type: ignore[attr-defined]  # noqa: SLF001 -- as pytest does
                item.funcargs = None  # type: ignore[attr-defined]
        if is_left and waits(item):
            self._leave(item, _Waiting(reports=reports, fixtures=fixtures, properties=properties))
        else:
            self._live.log(item, reports if is_left else reports[-1:])

    def _following(self, item: pytest.Item, nextitem: Any, *, is_left: bool) -> Any:
        """Whose fixtures stay when this test ends: those of the next one; of its own file, where only this test waits."""
        if nextitem is not None and not (is_left and _judges_run(nextitem)):
            return nextitem
        return next(iter(self._waiting), item.parent if is_left else None)

    def _leave(self, item: pytest.Item, waiting: _Waiting) -> None:
        """Leave a test for later: before what judges the whole run, or at the end of pytest's list."""
        self._waiting[item] = waiting
        items = item.session.items
        if hasattr(item.config, "workerinput"):
            return  # its controller says which test of the list comes next
        if self._border is None:
            self._border = next((one for one in items if _judges_run(one)), None)
        border = len(items) if self._border is None else items.index(self._border)
        items.insert(border if border > items.index(item) else len(items), item)

    @property
    def _is_over(self) -> bool:
        """Whether no second look may begin any more: the run is being ended, or their share of the time is used."""
        spent_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        return self._termination.signal is not None or spent_s > self._budget_s

    @property
    def _budget_s(self) -> float:
        return second_chance.budget_s(self._live.planned_s)

    def _begin(self, item: pytest.Item, waited: _Waiting) -> None:
        """Make a test as if it had not run, but for its first outcome. Before the first one, forget what was measured."""
        if self._began_s is None:
            self._began_s = time.monotonic()
            every = {item: waited, **self._waiting}
            what = second_chance.in_words(one.stash[RECORD] for one in every)
            self._live.say(f"gpucluster: {second_chance.AGAIN}: {what}; for at most {in_words(self._budget_s)}")
            used = frozenset[Any]().union(*(one.fixtures for one in every.values()))
            self._stale = frozenset(one for one in used if one.argname in self._phases.of_fixtures or _has_raised(one))
            self._look_again()
        attempts.forget(item)
        item.stash[WAITS] = False
        item.stash[FIRST_LOOK] = item.stash[RECORD]
        del item.stash[RECORD]
        if CRITERION in item.stash:
            item.stash[CRITERION] = replace(item.stash[CRITERION], judged=None, first_error=None, left_out=None, remarks={})
        item.user_properties[:] = waited.properties

    def _report_first(self, item: pytest.Item, waited: _Waiting) -> None:
        """Report the first look of a test that gets no second one."""
        item.stash[WAITS] = False
        self._live.log(item, waited.reports)
        self._live.done(item.stash[RECORD])


def _judges_run(item: pytest.Item) -> bool:
    return any(mark.name in WHOLE_RUN for mark in item.iter_markers())


def _used(item: Any) -> frozenset[Any]:
    """The fixtures of a test that are kept for others: those that it names, and those that were asked for while it ran."""
    named = (item._fixtureinfo.name2fixturedefs.get(name, ()) for name in item.fixturenames)  # noqa: SLF001
    asked = getattr(item._request, "_fixture_defs", {}).values()  # noqa: SLF001 -- pytest has no other way to them
    every = [*(one for known in named for one in known), *asked]
    return frozenset(one for one in every if one.scope != "function")


def _has_raised(fixture: Any) -> bool:
    """Whether pytest keeps an exception in place of a fixture's value."""
    return fixture.cached_result is not None and fixture.cached_result[2] is not None
