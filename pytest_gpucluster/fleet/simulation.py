"""What is simulated: the shape of the fleet, its GPU, its seed, and its planted faults. Pure data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.fleet.faults import GPUS_ONLY, Fault, FaultKind, parse_fault
from pytest_gpucluster.protocol.codec import TypedMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_GPUS = 65536
SHAPE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,2})", re.ASCII)
NODES_OF_A_LEAF = 4
JOIN_S = 3.0
"""How long a simulated run waits for absent ranks, once every present rank has joined."""


@dataclass(frozen=True, kw_only=True)
class Simulation(TypedMessage):
    """A fleet of ``nodes`` times ``gpus_per_node`` GPUs that does not exist. What is derived from its faults is built once.

    ``gpu`` is the id of a GPU spec, ``fabric`` what connects the nodes, ``nodes_per_domain`` how many of them NVLink joins.
    Equal simulations give equal values.
    """

    nodes: int
    gpus_per_node: int
    gpu: str = "h200-sxm"
    fabric: str = "infiniband"
    nodes_per_domain: int = 1
    seed: int = 0
    faults: tuple[Fault, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of GPUs, absent ones included."""
        return self.nodes * self.gpus_per_node

    @property
    def facts(self) -> dict[str, Any]:
        """The simulation as results.json and the journal have it."""
        return {
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "gpu": self.gpu,
            "seed": self.seed,
            "faults": [str(fault) for fault in self.faults],
        }

    def place_of(self, rank: int) -> tuple[int, int]:
        """(node, GPU) of a rank, both counted from 0."""
        return divmod(rank, self.gpus_per_node)

    def switch_of(self, node: int) -> str:
        """The leaf switch of a node."""
        return f"leaf{node // NODES_OF_A_LEAF}"

    def domain_of(self, node: int) -> str | None:
        """What the GPUs of a node's NVLink fabric have in common; None where NVLink ends at the node."""
        if self.nodes_per_domain == 1:
            return None
        alone = "clique" in self._kinds.get((node, None), ())
        return f"00000000-0000-0000-0000-{1 + node // self.nodes_per_domain:012d}/{node + 2 if alone else 1}"

    def has(self, rank: int, kind: FaultKind) -> bool:
        """Whether this fault is planted at this rank's GPU."""
        node, gpu = self.place_of(rank)
        return kind in self._kinds.get((node, gpu), ()) or kind in self._kinds.get((node, None), ())

    @cached_property
    def _kinds(self) -> Mapping[tuple[int, int | None], set[FaultKind]]:
        """The kinds of fault at each GPU, and under GPU None those of a whole node."""
        kinds: dict[tuple[int, int | None], set[FaultKind]] = {}
        for fault in self.faults:
            kinds.setdefault((fault.node, fault.gpu), set()).add(fault.kind)
        return kinds

    @cached_property
    def present(self) -> tuple[int, ...]:
        """The ranks that join."""
        return tuple(rank for rank in range(self.world_size) if not self.has(rank, "absent"))


def parse_simulation(shape: str, *, seed: int = 0, faults: list[str]) -> Simulation:
    """``128x8`` and texts such as ``node23-gpu3:slow`` as a :class:`Simulation`.

    Raises:
        ConfigurationError: a shape or a fault that is not understood, or a fault outside of the fleet.
    """
    found = SHAPE.fullmatch(shape)
    if found is None or int(found[1]) * int(found[2]) > MOST_GPUS:
        raise ConfigurationError(f"{shape!r} is no fleet; say NODESxGPUS, for example 128x8, with at most {MOST_GPUS} GPUs")
    simulation = Simulation(
        nodes=int(found[1]), gpus_per_node=int(found[2]), seed=seed, faults=tuple(parse_fault(one) for one in faults)
    )
    for fault in simulation.faults:
        if fault.node >= simulation.nodes or (fault.gpu or 0) >= simulation.gpus_per_node:
            last = f"node{simulation.nodes - 1}-gpu{simulation.gpus_per_node - 1}"
            raise ConfigurationError(f"{str(fault)!r} is outside of the fleet {shape}, whose last GPU is {last}")
        if fault.kind in GPUS_ONLY and simulation.gpus_per_node == 1:
            raise ConfigurationError(f"{str(fault)!r} needs a neighbour, and the nodes of the fleet {shape} have one GPU")
    if not simulation.present:
        raise ConfigurationError(f"nothing of the fleet {shape} is present: nobody could be asked")
    return simulation
