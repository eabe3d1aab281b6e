"""A user's measurements whose repeats agree, disagree, stall, agree at last, or straddle the limit of 100."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations

import contextlib
import statistics

import pytest

from pytest_gpucluster import MeasurementError

rounds = {}


def rate(*, case, centre, spread, iterations, stalled=0, first=None):  # noqa: PLR0913 -- a recipe
    """``iterations`` rates evenly between ``centre`` -+ half of ``spread``, the last of them ``stalled``.

    ``first``: the centre in the first round.
    """
    rounds[case] = rounds.get(case, 0) + 1
    middle = first if first is not None and rounds[case] == 1 else centre
    samples = [middle + spread * (step / (iterations - 1) - 0.5) for step in range(iterations)]
    samples[iterations - stalled :] = [1.0] * stalled
    return {"rate": statistics.median(samples), "samples": samples}


CASES = {
    "quiet": {"centre": 120.0, "spread": 2.0},
    "calm_at_last": {"centre": 120.0, "spread": 2.0, "first": 96.0},
    "wild": {"centre": 120.0, "spread": 44.0},
    "stalls": {"centre": 120.0, "spread": 2.0, "iterations": 30, "stalled": 2},
    "stalls_often": {"centre": 120.0, "spread": 2.0, "stalled": 3},
    "on_the_limit": {"centre": 100.5, "spread": 4.0},
    "slow": {"centre": 95.0, "spread": 4.0},
    "clearly_slow": {"centre": 80.0, "spread": 2.0},
    "advised": {"centre": 100.5, "spread": 4.0},
}


@pytest.fixture(scope="session")
def rates(cluster):
    return {name: cluster.run(rate, per="gpu", case=name, **{"iterations": 10, **case}) for name, case in CASES.items()}


@pytest.mark.parametrize("name", [name for name in CASES if name != "advised"])
def test_rate(rates, place, criterion, name):
    criterion.require(rates[name].repeated(place, "rate", "samples"))


def test_advised(rates, place, criterion):
    criterion.require(rates["advised"].repeated(place, "rate", "samples"))


def test_swallowed(rates, place, criterion):
    with contextlib.suppress(MeasurementError):
        criterion.require(rates["on_the_limit"].repeated(place, "rate", "samples"))


def test_fails_later(rates, place, criterion):
    with contextlib.suppress(MeasurementError):
        criterion.require(rates["on_the_limit"].repeated(place, "rate", "samples"))
    criterion.require(50)
