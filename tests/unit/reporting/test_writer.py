"""Reports while a run goes on: how often they are written, and that they are never an acceptance."""

from __future__ import annotations

import time

import pytest

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.reporting.writer import ReportWriter, not_ended


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
