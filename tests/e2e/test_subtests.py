"""Blocks of ``subtests.test()``: a good one changes nothing, a bad one makes its test no better than itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.runs import run_pytest
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SUITE = """
import unittest

import pytest

def test_rate(subtests, criterion):
    with subtests.test("before"):
        pass
    with subtests.test("around"):
        criterion.require(5)
    with subtests.test("after"):
        pass

def test_bad(subtests, criterion):
    with subtests.test("before"):
        assert not "bad"
    criterion.require(5)

def test_low(subtests, criterion):
    with subtests.test("around"):
        criterion.require(0)

def test_left_out(subtests, criterion):
    with subtests.test("before"):
        pytest.skip("not today")
    criterion.require(5)

def test_plain(subtests):
    with subtests.test("one"):
        pass

def test_plain_bad(subtests):
    with subtests.test("one"):
        assert not "bad"

class TestCase(unittest.TestCase):
    def test_of_unittest(self):
        for number in (1, 2):
            with self.subTest(number=number):
                self.assertEqual(number, 2)

    def test_good_of_unittest(self):
        with self.subTest():
            pass
"""
JUDGED = {"rate": "passed", "bad": "failed", "low": "failed", "left_out": "error"}
PLAIN = {"plain": "passed", "plain_bad": "failed", "of_unittest": "failed", "good_of_unittest": "passed"}
OUTCOMES = {**JUDGED, **PLAIN}
KINDS = {"passed": "passed", "failed": "failure", "error": "error"}


def test_blocks(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """results.json and the JUnit file agree; each test is there once."""
    if not request.config.pluginmanager.hasplugin("subtests"):
        pytest.skip("needs pytest 9, or pytest-subtests")
    (tmp_path / "test_blocks.py").write_text(SUITE, encoding="utf-8")
    limits = write_limits(tmp_path / "limits.yaml", {key: entry() for key in JUDGED}, extends=False)
    run = run_pytest(tmp_path, "--gpucluster", limits)
    rows = {row["criterion"].rpartition("test_")[2]: row["outcome"] for row in run.results["criteria"]}
    assert {key: rows.get(key) for key in OUTCOMES} == OUTCOMES, run.stdout
    for key, outcome in OUTCOMES.items():
        assert run.case(f"test_{key}").outcome == KINDS[outcome]
    assert run.results["verdict"] == "REJECTED"
