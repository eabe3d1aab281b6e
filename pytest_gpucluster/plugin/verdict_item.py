"""The verdict as the last item of the session, so that every reporter of pytest has it.

It is no test of the plan: it is made after all plugins have chosen the tests, it is not in the session's list while the tests
run, and it runs when the verdict is decided, however the session ended. So nothing can deselect it, skip it or stop before it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.reporting.junit import OWN_CLASS, VERDICT_CASE, Testcase

NODEID = f"{OWN_CLASS}::{VERDICT_CASE}"
"""Its node id: a test of no file. Allure takes every node id for ``file::name``."""
RUNNER = "runner"
"""pytest's plugin that sets collectors up and tears them down. A test that was interrupted has left some of them."""
OF_TESTS = ("session", "lfplugin", "stepwiseplugin", "gpucluster-phases")
"""Plugins that act on the outcome of a test: they count failures, stop the session, or remember what to run first next time."""
UNDECIDED = "the verdict is not decided yet"
PHASES = {"pytest_runtest_setup": "setup", "pytest_runtest_call": "runtest", "pytest_runtest_teardown": "teardown"}
"""What of the item runs in each phase."""


class VerdictItem(pytest.Item):
    """``gpucluster.verdict``: passed, failed, an error of the set-up, or skipped, as its testcase says."""

    testcase = Testcase(nodeid=NODEID, kind="error", message=UNDECIDED, text=UNDECIDED)
    """The verdict, once it is decided."""
    is_shown = False
    """Whether its outcome reached the reporters."""

    @property
    def ihook(self) -> Any:
        """The hooks of all plugins but those that act on tests."""
        return _Hooks(self)

    def setup(self) -> None:
        """End here where the verdict is neither good nor bad."""
        if self.testcase.kind == "skipped":
            pytest.skip(self.testcase.message)
        if self.testcase.kind == "error":
            pytest.fail(self.testcase.text, pytrace=False)

    def runtest(self) -> None:
        """Fail where the cluster is rejected."""
        if self.testcase.kind == "failure":
            pytest.fail(self.testcase.text, pytrace=False)

    def reportinfo(self) -> tuple[Any, None, str]:
        """It stands in no file."""
        return self.path, None, self.name

    @property
    def bad_phase(self) -> str | None:
        """The phase whose report is not passed; None if all are."""
        return {"passed": None, "failure": "call"}.get(self.testcase.kind, "setup")

    @property
    def bad_outcome(self) -> str:
        """The outcome of :attr:`bad_phase`."""
        return "skipped" if self.testcase.kind == "skipped" else "failed"


class _Hooks:
    """The hooks that pytest calls for the item; what runs in its phases needs no collector to be set up."""

    def __init__(self, item: VerdictItem) -> None:
        self._item = item

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "pytest_exception_interact":
            return lambda **_: None  # a verdict is no place for a debugger
        manager = self._item.config.pluginmanager
        names = (*OF_TESTS, RUNNER) if name in PHASES else OF_TESTS
        left_out = [manager.get_plugin(one) for one in names if manager.hasplugin(one)]
        if name in PHASES or name == "pytest_runtest_protocol":
            left_out += filter(_is_conftest, manager.get_plugins())
        hook: Callable[..., Any] = manager.subset_hook_caller(name, left_out)
        if name in PHASES:
            return partial(_then, hook, getattr(self._item, PHASES[name]))
        if name == "pytest_runtest_makereport":
            return lambda **arguments: _corrected(hook(**arguments), self._item)
        return partial(_show, hook, self._item) if name == "pytest_runtest_logreport" else hook


def add_verdict(session: pytest.Session) -> None:
    """Make the verdict the last collected item. Called after all plugins have chosen the tests."""
    session.items.append(_new_item(session))


def set_aside(session: pytest.Session) -> None:
    """Take the verdict out of the list of what is to run, so that the last test is the last one for pytest too."""
    tests = [item for item in session.items if not isinstance(item, VerdictItem)]
    session.testscollected -= len(session.items) - len(tests)
    session.items[:] = tests


def report_verdict(session: pytest.Session, testcase: Testcase) -> None:
    """Run the verdict: whatever other plugins do with it, its outcome reaches the reporters as it is."""
    set_aside(session)
    item = _new_item(session)
    session.items.append(item)
    session.testscollected = len(session.items)
    item.testcase = testcase
    item.user_properties += testcase.properties
    with contextlib.suppress(Exception):  # pytest.exit too: nothing that a plugin raises here may cost a report
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
    if not item.is_shown:
        item.ihook.pytest_runtest_logreport(report=_own_report(item))


def _new_item(session: pytest.Session) -> VerdictItem:
    item: VerdictItem = VerdictItem.from_parent(session, name=VERDICT_CASE, nodeid=NODEID)
    return item


def _is_conftest(plugin: object) -> bool:
    """Whether a plugin is for the tests of a folder. Its set-up may take a minute, and the verdict is in no folder."""
    return Path(getattr(plugin, "__file__", None) or "").name == "conftest.py"


def _then(hook: Callable[..., Any], phase: Callable[[], None], **arguments: Any) -> None:
    """Do what the plugins do, and then the phase, as pytest's own runner does."""
    hook(**arguments)
    phase()


def _show(hook: Callable[..., Any], item: VerdictItem, *, report: pytest.TestReport) -> None:
    item.is_shown = item.is_shown or report.when == (item.bad_phase or "call")
    hook(report=_corrected(report, item))


def _corrected(report: pytest.TestReport, item: VerdictItem) -> pytest.TestReport:
    """The report; one that a plugin changed, or that a plugin's own error is in, says again what the verdict is."""
    is_bad = report.when == item.bad_phase
    expected, words = (item.bad_outcome, item.testcase.message) if is_bad else ("passed", "")
    is_ours = report.outcome == expected and words in report.longreprtext
    return report if is_ours else _own_report(item, when=report.when)


def _own_report(item: VerdictItem, when: Any = None) -> pytest.TestReport:
    """The report of a phase, by default of the one that says the verdict, as nobody changed it."""
    phase: Any = when or item.bad_phase or "call"
    is_bad = phase == item.bad_phase
    words: Any = item.testcase.text
    if item.bad_outcome == "skipped":
        words = (str(item.path), 0, f"Skipped: {item.testcase.message}")
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome=item.bad_outcome if is_bad else "passed",  # type: ignore[arg-type]  # one of pytest's words
        longrepr=words if is_bad else None,
        when=phase,
        user_properties=item.user_properties,
        start=time.time(),
        stop=time.time(),
    )
