"""Reports while a run goes on: how often they are written, and that they are never an acceptance."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.reporting.journal import EVERY_S, ReportWriter, not_ended, texts_of
from pytest_gpucluster.reporting.results import ReportedTest, RunReport
from pytest_gpucluster.thresholds.limit import Limit
from tests.support.operations import operations


@pytest.mark.parametrize("rehearsal", [False, True])
@pytest.mark.parametrize(("outcome", "word"), [("passed", "INCOMPLETE"), ("skipped", "INCOMPLETE"), ("failed", "REJECTED")])
def test_no_acceptance_before_the_end(outcome: str, word: str, rehearsal: bool) -> None:  # noqa: FBT001 -- a parameter
    """Everything has its outcome, and a teardown may still fail; also with a waiver, and in a rehearsal."""
    waived = Record(criterion="w", place=None, outcome="failed", waivable=True, waiver={"who": "J. Doe"})
    records = [Record(criterion=key, place=None, outcome="passed") for key in "ab"]
    terms = not_ended(Terms(rehearsal=rehearsal, level_reached=True))
    for more in ([], [waived]):
        found = decide([*records, *more, Record(criterion="c", place=None, outcome=outcome)], terms)
        assert found.word == word
        assert "the run has not ended" in found.line


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        patch.setattr("pytest_gpucluster.reporting.journal.time.monotonic", lambda: self.now_s)


class Reports:
    """Reports that take so long to write; when they were begun."""

    def __init__(self, patch: pytest.MonkeyPatch, *, takes_s: float) -> None:
        self.clock, self.takes_s = Clock(patch), takes_s
        self.begun_s: list[float] = []
        self.writer = ReportWriter(self._write)

    def _write(self) -> None:
        self.begun_s.append(self.clock.now_s)
        self.clock.now_s += self.takes_s

    def call(self, seconds: float) -> float:
        """A call of so many seconds, looked at ten times a second; by how much the writing delays its end."""
        began_s = self.clock.now_s
        while self.clock.now_s < began_s + seconds:
            self.writer.catch_up(self.clock.now_s - began_s)
            self.clock.now_s += 0.1
        return max(0.0, self.clock.now_s - began_s - seconds - 0.1)


@pytest.mark.parametrize("takes_s", [0.0, 0.05, 8.0])
def test_no_outcome_waits_for_reports(takes_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two calls nothing is written but once, at the start, however many outcomes come."""
    reports = Reports(monkeypatch, takes_s=takes_s)
    for _ in range(100):
        reports.writer.note()
        reports.clock.now_s += 10
    assert reports.begun_s == [0.0]


def test_first_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of an earlier run may not stand for this one: what is expected is written at once, and what comes soon after."""
    reports = Reports(monkeypatch, takes_s=0.01)
    reports.writer.note()
    assert reports.begun_s == [0.0]
    reports.call(5)
    assert len(reports.begun_s) == 1  # nothing new
    reports.writer.note()
    reports.call(5)
    assert len(reports.begun_s) == 2


@pytest.mark.parametrize("takes_s", [0.01, 3.0])
def test_at_most_every_half_minute(takes_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 20 s with an outcome before each, for an hour."""
    reports = Reports(monkeypatch, takes_s=takes_s)
    reports.writer.note()
    while reports.clock.now_s < 3600:
        reports.writer.note()
        reports.call(20)
    gaps = [later - earlier for earlier, later in pairwise(reports.begun_s[1:])]
    assert min(gaps) >= EVERY_S
    assert max(gaps) < EVERY_S + 30


@pytest.mark.parametrize(("seconds", "takes_s"), [(0.2, 5.0), (4.0, 5.0), (6.0, 5.0), (60.0, 5.0), (0.05, 0.05)])
def test_a_call_is_hardly_delayed(seconds: float, takes_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long is written only in a call that has lasted as long; the first call alone cannot know it."""
    reports = Reports(monkeypatch, takes_s=takes_s)
    reports.writer.note()
    delays = []
    for _ in range(50):
        reports.writer.note()
        reports.clock.now_s += 30
        delays.append(reports.call(seconds))
    assert max(delays) <= max(0.1, takes_s if seconds > takes_s else 0.0)
    assert len(reports.begun_s) == (51 if seconds > takes_s or takes_s < 0.1 else 1)


def test_after_each_round_of_a_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the next call, also where the last writing was a moment ago."""
    reports = Reports(monkeypatch, takes_s=0.01)
    for number in range(1, 5):
        reports.writer.note(is_due=True)
        reports.call(1)
        assert len(reports.begun_s) == number


def test_a_disk_that_refuses_costs_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed elsewhere; the next outcome tries again."""
    clock, tried = Clock(monkeypatch), []

    def write() -> None:
        tried.append(1)
        raise OSError(28, "No space left on device")

    writer = ReportWriter(write)
    for _ in range(3):
        writer.note()
        writer.catch_up(0.0)
        clock.now_s += EVERY_S
    assert len(tried) == 3


@pytest.mark.parametrize("outcome", ["passed", "failed", "missing"])
def test_work_for_the_reports_of_many_outcomes(outcome: str) -> None:
    """Twice as many outcomes are twice the work, and an outcome is not much."""

    def texts(number: int) -> tuple[str, str]:
        return texts_of(report_of(outcome, number))

    texts(10)
    few, many = (operations(lambda number=number: texts(number)) for number in (200, 400))  # type: ignore[misc]
    assert many <= 2.2 * few
    assert few / 200 <= 12000


def report_of(outcome: str, number: int) -> RunReport:
    """The report of so many outcomes at as many GPUs."""
    limit = Limit(kind="min", value=700, unit="TFLOPS")
    places = Inventory(num_nodes=number, gpus_per_node=1, device="cuda").by_id
    cases = tuple(
        ReportedTest(
            nodeid=f"tests/test_a.py::test_rate[{place}]",
            record=Record(
                criterion="rate",
                place=place,
                outcome=outcome,
                value=500.0,
                limit=limit,
                culprits=(place,) if outcome != "passed" else (),
                reason=f"rate at {place}: too low" if outcome != "passed" else None,
            ),
        )
        for place in places
        if "-gpu" in place
    )
    terms = Terms(rehearsal=True, level_reached=True)
    verdict = decide([case.record for case in cases], terms)
    return RunReport(cases=cases, verdict=verdict, places=places, facts={}, is_rehearsal=True)
