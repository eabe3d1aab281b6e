"""Outcomes of fleets that were never measured: healthy ones, and what is planted in them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.judging.selection import Selector
from pytest_gpucluster.judging.verdict import FAILED, MISSING, PASSED, Record
from pytest_gpucluster.places import Inventory, Place
from tests.support.entries import limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LIMITS = {
    "bf16_tflops": limit("above", 700, "TFLOPS"),
    "hbm_bandwidth": limit("above", 4.1, "TB/s"),
    "clocks_under_load": limit("max", 0, "count"),
}
HEALTHY = {"bf16_tflops": 783.9, "hbm_bandwidth": 4.37, "clocks_under_load": 0.0}


def fleet(nodes: int, gpus: int, *, absent: Iterable[int] = (), device: Any = "cuda") -> dict[str, Place]:
    """Every GPU and node with what its hello said; absent nodes said none."""
    inventory = Inventory(num_nodes=nodes, gpus_per_node=gpus, device=device)
    gone = set(absent)
    bound = [
        replace(
            place,
            rank=rank,
            hostname=f"gpu-node-{place.node}",
            uuid=f"GPU-6f1c0f3e-5e1b-4a0c-9d7e-{rank:012d}",
            serial=f"1654923{rank:06d}",
            pci=f"00000000:{0x1B + 16 * (place.gpu or 0):02x}:00.0",
        )
        if place.node not in gone
        else place
        for rank, place in enumerate(inventory.places)
    ]
    nodes_ = [replace(node, hostname=f"gpu-node-{node.node}") if node.node not in gone else node for node in inventory.nodes]
    return {place.id: place for place in (*bound, *nodes_)}


def selector_of(records: Iterable[Record]) -> Selector:
    """Tests that are called as their criteria."""
    return Selector({(record.criterion, record.place): record.criterion for record in records})


def failed(criterion: str, place: str | None, value: float, **changes: Any) -> Record:
    """A measured value outside its limit, confirmed, which blames its GPU or node."""
    asked = changes.pop("limit", LIMITS.get(criterion, limit("above", 400, "GB/s")))
    facts: dict[str, Any] = {
        "blames": None if place is None else "gpu" if "-" in place else "node",
        "culprits": (place,) if place is not None else (),
        "confirmed": True,
        "margin_percent": asked.margin_percent(value),
        "reason": f"{criterion} at {place}: {value:g} {asked.unit}, {asked.missed_word} {asked.value:g} {asked.unit}",
    }
    return Record(criterion=criterion, place=place, outcome=FAILED, value=value, limit=asked, **{**facts, **changes})


def outcomes(places: Mapping[str, Place], bad: Iterable[Record] = ()) -> list[Record]:
    """Three criteria at every GPU, all good but ``bad``; those of nodes that are absent are missing."""
    planted = {(record.criterion, record.place): record for record in bad}
    rows = []
    for criterion, asked in LIMITS.items():
        for rank, place in enumerate(place for place in places.values() if place.gpu is not None):
            value = HEALTHY[criterion] * (1 + (rank % 5 - 2) / 100)
            good = Record(criterion=criterion, place=place.id, outcome=PASSED, value=value, limit=asked)
            why = f"not run: {place.id} is missing"
            gone = Record(criterion=criterion, place=place.id, outcome=MISSING, reason=why, blames="node")
            rows.append(planted.pop((criterion, place.id), good if place.rank is not None else gone))
    return [*rows, *planted.values()]
