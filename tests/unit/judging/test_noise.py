"""When repeats can be judged, and when a value stays open."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.errors import CriterionFailedError, MeasurementError
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.noise import Repeats, Spread, doubt, spread_of
from pytest_gpucluster.judging.verdict import FAILED, NOISY, PASSED
from pytest_gpucluster.places import Place
from tests.support.entries import limit, threshold

A = Place(id="node0-gpu0", node=0, gpu=0, rank=0, hostname="gpu-node-0")
B = Place(id="node0-gpu1", node=0, gpu=1, rank=1, hostname="gpu-node-0")
QUIET = [719, 720, 721]
WILD = [600, 720, 840]
NEAR = [698, 699, 701, 702]


def repeats(samples: list[float], *, then: list[float] | None = None) -> Repeats:
    """Around the middle sample; ``then`` is what a second look finds."""
    middle = sorted(samples)[len(samples) // 2]
    return Repeats(value=middle, samples=samples, again=None if then is None else lambda: repeats(then))


def criterion(**changes: Any) -> Criterion:
    """More than 700 TFLOPS, repeats within 3 %."""
    return Criterion(threshold=threshold(**{"noise": 0.03, **changes}), limit=limit("above", 700), place=A)


def test_deciles_are_interpolated() -> None:
    """Between neighbours, both ends included; a repeat alone is all three."""
    seen = spread_of([4.0, 1.0, 3.0, 2.0])
    assert (seen.low, seen.median, seen.high) == pytest.approx((1.3, 2.5, 3.7))
    assert spread_of([7.0]) == Spread(low=7.0, median=7.0, high=7.0, count=1)


@given(st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=1, max_size=50))
def test_spread_is_within_the_samples(samples: list[float]) -> None:
    """Low to high, whatever they are."""
    seen = spread_of(samples)
    assert min(samples) <= seen.low <= seen.median <= seen.high <= max(samples)
    assert seen.relative >= 0


@pytest.mark.parametrize("samples", [[-1.0, 0.0, 1.0]])
def test_spread_around_zero_is_infinite(samples: list[float]) -> None:
    """Nothing is relative to 0."""
    assert math.isinf(spread_of(samples).relative)
    assert spread_of([0.0, 0.0]).relative == 0


@pytest.mark.parametrize(
    ("samples", "allowed", "reason"),
    [
        (QUIET, 0.03, None),
        (WILD, 0.03, "spread over 26.7 %, and 3 % are allowed"),
        (WILD, 0.3, "the limit lies inside"),
        ([*QUIET, 600, *QUIET, *QUIET], 0.03, None),
        (NEAR, 0.03, "the limit lies inside the 10th to 90th percentile of 4 repeats, 698.3 to 701.7"),
        (NEAR, None, None),
        ([600, 840], 0.03, None),
        ([700, 700, 700], 0.03, None),
    ],
)
def test_doubt(samples: list[float], allowed: float | None, reason: str | None) -> None:
    """One outlier in ten is none; entries without an allowance and fewer than three repeats say nothing."""
    found = doubt(repeats(samples), limit=limit("above", 700), allowed=allowed)
    assert found is None if reason is None else found is not None and reason in found


REPEATS = st.lists(st.floats(min_value=0.1, max_value=1e6), min_size=3, max_size=50)


@given(samples=REPEATS, beyond=st.floats(min_value=1.01, max_value=100.0), is_floor=st.booleans())
def test_repeats_that_all_miss_by_more_than_their_spread_have_failed(
    *, samples: list[float], beyond: float, is_floor: bool
) -> None:
    """3.1 GB/s where 350 are asked is FAILED, whatever the repeats say of each other."""
    width = max(samples) - min(samples)
    away = beyond * width + 1.0
    missed = limit("above", max(samples) + away) if is_floor else limit("below", min(samples) - away)
    assert not any(missed.holds(sample) for sample in samples)
    assert doubt(repeats(samples), limit=missed, allowed=0.01) is None


@given(samples=REPEATS, share=st.floats(min_value=0.0, max_value=1.0), allowed=st.floats(min_value=0.0, max_value=10.0))
def test_repeats_that_straddle_the_limit_are_never_judged(samples: list[float], share: float, allowed: float) -> None:
    """Neither passed nor failed while the limit lies within their spread."""
    seen = spread_of(samples)
    value = seen.low + share * (seen.high - seen.low)
    if seen.low < value < seen.high:
        assert doubt(repeats(samples), limit=limit("above", value), allowed=allowed) is not None


@pytest.mark.parametrize(("value", "is_open"), [(350, False), (3.4, True), (2.9, True), (0.1, False)])
def test_only_repeats_near_the_limit_are_too_close(*, value: float, is_open: bool) -> None:
    """A link at a hundredth of its limit has failed; one that comes near it is measured again."""
    samples = [2.9, 3.0, 3.1, 3.2, 3.3, 3.4]
    assert (doubt(repeats(samples), limit=limit("above", value), allowed=0.05) is not None) == is_open


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "700", True, pytest.param(10**5000, id="long")])
def test_repeats_are_numbers(bad: Any) -> None:
    """Anything else was not measured."""
    with pytest.raises(MeasurementError, match="not a finite number"):
        Repeats(value=700, samples=[700, bad])


def test_clear_values_are_judged_at_once() -> None:
    """No second look is asked for."""
    good, bad = criterion(), criterion()
    good.require(repeats(QUIET))
    with pytest.raises(CriterionFailedError):
        bad.require(repeats([499, 500, 501]))
    assert good.judged is not None
    assert bad.judged is not None
    assert (good.judged.outcome, bad.judged.outcome) == (PASSED, FAILED)
    assert good.judged.evidence == {}


@pytest.mark.parametrize(("then", "outcome"), [(QUIET, PASSED), ([499, 500, 501], FAILED), (WILD, NOISY), (NEAR, NOISY)])
def test_second_look_decides(then: list[float], outcome: str) -> None:
    """The second value is judged if it is clear; the first is kept beside it."""
    judge = criterion()
    try:
        judge.require(repeats(WILD, then=then))
    except (CriterionFailedError, MeasurementError) as error:
        assert isinstance(error, CriterionFailedError) == (outcome == FAILED)  # noqa: PT017 -- either may come
    assert judge.judged is not None
    assert judge.judged.outcome == outcome
    assert judge.judged.value == repeats(then).value
    assert judge.judged.evidence["first measured TFLOPS"] == 720


def test_no_second_look_to_be_had() -> None:
    """What cannot be measured again stays open."""
    judge = criterion()
    with pytest.raises(MeasurementError, match="too close to call") as caught:
        judge.require(repeats(WILD))
    assert caught.value.kind == "noisy"


def test_by_places() -> None:
    """A clear failure at one place decides; otherwise one open place leaves all open."""
    failed, left_open, passed = criterion(), criterion(), criterion()
    with pytest.raises(CriterionFailedError):
        failed.require({A: repeats(WILD), B: repeats([499, 500, 501])})
    with pytest.raises(MeasurementError, match=r"gpu-node-0 gpu 0 \(node0-gpu0\) is too close"):
        left_open.require({A: repeats(WILD), B: repeats(QUIET)})
    passed.require({A: repeats(QUIET), B: 750})
    assert [judge.judged and judge.judged.outcome for judge in (failed, left_open, passed)] == [FAILED, NOISY, PASSED]


def test_failure_outranks_noise_and_noise_outranks_passing() -> None:
    """In whatever order they come."""
    judge = criterion()
    judge.require(750)
    with pytest.raises(MeasurementError):
        judge.require(repeats(WILD))
    judge.require(760)
    assert judge.judged is not None
    assert judge.judged.outcome == NOISY
    with pytest.raises(CriterionFailedError):
        judge.require(500)
    assert judge.judged.outcome == FAILED


def test_results_measure_everything_again_once() -> None:
    """Two doubtful places share the second look; a place that failed in it raises."""
    looks = []

    def again() -> Results:
        looks.append(1)
        return Results({A: {"rate": 720, "all": QUIET}}, {B: MeasurementError("died")})

    first = Results({A: {"rate": 720, "all": WILD}, B: {"rate": 720, "all": WILD}}, {}, again=again)
    judge = criterion()
    judge.require(first.repeated(A, "rate", "all"))
    with pytest.raises(MeasurementError, match="died"):
        criterion().require(first.repeated(B, "rate", "all"))
    assert looks == [1]
    assert judge.judged is not None
    assert judge.judged.outcome == PASSED
