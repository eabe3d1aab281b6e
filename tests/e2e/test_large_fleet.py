"""A fleet of 16 x 8: counts and outcomes of the whole suite, and how much is done for each test. Never seconds."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.reporting.table import duration
from tests.support.launching import ACCEPTANCE
from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NODES, EACH = 16, 8
COUNTS = """
import json, pathlib
from _pytest._code.code import ExceptionInfo
from _pytest.fixtures import FixtureRequest
from _pytest.nodes import Node
from pluggy import HookCaller
from pytest_gpucluster.reporting import journal

made = {"walks": 0, "tracebacks": 0, "reports": 0, "hooks": 0, "requests": 0}

def counted(owner, name, what):
    real = getattr(owner, name)
    def call(*arguments, **values):
        made[what] += 1
        return real(*arguments, **values)
    setattr(owner, name, call)

counted(Node, "iter_markers_with_node", "walks")
counted(HookCaller, "__call__", "hooks")
counted(FixtureRequest, "__init__", "requests")
counted(ExceptionInfo, "getrepr", "tracebacks")
counted(journal, "write_reports", "reports")

def pytest_unconfigure():
    pathlib.Path("made.json").write_text(json.dumps(made))
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> tuple[FinishedRun, dict[str, int]]:
    """The run, in which one GPU asks to be reset, and what was counted in it."""
    folder: Path = tmp_path_factory.mktemp("fleet")
    (folder / "counts.py").write_text(COUNTS, encoding="utf-8")
    plugins = ("-p", "pytest_gpucluster.plugin.fleet", "-p", "counts")
    planted = (f"--fleet={NODES}x{EACH}", "--fleet-bad=node7-gpu3:reset")
    run = run_pytest(folder, *plugins, *planted, ACCEPTANCE)
    page = (folder / "gpucluster-results" / "report.html").read_text(encoding="utf-8")
    shown = page.count(f"{run.results['timings']['waited_s']} s")
    return run, {**json.loads((folder / "made.json").read_text(encoding="utf-8")), "shown on the page": shown}


def test_every_part_has_each_of_its_outcomes(fleet: tuple[FinishedRun, dict[str, int]]) -> None:
    """Once: a criterion of a GPU at 128 places, of a node at 16; the one fault fails once, and names its GPU alone."""
    run, _ = fleet
    rows = [row for row in run.results["criteria"] if row["outcome"] != "not_selected"]
    keys = [(row["criterion"], row["place"] and row["place"]["id"]) for row in rows]
    assert len(keys) == len({*keys})
    places = Counter(criterion for criterion, _ in keys)
    assert {*places.values()} == {NODES * EACH, NODES, 1}
    outcomes = Counter(row["outcome"] for row in rows)
    assert {*outcomes} == {"passed", "skipped", "failed"}
    failed = [key for key, row in zip(keys, rows, strict=True) if row["outcome"] == "failed"]
    assert failed == [("recovery_action", "node7-gpu3")]
    assert [culprit["place"]["id"] for culprit in run.results["culprits"]] == ["node7-gpu3"]
    events = Counter(event["event"] for event in run.journal)
    assert events["outcome"] == len(rows)
    assert run.results["verdict"] == "REJECTED"


def test_the_run_says_how_long_all_ranks_waited(fleet: tuple[FinishedRun, dict[str, int]]) -> None:
    """Its own figure, a part of the run; the terminal and the page have the same, as they have all seconds of the run."""
    run, made = fleet
    timings = run.results["timings"]
    assert 0 < timings["waited_s"] < timings["total_s"] - timings["startup_s"]
    said = " ".join(run.stdout.split())
    assert f"; ranks waited {duration(timings['waited_s'])}" in said
    assert f"took {duration(timings['total_s'])}: " in said
    assert f"other {duration(timings['other_s'])}" in said
    assert made["shown on the page"] == 1


def test_what_is_done_for_each_test(fleet: tuple[FinishedRun, dict[str, int]]) -> None:
    """No walk over all tests for one, no traceback that nobody sees; reports at the start, at the end, and rarely between."""
    run, made = fleet
    tests = sum(row["outcome"] != "not_selected" for row in run.results["criteria"])
    assert tests > 40 * NODES * EACH
    assert made["walks"] < 20 * tests  # before: 1,800
    assert made["hooks"] < 19 * tests  # before: 22.6 a test
    assert made["requests"] < 4 * tests  # requests for fixtures; before: 7.8 a test
    assert made["tracebacks"] <= 2  # before: one a GPU
    assert 2 <= made["reports"] <= 3 + run.results["timings"]["total_s"] / 30
