"""What is made of all records of a run takes twice the work for twice the places. Counted in bytecodes, never in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.judging import culprits as causes
from pytest_gpucluster.judging.culprits import find_culprits
from pytest_gpucluster.judging.selection import Selector
from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.reporting.bad_parts import Shown, describe_bad_parts
from pytest_gpucluster.thresholds.limit import Limit
from tests.support.fleet_records import selector_of
from tests.support.operations import operations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.text import Text

    from pytest_gpucluster.places import Place


def record(place: str, outcome: str) -> Record:
    """One outcome, as most runs have it."""
    is_measured = outcome in ("passed", "failed")
    return Record(
        criterion="rate",
        place=place,
        outcome=outcome,
        value=5.0 if is_measured else None,
        limit=Limit(kind="min", value=7, unit="TFLOPS"),
        reason=None if outcome == "passed" else f"rate at {place}: {outcome}",
        culprits=() if outcome == "passed" else (place,),
        cause="the same everywhere" if outcome == "error" else None,
        blames="software" if outcome == "error" else None,
    )


def blocks(records: list[Record], places: Mapping[str, Place]) -> list[Text]:
    """The bad parts as a terminal shows them."""
    return describe_bad_parts(records, Shown(places=places, tests=selector_of(records), device="cuda", width=80))


MADE: dict[str, Callable[[list[Record], Mapping[str, Place]], object]] = {
    "verdict": lambda records, _places: decide(records, Terms(rehearsal=True, level_reached=True)),
    "culprits": find_culprits,
    "bad parts": blocks,
    "first seen": lambda records, _places: causes.first_seen(records),
}


OUTCOMES = ("passed", "failed", "error", "noisy", "missing")
CASES = [(what, outcome) for what in MADE for outcome in OUTCOMES]


@pytest.mark.parametrize(("what", "outcome"), CASES)
def test_work_for_twice_the_places(what: str, outcome: str) -> None:
    """Every place has the same outcome."""

    def work(num_nodes: int) -> int:
        inventory = Inventory(num_nodes=num_nodes, gpus_per_node=8, device="cuda")
        records = [record(place.id, outcome) for place in inventory.places]
        places = inventory.by_id
        return operations(lambda: MADE[what](records, places))

    work(1)
    assert work(64) <= 2.3 * work(32)


def test_work_to_select_tests_again() -> None:
    """Of each criterion, all places: a few bytecodes for each test of the run, in which a name is looked for."""
    criteria, places = range(8), range(200)
    selector = Selector(
        {(f"c{one}", f"node{place}"): f"f.py::test_c{one}[node{place}]" for one in criteria for place in places}
    )
    work = operations(lambda: [selector.select([(f"c{one}", f"node{place}") for place in places]) for one in criteria])
    assert work < 100 * len(criteria) * len(criteria) * len(places)
