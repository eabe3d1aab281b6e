"""The bookkeeping of one test is the same work at 16 and at 128 expected nodes. Counted in bytecodes, never in seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.cluster.binding import Binding
from pytest_gpucluster.cluster.calls import Cluster
from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judging.plan import places_covered_by
from pytest_gpucluster.places import Inventory, Place
from tests.support.operations import operations

if TYPE_CHECKING:
    from collections.abc import Callable

FEW, MANY = 16, 128
LOST = MeasurementError("planted", kind="died")


class Bound:
    """A cluster whose last node is absent, and one GPU of whose first node is missing; what was measured on it."""

    def __init__(self, num_nodes: int) -> None:
        self.inventory = Inventory(num_nodes=num_nodes, gpus_per_node=8, device="cpu")
        places = [
            place if place.node == num_nodes - 1 or place.id == "node0-cpu7" else replace(place, rank=rank, hostname="h")
            for rank, place in enumerate(self.inventory.places)
        ]
        controller: Any = None
        self.cluster = Cluster(controller, Binding(inventory=self.inventory, places=tuple(places)))
        answering = [place for place in places if place.rank is not None]
        self.results = Results(dict.fromkeys(answering, 1.0), {places[-1]: LOST, places[7]: LOST})

    def require(self, place: Place) -> None:
        """Ask for a place at which nothing answers."""
        with pytest.raises(MeasurementError):
            self.cluster.require_present(place)

    def read_lost(self) -> None:
        """Read the value of a place that could not be measured."""
        with pytest.raises(MeasurementError):
            self.results[self.inventory.places[-1]]


ASKED: dict[str, Callable[[Bound], object]] = {
    "a GPU that answers": lambda bound: bound.cluster.require_present(bound.inventory.places[0]),
    "a node that answers": lambda bound: bound.cluster.require_present(bound.inventory.nodes[1]),
    "a GPU of an absent node": lambda bound: bound.require(bound.inventory.places[-1]),
    "an absent node": lambda bound: bound.require(bound.inventory.nodes[-1]),
    "a missing GPU": lambda bound: bound.require(bound.inventory.places[7]),
    "the value of a GPU": lambda bound: bound.results[bound.inventory.places[0]],
    "the value of a node": lambda bound: bound.results[bound.inventory.nodes[1]],
    "the first value of a node": lambda bound: bound.results.first_of(bound.inventory.nodes[1]),
    "an error": lambda bound: bound.read_lost(),
    "what a node covers": lambda bound: places_covered_by(bound.inventory.nodes[1], bound.inventory),
    "what the cluster covers": lambda bound: places_covered_by(None, bound.inventory),
    "all nodes": lambda bound: bound.cluster.nodes,
    "the number of ranks": lambda bound: bound.cluster.world_size,
}


@pytest.mark.parametrize("asked", ASKED)
def test_work_for_one_test(asked: str) -> None:
    """What a test asks for at one place, once others have asked."""
    few, many = Bound(FEW), Bound(MANY)
    for bound in (few, many):
        ASKED[asked](bound)
    assert operations(lambda: ASKED[asked](many)) <= 1.2 * operations(lambda: ASKED[asked](few))


def test_the_count_sees_more_work() -> None:
    """The twin of the tests above: work that grows with the places is counted as more."""
    few, many = Bound(FEW), Bound(MANY)
    assert operations(lambda: list(map(str, many.cluster.places))) > 4 * operations(lambda: list(map(str, few.cluster.places)))


def test_an_error_that_many_tests_read_keeps_no_frames() -> None:
    """Each reader of the same error starts a traceback of its own: a chain of all readers holds all their frames."""
    bound = Bound(2)
    for _ in range(5):
        with pytest.raises(MeasurementError) as caught:
            bound.results[bound.inventory.places[-1]]
        assert len(caught.traceback) == 2
