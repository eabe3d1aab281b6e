"""When repeats can be judged, and when a value stays open."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.errors import CriterionFailedError, MeasurementError
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.noise import (
    MORE,
    Repeats,
    Settled,
    Spread,
    doubt,
    doubt_of_median,
    interval_of_median,
    samples_of,
    settle,
    spread_of,
    stalls_of,
)
from pytest_gpucluster.judging.verdict import FAILED, NOISY, PASSED
from pytest_gpucluster.places import Place
from tests.support.entries import limit, threshold

A = Place(id="node0-gpu0", node=0, gpu=0, rank=0, hostname="gpu-node-0")
B = Place(id="node0-gpu1", node=0, gpu=1, rank=1, hostname="gpu-node-0")
QUIET = [719, 720, 721]
WILD = [600, 720, 840]
NEAR = [698, 699, 701, 702]


def repeats(samples: list[float], *then: list[float], took_s: float = 0.0) -> Repeats:
    """Around the middle sample; ``then`` is what further rounds find, the last one again and again."""
    middle = sorted(samples)[len(samples) // 2]
    further = then[1:] or then
    again = (lambda: repeats(then[0], *further, took_s=took_s)) if then else None
    return Repeats(value=middle, samples=samples, again=again, took_s=took_s)


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


@pytest.mark.parametrize(
    ("value", "samples"),
    [(800, []), (800, [100] * 20), (800, [100, 799]), (100.0, [800.0]), (0.0, [700.0] * 3), (-1, [-3, -2]), (5, [0, 0, 0])],
)
def test_a_value_is_the_middle_of_its_repeats(value: float, samples: list[float]) -> None:
    """Without repeats, or beyond all of them, it was not measured: 800 beside repeats of 100 would pass, or blame a part."""
    with pytest.raises(MeasurementError, match=r"has no repeats|is not the middle of its repeats"):
        Repeats(value=value, samples=samples)


@pytest.mark.parametrize(("value", "samples"), [(71.23456, [71.23]), (-0.0, [0.0]), (-2.5, [-3, -2]), (1e-9, [1.0004e-9])])
def test_repeats_may_be_rounded(value: float, samples: list[float]) -> None:
    """As those of the report are."""
    assert Repeats(value=value, samples=samples).value == value


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


@pytest.mark.parametrize(
    ("then", "outcome", "value"),
    [(QUIET, PASSED, 720), ([499, 500, 501], FAILED, 500.5), ([694, 698, 702, 706], NOISY, 702), (NEAR, NOISY, 701)],
)
def test_further_rounds_decide(then: list[float], outcome: str, value: float) -> None:
    """The median of all repeats is judged once its interval is clear; what was measured first is kept beside it."""
    judge = criterion()
    try:
        judge.require(repeats(WILD, then * 3))
    except (CriterionFailedError, MeasurementError) as error:
        assert isinstance(error, CriterionFailedError) == (outcome == FAILED)  # noqa: PT017 -- either may come
    assert judge.judged is not None
    assert judge.judged.outcome == outcome
    assert judge.judged.value == pytest.approx(value, abs=1)
    assert judge.judged.evidence["first measured TFLOPS"] == 720
    assert "spread over 26.7 %" in judge.judged.evidence["measured again because"]


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
        return Results({A: {"rate": 720, "all": QUIET * 3}}, {B: MeasurementError("died")})

    first = Results({A: {"rate": 720, "all": WILD}, B: {"rate": 720, "all": WILD}}, {}, again=again)
    judge = criterion()
    judge.require(first.repeated(A, "rate", "all"))
    with pytest.raises(MeasurementError, match="died"):
        criterion().require(first.repeated(B, "rate", "all"))
    assert looks == [1]
    assert judge.judged is not None
    assert judge.judged.outcome == PASSED


# --- the median and its interval ---


@pytest.mark.parametrize(
    ("count", "ends"), [(3, (1, 3)), (7, (1, 7)), (8, (1, 8)), (20, (4, 17)), (30, (8, 23)), (400, (174, 227))]
)
def test_interval_is_that_of_the_tables(count: int, ends: tuple[int, int]) -> None:
    """Order statistics of the sign test at 99 %; fewer than 8 repeats are all in it."""
    assert interval_of_median([*range(count, 0, -1)]) == ends


def test_interval_has_the_median_in_99_of_100_samples() -> None:
    """Of a skewed distribution too."""
    chance = random.Random(7)
    for count in (8, 20, 61):
        samples = [[chance.expovariate(1) for _ in range(count)] for _ in range(4000)]
        covered = sum(low <= math.log(2) <= high for low, high in map(interval_of_median, samples))
        assert covered / 4000 >= 0.985


def settled(samples: list[float], *then: list[float], took_s: float = 0.0, **terms: Any) -> Settled:
    """By more than 50, repeats within 8 %."""
    first = repeats(samples, *then, took_s=took_s)
    return settle(first, limit=limit("above", 50), **{"allowed": 0.08, **terms})


SHARED_HOST = [54.8] * 20 + [30.0, 34.0, 38.0, 41.0, 45.0, 48.0, 49.0, 52.0, 53.0, 54.0]
"""Spread 31 %, and the median 9 % above the limit, as on two shared H100 (2026-11-25)."""


def test_a_spread_alone_is_no_doubt() -> None:
    """It is measured once more, and then the median is judged."""
    found = settled(SHARED_HOST, SHARED_HOST)
    assert (found.doubt, found.value, len(found.rounds)) == (None, 54.8, 2)
    assert found.why is not None


def test_without_a_further_round_the_interval_decides() -> None:
    """Of enough repeats; the median is the value."""
    assert settled(SHARED_HOST).doubt is None
    assert settled([54.8, 54.8, 30.0]).doubt is not None


def test_a_median_at_the_limit_is_left_open() -> None:
    """However often it is measured, until the budget of rounds or of seconds is used."""
    at_limit = [49.0, 49.5, 49.9, 50.1, 50.5, 51.0]
    by_rounds, by_seconds = settled(at_limit, at_limit, took_s=0.1), settled(at_limit, at_limit, took_s=30.0)
    for found, rounds in ((by_rounds, 1 + MORE), (by_seconds, 6)):
        assert found.doubt is not None
        assert "the limit lies inside the 99 % interval of the median" in found.doubt
        assert (len(found.rounds), found.is_final) == (rounds, True)


def test_one_burst_is_no_failure() -> None:
    """A whole round was disturbed, and the next ones were not; a part that stays there has failed."""
    burst, calm = [46.0, 46.2, 46.4, 46.1] * 5, [54.6, 54.7, 54.8, 54.9] * 5
    assert settled(burst, calm).value > 54
    assert settled(burst, calm).doubt is None
    slow = settled(burst, burst)
    assert (slow.doubt, len(slow.rounds)) == (None, 3)
    assert slow.value < 50


def test_a_part_that_reaches_its_limit_now_and_then_is_measured_to_the_end() -> None:
    """Three disturbed rounds may be chance; if it stays so, the median has missed."""
    disturbed, calm = [40.0] * 14 + [54.8] * 6, [54.8] * 20
    assert settled(disturbed, disturbed, disturbed, calm).value == 54.8
    slow = settled(disturbed, disturbed)
    assert (slow.value, slow.doubt, len(slow.rounds)) == (40.0, None, 1 + MORE)


def test_half_of_the_rounds_disturbed_is_no_failure() -> None:
    """The interval of all repeats may lie below the limit; as many rounds by themselves do not."""
    rounds = [repeats([54.0] * 10), repeats([40.0] * 36)]
    assert interval_of_median(samples_of(rounds)) == (40.0, 40.0)
    why = doubt_of_median(rounds, limit=limit("above", 50))
    assert why == "46 repeats miss the limit, but by its own median only 1 of 2 rounds does"
    assert doubt_of_median([*rounds, rounds[1]], limit=limit("above", 50)) is None


def test_a_far_miss_fails_at_once() -> None:
    """Nothing is measured again for it."""
    found = settled([24.9, 25.0, 25.1], [55.0, 55.1, 55.2])
    assert (found.value, len(found.rounds), found.doubt) == (25.0, 1, None)


@pytest.mark.parametrize("is_floor", [True, False])
def test_stalls_are_counted(*, is_floor: bool) -> None:
    """2 of 30 repeats at 1 % of the rate: or, as times, a hundred times as long."""
    found = stalls_of([100.0] * 28 + ([1.0, 1.2] if is_floor else [10_000.0, 8000.0]), is_floor=is_floor)
    assert (found.stalled, found.count, found.worst) == (2, 30, 1.0 if is_floor else 10_000.0)
    assert stalls_of([100.0, 51.0, 199.0], is_floor=is_floor).stalled == 0


@pytest.mark.parametrize("kind", ["above", "below"])
def test_a_value_that_passes_in_spite_of_stalls_says_so(kind: str) -> None:
    """How many, and the worst."""
    judge = Criterion(threshold=threshold(noise=0.03), limit=limit(kind, 700), place=A)
    rate, stall = (750.0, 7.5) if kind == "above" else (650.0, 65_000.0)
    judge.require(repeats([rate] * 28 + [stall, stall]), remark="of 3 hosts")
    assert judge.judged is not None
    assert judge.judged.outcome == PASSED
    worst = "7.5" if kind == "above" else "65000"
    stalls = f"2 of 30 repeats took more than twice as long as the median, the worst {worst} TFLOPS"
    assert judge.judged.remark == f"of 3 hosts; {stalls}"


def test_steady_repeats_have_no_remark() -> None:
    """Nor have those of an entry without noise and stalls."""
    steady, loose = criterion(), criterion(noise=None)
    steady.require(repeats(QUIET))
    loose.require(repeats([750.0, 750.0, 1.0]))
    assert [judge.judged and judge.judged.remark for judge in (steady, loose)] == [None, None]


def test_more_stalls_than_the_entry_allows_fail() -> None:
    """By their share, in words; as many as are allowed are a remark."""
    few, many = criterion(stalls=0.1), criterion(stalls=0.1)
    few.require(repeats([750.0] * 27 + [7.5] * 3))
    with pytest.raises(CriterionFailedError, match=r"20 %, above 10 % .*repeats that took twice as long as the median"):
        many.require(repeats([750.0] * 24 + [7.5] * 6))
    assert few.judged is not None
    assert many.judged is not None
    assert (few.judged.outcome, many.judged.outcome) == (PASSED, FAILED)
    assert (many.judged.value, many.judged.unit) == (20.0, "%")
    assert many.judged.evidence["median TFLOPS"] == 750


def test_stalls_are_measured_on_too() -> None:
    """Two in the first thirty, and none in the round after: that was one disturbance."""
    judge = criterion(stalls=0.05)
    judge.require(repeats([750.0] * 28 + [7.5] * 2, [750.0] * 30))
    assert judge.judged is not None
    assert judge.judged.outcome == PASSED
    assert "2 of 30 repeats stalled, and 5 % may" in judge.judged.evidence["measured again because"]


def test_a_slow_part_that_stalls_fails_by_its_median() -> None:
    """The rate is shown, not the share."""
    judge = criterion(stalls=0.1)
    with pytest.raises(CriterionFailedError):
        judge.require(repeats([500.0] * 20 + [5.0] * 10))
    assert judge.judged is not None
    assert (judge.judged.value, judge.judged.unit) == (500.0, "TFLOPS")
