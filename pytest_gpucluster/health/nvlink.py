"""NVLinks beside what is promised: up and at their rate, the fabric joined, the NVLink domain that of the rack. Pure.

The judges of this module take readings by GPU, and blame the GPUs that are bad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.inventory.reading import NotAvailable, or_none, split
from pytest_gpucluster.judging.agreement import is_majority, majority
from pytest_gpucluster.judging.finding import BAD, HERE, UNKNOWN, Finding, Said, finding_of
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.nvlinks import GpuFabric, NvLink

__all__ = ["judge_ber", "judge_domain", "judge_fabric", "judge_nvlinks"]

JOINED = "completed"
DOMAIN_ADVICE = "look at the partitions of the rack (fabric manager) and at IMEX on the node (nvidia-imex-ctl -N)"
FABRIC_ADVICE = "look at the fabric manager of the node (systemctl status nvidia-fabricmanager, and its log), and restart it"


def judge_nvlinks(nvlinks: Mapping[Any, list[NvLink] | NotAvailable], *, gb_s: float) -> Finding:
    """How many NVLinks of the GPU with the fewest are up and carry ``gb_s`` (10^9 bytes a second, one way) or more.

    A link of which the state or the rate is unknown counts as up.
    """
    known, unread = split(nvlinks)
    most = max(map(len, known.values()), default=0)
    said: list[Said] = [(gpu, UNKNOWN, f"its NVLinks are {why}") for gpu, why in unread.items()]
    number_up = {}
    for gpu, links in known.items():
        faults = [f"link {one.link} {fault}" for one in links if (fault := _link_fault(one, gb_s)) is not None]
        number_up[gpu] = len(links) - len(faults)
        faults += [f"{counted(len(links), 'link')}, and others have {most}"] if len(links) < most else []
        said += [(gpu, BAD, fault) for fault in faults]
        said += [(gpu, UNKNOWN, f"link {one.link}: {why}") for one in links if (why := _unknown_of(one)) is not None]
    return replace(finding_of(said), value=min(number_up.values(), default=None), kind="gpu")


def judge_ber(nvlinks: Mapping[Any, list[NvLink] | NotAvailable], *, kind: str, is_healthy: Callable[[float], bool]) -> Finding:
    """The highest bit error rate of all NVLinks that are up.

    Args:
        nvlinks: by GPU.
        kind: ``effective``, after correction, or ``symbol``.
        is_healthy: whether a rate is within the limit.
    """
    listed, unread = split(nvlinks)
    unknown: list[Said] = [(gpu, UNKNOWN, f"its NVLinks are {why}") for gpu, why in unread.items()]
    worst: dict[Any, tuple[float, int]] = {}
    for gpu, links in listed.items():
        rates, hidden = split({one.link: getattr(one, f"{kind}_ber") for one in links if one.is_up is not False})
        unknown += [(gpu, UNKNOWN, f"link {link}: its {kind} BER is {why}") for link, why in hidden.items()]
        worst.update({gpu: max((rate, link) for link, rate in rates.items())} if rates else {})
    shown = {gpu: f"link {link}: {rate:g}" for gpu, (rate, link) in worst.items()}
    return replace(
        finding_of(unknown),
        bad={gpu: (shown[gpu],) for gpu, (rate, _) in worst.items() if not is_healthy(rate)},
        value=max((rate for rate, _ in worst.values()), default=None),
        kind="gpu",
        evidence={str(gpu): text for gpu, text in shown.items()},
    )


def _link_fault(link: NvLink, gb_s: float) -> str | None:
    """What is wrong with a link, as far as that is known."""
    if link.is_up is False:
        return "is down"
    if link.is_up is True and not isinstance(link.speed_gb_s, NotAvailable) and link.speed_gb_s < gb_s:
        return f"at {link.speed_gb_s:g} of {gb_s:g} GB/s"
    return None


def _unknown_of(link: NvLink) -> str | None:
    """What of a link is not known, and why. The rate of a link that is down does not matter."""
    if isinstance(link.is_up, NotAvailable):
        return f"its state is {link.is_up}"
    if link.is_up and isinstance(link.speed_gb_s, NotAvailable):
        return f"its rate is {link.speed_gb_s}"
    return None


def judge_fabric(peers: Mapping[Any, str | NotAvailable], fabrics: Mapping[Any, GpuFabric | NotAvailable]) -> Finding:
    """Every GPU whose NVLinks end at a switch must have joined, in one clique. NVLinks that end at GPUs need no fabric.

    Args:
        peers: what the links of each GPU end at.
        fabrics: the fabric of each GPU.
    """
    return replace(finding_of(_fabrics(peers, fabrics)), kind="gpu", advice=FABRIC_ADVICE)


def _fabrics(peers: Mapping[Any, str | NotAvailable], fabrics: Mapping[Any, GpuFabric | NotAvailable]) -> Iterator[Said]:
    joined: dict[Any, tuple[str, int]] = {}
    for gpu, fabric in fabrics.items():
        peer = peers[gpu]
        if isinstance(peer, NotAvailable):
            yield gpu, UNKNOWN, f"what its NVLinks end at is {peer}"
        elif peer == "gpu":
            continue
        elif isinstance(fabric, NotAvailable):
            yield gpu, UNKNOWN, f"its fabric is {fabric}"
        elif fabric.state == "not_supported":
            yield gpu, UNKNOWN, f"its NVLinks end at a {peer}, and it shows no fabric"
        elif (fault := _fabric_fault(fabric)) is not None:
            yield gpu, BAD, fault
        elif isinstance(fabric.troubles, NotAvailable):
            yield gpu, UNKNOWN, f"its health is {fabric.troubles}"
        else:
            joined[gpu] = (fabric.cluster_uuid, fabric.clique)
    usual = majority(joined.values())
    cliques = {gpu: f"in clique {clique} of cluster {cluster}" for gpu, (cluster, clique) in joined.items()}
    if usual is not None:
        yield from ((gpu, BAD, text) for gpu, text in cliques.items() if joined[gpu] != usual)
    elif joined:  # nobody can say which of them are wrong
        texts = ", ".join(f"{counted(number, 'GPU')} {text}" for text, number in Counter(cliques.values()).items())
        yield HERE, BAD, f"no clique has the majority: {texts}"


def _fabric_fault(fabric: GpuFabric) -> str | None:
    if fabric.state != JOINED:
        return f"its state is {fabric.state}"
    if fabric.error is not None:
        return f"its registration failed: {fabric.error}"
    return ", ".join(or_none(fabric.troubles) or ()) or None


def judge_domain(node: str, fabrics: Mapping[str, Sequence[str | None]], *, nodes_per_domain: int) -> Finding:
    """Whether the GPUs of a node are in the NVLink domain of its rack; see :func:`outside_domains` for the arguments."""
    why = outside_domains(fabrics, nodes_per_domain=nodes_per_domain).get(node)
    if why is None:
        return Finding(kind="node", evidence={"domain": fabrics[node][0]})
    return Finding(bad={HERE: (why,)}, kind="node", advice=DOMAIN_ADVICE)


def outside_domains(fabrics: Mapping[str, Sequence[str | None]], *, nodes_per_domain: int) -> dict[str, str]:
    """Why each node is outside, by node id; nodes that are in a domain are left out.

    As many domains as the nodes need are expected, and the largest are taken for them, if each has the majority over all
    that are left. Where it cannot be told which is the odd one, the nodes of all that may be are outside.

    Args:
        fabrics: by node id, the fabric of each of its GPUs; None where NVLink ends at the node by what the GPU shows.
        nodes_per_domain: how many nodes a domain has.
    """
    found: dict[str, str] = {}
    domains: dict[str, str] = {}
    for node, of_gpus in fabrics.items():
        own = [fabric for fabric in of_gpus if fabric is not None]
        if len(own) < len(of_gpus):
            without = len(of_gpus) - len(own)
            found[node] = f"{without} of {counted(len(of_gpus), 'GPU')} show no NVLink fabric beyond the node"
        elif len({*own}) > 1:
            found[node] = f"its GPUs are in {counted(len({*own}), 'NVLink fabric')}"
        else:
            domains[node] = own[0]
    return {**found, **_odd_ones(domains, expected=-(-len(fabrics) // nodes_per_domain))}


def _odd_ones(domains: Mapping[str, str], *, expected: int) -> dict[str, str]:
    sizes = Counter(domains.values())
    ordered = sizes.most_common()
    if len(ordered) <= expected:
        return {}
    rest = sum(size for _, size in ordered[expected:])
    certain = {domain for domain, size in ordered[:expected] if is_majority(size, size + rest)}
    domains_text = f"{len(ordered)} NVLink domains where {expected} would do"
    return {
        node: f"in domain {domain} with {counted(sizes[domain] - 1, 'other node')}: {domains_text}"
        for node, domain in domains.items()
        if domain not in certain
    }
