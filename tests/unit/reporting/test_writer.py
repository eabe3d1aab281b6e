"""Reports while a run goes on: how often they are written, and that they are never an acceptance."""

from __future__ import annotations

import time

import pytest

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.reporting.results import ReportedTest, RunReport
from pytest_gpucluster.reporting.writer import ReportWriter, not_ended, texts_of
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


def test_costly_writing_is_rare() -> None:
    """A hundred outcomes in no time are one write, and another when something long begins; nothing new is none."""
    written: list[float] = []

    def write() -> None:
        time.sleep(0.02)
        written.append(time.monotonic())

    writer = ReportWriter(write)
    for _ in range(100):
        writer.note()
    assert len(written) == 1
    writer.catch_up()
    writer.catch_up()
    assert len(written) == 2


def test_a_disk_that_refuses_costs_no_run() -> None:
    """It is noticed elsewhere; the next outcome tries again."""
    tried: list[int] = []

    def write() -> None:
        tried.append(1)
        raise OSError(28, "No space left on device")

    writer = ReportWriter(write)
    writer.note()
    time.sleep(0.05)
    writer.note()
    assert len(tried) == 2


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        patch.setattr("pytest_gpucluster.reporting.writer.time.monotonic", lambda: self.now_s)


@pytest.mark.parametrize(("takes_s", "most"), [(3.0, 7), (0.01, 100)])
def test_many_calls_after_one_another(takes_s: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred calls of 2 s each, an outcome before each: reports that take long are written in about 5 % of the time.

    Reports that take little are written before every call.
    """
    clock, written = Clock(monkeypatch), []

    def write() -> None:
        clock.now_s += takes_s
        written.append(clock.now_s)

    writer = ReportWriter(write)
    for _ in range(100):
        writer.note()
        writer.catch_up()
        clock.now_s += 2
    assert min(4, most) <= len(written) <= most


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
