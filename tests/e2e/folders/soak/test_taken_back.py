"""Tests that would rather not have seen what their soak found, and one that leaves its soak early."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations

import os
import shutil

import pytest
from test_wear import read, wear

from pytest_gpucluster import SoakWork


@pytest.fixture(scope="session")
def worn(cluster, recipe, soak):
    works = {"wear": SoakWork(read=read, keep="total"), "tear": SoakWork(read=read, keep="highest")}
    for turn in soak.rounds(works):
        turn.keep(cluster.run(wear, per="gpu", places=turn.places, round_number=turn.round, **recipe(turn.criterion)))
        if turn.criterion == "tear" and "LEAVE_EARLY" in os.environ:
            break
    yield soak
    shutil.copy("gpucluster-results/results.json", "at_the_last_teardown.json")


def test_wear(worn, place, criterion):
    if "LEAVE_EARLY" in os.environ:
        worn["wear", place].judge(criterion)
    pytest.skip("let us not talk about it")


@pytest.mark.xfail(reason="known")
def test_tear(worn, place, criterion):
    criterion.require(0)
