"""PCIe links on the way to NICs that run below what both of their ends can; and which GPU is near which NIC. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpucluster.inventory.pci_tree import PciNode, PciPath


@dataclass(frozen=True, slots=True)
class LinksSeen:
    """The links on the way to a host's NICs: how many were seen, which are narrow (by address), and what is not known."""

    links: int
    names: tuple[str, ...]
    facts: tuple[str, ...]
    unknown: tuple[str, ...]


def judge_links(paths: Mapping[str, PciPath | NotAvailable]) -> LinksSeen:
    """Every link on these ways, once. ``paths`` by the name of the NIC."""
    narrow: dict[str, str] = {}
    unknown: dict[str, None] = {}
    seen = set()
    for name, path in paths.items():
        if isinstance(path, NotAvailable):
            unknown[f"{name}: its way is {path}"] = None
            continue
        for lower, upper in _links(path):
            seen.add(lower.address)
            lost, why = _lost(lower, upper)
            if why is not None:
                unknown[f"{lower.address}: {why}"] = None
            elif lost is not None:
                narrow.setdefault(lower.address, f"{lower.address} on the way to {name}: {lost}")
    if not seen and not unknown:
        unknown["there is no NIC of the fabric to look at"] = None
    return LinksSeen(len(seen), tuple(narrow), tuple(narrow.values()), tuple(unknown))


def nearest_gpus(nic: PciPath, gpus: Mapping[str, PciPath | NotAvailable]) -> tuple[str, ...]:
    """The GPUs below the nearest bridge that a NIC has in common with any; otherwise those of its NUMA node."""
    known = {address: path for address, path in gpus.items() if not isinstance(path, NotAvailable)}
    bridges = [node.address for node in nic.nodes[1:]]
    for bridge in bridges:
        below = [address for address, path in known.items() if bridge in {node.address for node in path.nodes[1:]}]
        if below:
            return tuple(below)
    if isinstance(nic.numa_node, NotAvailable) or nic.numa_node.startswith("-"):
        return ()
    return tuple(address for address, path in known.items() if path.numa_node == nic.numa_node)


def _links(path: PciPath) -> Iterator[tuple[PciNode, PciNode | None]]:
    """Both ends of each link: a bridge of a switch is an end of one link, and the next bridge an end of another.

    The upper end is None where it is not shown, as in a virtual machine.
    """
    nodes = path.nodes
    for at in range(0, len(nodes), 2):
        yield nodes[at], nodes[at + 1] if at + 1 < len(nodes) else None


def _lost(lower: PciNode, upper: PciNode | None) -> tuple[str | None, str | None]:
    """What a link lacks, in words, and why that is not known."""
    now = (lower.speed_gt_s, lower.width)
    most = [(lower.max_speed_gt_s, lower.max_width), *([(upper.max_speed_gt_s, upper.max_width)] if upper else [])]
    speeds, widths = (_known(end[at] for end in most) for at in (0, 1))
    for value, name in ((now[0], "speed"), (now[1], "width")):
        if isinstance(value, NotAvailable):
            return None, f"the {name} of its link is {value}"
    if not speeds or not widths:
        return None, "what its link can is not shown"
    assert not isinstance(now[0], NotAvailable)
    assert not isinstance(now[1], NotAvailable)
    if now[0] >= min(speeds) and now[1] >= min(widths):
        return None, None
    return f"x{now[1]} at {now[0]:g} GT/s of x{min(widths):g} at {min(speeds):g} GT/s", None


def _known(values: Iterable[float | NotAvailable]) -> list[float]:
    return [value for value in values if not isinstance(value, NotAvailable)]
