"""How far clocks are apart, and what the time of the question hides."""

from __future__ import annotations

import pytest

from pytest_gpucluster.health.hosts import ClockReading, Skew, judge_clock, skews


def shown(offset_s: float, took_s: float = 0.002, at_s: float = 1e9) -> ClockReading:
    """A clock that is ahead by ``offset_s``, shown in the middle of a question."""
    return ClockReading(shown_s=at_s + took_s / 2 + offset_s, sent_s=at_s, received_s=at_s + took_s)


def skews_of(*offsets_s: float) -> list[float]:
    """The skew of each host in seconds."""
    found = skews({f"node{at}": shown(offset_s) for at, offset_s in enumerate(offsets_s)})
    return [found[f"node{at}"].skew_s for at in range(len(found))]


@pytest.mark.parametrize(
    ("offsets_s", "expected_s"),
    [
        ((0.0, 0.0, 0.0), [0, 0, 0]),
        ((0.0, -2.5, 0.0, 0.001), [0.001, 2.5, 0.001, 0.001]),
        ((0.0, 2.5), [2.5, 2.5]),
        ((5.0, 5.0, 5.0), [0, 0, 0]),
        ((0.0,), []),
    ],
)
def test_skews(offsets_s: tuple[float, ...], expected_s: list[float]) -> None:
    """From most clocks: a controller whose clock is wrong itself blames nobody else. Of two hosts both are named."""
    assert skews_of(*offsets_s) == pytest.approx(expected_s, abs=2e-4)


def test_a_slow_question_shows_little() -> None:
    """Half of its time is not known, and that of the others is added."""
    found = skews({"node0": shown(0, 0.002), "node1": shown(0.05, 0.4), "node2": shown(0, 0.004)})
    assert found["node1"].doubt_s == pytest.approx(0.2 + 0.0015, abs=1e-6)
    assert not found["node1"].is_known(0.1)
    assert found["node0"].doubt_s == pytest.approx(0.001 + 0.101, abs=1e-6)


@pytest.mark.parametrize(
    ("skew_s", "doubt_s", "known"),
    [(0.0, 0.05, True), (2.5, 0.2, True), (0.09, 0.02, False), (0.11, 0.02, False), (0.0, 0.2, False)],
)
def test_what_is_known(skew_s: float, doubt_s: float, known: bool) -> None:  # noqa: FBT001 -- the expected value
    """On which side of the limit the clock surely is."""
    skew = Skew(skew_s=skew_s, doubt_s=doubt_s)
    assert skew.is_known(0.1) is known
    assert skew.is_within(0.1) is (known and skew_s < 0.1)


def test_a_clock_that_was_set_meanwhile() -> None:
    """A question that ends before it began has no doubt below zero."""
    assert ClockReading(shown_s=1.0, sent_s=2.0, received_s=1.5).doubt_s == 0


@pytest.mark.parametrize(
    ("skew", "judged"), [(None, None), (Skew(skew_s=0.09, doubt_s=0.02), None), (Skew(skew_s=2.5, doubt_s=0.2), 2.5)]
)
def test_a_clock_is_judged_where_its_skew_is_known(skew: Skew | None, judged: float | None) -> None:
    """Otherwise it is unknown, with the reason."""
    found = judge_clock(skew, limit_s=0.1)
    assert (found.judged, bool(found.doubts)) == (judged, judged is None)
