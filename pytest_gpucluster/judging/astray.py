"""Which nodes take another way than the promised fabric. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class NodeTraffic:
    """The connections that the ranks of one node opened to other nodes.

    Attributes:
        connections: all of them.
        astray: those that are not on the promised fabric.
    """

    connections: int
    astray: int

    @property
    def is_all_astray(self) -> bool:
        """Whether the node uses the fabric for nothing."""
        return self.connections == self.astray > 0


def guilty_of_astray(traffic: Mapping[str, NodeTraffic]) -> tuple[str, ...]:
    """The nodes that use the fabric for nothing, where others use it; a neighbour of one has some connections astray.

    Nobody where no node uses the fabric: then it is not the nodes.
    """
    others = [node for node in traffic.values() if not node.is_all_astray and node.connections > 0]
    return tuple(name for name, node in traffic.items() if others and node.is_all_astray)


def describe_astray(traffic: Mapping[str, NodeTraffic]) -> dict[str, str]:
    """For each node with connections off the fabric, how many of how many."""
    return {name: f"{node.astray} of {node.connections} connections" for name, node in traffic.items() if node.astray}
