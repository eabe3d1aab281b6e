"""The same work again and again, for hours: what one good round does not prove."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from pytest_gpucluster.cluster.soak import Seen, Work
from pytest_gpucluster.judging.agreement import only_itself, suspicions_in_round
from pytest_gpucluster.measurements.digest import digests
from pytest_gpucluster.measurements.hbm_pattern import hbm_pattern
from pytest_gpucluster.measurements.sustained import sustained


def rates(results):
    """The median of a round's last half, and its worst slice."""
    return {
        place: Seen(value=rate.tflops, evidence={"lowest slice TFLOPS": min(rate.slices_tflops), **rate.evidence})
        for place, rate in measured(results).items()
    }


def measured(results):
    """The values of those that have one."""
    return {place: results[place] for place in results if place not in results.errors}


def differing_kinds(first, rounds, results):
    """Kinds of work whose digest differs in a round.

    ``first`` keeps each GPU's digests of its first round, and ``rounds`` counts the rounds of all calls by GPU.
    """
    found = measured(results)
    rounds.update({place: one.rounds for place, one in found.items()})
    digests_of = {place: one.digests for place, one in found.items()}
    first.update({place: one for place, one in digests_of.items() if place not in first})
    models = {place: one.model for place, one in found.items()}
    unsteady = {place: one.unsteady for place, one in found.items()}
    suspected = suspicions_in_round(digests_of, models, first=first, unsteady=unsteady)
    sizes = Counter(models.values())
    return {
        place: Seen(
            value=len(kinds),
            evidence=kinds,
            remark=None if sizes[models[place]] > 1 else only_itself(rounds[place]),
        )
        for place, kinds in suspected.items()
    }


def wrong_words(results):
    """Words that were not what had been written."""
    return {
        place: Seen(
            value=found.errors,
            evidence={**found.errors_by_kind, "first": [error.text for error in found.first_errors[:1]]},
        )
        for place, found in measured(results).items()
    }


MEASURE = {"bf16_soak": sustained, "silent_corruption_soak": digests, "hbm_pattern_soak": hbm_pattern}


@pytest.fixture(scope="session")
def soaked(cluster, recipe, soak):
    """Every kind of work in turn, round after round, until the time is over; each begins in the heat of the one before."""
    works = {
        "bf16_soak": Work(read=rates, keep="lowest"),
        "silent_corruption_soak": Work(read=functools.partial(differing_kinds, {}, Counter()), keep="total", compares=True),
        "hbm_pattern_soak": Work(read=wrong_words, keep="total"),
    }
    for turn in soak.rounds(works):
        other_words = {"first_pass": turn.round} if turn.criterion == "hbm_pattern_soak" else {}
        arguments = {**recipe(turn.criterion), **other_words}
        turn.keep(cluster.run(MEASURE[turn.criterion], per="gpu", places=turn.places, **arguments))
    return soak


@pytest.mark.compute
def test_bf16_soak(soaked, place, criterion):
    """The GPU holds its rate in the worst round."""
    soaked["bf16_soak", place].judge(criterion)


@pytest.mark.compute
def test_silent_corruption_soak(soaked, place, criterion):
    """The same bits in all rounds."""
    soaked["silent_corruption_soak", place].judge(criterion)


@pytest.mark.memory
def test_hbm_pattern_soak(soaked, place, criterion):
    """Not one wrong word in any round."""
    soaked["hbm_pattern_soak", place].judge(criterion)
