"""What is judged over the whole run: the values of the other GPUs of an NVLink domain."""

from __future__ import annotations

from dataclasses import replace

from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.plugin.whole_run.run_readings import OverRun, _Taken

PLACES = Inventory(num_nodes=3, gpus_per_node=2, device="cuda").places


def of_domain(*fabrics: str | None) -> list[str]:
    """The GPUs in the domain of node0-gpu0; node1-gpu1 could not be measured."""
    bound = [replace(place, fabric=fabrics[place.node]) for place in PLACES]
    values = {place: place.id for place in bound if place.id != "node1-gpu1"}
    errors = {place: MeasurementError("lost") for place in bound if place not in values}
    taken = _Taken(Results(values, errors), 0.0)
    found = OverRun(taken, taken).of_domain(PLACES[0])
    assert all(place.id == value for place, value in found.items())
    return [place.id for place in found]


def test_a_domain_of_several_nodes() -> None:
    """All nodes with the same fabric, without those that could not be measured."""
    assert of_domain("rack 1", "rack 1", "rack 2") == ["node0-gpu1", "node1-gpu0"]


def test_nvlink_that_ends_at_the_node() -> None:
    """The node alone."""
    assert of_domain(None, None, None) == ["node0-gpu1"]
