"""The time of day is set while a run goes on, forwards and backwards, at the controller and at the ranks."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.commands import main
from tests.support.runs import run_pytest
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

CONFTEST = '''
"""Each phase of each test begins at another time of day. Nothing that is measured by a clock nobody sets may notice."""

import itertools
import time

own, own_ns = time.time, time.time_ns
STEPS_S = itertools.cycle([0, 3600, -3600, 400 * 86400, -30 * 86400, 0.5, -90])
now = {"s": 0}
time.time = lambda: own() + now["s"]
time.time_ns = lambda: own_ns() + int(now["s"] * 1e9)


def step(*_, **__):
    now["s"] = next(STEPS_S)


pytest_runtest_logstart = pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = lambda: step()
'''
TESTS = '''
import os
import time

import pytest

from pytest_gpucluster import MeasurementError


@pytest.fixture(scope="session")
def rates(cluster):
    return cluster.run(rate, per="gpu")


def rate():
    """A rank whose clock is set back while it measures."""
    own = time.time
    time.time = lambda: own() - 86400
    try:
        time.sleep(0.2)
    finally:
        time.time = own
    return 1.0 if os.environ["RANK"] == "0" else 0.1


def test_rate(rates, place, criterion):
    criterion.require(rates[place])


def hang():
    time.sleep(600)


def test_deadline(cluster):
    began_s = time.monotonic()
    with pytest.raises(MeasurementError):
        cluster.run(hang, per="gpu", deadline_s=2).value
    assert time.monotonic() - began_s < 60


def test_plain():
    time.sleep(0.05)


def seen():
    return 3


@pytest.mark.over_run(seen, per="gpu")
def test_seconds(over_run, place):
    assert 0 < over_run.seconds < 300
    assert over_run[place] == (3, 3)
'''


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[FinishedRun, Path, float]:
    """A rehearsal on two ranks, its folder, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("clock")
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_clock.py").write_text(TESTS, encoding="utf-8")
    limits = write_limits(folder / "limits.yaml", {"rate": entry(per="gpu", min=0.5)}, extends=False)
    began_s = time.monotonic()
    return run_pytest(folder, "--gpucluster", limits, "test_clock.py"), folder, time.monotonic() - began_s


def test_outcomes_are_those_of_the_values(ran: tuple[FinishedRun, Path, float]) -> None:
    """No false green and no false red, and no hang."""
    run, _, _ = ran
    found = {case.name: case.outcome for case in run.cases if case.name.startswith("test_")}
    places = ("node0-cpu0", "node0-cpu1")
    assert found == {
        "test_rate[node0-cpu0]": "passed",
        "test_rate[node0-cpu1]": "failure",
        "test_deadline": "passed",
        "test_plain": "passed",
        **{f"test_seconds[{place}]": "passed" for place in places},
    }, run.stdout
    assert run.results["verdict"] == "REJECTED"
    assert [culprit["place"]["id"] for culprit in run.results["culprits"]] == ["node0-cpu1"]


def test_no_time_is_negative_or_of_the_day(ran: tuple[FinishedRun, Path, float]) -> None:
    """In JUnit, results.json and the terminal's line: each lies within the seconds that the run took."""
    run, _, took_s = ran
    assert run.junit is not None
    times = [float(element.get("time", "0")) for element in run.junit.iter() if element.get("time") is not None]
    times += [value for value in run.results["timings"].values() if isinstance(value, (int, float))]
    times += [run.results["run"]["duration_s"]]
    assert len(times) > 5
    assert [one for one in times if not 0 <= one <= took_s + 1] == []
    assert f"took {run.results['timings']['total_s']:.1f} s" in run.stdout


def test_reports_from_the_journal_say_the_same(ran: tuple[FinishedRun, Path, float], tmp_path: Path) -> None:
    """The journal's times jump; what is made of it does not."""
    run, folder, took_s = ran
    results = folder / "gpucluster-results"
    assert main.main(["report", str(results), "--junitxml", str(tmp_path / "junit.xml")]) in (0, 1)
    rebuilt = json.loads((results / "results.json").read_text(encoding="utf-8"))
    assert (rebuilt["verdict"], rebuilt["verdict_line"]) == (run.results["verdict"], run.results["verdict_line"])
    assert 0 <= rebuilt["run"]["duration_s"] <= took_s + 1
    assert 0 <= rebuilt["timings"]["total_s"] <= took_s + 1


def test_a_cut_journal_takes_no_negative_time(ran: tuple[FinishedRun, Path, float], tmp_path: Path) -> None:
    """Of a run that was killed only the journal's times of day are known: a duration by them is at least 0."""
    _, folder, _ = ran
    lines = (folder / "gpucluster-results" / "journal.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for number in range(4, len(lines)):
        cut = tmp_path / str(number)
        cut.mkdir()
        (cut / "journal.jsonl").write_text("".join(lines[:number]), encoding="utf-8")
        main.main(["report", str(cut)])
        rebuilt = json.loads((cut / "results.json").read_text(encoding="utf-8"))
        assert rebuilt["run"]["duration_s"] >= 0
        assert rebuilt["timings"]["total_s"] >= 0, lines[number - 1]
