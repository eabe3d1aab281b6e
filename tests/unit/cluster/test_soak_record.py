"""A soak that is cut short and read back from its journal: it is the same soak as the one that was not cut."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.cluster.soak import CLUSTER, SoakRecord, SoakResult, read_back
from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judging.finding import Finding
from pytest_gpucluster.places import Place

if TYPE_CHECKING:
    from collections.abc import Iterable

PLACES = tuple(Place(id=f"node0-gpu{gpu}", node=0, gpu=gpu, rank=gpu) for gpu in range(3))
KEEPS = {"rate": "lowest", "heat": "highest", "errors": "total"}


def begin(places: Iterable[Place] = PLACES) -> dict[tuple[str, str], SoakResult]:
    """Nothing is kept yet."""
    return {
        (key, place.id): SoakResult(criterion=key, place=place, keep=keep) for key, keep in KEEPS.items() for place in places
    }  # type: ignore[arg-type]


def measure(kept: dict[tuple[str, str], SoakResult], number: int, value: float, record: SoakRecord | None) -> list[Any]:
    """One round: the events of its measurements, through JSON and back."""
    events = []
    for key in KEEPS:
        ours = [one for one in kept.values() if one.criterion == key]
        for gpu, one in enumerate(ours):
            bad = {f"mlx5_{gpu}": ("lost its link",), PLACES[0]: ("is slow", "is hot")} if gpu else {}
            doubts = {"port 9": ("was refused",), PLACES[1]: ("is gone",)} if gpu == 2 and number > 1 else {}
            found = Finding(
                value=value + gpu,
                bad=bad,
                unknown=doubts,
                kind="nic" if gpu else None,
                advice="replace its cable" if gpu else None,
                evidence={"W": 100 * number},
                remark="single" if number > 1 else None,
            )
            one.add(number, found)
        if record is not None:
            events.append(json.loads(json.dumps(strict_json(record.facts(ours)))))
    return events


def whole(kept: dict[tuple[str, str], SoakResult]) -> dict[tuple[str, str], Any]:
    """All that is kept."""
    found = {}
    for key, one in kept.items():
        assert one.worst is not None
        said = (one.worst.bad, one.worst.kind, one.worst.advice, one.unknown)
        worst = (one.worst_round, one.worst.value, one.worst.evidence, said)
        found[key] = (one.value, one.rounds, one.first_and_last, one.remark, worst)
    return found


@given(
    st.lists(st.floats(min_value=-1e6, max_value=1e6, width=64) | st.integers(0, 3), min_size=2, max_size=6),
    st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_a_soak_that_was_cut_is_the_same_soak(values: list[float], at: int) -> None:
    """Cut after any round, and gone on with: all that is kept is as in a soak that was not cut."""
    at = min(at, len(values) - 1)
    uncut, before, record = begin(), begin(), SoakRecord()
    events = []
    for number, value in enumerate(values[:at], start=1):
        measure(uncut, number, value, None)
        events += measure(before, number, value, record)
    earlier = read_back(events, places=PLACES, num_whole_rounds=at, elapsed_s=60.0 * at)
    assert (earlier.round, earlier.num_whole_rounds, earlier.elapsed_s) == (at, at, 60.0 * at)
    resumed = {key: earlier.kept[key] for key in uncut}
    for number, value in enumerate(values[at:], start=at + 1):
        measure(uncut, number, value, None)
        measure(resumed, number, value, None)
    assert whole(resumed) == whole(uncut)


def test_an_unfinished_round_counts_and_is_not_whole() -> None:
    """What was measured in it stays; the next round has the next number."""
    record, kept = SoakRecord(), begin()
    events = [*measure(kept, 1, 5.0, record), *measure(kept, 2, 1.0, record)[:1]]
    earlier = read_back(events, places=PLACES, num_whole_rounds=1, elapsed_s=60)
    assert (earlier.round, earlier.num_whole_rounds) == (2, 1)
    assert (earlier.kept["rate", "node0-gpu0"].value, earlier.kept["heat", "node0-gpu0"].value) == (1.0, 5.0)


def test_a_value_of_all_nodes() -> None:
    """It stands at no place of the cluster."""
    one = SoakResult(criterion="busbw", place=CLUSTER, keep="lowest")
    one.add(1, Finding(value=300.0))
    earlier = read_back([SoakRecord().facts([one])], places=PLACES, num_whole_rounds=1, elapsed_s=9)
    assert earlier.kept["busbw", "cluster"].place is CLUSTER


def test_a_large_round_is_short() -> None:
    """Counts that are all zero are written once, and evidence only in the first round or a worse one."""
    places = tuple(Place(id=f"node{node}-gpu{gpu}", node=node, gpu=gpu) for node in range(16) for gpu in range(8))
    kept = [SoakResult(criterion="errors", place=place, keep="total") for place in places]
    record, lengths = SoakRecord(), []
    for number in range(1, 4):
        for one in kept:
            one.add(number, Finding(value=0, evidence={"ports": ["mlx5_0"] * 8}))
        lengths.append(len(json.dumps(record.facts(kept))))
    assert lengths[0] > 10_000
    assert max(lengths[1:]) < 200


def test_what_could_not_be_measured_is_left_out() -> None:
    """Its error is an outcome of its own, and no soak goes on after one."""
    kept = list(begin(PLACES[:2]).values())[:2]
    kept[0].add(1, Finding(value=1.0))
    kept[1].fail(1, MeasurementError("rank 1 died"))
    assert SoakRecord().facts(kept)["places"] == ["node0-gpu0"]


FACTS = {"round": 1, "criterion": "rate", "keep": "lowest", "usual": 1.0, "places": ["node0-gpu0"], "values": {}, "details": {}}
DAMAGES: list[dict[str, Any]] = [
    {"keep": "best"},
    {"usual": "5"},
    {"usual": True},
    {"places": ["node9-gpu9"]},
    {"values": None},
    {"details": []},
    {"round": "x"},
]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damaged_facts_are_refused(damage: dict[str, Any]) -> None:
    """By one of the errors that whoever reads a journal expects."""
    assert read_back([FACTS], places=PLACES, num_whole_rounds=1, elapsed_s=1).kept
    with pytest.raises((AttributeError, LookupError, TypeError, ValueError)):
        read_back([{**FACTS, **damage}], places=PLACES, num_whole_rounds=1, elapsed_s=1)
