"""What adapters are set to, GPUDirect, cables by LLDP, and ways from a host to what manages it. Pure.

Nothing here ever ran beside an InfiniBand or RoCE adapter, a BMC or a DPU: forms of files are those of the kernel's source.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.health.nics import ACTIVE, label, own_ports
from pytest_gpucluster.inventory.nics import OPEN, ROCE_V2, Nic, NicPort, SwitchPort, roce_mtu
from pytest_gpucluster.inventory.reading import CLOSED, NONE, NotAvailable, apply, or_none, split
from pytest_gpucluster.judging.agreement import majority
from pytest_gpucluster.judging.finding import HERE, Finding, gather
from pytest_gpucluster.thresholds.versions import parse

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.machine import Management
    from pytest_gpucluster.measurements.host import NicPaths

__all__ = ["judge_cabling", "judge_gpudirect", "judge_management", "judge_nic_settings"]

FULL_MEMBER = 0x8000
"""The bit of a partition key that makes a full member."""
DMA_BUF_KERNEL = (5, 12)
"""From here on RDMA takes memory by dma_buf (NVIDIA's GPU Operator, page on GPUDirect RDMA)."""
HALF = 0.5


def judge_nic_settings(hosts: Mapping[str, NicPaths], fabric: str) -> dict[str, Finding]:
    """Of each host, ports of the fabric that are up and that NCCL cannot use, or not as the others are used."""
    ports = {host: _up(found, fabric) for host, found in hosts.items()}
    mtus = {host: {label(*one): _rdma_mtu(hosts[host], *one) for one in listed} for host, listed in ports.items()}
    known = [size for sizes in mtus.values() for size in sizes.values() if isinstance(size, int)]
    return {host: _settings(hosts[host], listed, mtus[host], known) for host, listed in ports.items()}


def _up(found: NicPaths, fabric: str) -> list[tuple[Nic, NicPort]]:
    return [(nic, port) for nic, port in own_ports(or_none(found.nics) or (), fabric) if port.state == ACTIVE]


def _rdma_mtu(found: NicPaths, nic: Nic, port: NicPort) -> int | NotAvailable:
    """By ibv_devinfo, otherwise by the kernel's rule for Ethernet."""
    unlisted = NotAvailable("ibv_devinfo does not list it")
    said = apply(lambda sizes: sizes.get(f"{nic.device}:{port.number}", unlisted), found.rdma_mtus)
    return apply(roce_mtu, port.mtu) if isinstance(said, NotAvailable) and port.fabric == "roce" else said


def _settings(
    found: NicPaths, ports: Sequence[tuple[Nic, NicPort]], mtus: Mapping[str, int | NotAvailable], known: Sequence[int]
) -> Finding:
    facts = [(label(nic, port), *fact) for nic, port in ports for fact in _facts(nic, port)]
    usual, sizes = majority(known), Counter(known)
    for name, size in mtus.items():
        if isinstance(size, NotAvailable):
            facts += [(name, "unknown", f"its RDMA MTU is {size}")] if known else []
        elif size != usual and len(sizes) > 1:
            of_others = f"{sizes[usual]} of {len(known)} ports have {usual}" if usual is not None else "the ports differ"
            facts.append((name, "bad", f"its RDMA MTU is {size} bytes, and {of_others}"))
    unlisted = (f"the adapters are {found.nics}",) if isinstance(found.nics, NotAvailable) else ()
    return Finding(
        bad=gather((name, text) for name, kind, text in facts if kind == "bad"),
        unknown={**gather((name, text) for name, kind, text in facts if kind == "unknown"), HERE: unlisted},
        kind="nic",
        remark="the RDMA MTU is not compared: no host shows it" if mtus and not known else None,
        evidence={"ports": len(ports), "RDMA MTU": ", ".join(f"{name}: {size}" for name, size in mtus.items())},
        advice="set the ports as the other hosts have them: device files, GIDs, partition keys, MTU",
    )


def _facts(nic: Nic, port: NicPort) -> Iterator[tuple[str, str]]:
    """What keeps NCCL from this port, and what of that is not known."""
    if isinstance(nic.verbs, NotAvailable):
        yield "unknown", f"whether it can be opened is {nic.verbs}"
    elif nic.verbs != OPEN:
        yield "bad", f"NCCL cannot open it: {nic.verbs}"
    if port.fabric == "roce":
        if isinstance(port.gid_types, NotAvailable):
            yield "unknown", f"its kinds of GIDs are {port.gid_types}"
        elif ROCE_V2 not in port.gid_types:
            yield "bad", f"it has no GID of {ROCE_V2}, and no router passes on {', '.join(port.gid_types) or 'what has none'}"
    if port.fabric == "infiniband":
        if isinstance(port.pkeys, NotAvailable):
            yield "unknown", f"its partition keys are {port.pkeys}"
        elif not any(int(key, 16) & FULL_MEMBER for key in port.pkeys):
            keys = ", ".join(port.pkeys) or "none"
            yield "bad", f"it is a full member of no partition ({keys}): limited members do not reach each other"


def judge_gpudirect(found: NicPaths) -> Finding:
    """Whether adapters can reach the memory of GPUs: by nvidia_peermem, or by dma_buf of the open driver."""
    kernel = parse("kernel", found.kernel)
    has_dma_buf = found.open_driver
    if found.open_driver is True:
        old = "which is no version that is known here"
        has_dma_buf = NotAvailable(f"kernel {found.kernel!r}, {old}") if kernel is None else kernel.numbers >= DMA_BUF_KERNEL
    ways = {"nvidia_peermem": found.peer_memory, "dma_buf": has_dma_buf}
    shown = {name: str(value) for name, value in {**ways, "open driver": found.open_driver, "kernel": found.kernel}.items()}
    open_ways = [name for name, is_there in ways.items() if is_there is True]
    doubts = [] if open_ways else [f"{name}: {why}" for name, why in ways.items() if isinstance(why, NotAvailable)]
    lost = "neither nvidia_peermem is loaded, nor has the host dma_buf (open driver, kernel 5.12 or newer)"
    return Finding(
        bad={HERE: () if open_ways or doubts else (lost,)},
        unknown={HERE: doubts},
        kind="settings",
        advice="load nvidia_peermem, or install NVIDIA's open driver (gpucluster info)",
        evidence=shown,
    )


def judge_cabling(hosts: Mapping[str, NicPaths], fabric: str) -> dict[str, Finding | None]:
    """Of each host, interfaces that end at another switch than those of hosts cabled like it; None where LLDP says nothing.

    Hosts that agree on more than half of their interfaces are cabled alike, and of these most are right. Two interfaces at one
    switch port are wrong anywhere.
    """
    wanted = {host: _interfaces_of(found, fabric) for host, found in hosts.items()}
    seen = {
        host: {name: one for name, one in (or_none(found.neighbours) or {}).items() if name in wanted[host]}
        for host, found in hosts.items()
    }
    return {host: _cables(host, seen, wanted[host], found.neighbours) for host, found in hosts.items()}


def _interfaces_of(found: NicPaths, fabric: str) -> list[str]:
    """The network interfaces of the fabric's ports that are up."""
    return [name for _, port in _up(found, fabric) for name in or_none(port.netdevs) or ()]


def _cables(
    host: str,
    seen: Mapping[str, Mapping[str, SwitchPort]],
    wanted: Sequence[str],
    said: Mapping[str, SwitchPort] | NotAvailable,
) -> Finding | None:
    if isinstance(said, NotAvailable):
        return None if "not installed" in said.why else Finding(unknown={HERE: (f"its cables are {said}",)}, kind="nic")
    own = seen[host]
    alike = [other for other in seen.values() if _agreement(own, other) > HALF]
    bad: dict[str, tuple[str, ...]] = {}
    for name, end in own.items():
        there = [other[name].switch for other in alike if name in other]
        usual = majority(there)
        if usual is not None and usual != end.switch:
            bad[name] = (f"ends at {end.switch} {end.port}, and at {usual} on {there.count(usual)} of {len(there)} hosts",)
    twice = Counter((one.switch, one.port) for other in seen.values() for one in other.values())
    for name, end in own.items():
        if twice[end.switch, end.port] > 1:
            bad[name] = (*bad.get(name, ()), f"ends at {end.switch} {end.port}, as another interface does")
    silent = {name: ("no switch announces itself there",) for name in wanted if name not in own}
    shown = ", ".join(f"{name}: {end.switch} {end.port}" for name, end in own.items())
    return Finding(bad=bad, unknown=silent, kind="nic", evidence={"cables": shown}, advice="compare the cables with their plan")


def _agreement(one: Mapping[str, SwitchPort], other: Mapping[str, SwitchPort]) -> float:
    """The share of interfaces of one host that end at the same switch on another one."""
    same = [name for name, end in one.items() if name in other and other[name].switch == end.switch]
    return len(same) / len(one) if one else 0.0


def judge_management(found: Management, nics: Sequence[Nic] | NotAvailable) -> Finding:
    """Ways by which this process reaches the BMC of its host, or the boot of a DPU."""
    ways = {"the BMC": found.bmc, "a DPU's console and boot": found.rshim}
    known, hidden = split(ways)
    bad = [f"{what} can be reached by {way}" for what, way in known.items() if way not in (NONE, CLOSED)]
    unknown = [f"{what}: {why}" for what, why in hidden.items()]
    networks = or_none(found.bmc_networks)
    if networks is None:
        unknown.append(f"network interfaces: {found.bmc_networks}")
    elif networks:
        bad.append(f"the BMC can be reached by {', '.join(networks)} (network over USB)")
    dpus = [nic.device for nic in or_none(nics) or () if _is_dpu(nic)]
    shown: dict[str, Any] = {"BMC": str(found.bmc), "RShim": str(found.rshim), "DPUs": ", ".join(dpus) or "none"}
    mode = f"whether {', '.join(dpus)} run in DPU or NIC mode is not known: firmware tools (mlxconfig) alone show it"
    return Finding(
        bad={HERE: bad},
        unknown={HERE: unknown},
        kind="settings",
        remark=mode if dpus else None,
        evidence=shown,
        advice="unload ipmi_devintf and rshim, or leave them to root alone; switch off the BMC's network over USB",
    )


def _is_dpu(nic: Nic) -> bool:
    """BlueField 2 and 3 as the driver names them."""
    return isinstance(nic.hca_type, str) and re.fullmatch(r"MT416(86|92)", nic.hca_type) is not None
