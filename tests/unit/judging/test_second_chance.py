"""What is measured once more at the end, for how long, and what both looks say together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpucluster.judging.second_chance import AGAIN, budget_s, in_words, is_due, with_first_look
from pytest_gpucluster.judging.verdict import OUTCOMES, Record
from tests.support.entries import limit


def record(outcome: str, value: float | None = None, **changes: Any) -> Record:
    """An outcome of bf16 at one GPU."""
    return Record(criterion="bf16", place="node0-gpu0", outcome=outcome, value=value, limit=limit(), **changes)


NOISY = record("noisy", 705.0, reason="bf16 is too close to call\n  why")
BUSY = record("error", reason="GPU not idle: a job", is_disturbed=True)


@pytest.mark.parametrize(
    ("one", "due"),
    [
        (NOISY, True),
        (BUSY, True),
        (record("error", reason="a rank died"), False),
        (replace(NOISY, waiver={"who": "somebody"}), False),
        (replace(BUSY, teardown="its teardown failed"), False),
        *((record(outcome), False) for outcome in OUTCOMES if outcome != "noisy"),
    ],
)
def test_what_is_due(one: Record, due: bool) -> None:  # noqa: FBT001 -- a parameter
    """What was undecided or disturbed, and nothing that was decided: a failure least of all."""
    assert is_due(one) is due


@pytest.mark.parametrize("first", [NOISY, BUSY])
@pytest.mark.parametrize("outcome", ["passed", "failed", "noisy", "error"])
def test_the_second_look_decides(first: Record, outcome: str) -> None:
    """Its outcome and value count; both values are in the evidence, and in a text."""
    second = record(outcome, 750.0, reason=None if outcome == "passed" else "bf16: what it is", evidence={"SM MHz": 1980})
    both = with_first_look(second, first)
    assert (both.outcome, both.value) == (outcome, 750.0)
    assert both.evidence == {
        "SM MHz": 1980,
        AGAIN: True,
        "first look": first.outcome,
        "first look value": first.value,
        "first look reason": first.message,
    }
    text = both.remark if outcome == "passed" else both.reason
    assert text is not None
    assert f"{AGAIN}: 750 TFLOPS; first " in text
    assert ("705 TFLOPS" if first is NOISY else "GPU not idle: a job") in text


def test_a_second_look_that_did_not_take_place_leaves_the_first() -> None:
    """The run was ended meanwhile: the first outcome stays, and says so."""
    both = with_first_look(record("missing", reason="not run: terminated by SIGTERM"), NOISY)
    assert (both.outcome, both.value) == ("noisy", 705.0)
    assert "not measured again: not run: terminated by SIGTERM" in str(both.reason)


def test_a_remark_of_the_second_look_stays() -> None:
    """Stalls beside it."""
    both = with_first_look(record("passed", 750.0, remark="2 of 30 repeats stalled"), NOISY)
    assert str(both.remark).startswith("2 of 30 repeats stalled; ")


def test_a_load_that_was_gone_is_one_remark() -> None:
    """Of all places and criteria, whatever each of them measured then and now."""
    first = replace(BUSY, cause="host not idle", blames="host")
    remarks = {
        with_first_look(record("passed", value), replace(first, reason=f"host not idle: a job, {value}")).remark
        for value in (750.0, 751.0)
    }
    assert remarks == {f"{AGAIN}; first not measured: host not idle"}
    again = replace(first, reason="host not idle: a job on vm; bf16 at gpu 0: 39 TFLOPS\n  next: end it")
    still = with_first_look(again, first)
    assert str(still.reason).endswith(f"\n  {AGAIN}: not measured; first not measured: host not idle")


def test_an_advisory_miss_keeps_its_reason() -> None:
    """Passed, with a text that says both."""
    both = with_first_look(record("passed", 650.0, advisory=True, reason="below"), BUSY)
    assert AGAIN in str(both.reason)
    assert both.remark is None


def test_a_long_first_reason_is_cut_in_the_text_alone() -> None:
    """results.json has it whole."""
    both = with_first_look(record("passed", 750.0), replace(BUSY, reason="x" * 1000))
    assert len(str(both.remark)) < 300
    assert both.evidence["first look reason"] == "x" * 1000


@pytest.mark.parametrize(("planned_s", "seconds"), [(4.0, 60.0), (120.0, 60.0), (240.0, 120.0)])
def test_second_looks_have_a_share_of_the_plan(planned_s: float, seconds: float) -> None:
    """Half of it, and a minute at least."""
    assert budget_s(planned_s) == seconds


def test_what_is_measured_again_in_a_line() -> None:
    """By criterion; many are counted."""
    two = [record("noisy"), replace(record("noisy"), place="node0-gpu1")]
    assert in_words([*two, replace(two[0], criterion="hbm")]) == "bf16 2, hbm"
    many = [replace(two[0], criterion=f"c{number}") for number in range(9)]
    assert in_words(many).endswith("c5, and 3 more criteria")
