"""Ports of NICs beside the promise and the other hosts, PCIe links on the way to NICs, nodes off the fabric. Pure.

No list says which ports should be up. A port should be up where ports like it are up on half of the hosts or more; a port that
is down everywhere is off by design. One with a link is not, whoever else has the same: it waits for a subnet manager.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_gpucluster.inventory.nics import Nic, NicPort
from pytest_gpucluster.inventory.pci_tree import PciNode, PciPath
from pytest_gpucluster.inventory.reading import NotAvailable, or_none, split
from pytest_gpucluster.judging.finding import BAD, HERE, NOBODY, UNKNOWN, Finding, Said, finding_of
from pytest_gpucluster.text import counted

__all__ = [
    "NodeTraffic",
    "PortPromise",
    "judge_pcie_links",
    "judge_ports",
    "judge_redirection",
    "judge_transport",
    "nearest_gpus",
    "own_ports",
]

ACTIVE, LINK_UP = "ACTIVE", "LinkUp"
OFF_FABRIC_ADVICE = "look there at the adapters, at nvidia_peermem or dma_buf, and at NCCL's variables: gpucluster info"
OFF = ("DOWN", "NOP")
LINKED = (LINK_UP, "LinkErrorRecovery", "PortConfigurationTraining")
"""Physical states of a port that has a cable with something at its other end."""
SHORT = 0.99
"""Of the promised rate of all ports of a host: less is a fault, and no rounding of the kernel's words."""
GBIT_PER_GB = 8
ANY_RATE = 1e-9
"""What a port must reach that should be up at any rate."""
PortKey = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortPromise:
    """What the profile says of a host's ports: how many are up, at which rate at least. None: the other hosts say it.

    ``total_gb_s``: what all of them carry, in 10^9 bytes a second one way.
    """

    fabric: str
    ports: int | None = None
    gbit_s: float | None = None
    total_gb_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    """A port with its rate, 0 where it is not up; ``unknown`` says why the rate is not known, and the rate is infinite.

    ``waits``: it has a link and is not up.
    """

    key: PortKey
    name: str
    rate: float
    shows: str
    unknown: str | None
    waits: bool = False


def label(nic: Nic, port: NicPort | None = None) -> str:
    """``mlx5_2 port 1 (0000:1a:00.0)``."""
    number = "" if port is None else f" port {port.number}"
    return f"{nic.device}{number}" + ("" if isinstance(nic.pci, NotAvailable) else f" ({nic.pci})")


def own_ports(nics: Iterable[Nic], fabric: str) -> list[tuple[Nic, NicPort]]:
    """The ports of a fabric, and those of which the fabric is not known, without those of NVSwitches.

    A virtual function has no cable of its own. It counts where a host shows no physical port: a container has nothing else.
    """
    ports = [
        (nic, port)
        for nic in nics
        if nic.is_nvswitch is not True and not isinstance(nic.ports, NotAvailable)
        for port in nic.ports
        if isinstance(port.fabric, NotAvailable) or port.fabric == fabric
    ]
    return [(nic, port) for nic, port in ports if not nic.is_virtual] or ports


def unread_adapters(nics: Iterable[Nic]) -> list[str]:
    """The adapters whose ports cannot be listed, and why."""
    return [f"{label(nic)}: its ports are {nic.ports}" for nic in nics if isinstance(nic.ports, NotAvailable)]


def judge_ports(hosts: Mapping[str, Sequence[Nic] | NotAvailable], promise: PortPromise) -> dict[str, Finding]:
    """Of each host, how many ports fewer than expected are up at their expected rate, beside the promise and the other hosts.

    Args:
        hosts: the adapters that each host shows, by host.
        promise: what the profile says.
    """
    found = {host: _ports(nics, promise.fabric) for host, nics in hosts.items()}
    unread = {host: _unread(nics, found[host], promise.fabric) for host, nics in hosts.items()}
    voters = [found[host] for host in hosts if not unread[host]] or [found[host] for host in hosts]
    expected = _expected([_rates(ports) for ports in voters], promise)
    usual = _usual_by_key(voters)
    has_peers = len(hosts) > 1 or promise.ports is not None
    names = {host: _names(nics, promise.fabric) for host, nics in hosts.items()}
    write_it = "measure it beside others, or write it: nic_ports: {profiles: {NAME: {recipe: {ports: N}}}}"
    nothing = f"one host answers, so nothing says how many of its {promise.fabric} ports should be up; {write_it}"
    alone = [] if has_peers else [nothing]
    doubts = {host: {HERE: unread[host], NOBODY: alone} for host in hosts}
    judged = {}
    for host, ports in found.items():
        if isinstance(hosts[host], NotAvailable):
            judged[host] = Finding(kind="nic", unknown=doubts[host], evidence={"expected": _in_words(expected)})
        else:
            of_host = _judged(ports, expected, usual, doubts[host], promise).with_evidence(**_special(hosts[host]))
            judged[host] = replace(of_host, remark=_other_names(host, names))
    return judged


def _other_names(host: str, names: Mapping[str, Sequence[str]]) -> str | None:
    """How the names of a host's adapters differ from those that most other hosts have; None where they do not."""
    others = Counter(", ".join(found) for other, found in names.items() if other != host and found)
    own, usual = ", ".join(names[host]), max(others, key=lambda one: others[one], default="")
    if not own or not usual or own == usual:
        return None
    where = counted(others[usual], "host")
    return f"its adapters have other names than on {where}: {own}, not {usual}; NCCL_IB_HCA fits one of them"


def _special(nics: Sequence[Nic] | NotAvailable) -> dict[str, list[str]]:
    """The adapters of a host that are no physical ports of a fabric, by what they are."""
    listed = or_none(nics) or ()
    kinds = {
        "virtual functions": [nic.device for nic in listed if nic.is_virtual],
        "of NVSwitches, not counted": [nic.device for nic in listed if nic.is_nvswitch is True],
        "perhaps of NVSwitches": [nic.device for nic in listed if isinstance(nic.is_nvswitch, NotAvailable)],
    }
    return {kind: names for kind, names in kinds.items() if names}


def _names(nics: Sequence[Nic] | NotAvailable, fabric: str) -> list[str]:
    """The names of the adapters of a fabric whose ports are up."""
    listed = or_none(nics) or ()
    return list(dict.fromkeys(nic.device for nic, port in own_ports(listed, fabric) if port.state == ACTIVE))


def _ports(nics: Sequence[Nic] | NotAvailable, fabric: str) -> list[_Port]:
    """The ports of a host; an unknown one for each adapter whose ports cannot be listed."""
    if isinstance(nics, NotAvailable):
        return []
    names = [label(nic) for nic in nics if isinstance(nic.ports, NotAvailable)]
    unlisted = [_Port(key=(name, 0), name=name, rate=math.inf, shows=name, unknown=None) for name in names]
    return [*(_port(nic, port) for nic, port in own_ports(nics, fabric)), *unlisted]


def _port(nic: Nic, port: NicPort) -> _Port:
    values = {"fabric": port.fabric, "state": port.state, "physical state": port.physical_state, "rate": port.rate_gbit_s}
    unread = [f"{name} {why}" for name, why in split(values)[1].items()]
    is_up = port.state == ACTIVE and port.physical_state == LINK_UP
    states = ((port.state, ACTIVE), (port.physical_state, LINK_UP))
    is_down = any(not isinstance(value, NotAvailable) and value != up for value, up in states)
    rate = port.rate_gbit_s
    unread += [f"rate {port.rate} though it is up"] if is_up and rate == 0 else []
    name = label(nic, port)
    known = is_down or (is_up and not isinstance(rate, NotAvailable))
    return _Port(
        key=(nic.device if isinstance(nic.pci, NotAvailable) else nic.pci, port.number),
        name=name,
        rate=math.inf if not known or isinstance(rate, NotAvailable) else rate if is_up else 0.0,
        shows=str(port.rate) if is_up else f"{port.state}, {port.physical_state}",
        unknown=f"{name}: {'; '.join(unread)}" if unread and not is_down else None,
        waits=is_down and (port.physical_state in LINKED or not (isinstance(port.state, NotAvailable) or port.state in OFF)),
    )


def _unread(nics: Sequence[Nic] | NotAvailable, ports: Iterable[_Port], fabric: str) -> list[str]:
    if isinstance(nics, NotAvailable):
        return [f"no {fabric} adapter could be read: {nics.why}; no RDMA driver is loaded, or the container hides it"]
    return [*unread_adapters(nics), *(port.unknown for port in ports if port.unknown is not None)]


def _rates(ports: Iterable[_Port]) -> list[float]:
    return sorted((port.rate for port in ports), reverse=True)


def _expected(rates: Sequence[Sequence[float]], promise: PortPromise) -> list[float]:
    """The rate that each port of a host should have, fastest first: what half of the hosts or more have, or the promise."""
    longest = max(map(len, rates), default=0)
    usual = [_of_half([one[at] if at < len(one) else 0.0 for one in rates]) for at in range(longest)]
    usual = [0.0 if math.isinf(rate) else rate for rate in usual]
    least = promise.gbit_s or ANY_RATE
    if promise.ports is None:
        return [max(rate, least) for rate in usual if rate > 0] or [least]
    return [max(usual[at] if at < longest else 0.0, least) for at in range(promise.ports)]


def _of_half(values: Sequence[float]) -> float:
    """The highest value that half of them or more reach."""
    return sorted(values, reverse=True)[(len(values) - 1) // 2] if values else 0.0


def _usual_by_key(hosts: Sequence[Sequence[_Port]]) -> dict[PortKey, tuple[float, str]]:
    """The rate that the port at each PCI address has on half of the hosts or more, with its name there."""
    by_key = [{port.key: port for port in ports} for ports in hosts]
    names = {key: port.name for ports in by_key for key, port in ports.items()}
    return {key: (_of_half([ports[key].rate if key in ports else 0.0 for ports in by_key]), names[key]) for key in names}


def _judged(
    ports: Sequence[_Port],
    expected: Sequence[float],
    usual: Mapping[PortKey, tuple[float, str]],
    doubts: Mapping[str, Sequence[str]],
    promise: PortPromise,
) -> Finding:
    rates = _rates(ports)
    fewer = sum(at >= len(rates) or rates[at] < rate for at, rate in enumerate(expected))
    waiting = {} if promise.ports is not None else _waiting(ports, usual)
    short = _short(rates, promise)
    bad = max(fewer + len(waiting), short)
    named = {**(_to_look_at(ports, expected, usual) if fewer else {}), **waiting}
    total = {} if promise.total_gb_s is None else {"promised": f"{promise.total_gb_s * GBIT_PER_GB:g} Gb/s of all ports"}
    return Finding(
        bad={name: (fact,) for name, fact in (named or (_too_slow(ports, promise) if short else {})).items()},
        unknown=doubts,
        value=bad if bad or not any(doubts.values()) else None,
        kind="nic",
        evidence={"up": _in_words(rate for rate in rates if 0 < rate < math.inf), "expected": _in_words(expected), **total},
    )


def _waiting(ports: Iterable[_Port], usual: Mapping[PortKey, tuple[float, str]]) -> dict[str, str]:
    """The ports that have a link and are not up, nor are those like them on other hosts: no subnet manager knows them."""
    return {port.name: port.shows for port in ports if port.waits and usual.get(port.key, (0.0, ""))[0] == 0}


def _short(rates: Sequence[float], promise: PortPromise) -> int:
    """How many ports like the fastest one are missing in the rate that the profile promises of all of them."""
    if promise.total_gb_s is None or promise.gbit_s is not None or max(rates, default=0.0) == 0:
        return 0
    total = promise.total_gb_s * GBIT_PER_GB
    return 0 if sum(rates) >= SHORT * total else math.ceil((total - sum(rates)) / max(rates))


def _too_slow(ports: Sequence[_Port], promise: PortPromise) -> dict[str, str]:
    """The ports slower than the fastest one; all of them where they carry at most half of what is promised.

    Where none is slower, ports that the host does not show are missing, and no port is to blame.
    """
    fastest, total = max(ports, key=lambda port: port.rate), GBIT_PER_GB * (promise.total_gb_s or 0)
    up = sum(port.rate > 0 for port in ports)
    missing = math.ceil(SHORT * total / fastest.rate) - up
    slower = {port.name: port.shows for port in ports if port.rate < fastest.rate or missing >= up}
    return slower or {HERE: f"{missing} more at this rate are promised: {fastest.shows}"}


def _to_look_at(
    ports: Sequence[_Port], expected: Sequence[float], usual: Mapping[PortKey, tuple[float, str]]
) -> dict[str, str]:
    """The ports that are slower than those at the same place of other hosts; without any, those slower than expected."""
    here = {port.key: port for port in ports}
    slow = {port.name: port.shows for port in ports if port.rate < usual.get(port.key, (0.0, ""))[0]}
    absent = {name: "is absent" for key, (rate, name) in usual.items() if rate > 0 and key not in here}
    slower = {port.name: port.shows for port in ports if port.rate < max(expected, default=0.0)}
    return {**slow, **absent} or slower


def _in_words(rates: Iterable[float]) -> str:
    """``8 at 400 Gb/s, 1 at 200 Gb/s``."""
    counted = Counter(rates)
    words = [f"{number} at {'any rate' if rate == ANY_RATE else f'{rate:g} Gb/s'}" for rate, number in counted.items()]
    return ", ".join(words) or "none"


@dataclass(frozen=True, slots=True)
class NodeTraffic:
    """The connections that the ranks of one node opened to other nodes; ``off_fabric`` of them not on the promised fabric."""

    connections: int
    off_fabric: int

    @property
    def is_off_fabric(self) -> bool:
        """Whether the node uses the fabric for nothing."""
        return self.connections == self.off_fabric > 0


def judge_transport(traffic: Mapping[Any, NodeTraffic], unknown: Sequence[str] = ()) -> Finding:
    """How many connections between nodes are not on the promised fabric; ``unknown``: names of networks that nobody knows.

    A node that uses the fabric for nothing is blamed if other nodes use it: a neighbour of such a node has some connections off
    the fabric too. If no node uses it, nobody is blamed.
    """
    others = [node for node in traffic.values() if not node.is_off_fabric and node.connections > 0]
    off_fabric = [name for name, node in traffic.items() if others and node.is_off_fabric]
    bad = dict.fromkeys(off_fabric, ("no connection is on the promised fabric",))
    off = {str(name): f"{one.off_fabric} of {one.connections} connections" for name, one in traffic.items() if one.off_fabric}
    return Finding(
        bad=bad,
        unknown={HERE: [f"unknown network {name}: it is not known which fabric carries it" for name in unknown]},
        value=sum(node.off_fabric for node in traffic.values()),
        kind="host" if bad else None,
        unknown_kind="unknown",
        advice=OFF_FABRIC_ADVICE if bad else None,
        evidence={"off the fabric": off} if off else {},
    )


def judge_pcie_links(paths: Mapping[str, PciPath | NotAvailable]) -> Finding:
    """Every PCIe link on the way to a host's NICs, once: those below what both of their ends can. ``paths`` by NIC."""
    known, unread = split(paths)
    said: list[Said] = [(name, UNKNOWN, f"its way is {why}") for name, why in unread.items()]
    links: dict[str, tuple[str, PciNode, PciNode | None]] = {}
    for name, path in known.items():
        for lower, upper in _links(path):
            links.setdefault(lower.address, (name, lower, upper))
    said += [one for link in links.values() for one in _lost(*link)]
    if not links and not said:
        said.append((HERE, UNKNOWN, "there is no NIC of the fabric to look at"))
    return replace(finding_of(said), kind="nic", evidence={"PCIe links": len(links)})


def judge_redirection(
    nics: Mapping[str, PciPath | NotAvailable], gpus: Mapping[str, PciPath | NotAvailable] | NotAvailable
) -> Finding | None:
    """Bridges that send what a NIC and a GPU below one switch exchange up to the root: access control (ACS) is on.

    None where there are such bridges and none may be read, as by everybody but root. A virtual machine shows none: the evidence
    then counts 0 bridges.
    """
    listed = or_none(gpus) or {}
    lost = split({**nics, **listed})[1]
    pairs = [(name, nic, address, gpu) for name, nic in nics.items() for address, gpu in listed.items()]
    states: dict[str, bool | NotAvailable] = {}
    between: dict[str, list[str]] = {}
    for name, nic, address, gpu in pairs:
        ways = [{} if isinstance(way, NotAvailable) else {one.address: one for one in way.nodes[1:]} for way in (nic, gpu)]
        for bridge in ways[0].keys() ^ ways[1].keys() if ways[0].keys() & ways[1].keys() else ():
            states[bridge] = {**ways[0], **ways[1]}[bridge].redirects_peers
            between.setdefault(bridge, []).append(f"{name} and GPU {address}")
    if states and all(isinstance(state, NotAvailable) for state in states.values()):
        return None
    unknown = split(states)[1]
    refused = {HERE: (f"the GPUs on the PCI bus are {gpus}",)} if isinstance(gpus, NotAvailable) else {}
    return Finding(
        bad={bridge: [f"is between {', '.join(between[bridge])}"] for bridge, state in states.items() if state is True},
        unknown={**refused, **{part: (f"its access control is {why}",) for part, why in {**lost, **unknown}.items()}},
        evidence={"bridges": len(states)},
        kind="settings",
        advice="switch access control (ACS) off for these bridges, in the firmware or by setpci",
    )


def nearest_gpus(nic: PciPath, gpus: Mapping[str, PciPath | NotAvailable]) -> tuple[str, ...]:
    """The GPUs below the nearest bridge that a NIC has in common with any; otherwise those of its NUMA node."""
    known, _ = split(gpus)
    for bridge in (node.address for node in nic.nodes[1:]):
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


def _lost(name: str, lower: PciNode, upper: PciNode | None) -> Iterator[Said]:
    """What a link on the way to a NIC lacks, or why that is not known."""
    part, speed, width = lower.address, lower.speed_gt_s, lower.width
    ends = (lower,) if upper is None else (lower, upper)
    speeds = [most for end in ends if (most := or_none(end.max_speed_gt_s)) is not None]
    widths = [most for end in ends if (most := or_none(end.max_width)) is not None]
    if isinstance(speed, NotAvailable):
        yield part, UNKNOWN, f"the speed of its link is {speed}"
    elif isinstance(width, NotAvailable):
        yield part, UNKNOWN, f"the width of its link is {width}"
    elif not speeds or not widths:
        yield part, UNKNOWN, "what its link can is not shown"
    elif speed < min(speeds) or width < min(widths):
        yield part, BAD, f"on the way to {name}: x{width} at {speed:g} GT/s of x{min(widths):g} at {min(speeds):g} GT/s"
