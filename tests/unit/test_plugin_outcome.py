"""From pytest's report of a teardown to an outcome."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpucluster.pairing import Pair
from pytest_gpucluster.plugin_outcome import Told, outcome_of
from pytest_gpucluster.verdict import Record, Terms, decide


def after_teardown(earlier: Record) -> Record | None:
    """What a teardown that fails makes of it."""
    with pytest.raises(IsADirectoryError) as caught:
        Path("/").read_bytes()
    call: Any = SimpleNamespace(when="teardown", excinfo=caught)
    report: Any = SimpleNamespace(outcome="failed", when="teardown")
    pair = Pair(criterion="tflops", place=None, judges=True)
    return outcome_of(report, call, Told(pair=pair, rule=None, criterion=None, earlier=earlier))


def test_a_waiver_covers_no_failing_teardown() -> None:
    """The failure was answered for, the teardown was not: an error without a waiver, and no acceptance."""
    waived = Record(criterion="tflops", place=None, outcome="failed", waiver={"who": "J. Doe"})
    found = after_teardown(waived)
    assert found is not None
    assert (found.outcome, found.waiver) == ("error", None)
    passed = Record(criterion="other", place=None, outcome="passed")
    assert decide([passed, found], Terms(rehearsal=False, level_reached=True)).word == "INCOMPLETE"


@pytest.mark.parametrize("outcome", ["failed", "error", "missing", "noisy"])
def test_what_was_bad_before_stays_as_it_was(outcome: str) -> None:
    """The teardown adds nothing to it."""
    assert after_teardown(Record(criterion="tflops", place=None, outcome=outcome)) is None
