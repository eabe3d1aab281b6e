"""How far clocks are apart, and what the time of the question hides."""

from __future__ import annotations

import pytest

from pytest_gpucluster.health.hosts import Look, Skew, skews


def look(offset_s: float, took_s: float = 0.002, at_s: float = 1e9) -> Look:
    """A clock that is ahead by ``offset_s``, shown in the middle of a question."""
    return Look(shown_s=at_s + took_s / 2 + offset_s, asked_s=at_s, answered_s=at_s + took_s)


def skews_of(*offsets_s: float) -> list[float]:
    """The skew of each host in seconds."""
    found = skews({f"node{at}": look(offset_s) for at, offset_s in enumerate(offsets_s)})
    return [found[f"node{at}"].skew_s for at in range(len(found))]


@pytest.mark.parametrize(
    ("offsets_s", "expected_s"),
    [
        ((0.0, 0.0, 0.0), [0, 0, 0]),
        ((0.0, -2.5, 0.0, 0.001), [0, 2.5, 0, 0.001]),
        ((0.0, 2.5), [2.5, 2.5]),
        ((5.0, 5.0, 5.0), [0, 0, 0]),
        ((0.0,), []),
    ],
)
def test_skews(offsets_s: tuple[float, ...], expected_s: list[float]) -> None:
    """From the median: an asking host that is wrong itself blames nobody else. Of two hosts both are named."""
    assert skews_of(*offsets_s) == pytest.approx(expected_s, abs=2e-4)


def test_a_slow_question_tells_little() -> None:
    """Half of its time is not known, and that of the others is added."""
    found = skews({"node0": look(0, 0.002), "node1": look(0.05, 0.4), "node2": look(0, 0.004)})
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


def test_a_clock_that_was_set_while_asking() -> None:
    """A question that ends before it began has no doubt below zero."""
    assert Look(shown_s=1.0, asked_s=2.0, answered_s=1.5).doubt_s == 0
