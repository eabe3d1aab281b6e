"""A criterion that is judged bad after its test has passed: in a teardown, by a thread, by another test. Never green."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.runs import run_pytest
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

TESTS = """
import threading
from contextlib import suppress

import pytest

kept = {}


@pytest.fixture
def judges_at_its_end(criterion):
    yield
    with suppress(Exception):
        criterion.require(JUDGED)


def test_teardown(judges_at_its_end, criterion):
    criterion.require(2)


def test_thread(criterion):
    criterion.require(2)
    kept["go"] = threading.Event()
    kept["thread"] = threading.Thread(target=lambda: (kept["go"].wait(), criterion.require(JUDGED)))
    kept["thread"].start()


def test_stored(criterion):
    criterion.require(2)
    kept["criterion"] = criterion


def test_zz_uses_them(cluster):
    kept["go"].set()
    kept["thread"].join()
    with suppress(Exception):
        kept["criterion"].require(JUDGED)
"""
NAMES = ("teardown", "thread", "stored")


@pytest.mark.parametrize(("judged", "verdict"), [("1", "REHEARSED"), ("0", "INCOMPLETE"), ("None", "INCOMPLETE")])
def test_it_is_not_green(tmp_path: Path, judged: str, verdict: str) -> None:
    """A teardown makes an error of its test. What comes later still forbids an acceptance, by the test's name."""
    (tmp_path / "test_own.py").write_text(TESTS.replace("JUDGED", judged), encoding="utf-8")
    limits = write_limits(tmp_path / "limits.yaml", {name: entry() for name in NAMES}, extends=False)
    ran = run_pytest(tmp_path, "--gpucluster", limits, "-W", "ignore", "test_own.py")
    assert ran.results["verdict"] == verdict, ran.stdout
    outcomes = {row["criterion"]: row["outcome"] for row in ran.results["criteria"]}
    is_good = verdict == "REHEARSED"
    assert outcomes == {**dict.fromkeys((*NAMES, "zz_uses_them"), "passed"), "teardown": "passed" if is_good else "error"}
    late = [one for one in ran.results["objections"] if "was judged after it had ended" in one]
    named = [one.partition(" was")[0].partition("::test_")[2] for one in late]
    assert named == ([] if is_good else ["thread", "stored"])
    assert (ran.returncode == 0) is is_good


def test_a_python_without_asserts_is_refused(tmp_path: Path) -> None:
    """Under -O every assert is gone, also those of a module that a test or a measurement calls."""
    (tmp_path / "test_own.py").write_text("def test_low():\n    assert 0\n", encoding="utf-8")
    words = (sys.executable, "-m", "pytest", "--gpucluster", "--assert=plain", "test_own.py")
    variables = {**os.environ, "PYTHONOPTIMIZE": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 4, done.stdout
    assert "python -O (PYTHONOPTIMIZE) removes every assert" in done.stderr
    assert not (tmp_path / "gpucluster-results").exists()
