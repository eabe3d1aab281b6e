"""``pytest -n``: the controller of pytest-xdist has the run and its agents; each of its workers judges the tests of one GPU.

``-n`` saves no time, because a run measures all GPUs at once anyway. Tests that need all GPUs are left out, with the reason.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # xdist ships no types

from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.controller.relay import Collected, Relay, RelayedController
from pytest_gpucluster.errors import GpuclusterError
from pytest_gpucluster.inventory.program import die_with_parent
from pytest_gpucluster.judging.plan import Rule
from pytest_gpucluster.judging.verdict import ERROR, NOT_SELECTED, SKIPPED, Record
from pytest_gpucluster.plugin.collection import expected_of
from pytest_gpucluster.plugin.outcome import make_fit
from pytest_gpucluster.plugin.pairing import is_distributed, register_part, uses_us
from pytest_gpucluster.plugin.stash_keys import PAIR, RULE
from pytest_gpucluster.reporting.journal import record_facts, record_from_facts

if TYPE_CHECKING:
    from pytest_gpucluster.plugin.run import Run

INPUT = "gpucluster"
OBJECTION = "run by pytest-xdist (-n), which judges one GPU at a time"
NEEDS_ALL = Rule(text="needs all GPUs at once; run without -n", cause="needs all GPUs at once")


def connect(config: pytest.Config) -> RelayedController:
    """Become a worker of pytest-xdist whose calls its controller makes; ends the worker if the run has ended already."""
    die_with_parent()  # pytest-xdist alone would let it finish its test, however long that takes
    try:
        return RelayedController(**config.workerinput[INPUT], rootdir=config.rootpath)  # type: ignore[attr-defined]  # set by xdist
    except OSError:
        pytest.exit("the run has ended already", returncode=int(pytest.ExitCode.USAGE_ERROR))


def register(config: pytest.Config, run: Run, relayed: RelayedController | None) -> None:
    """Register what is different in a process of pytest-xdist; ``relayed``: the controller, seen from a worker."""
    if relayed is not None:
        run.phases.send = send_outcome
        run.second_chance.point_at = point_at
    register_part(config, XdistController(config, run) if relayed is None else XdistWorker(relayed), "xdist")


class XdistController:
    """Fixes the expected set that its workers collected, makes their calls, and records their outcomes. Runs no test."""

    def __init__(self, config: pytest.Config, run: Run) -> None:
        """``run`` has the agents and the reports."""
        self._config = config
        self._run = run
        self._crashed: pytest.TestReport | None = None
        self._relay: Relay | None = None
        self._is_planned = False
        self._keys: dict[str, tuple[str, str | None]] = {}
        run.session.state.objections.append(OBJECTION)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Called for each new worker: give it the address for its calls."""
        controller = self._run.session.controller
        if self._relay is None:
            self._relay = Relay(controller)
        node.workerinput[INPUT] = {"address": self._relay.address, "world_size": controller.world_size}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self) -> None:
        """Called when a worker has collected: the first one fixes the expected set, or ends the run if it refused a test."""
        assert self._relay is not None
        assert self._relay.collected is not None
        if self._is_planned:
            return
        self._is_planned = True
        if self._relay.collected.refused is not None:
            raise pytest.UsageError(self._relay.collected.refused)
        self._keys.update({nodeid: (criterion, place) for nodeid, criterion, place in self._relay.collected.expected})
        self._run.collection.expect(self._keys, subjects={})
        with contextlib.suppress(GpuclusterError):  # the session keeps it, and every measurement raises it
            _ = self._run.session.cluster

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> PlaceScheduling:
        """Keep the tests of one GPU in one worker, whatever ``--dist`` says."""
        return PlaceScheduling(config, log, keys=self._keys)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Called when a worker died: the test that it ran was not judged, which is an ERROR at its place."""
        criterion, place = self._keys[crashitem]
        where = () if place is None else (place,)
        reason = f"not judged: pytest-xdist's {report.longrepr}"
        report.when, report.longrepr = "setup", reason
        report.location = (report.location[0], None, crashitem.partition("::")[2])
        record = Record(criterion=criterion, place=place, outcome=ERROR, reason=reason, culprits=where, started=True)
        record = replace(record, blames="unknown", cause="a process of pytest-xdist died")
        make_fit(report)
        attach(report, record)
        self._crashed = report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        """Record the outcome that a report brings; add the teardown of a test whose worker died before it."""
        result = yield
        if hasattr(report, INPUT):
            self._run.session.recorder.record_outcome(record_from_facts(json.loads(getattr(report, INPUT))))
        if report is self._crashed:
            end = copy.copy(report)
            end.when, end.outcome, end.longrepr = "teardown", "passed", None
            delattr(end, INPUT)
            self._config.hook.pytest_runtest_logreport(report=end)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Distinguish ``-x`` and ``--maxfail`` from Ctrl-C: pytest-xdist raises KeyboardInterrupt for both."""
        try:
            return (yield)
        except KeyboardInterrupt as error:
            if 0 < (session.config.option.maxfail or 0) <= session.testsfailed:
                session.shouldfail = str(error)
            raise

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Free workers that still wait for a call, so that pytest-xdist can end them."""
        if self._relay is not None:
            self._relay.close()


class PlaceScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """Schedules by place, and does not run a test again whose worker died in it."""

    def __init__(self, config: pytest.Config, log: Any, *, keys: Mapping[str, tuple[str, str | None]]) -> None:
        """``keys``: criterion and place id of each test by nodeid, filled when the first worker has collected."""
        super().__init__(config, log)
        self._keys = keys

    def _split_scope(self, nodeid: str) -> str:
        return self._keys[nodeid][1] or "all GPUs"

    def remove_node(self, node: Any) -> str | None:
        """Put the tests that a dead worker did not run back into the queue; returns the test that it ran, None if none."""
        work = self.assigned_work.pop(node)
        crashed: str | None = next((test for unit in work.values() for test, is_done in unit.items() if not is_done), None)
        if crashed is not None:
            work[self._split_scope(crashed)][crashed] = True
            self.workqueue.update({scope: unit for scope, unit in work.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
        return crashed


class XdistWorker:
    """Sends the expected set of a worker to the controller. Writes no file."""

    def __init__(self, relayed: RelayedController) -> None:
        """``relayed`` leads to the controller."""
        self._relayed = relayed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, None]:
        """Send the expected set to the controller, or the usage error, which would only crash this worker."""
        try:
            yield
            collected = Collected(expected=tuple((nodeid, *key) for nodeid, key in expected_of(items).items()), refused=None)
        except pytest.UsageError as error:
            collected = Collected(expected=(), refused=str(error))
            items.clear()
        for item in items:
            if _needs_all(item):
                item.stash.setdefault(RULE, NEEDS_ALL)
        self._relayed.ask(collected)


def _needs_all(item: pytest.Item) -> bool:
    place = item.stash[PAIR].place
    is_of_one_gpu = place is not None and place.gpu is not None
    return is_distributed(item) or (not is_of_one_gpu and uses_us(item))


def point_at(item: pytest.Item) -> None:
    """Say that a report that comes after the loop of this worker is of this test."""
    for plugin in item.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.item_index = item.session.items.index(item)


def send_outcome(report: pytest.TestReport, record: Record, rule: Rule | None) -> None:
    """Put the outcome into the report as JSON, because only plain data cross from a worker to the controller.

    A test that needs all GPUs was not selected: ``rule``, which leaves it out, is none of the profile.
    """
    is_left_out = rule is NEEDS_ALL and record.outcome == SKIPPED
    attach(report, replace(record, outcome=NOT_SELECTED) if is_left_out else record)


def attach(report: pytest.TestReport, record: Record) -> None:
    """Put an outcome into a report."""
    setattr(report, INPUT, json.dumps(strict_json(record_facts(record))))
