"""A test that some plugin repeats until it is green, or whose failure it hides, is not green, however the plugin does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.runs import run_pytest
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

TESTS = """
import unittest

tries = []

def try_once(name):
    tries.append(name)
    assert tries.count(name) > 1, "the first try"

def test_plain():
    try_once("plain")

def test_judged(criterion):
    try_once("judged")
    criterion.require(1)

def test_low(criterion):
    tries.append("low")
    criterion.require(tries.count("low") - 1)

class TestGroup:
    def test_method(self):
        try_once("method")

class TestCase(unittest.TestCase):
    def test_of_unittest(self):
        try_once("unittest")

def test_good():
    pass
"""
HIDDEN = """
@pytest.mark.distributed
def test_spread(rank):
    assert rank < 0, "every rank"

def test_late(criterion):
    criterion.require(1)
    assert False, "after its value was good"
"""
HEAD = "import pytest\nfrom _pytest.runner import runtestprotocol\n\ndef good(item):\n    return 'good' in item.name\n\n"
RETRIES = {
    "the whole protocol, again": (
        "@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_protocol(item):\n    done = yield\n"
        "    if not good(item):\n        item._initrequest()\n        runtestprotocol(item)\n    return done\n"
    ),
    "the whole protocol, reported once": (
        "@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_protocol(item, nextitem):\n"
        "    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)\n"
        "    for left in (1, 0):\n        item._initrequest()\n"
        "        reports = runtestprotocol(item, nextitem=nextitem, log=False)\n"
        "        if not left or good(item):\n            break\n"
        "    for report in reports:\n        item.ihook.pytest_runtest_logreport(report=report)\n"
        "    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)\n    return True\n"
    ),
    "the call": (
        "@pytest.hookimpl(tryfirst=True, wrapper=True)\ndef pytest_runtest_call(item):\n    try:\n        return (yield)\n"
        "    except BaseException:\n        item.runtest()\n"
    ),
    "the function": (
        "@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem):\n"
        "    values = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}\n"
        "    try:\n        pyfuncitem.obj(**values)\n    except BaseException:\n"
        "        pyfuncitem.obj(**values)\n    return True\n"
    ),
    "in the report": (
        "@pytest.hookimpl(tryfirst=True, wrapper=True)\ndef pytest_runtest_makereport(item, call):\n    report = yield\n"
        "    if call.when == 'call' and report.failed:\n        item.runtest()\n        report.outcome = 'passed'\n"
        "    return report\n"
    ),
    "in the report, first": (
        "@pytest.hookimpl(trylast=True, wrapper=True)\ndef pytest_runtest_makereport(item, call):\n    report = yield\n"
        "    if call.when == 'call' and call.excinfo:\n        item.runtest()\n        call.excinfo = None\n"
        "        report.outcome, report.longrepr = 'passed', None\n    return report\n"
    ),
}
HIDING = {
    "around the call": (
        "@pytest.hookimpl(WRAPPER)\ndef pytest_runtest_call(item):\n    try:\n        return (yield)\n"
        "    except BaseException:\n        return None\n"
    ),
    "around the function": (
        "@pytest.hookimpl(WRAPPER)\ndef pytest_pyfunc_call(pyfuncitem):\n    try:\n        return (yield)\n"
        "    except BaseException:\n        return True\n"
    ),
    "in place of the function": (
        "@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem):\n    return None if good(pyfuncitem) else True\n"
    ),
    "in place of the call": (
        "@pytest.hookimpl(trylast=True)\ndef pytest_runtest_setup(item):\n"
        "    if not good(item):\n        item.runtest = lambda: None\n"
    ),
    "in the report": (
        "@pytest.hookimpl(WRAPPER)\ndef pytest_runtest_makereport(item, call):\n"
        "    if call.when == 'call':\n        call.excinfo = None\n    return (yield)\n"
    ),
}
BAD = ("failed", "error")


def started(folder: Path, retry: str, more: str = "") -> FinishedRun:
    """A rehearsal of tests of which all but one pass at the second try only; ``more`` of them."""
    (folder / "conftest.py").write_text(HEAD + retry, encoding="utf-8")
    (folder / "test_tries.py").write_text(f"import pytest\n{TESTS}{more}", encoding="utf-8")
    limits = write_limits(
        folder / "limits.yaml", {name: entry() for name in ("judged", "low", *(["late"] if more else []))}, extends=False
    )
    return run_pytest(folder, "--gpucluster", limits, "test_tries.py")


@pytest.mark.parametrize("retry", RETRIES)
def test_a_second_try_is_not_believed(tmp_path: Path, retry: str) -> None:
    """The first outcome counts, or the test is an ERROR that says how often it ran. What ran once is green."""
    ran = started(tmp_path, RETRIES[retry])
    rows = {row["criterion"]: row for row in ran.results["criteria"]}
    assert rows.pop("good")["outcome"] == "passed"
    assert {name: row["outcome"] for name, row in rows.items() if row["outcome"] not in BAD} == {}, ran.stdout
    assert rows["low"]["outcome"] == "failed"
    for name, row in rows.items():
        assert row["outcome"] == "failed" or "was run 2 times; a repeated test is not accepted" in row["reason"], (name, row)
    assert ran.results["verdict"] == "REJECTED"
    assert ran.returncode != 0
    tried = {"test_plain", "test_judged", "test_method", "test_of_unittest"}
    assert {case.outcome for case in ran.cases if case.name in tried} <= {"failure", "error"}


@pytest.mark.parametrize("order", ["tryfirst", pytest.param("trylast", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hiding", HIDING)
def test_a_failure_that_a_hook_hides_is_not_green(tmp_path: Path, hiding: str, order: str) -> None:
    """The test raised, or its function was never called: what passes then was not shown. What ran is green."""
    ran = started(tmp_path, HIDING[hiding].replace("WRAPPER", f"wrapper=True, {order}=True"), HIDDEN)
    rows = {row["criterion"]: row for row in ran.results["criteria"]}
    assert rows.pop("good")["outcome"] == "passed"
    assert {"spread", "late"} < {*rows}
    assert {name: row["outcome"] for name, row in rows.items() if row["outcome"] not in BAD} == {}, ran.stdout
    assert ran.returncode != 0
    assert ran.case("test_plain").outcome in {"failure", "error"}
    word = "was not called" if hiding.startswith("in place of") else "raised AssertionError"
    assert word in rows["plain"]["reason"] or rows["plain"]["outcome"] == "failed"


def test_a_test_that_runs_once_is_believed(tmp_path: Path) -> None:
    """The same tests without any plugin fail by their first try."""
    ran = started(tmp_path, "")
    found = {row["criterion"]: row["outcome"] for row in ran.results["criteria"]}
    assert found == {
        "plain": "failed",
        "judged": "failed",
        "low": "failed",
        "method": "failed",
        "of_unittest": "failed",
        "good": "passed",
    }
