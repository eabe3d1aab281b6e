"""One limit: which values hold, and how far inside they are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pytest_gpucluster.judging.verdict import Record, is_only_measured
from pytest_gpucluster.thresholds.limit import Limit

HUGE = 10**400
"""An int that no float can hold."""


@pytest.mark.parametrize(
    ("kind", "at", "inside", "outside"),
    [("above", False, 701, 699), ("min", True, 701, 699), ("below", False, 699, 701), ("max", True, 699, 701)],
)
def test_limit_holds(kind: Any, at: bool, inside: float, outside: float) -> None:  # noqa: FBT001  # a table column
    """Strict and inclusive, floors and ceilings, with the margin to them."""
    limit = Limit(kind=kind, value=700, unit="TFLOPS")
    assert limit.holds(700) is at
    assert limit.holds(inside)
    assert not limit.holds(outside)
    assert limit.margin_percent(inside) == pytest.approx(100 / 700)
    assert limit.margin_percent(outside) == pytest.approx(-100 / 700)


NO_NUMBERS = (math.nan, math.inf, -math.inf, HUGE, -HUGE, None, True, False, "701", "", [], {})


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: str(value)[:5])
def test_a_limit_never_holds_without_a_number(value: object) -> None:
    """No kind of limit holds for anything but a finite number."""
    kinds: tuple[Any, ...] = ("above", "below", "min", "max")
    assert not any(Limit(kind=kind, value=1, unit="count").holds(value) for kind in kinds)


def test_no_margin_to_zero() -> None:
    """A percentage of nothing means nothing, and a value without an end has none."""
    assert Limit(kind="max", value=0, unit="errors").margin_percent(3) is None
    assert [Limit(kind="max", value=1, unit="errors").margin_percent(value) for value in (math.inf, HUGE)] == [None, None]
    assert Limit(kind="above", value=1e-300, unit="s").margin_percent(1e300) is None
    assert Limit(kind="above", value=1.797693134862316e306, unit="s").margin_percent(0.0) == -100


@pytest.mark.parametrize(
    ("kind", "value", "is_none"),
    [("above", 0, True), ("below", 1_000_000, True), ("below", 30, False), ("above", 1_000_000, False), ("below", 0, False)],
)
def test_a_limit_that_asks_for_nothing(kind: Any, value: float, *, is_none: bool) -> None:
    """A rate above zero, and a time below what no hardware takes: such a value is only measured, and never `ok`."""
    limit = Limit(kind=kind, value=value, unit="us")
    record = Record(criterion="latency[all_reduce]", place="node0", outcome="passed", value=14.2, limit=limit)
    assert limit.is_none is is_none
    assert is_only_measured(record) is is_none
