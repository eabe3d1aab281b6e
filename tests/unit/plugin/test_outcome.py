"""From pytest's report to an outcome: what a test does afterwards makes nothing better."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.errors import DoesNotApplyError, MeasurementError
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.noise import Repeats
from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.plugin.outcome import ItemContext, outcome_of
from pytest_gpucluster.plugin.pairing import Pairing
from tests.support.entries import limit, threshold

if TYPE_CHECKING:
    from collections.abc import Callable


PAIR = Pairing(criterion="tflops", place=None, judges=True)


def after_teardown(earlier: Record, outcome: str = "failed") -> Record | None:
    """What a teardown that fails makes of it."""
    with pytest.raises(IsADirectoryError) as caught:
        Path("/").read_bytes()
    call: Any = SimpleNamespace(when="teardown", excinfo=caught)
    report: Any = SimpleNamespace(outcome=outcome, when="teardown", wasxfail="known")
    found = outcome_of(report, call, ItemContext(pair=PAIR, rule=None, criterion=None, earlier=earlier))
    assert (report.outcome, hasattr(report, "wasxfail")) == ("failed", False)
    return found


def test_a_waiver_covers_no_failing_teardown() -> None:
    """The failure was answered for, the teardown was not: an error without a waiver, and no acceptance."""
    waived = Record(criterion="tflops", place=None, outcome="failed", waiver={"who": "J. Doe"}, waivable=True)
    found = after_teardown(waived)
    assert found is not None
    assert (found.outcome, found.waiver, found.waivable) == ("error", None, False)
    passed = Record(criterion="other", place=None, outcome="passed")
    assert decide([passed, found], Terms(rehearsal=False, level_reached=True)).word == "INCOMPLETE"


@pytest.mark.parametrize("outcome", ["failed", "error", "missing", "noisy"])
def test_what_was_bad_before_stays_as_it_was(outcome: str) -> None:
    """The teardown adds only how it failed itself."""
    before = Record(criterion="tflops", place=None, outcome=outcome, reason="bad")
    found = after_teardown(before)
    assert found is not None
    assert found.teardown is not None
    assert found.teardown.startswith("its teardown failed: IsADirectoryError")
    assert replace(found, teardown=None, started=False) == before


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_mark_hides_no_failing_teardown(outcome: str) -> None:
    """Pytest calls it skipped where the test has the mark xfail, or the teardown itself calls pytest.skip."""
    found = after_teardown(Record(criterion="tflops", place=None, outcome="passed"), outcome)
    assert found is not None
    assert found.outcome == "error"


def run(body: Callable[[Criterion], None], *, when: Any = "call", **told: Any) -> tuple[Record, Any]:
    """The record and the corrected report of a test with this body, or with a fixture of it, in its call phase or set-up."""
    judge = Criterion(threshold=threshold(noise=0.05), limit=limit(), place=None)
    call = pytest.CallInfo.from_call(lambda: body(judge), when)
    kind = "passed" if call.excinfo is None else "skipped" if call.excinfo.errisinstance(pytest.skip.Exception) else "failed"
    text = "" if call.excinfo is None else call.excinfo.exconly()
    report: Any = SimpleNamespace(outcome=kind, when=when, longrepr=text, longreprtext=text)
    record = outcome_of(report, call, ItemContext(pair=PAIR, rule=None, criterion=judge, earlier=None, **told))
    assert record is not None
    return record, report


def passes(criterion: Criterion) -> None:
    """A good value."""
    criterion.require(800)


def fails(criterion: Criterion) -> None:
    """A bad one."""
    criterion.require(500)


def skips(criterion: Criterion) -> None:
    """Leaves by itself."""
    del criterion
    pytest.skip("let us not talk about it")


def is_noisy(criterion: Criterion) -> None:
    """Too close to call, twice."""
    repeats = [500.0, 800.0, 900.0]
    criterion.require(Repeats(value=800.0, samples=repeats, again=lambda: Repeats(value=800.0, samples=repeats * 3)))


def swallows(value: Any, then: Callable[[Criterion], None]) -> Callable[[Criterion], None]:
    """Hears nothing of what becomes of the first value."""

    def body(criterion: Criterion) -> None:
        with contextlib.suppress(Exception):
            criterion.require(value)
        then(criterion)

    return body


def found(outcome: str) -> Record:
    """What a round of the soak has put on record."""
    return Record(criterion="tflops", place=None, outcome=outcome, value=400.0, reason="in round 2")


@pytest.mark.parametrize("then", [None, skips, is_noisy])
def test_a_fixture_that_judges_makes_a_failure(then: Callable[[Criterion], None] | None) -> None:
    """A bad value was measured, in the set-up too, and whatever the fixture does after it."""
    record, report = run(fails if then is None else swallows(500, then), when="setup")
    assert (record.outcome, record.value, record.waivable) == ("failed", 500.0, then is not skips)
    assert (report.outcome, report.when) == ("failed", "call")


@pytest.mark.parametrize("body", [skips, is_noisy])
def test_a_fixture_without_a_bad_value_is_an_error(body: Callable[[Criterion], None]) -> None:
    """It could not make what its test needs."""
    record, report = run(body, when="setup")
    assert (record.outcome, report.outcome, report.when) == ("error", "failed", "setup")


@pytest.mark.parametrize("before", ["failed", "error"])
@pytest.mark.parametrize("body", [passes, skips, is_noisy, lambda criterion: None])
def test_what_a_round_found_stays(before: str, body: Callable[[Criterion], None]) -> None:
    """The test passes, skips, judges something else or nothing: the record is no better for it, and pytest's report agrees."""
    record, report = run(body, kept=found(before))
    assert (record.outcome, record.reason, record.waivable) == (before, "in round 2", False)
    assert (report.outcome, report.when, report.longrepr) == ("failed", "call" if before == "failed" else "setup", "in round 2")


def test_an_expected_failure_does_not_hide_it() -> None:
    """pytest.xfail is an exception of the test's own like any other."""
    record, report = run(lambda _: pytest.xfail("known"), kept=found("failed"))
    assert (record.outcome, report.outcome) == ("failed", "failed")


def test_the_judgement_at_the_end_holds_all_rounds() -> None:
    """It takes the place of a round's failure, and turns an error into the failure that it is."""
    for before in ("failed", "error"):
        record, _ = run(fails, kept=found(before))
        assert (record.outcome, record.value) == ("failed", 500.0)


@pytest.mark.parametrize(("body", "outcome"), [(passes, "error"), (fails, "failed"), (is_noisy, "noisy"), (skips, "error")])
def test_a_soak_that_was_not_measured_to_its_end(body: Callable[[Criterion], None], outcome: str) -> None:
    """Passes nobody, and nobody can answer for what it found; to its end, a bad value can be answered for."""
    record, _ = run(body, unmeasured="no whole round of the soak was measured")
    assert (record.outcome, record.waivable) == (outcome, False)
    if body is passes:
        assert record.reason == "tflops was not measured to its end: no whole round of the soak was measured"
    whole, _ = run(body)
    assert whole.waivable == (body in (fails, is_noisy))


@pytest.mark.parametrize("value", [math.nan, None, "800", {}])
def test_no_value_is_an_error_that_a_second_one_does_not_heal(value: Any) -> None:
    """NaN and the like, also where the test goes on as if nothing had been; a bad value beside it cannot be waived."""
    for then in (passes, skips):
        record, report = run(swallows(value, then))
        assert (record.outcome, report.outcome, report.when) == ("error", "failed", "setup")
    record, _ = run(swallows(value, fails))
    assert (record.outcome, record.waivable) == ("failed", False)


def test_only_a_value_can_be_answered_for() -> None:
    """Not an assertion of the test's own, nor a test that fell over after its value."""
    assert run(fails)[0].waivable
    assert run(swallows(500, passes))[0].waivable
    assert not run(swallows(500, skips))[0].waivable

    def asserts(criterion: Criterion) -> None:
        criterion.require(800)
        raise AssertionError

    record, _ = run(asserts)
    assert (record.outcome, record.waivable) == ("failed", False)


def left_out(criterion: Criterion, error: BaseException) -> tuple[str, str | None]:
    """What becomes of a test that ends with this error, and the rule that is told."""
    with pytest.raises(type(error)) as caught:
        raise error
    call: Any = SimpleNamespace(when="call", excinfo=caught)
    report: Any = SimpleNamespace(
        outcome="failed", when="call", location=("test_x.py", 1, "test_x"), longreprtext="", longrepr=""
    )
    found = outcome_of(report, call, ItemContext(pair=PAIR, rule=None, criterion=criterion, earlier=None))
    assert found is not None
    assert (report.outcome == "skipped") == (found.outcome == "skipped")
    return found.outcome, found.cause


def test_a_criterion_leaves_by_its_own_rule_only() -> None:
    """Its entry names the program; without that, after a value, or by an error that somebody else made, it may not."""
    optional = Criterion(threshold=threshold("tflops", needs={"program": "dcgmi"}), limit=limit(), place=None)
    with pytest.raises(DoesNotApplyError, match="needs dcgmi, which is not installed on any host") as caught:
        optional.does_not_apply("on any host")
    assert left_out(optional, caught.value) == ("skipped", "no dcgmi")
    rooted = Criterion(threshold=threshold("tflops", needs={"root": True}), limit=limit(), place=None)
    with pytest.raises(DoesNotApplyError, match=r"needs to run as root on host a; root would see: [A-Z]") as refused:
        rooted.does_not_apply("on host a")
    assert left_out(rooted, refused.value) == ("skipped", "not root")
    assert left_out(optional, DoesNotApplyError("mine", cause="mine"))[0] == "error"
    assert left_out(replace(optional, first_error=MeasurementError("no value")), caught.value)[0] == "error"
    judged = replace(optional)
    judged.require(1e6)
    assert left_out(judged, caught.value)[0] == "error"
    bound = Criterion(threshold=threshold("tflops"), limit=limit(), place=None)
    with pytest.raises(MeasurementError, match="may not leave by itself"):
        bound.does_not_apply("here")
    assert left_out(bound, DoesNotApplyError("mine", cause="mine"))[0] == "error"
