"""Parts by their identity: a re-test never measures another part."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.cluster.binding import Binding, places_of_parts
from pytest_gpucluster.config.settings import parse_part
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.places import Inventory

if TYPE_CHECKING:
    from collections.abc import Collection

    from pytest_gpucluster.places import Place


def places_of(*, absent: int | None = None, hosts: tuple[str, ...] = ("a", "b", "c")) -> Collection[Place]:
    """Three nodes of two GPUs; the absent one is known by the list alone."""
    inventory = Inventory(num_nodes=3, gpus_per_node=2, device="cuda", hosts=hosts)
    places = [
        replace(place, rank=rank, hostname="abc"[place.node], uuid=f"GPU-{rank}", serial=f"16{rank}")
        if place.node != absent
        else place
        for rank, place in enumerate(inventory.places)
    ]
    return Binding(inventory=inventory, places=tuple(places)).by_id.values()


PLACES = places_of()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("b", {"node1", "node1-gpu0", "node1-gpu1"}),
        ("B.site.example", {"node1", "node1-gpu0", "node1-gpu1"}),
        ("b:GPU-3", {"node1-gpu1"}),
        ("b:gpu-3", {"node1-gpu1"}),
        ("b:163", {"node1-gpu1"}),
        ("b:gpu1", {"node1-gpu1"}),
    ],
)
def test_a_part(text: str, ids: set[str]) -> None:
    """All of a host; one GPU by UUID, serial number or its number there."""
    assert places_of_parts([parse_part(text)], PLACES) == ids


def test_several_parts() -> None:
    """Together."""
    assert places_of_parts([parse_part("a:gpu0"), parse_part("c:165")], PLACES) == {"node0-gpu0", "node2-gpu1"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("d", "--gpucluster-only d: no host of this run has that name; its hosts: a, b, c."),
        ("node1", "--gpucluster-only node1: no host of this run has that name; its hosts: a, b, c."),
        ("b:GPU-9", "b has no such part; it has gpu0 serial 162 GPU-2, gpu1 serial 163 GPU-3"),
        ("b:gpu2", "b has no such part; it has gpu0 serial 162 GPU-2, gpu1 serial 163 GPU-3"),
        ("b:GPU-5", "it has gpu0 serial 162 GPU-2, gpu1 serial 163 GPU-3; that part is c gpu 1 now"),
        ("b:165", "; that part is c gpu 1 now"),
    ],
)
def test_another_part_is_refused(text: str, why: str) -> None:
    """With what is there instead."""
    with pytest.raises(ConfigurationError) as raised:
        places_of_parts([parse_part("a"), parse_part(text)], PLACES)
    assert why in str(raised.value)


def test_a_host_that_is_absent() -> None:
    """All of it is missing; none of its GPUs can be told by its identity."""
    assert places_of_parts([parse_part("b")], places_of(absent=1)) == {"node1", "node1-gpu0", "node1-gpu1"}
    with pytest.raises(ConfigurationError, match="--gpucluster-only b:GPU-3: b does not answer"):
        places_of_parts([parse_part("b:GPU-3")], places_of(absent=1))
    with pytest.raises(ConfigurationError, match="its hosts: a, c"):
        places_of_parts([parse_part("b")], places_of(absent=1, hosts=()))


@pytest.mark.parametrize("text", ["", ":GPU-1", "a:", " : "])
def test_what_names_no_part(text: str) -> None:
    """Said before anything starts."""
    with pytest.raises(ConfigurationError, match="names no part; say HOST, HOST:UUID, HOST:SERIAL or HOST:gpu3"):
        parse_part(text)
