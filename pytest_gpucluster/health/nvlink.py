"""NVLinks beside what is promised: up and at their rate, the fabric joined, the NVLink domain that of the rack. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.forecast import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.inventory.nvlinks import GpuFabric, NvLink

JOINED = "completed"
DOMAIN_ADVICE = "look at the partitions of the rack (fabric manager) and at IMEX on the node (nvidia-imex-ctl -N)"
FABRIC_ADVICE = "look at the fabric manager of the node (systemctl status nvidia-fabricmanager, and its log), and restart it"


@dataclass(frozen=True, slots=True)
class FabricSeen:
    """The fabric of a host's GPUs: what is wrong with each that is not healthy (``bad``), and what is not known of others."""

    bad: Mapping[str, str]
    unknown: Mapping[str, tuple[str, ...]]


def judge_fabric(peers: Mapping[str, str | NotAvailable], fabrics: Mapping[str, GpuFabric | NotAvailable]) -> FabricSeen:
    """Every GPU whose NVLinks end at a switch must have joined. Both arguments are by GPU; ``peers``: what its links end at.

    NVLinks that end at GPUs need no fabric.
    """
    bad: dict[str, str] = {}
    unknown: dict[str, tuple[str, ...]] = {}
    joined: dict[str, tuple[str, int]] = {}
    for gpu, fabric in fabrics.items():
        peer = peers[gpu]
        if isinstance(peer, NotAvailable):
            unknown[gpu] = (f"what its NVLinks end at is {peer}",)
        elif peer == "gpu":
            continue
        elif isinstance(fabric, NotAvailable):
            unknown[gpu] = (f"its fabric is {fabric}",)
        elif fabric.state == "not_supported":
            unknown[gpu] = (f"its NVLinks end at a {peer}, and it tells of no fabric",)
        elif (fault := _fabric_fault(fabric)) is not None:
            bad[gpu] = fault
        else:
            joined[gpu] = (fabric.cluster_uuid, fabric.clique)
    usual = Counter(joined.values()).most_common(1)
    bad.update({gpu: f"in clique {at[1]} of cluster {at[0]}" for gpu, at in joined.items() if at != usual[0][0]})
    return FabricSeen(bad, unknown)


def _fabric_fault(fabric: GpuFabric) -> str | None:
    if fabric.state != JOINED:
        return f"its state is {fabric.state}"
    if fabric.error is not None:
        return f"its registration failed: {fabric.error}"
    return ", ".join(fabric.troubles) or None


@dataclass(frozen=True, slots=True)
class LinksUp:
    """The NVLinks of several GPUs.

    Attributes:
        by_gpu: how many links of each GPU are up at their rate; a GPU of which nothing is known is left out.
        facts: what is wrong with the others.
        unknown: by GPU, why nothing can be said of some of its links, or of all. Such a link counts as up in ``by_gpu``.
    """

    by_gpu: Mapping[str, int]
    facts: tuple[str, ...]
    unknown: Mapping[str, tuple[str, ...]]


def count_nvlinks(nvlinks: Mapping[str, list[NvLink] | NotAvailable], *, gb_s: float) -> LinksUp:
    """How many NVLinks of each GPU are up and carry ``gb_s`` (10^9 bytes a second, one way) or more."""
    by_gpu: dict[str, int] = {}
    facts: list[str] = []
    unknown: dict[str, tuple[str, ...]] = {}
    for gpu, links in nvlinks.items():
        if isinstance(links, NotAvailable):
            unknown[gpu] = (f"its NVLinks are {links}",)
            continue
        bad = {f"{gpu} link {one.link} {fault}" for one in links if (fault := _link_fault(one, gb_s)) is not None}
        by_gpu[gpu] = len(links) - len(bad)
        facts += sorted(bad)
        whys = tuple(f"link {one.link}: {why}" for one in links if (why := _unknown(one)) is not None)
        unknown.update({gpu: whys} if whys else {})
    return LinksUp(by_gpu, tuple(facts), unknown)


def worst_ber(
    nvlinks: Mapping[str, list[NvLink] | NotAvailable], *, kind: str
) -> tuple[dict[str, tuple[float, int]], dict[str, tuple[str, ...]]]:
    """The highest bit error rate of each GPU's NVLinks that are up, with its link; and by GPU, of which links nothing is known.

    Args:
        nvlinks: by GPU.
        kind: ``effective``, after correction, or ``symbol``.
    """
    found: dict[str, tuple[float, int]] = {}
    unknown: dict[str, tuple[str, ...]] = {}
    for gpu, links in nvlinks.items():
        if isinstance(links, NotAvailable):
            unknown[gpu] = (f"its NVLinks are {links}",)
            continue
        rates = {one.link: getattr(one, f"{kind}_ber") for one in links if one.is_up is not False}
        whys = tuple(f"link {link}: its {kind} BER is {rate}" for link, rate in rates.items() if isinstance(rate, NotAvailable))
        unknown.update({gpu: whys} if whys else {})
        known = [(rate, link) for link, rate in rates.items() if not isinstance(rate, NotAvailable)]
        if known:
            found[gpu] = max(known)
    return found, unknown


def _link_fault(link: NvLink, gb_s: float) -> str | None:
    """What is wrong with a link, as far as that is known."""
    if link.is_up is False:
        return "is down"
    if link.is_up is True and not isinstance(link.speed_gb_s, NotAvailable) and link.speed_gb_s < gb_s:
        return f"at {link.speed_gb_s:g} of {gb_s:g} GB/s"
    return None


def _unknown(link: NvLink) -> str | None:
    """What of a link is not known, and why. The rate of a link that is down does not matter."""
    if isinstance(link.is_up, NotAvailable):
        return f"its state is {link.is_up}"
    if link.is_up and isinstance(link.speed_gb_s, NotAvailable):
        return f"its rate is {link.speed_gb_s}"
    return None


def outside_domains(fabrics: Mapping[str, Sequence[str | None]], *, nodes_per_domain: int) -> dict[str, str]:
    """Why each node is outside, by node id; nodes that are in a domain are left out.

    As many domains as the nodes need are expected, and the largest are taken for them. Where it cannot be told which is the
    odd one, the nodes of all that may be are outside.

    Args:
        fabrics: by node id, the fabric of each of its GPUs; None where NVLink ends at the node by what the GPU tells.
        nodes_per_domain: how many nodes a domain has.
    """
    found: dict[str, str] = {}
    domains: dict[str, str] = {}
    for node, of_gpus in fabrics.items():
        own = [fabric for fabric in of_gpus if fabric is not None]
        if len(own) < len(of_gpus):
            alone = len(of_gpus) - len(own)
            found[node] = f"{alone} of {counted(len(of_gpus), 'GPU')} tell of no NVLink fabric beyond the node"
        elif len({*own}) > 1:
            found[node] = f"its GPUs are in {len({*own})} NVLink fabrics"
        else:
            domains[node] = own[0]
    return {**found, **_odd_ones(domains, expected=-(-len(fabrics) // nodes_per_domain))}


def _odd_ones(domains: Mapping[str, str], *, expected: int) -> dict[str, str]:
    sizes = Counter(domains.values())
    ordered = sizes.most_common()
    if len(ordered) <= expected:
        return {}
    least = ordered[expected - 1][1]
    certain = {domain for domain, size in ordered if size > least or (size == least and ordered[expected][1] < least)}
    told = f"{len(ordered)} NVLink domains where {expected} would do"
    return {
        node: f"in domain {domain} with {counted(sizes[domain] - 1, 'other node')}: {told}"
        for node, domain in domains.items()
        if domain not in certain
    }
