"""How near two devices are to each other, in the words of ``nvidia-smi topo -m``. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.pci_tree import PciPath

SAME_SWITCH_BRIDGES = 2
"""Bridges of a device up to the switch that it shares with another one: its own port and the switch's upward port."""
NO_NUMA_NODE = "-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a device is.

    ``addresses`` is its way up the PCIe tree, its own address first; None where that is not known. ``numa_node`` is None
    where the firmware does not tell. ``nvlinks`` counts those that lead up to a switch.
    """

    addresses: tuple[str, ...] | None
    numa_node: str | None = None
    nvlinks: int = 0


def position(path: PciPath | NotAvailable | None, *, nvlinks: int = 0) -> Position:
    """The position of a device with this way up the PCIe tree; None: the tree does not list it."""
    if path is None or isinstance(path, NotAvailable):
        return Position(addresses=None, nvlinks=nvlinks)
    unknown = isinstance(path.numa_node, NotAvailable) or path.numa_node == NO_NUMA_NODE
    return Position(
        addresses=tuple(node.address for node in path.nodes),
        numa_node=None if unknown else str(path.numa_node),
        nvlinks=nvlinks,
    )


def nearness(one: Position, other: Position) -> str | None:
    """``NV18`` where NVLinks lead from both to a switch, else the way over PCIe; None where that is not known.

    PIX below one switch, PXB over several bridges, PHB below one host bridge, NODE of one NUMA node, SYS of two.
    """
    nvlinks = min(one.nvlinks, other.nvlinks)
    return f"NV{nvlinks}" if nvlinks else _over_pcie(one, other)


def _over_pcie(one: Position, other: Position) -> str | None:
    if one.addresses is None or other.addresses is None:
        return None
    above = one.addresses[1:], other.addresses[1:]
    shared = [address for address in above[0] if address in above[1]]
    if shared:
        return "PIX" if max(up.index(shared[0]) for up in above) < SAME_SWITCH_BRIDGES else "PXB"
    if all(above) and _bus(above[0][-1]) == _bus(above[1][-1]):
        return "PHB"
    if one.numa_node is None or other.numa_node is None:
        return None
    return "NODE" if one.numa_node == other.numa_node else "SYS"


def _bus(address: str) -> str:
    """Domain and bus; the root ports of a host bridge are on one bus."""
    return address.rpartition(":")[0]
