"""A user's measurements whose repeats agree, disagree, agree the second time, or straddle the limit of 100."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations

import contextlib

import pytest

from pytest_gpucluster import MeasurementError


def rate(*, centre, spread, iterations):
    """``iterations`` rates evenly between ``centre`` -+ half of ``spread``; ``spread`` by number of iterations."""
    width = spread[str(iterations)]
    samples = [centre + width * (step / (iterations - 1) - 0.5) for step in range(iterations)]
    return {"rate": centre, "samples": samples, "iterations": iterations}


CASES = {
    "quiet": {"centre": 120.0, "spread": {"10": 2.0}},
    "calm_at_last": {"centre": 120.0, "spread": {"10": 40.0, "30": 2.0}},
    "wild": {"centre": 120.0, "spread": {"10": 40.0, "30": 40.0}},
    "on_the_limit": {"centre": 100.5, "spread": {"10": 4.0, "30": 4.0}},
    "clearly_slow": {"centre": 80.0, "spread": {"10": 2.0}},
    "advised": {"centre": 120.0, "spread": {"10": 40.0, "30": 40.0}},
}


@pytest.fixture(scope="session")
def rates(cluster):
    return {name: cluster.run(rate, per="gpu", iterations=10, **case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", [name for name in CASES if name != "advised"])
def test_rate(rates, place, criterion, name):
    criterion.require(rates[name].repeated(place, "rate", "samples"))


def test_advised(rates, place, criterion):
    criterion.require(rates["advised"].repeated(place, "rate", "samples"))


def test_swallowed(rates, place, criterion):
    with contextlib.suppress(MeasurementError):
        criterion.require(rates["wild"].repeated(place, "rate", "samples"))


def test_fails_later(rates, place, criterion):
    with contextlib.suppress(MeasurementError):
        criterion.require(rates["wild"].repeated(place, "rate", "samples"))
    criterion.require(50)
