"""A place that is missing, or could not be measured, costs pytest no traceback; an exception of a test does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.runs import run_pytest
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

COUNTS = """
import json, pathlib
from _pytest._code.code import ExceptionInfo

made, real = [], ExceptionInfo.getrepr

def getrepr(self, *args, **kwargs):
    made.append(self.typename)
    return real(self, *args, **kwargs)

ExceptionInfo.getrepr = getrepr

def pytest_unconfigure():
    pathlib.Path("made.json").write_text(json.dumps(made))
"""
TESTS = """
import pytest

def fails():
    raise ValueError("planted")

@pytest.fixture(scope="session")
def failed(cluster):
    return cluster.run(fails, per="gpu")

def test_present(place, criterion):
    criterion.require(1)

def test_measured(failed, place, criterion):
    criterion.require(failed[place])

@pytest.mark.xfail(reason="not yet")
def test_expected(failed, place, criterion):
    criterion.require(failed[place])

def test_refused(recipe, criterion):
    recipe("nonsense")

def test_crashed(criterion):
    raise KeyError("mine")

def test_low(criterion):
    criterion.require(0)

def test_absent_program(criterion):
    criterion.does_not_apply("here")
"""


def test_no_traceback_is_made_for_errors_of_ours(tmp_path: Path) -> None:
    """Only the exception of a test has one; each text is what it was, in results.json and in the JUnit file."""
    (tmp_path / "conftest.py").write_text(COUNTS, encoding="utf-8")
    (tmp_path / "test_own.py").write_text(TESTS, encoding="utf-8")
    limits = {name: entry(per="gpu") for name in ("present", "measured", "expected")}
    limits |= {name: entry() for name in ("refused", "crashed", "low")}
    limits["absent_program"] = entry(needs={"program": "no-such-program"})
    option = write_limits(tmp_path / "limits.yaml", limits, extends=False)
    expect = "--gpucluster-expect=nodes=3,gpus_per_node=1"
    run = run_pytest(tmp_path, "--gpucluster", "test_own.py", option, expect)
    missing = "not run: an unknown host is absent: no such node joined (1 of 3 expected places answer)"
    for name in ("present", "measured", "expected"):
        assert run.outcomes(name)["node2-cpu0"] == "missing"
        assert run.row(name, "node2-cpu0")["reason"] == missing
        case = run.case(f"test_{name}[node2-cpu0]")
        assert (case.outcome, case.text.startswith(missing)) == ("error", True)
        assert "Error" not in case.text
    assert run.row("present", "node0-cpu0")["outcome"] == "passed"
    first, later = (run.case(f"test_{name}[node0-cpu0]").text for name in ("measured", "expected"))
    assert run.row("measured", "node0-cpu0")["reason"] in first
    for text in (first, later):
        assert text.startswith("fails was not measured: rank 0 (node0-cpu0, ")
        assert "ValueError: planted" in text
    assert "whole text: see measured at node0-cpu0" in later
    assert "recipe('nonsense'): " in run.case("test_refused").text.partition("\n")[0]
    assert "KeyError: 'mine'" in run.case("test_crashed").text
    assert 'raise KeyError("mine")' in run.case("test_crashed").text
    low = run.case("test_low")
    assert (low.outcome, low.text.startswith("low at the cluster: 0,")) == ("failure", True), low.text
    left = run.row("absent_program")
    assert (left["outcome"], left["reason"]) == ("skipped", "needs no-such-program, which is not installed here")
    assert run.case("test_absent_program").outcome == "skipped"
    assert "absent  2 unknown hosts  2 nodes, 6 expected outcomes missing" in run.stdout
    assert json.loads((tmp_path / "made.json").read_text(encoding="utf-8")) == ["KeyError", "Failed"]  # the verdict's


def test_who_asks_for_it_sees_the_traceback(tmp_path: Path) -> None:
    """With ``-vv``, below the text by value."""
    (tmp_path / "test_own.py").write_text(TESTS, encoding="utf-8")
    option = write_limits(tmp_path / "limits.yaml", {"low": entry()}, extends=False)
    run = run_pytest(tmp_path, "--gpucluster", "test_own.py", "-k", "low", option, "-vv")
    assert run.row("low")["reason"].startswith("low at the cluster: 0,")
    shown = run.stdout.partition("low at the cluster: 0,")[2]
    assert "Traceback" in shown
    assert "criterion.require(0)" in shown
