"""A user's own soak: rounds of a tiny measurement that fails, dies or stays well, as the file ``planted`` says."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from pytest_gpucluster import Finding, SoakWork


def wear(*, round_number, pause_s):
    """How many errors this rank sees in this round: what is planted for it, as {rank: {round: errors or "kill"}}."""
    time.sleep(pause_s)
    planted = json.loads(Path("planted").read_text(encoding="utf-8"))
    found = planted.get(os.environ["RANK"], {}).get(str(round_number), 0)
    if found == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"errors": found}


def read(results):
    return {place: Finding(value=results[place]["errors"]) for place in results if place not in results.errors}


@pytest.fixture(scope="session")
def worn(cluster, recipe, soak):
    works = {"wear": SoakWork(read=read, keep="total"), "tear": SoakWork(read=read, keep="highest")}
    for turn in soak.rounds(works):
        number = turn.round if turn.criterion == "wear" else 0
        found = cluster.run(wear, per="gpu", places=turn.places, round_number=number, **recipe(turn.criterion))
        turn.keep(found)
    return soak


def test_wear(worn, place, criterion):
    worn["wear", place].judge(criterion)


def test_tear(worn, place, criterion):
    worn["tear", place].judge(criterion)


def test_zeal(cluster, criterion):
    criterion.require(cluster.world_size)
