"""The network that carries NCCL's channels, read from NCCL's own log.

NCCL reads ``NCCL_DEBUG`` once per process. So the parent of this process sets ``NCCL_DEBUG=INFO``,
``NCCL_DEBUG_SUBSYS=INIT,NET,ENV`` (or more) and ``NCCL_DEBUG_FILE`` before the first communicator. It also sets
``GPUCLUSTER_NCCL_LOG`` to the path of that file (:mod:`~pytest_gpucluster.inventory.nccl_log`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.inventory import nccl_log
from pytest_gpucluster.measurements import progress, timing
from pytest_gpucluster.measurements.collectives import gather_texts, node_number

_CHANNEL = re.compile(
    r"NCCL INFO Channel (?P<channel>\d+)(?:/\d+)? : (?P<source>\d+)\[[0-9a-fx]+\] -> (?P<target>\d+)\[[0-9a-fx]+\]"
    r"(?: \[(?P<direction>send|receive)\])? via (?P<path>.+?)(?: comm .*)?$",
    re.MULTILINE,
)
_NET = re.compile(r"NET/(?P<name>.+?)/(?P<device>\d+)(?P<rest>.*)")
_NETWORK = re.compile(r"NCCL INFO .*?Using network (?P<name>.+?)\s*$", re.MULTILINE)
_PORT = re.compile(r"(?P<nic>[\w.+-]+)(?::uverbs\d+)?(?P<number>(?::\d+)+)/(?P<layer>IB|RoCE)\b")
_ADAPTER = re.compile(r"\[(?P<index>\d+)\](?:=\{(?P<merged>[^}\n]*)\}|(?P<alone>[\w.+-]+(?::\d+)+/\w+))")
"""One entry of the list of adapters: a port, or several that NCCL merged into one (``[0]={[0] mlx5_0:1/RoCE, ...}``)."""
_VIRTUAL = re.compile(r"Made virtual device \[(?P<index>\d+)\] name=(?P<nic>[\w.-]+)")
"""From NCCL 2.23 on, channels have the numbers of these and not of the ports: one of a port, or of several merged ones."""

SHOWN_LINES = 8
"""Log lines kept as evidence."""

NVLINK = "nvlink"
FABRICS: Mapping[str, Callable[[str], bool]] = {
    "infiniband": lambda kind: kind.startswith("NET/IB") and "/GDRDMA" in kind,
    "roce": lambda kind: kind.startswith(("NET/RoCE", "NET/gIB")) and "/GDRDMA" in kind,
    "efa": lambda kind: kind.endswith("Libfabric/GDRDMA"),
    "tcpx": lambda kind: kind.startswith("NET/GPUDirectTCPX"),
    "tcpxo": lambda kind: kind.startswith("NET/FasTrak"),
    "sockets": lambda kind: kind.startswith("NET/Socket"),
    NVLINK: lambda kind: kind.startswith("P2P/MNNVL"),
}
"""What each promised fabric accepts between nodes: RDMA with GPUDirect only; ``nvlink`` is multi-node NVLink.

AWS's plugin for EFA calls itself ``AWS Libfabric`` (a log of two H200 hosts: https://github.com/NVIDIA/nccl/issues/1597), and
``Libfabric`` since it is not of AWS alone. NCCL
calls multi-node NVLink ``P2P/MNNVL`` (its transport/p2p.cc). Google's plugin ``gIB`` is RoCE (recorded channels of A3 Ultra).
Of Google's TCPX and TCPXO only the names are recorded (``Using network GPUDirectTCPX_v7``, ``FasTrak``), and no channel: the
form is that of NCCL's net.cc, and whether GPUDirect is used cannot be told from it.
"""
NETWORKS = re.compile(
    r"NET/(IB|RoCE|(IBext|gIB|GPUDirectTCPX|FasTrak)(_v\d+)?|AWS Libfabric|Libfabric|FastSocket|Socket)(/GDRDMA)?"
)
"""Channels of networks that are known: those of :data:`FABRICS`, and Google's ``FastSocket``, which is plain TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclChannel:
    """One connection NCCL made: ``kind`` without device numbers (``NET/IB/GDRDMA``), ``line`` as logged."""

    source: int
    target: int
    kind: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """The channels of this rank in a group over all ranks.

    ``kinds`` counts them all, ``inter_node`` those whose ends lie on different nodes, ``in_domain`` those of them whose nodes
    are in one NVLink domain. ``gdr``: every inter-node channel
    uses GPUDirect RDMA (None: there is none). ``network`` is NCCL's choice (``IB``, ``Socket``, a plugin's name),
    ``devices`` the adapters it uses (``mlx5_0:1/IB``), ``lines`` a few lines of the log as evidence.
    """

    backend: str
    network: str | None
    devices: list[str]
    kinds: dict[str, int]
    inter_node: dict[str, int]
    in_domain: dict[str, int]
    gdr: bool | None
    num_nodes: int
    lines: list[str]


def transport(*, size_bytes: int = 1 << 20, node: int | None = None, domains: Sequence[str | None] | None = None) -> Transport:
    """Create a group over all ranks, all-reduce ``size_bytes`` on it, and read which channels NCCL opened.

    NCCL connects only what an operation needs, so ``size_bytes`` should be the size that matters. Gloo, which carries a
    rehearsal, has TCP sockets only.

    Args:
        size_bytes: bytes of the float32 buffer.
        node: this rank's node number; by default ``GPUCLUSTER_NODE``.
        domains: the NVLink domain of each rank, None where it ends at the node; by default it does everywhere.

    Raises:
        RuntimeError: nothing was measured: a rank's log is missing or shows no channel, or there are several nodes and
            no rank shows a channel between two. Every rank raises, naming the ranks.
    """
    nodes = [int(number) for number in gather_texts(str(node_number(node)))]
    if dist.get_backend() != "nccl":
        return _of_gloo(nodes)
    before = read_log()
    progress.report("new group", 0.0)
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.all_reduce(torch.ones(max(1, size_bytes // 4), device=timing.current_device()), group=group)
    timing.synchronize()
    dist.destroy_process_group(group)
    text = read_log()
    # Other groups of this process number their ranks differently: only the new one's lines count.
    channels = parse_nccl_log(text[len(before) :], devices_from=text)
    found = summarise(text, channels, nodes=nodes, domains=domains)
    _require_channels(found, len(channels), several_ranks=len(nodes) > 1)
    return found


def parse_nccl_log(text: str, *, devices_from: str | None = None) -> list[NcclChannel]:
    """The channels in a log NCCL wrote at ``NCCL_DEBUG=INFO``.

    Args:
        text: the part of the log in which to find channels.
        devices_from: the part that lists the adapters and whether each is InfiniBand or RoCE; by default ``text``.
    """
    layers = _layers(devices_from or text)
    return [
        NcclChannel(
            source=int(found["source"]),
            target=int(found["target"]),
            kind=_kind(found["path"].strip(), layers),
            line=found.group(0),
        )
        for found in _CHANNEL.finditer(text)
    ]


def _layers(text: str) -> defaultdict[int, str | None]:
    """InfiniBand or RoCE by the number of a device; of a number that nothing lists, the layer that all ports have."""
    layers: dict[int, str] = {}
    for found in _ADAPTER.finditer(text):
        port = _PORT.search(found["merged"] or found["alone"])
        if port is not None:
            layers[int(found["index"])] = port["layer"]
    of_nic = grouped((port["nic"], port["layer"]) for port in _PORT.finditer(text))
    for found in _VIRTUAL.finditer(text):
        if len({*of_nic.get(found["nic"], ())}) == 1:
            layers[int(found["index"])] = of_nic[found["nic"]][0]
    every = set().union(*of_nic.values())
    return defaultdict(lambda: min(every) if len(every) == 1 else None, layers)


def summarise(
    text: str, channels: list[NcclChannel], *, nodes: list[int], domains: Sequence[str | None] | None = None
) -> Transport:
    """Count ``channels``; ``nodes`` is the node number of every rank of their group, ``domains`` its NVLink domain."""
    crossing = [one for one in channels if nodes[one.source] != nodes[one.target]]
    of = domains or [None] * len(nodes)
    in_domain = [one for one in crossing if of[one.source] is not None and of[one.source] == of[one.target]]
    networks = _NETWORK.findall(text)
    devices = sorted({f"{found['nic']}{found['number']}/{found['layer']}" for found in _PORT.finditer(text)})
    return Transport(
        backend="nccl",
        network=networks[-1] if networks else None,
        devices=devices,
        kinds=dict(sorted(Counter(one.kind for one in channels).items())),
        inter_node=dict(sorted(Counter(one.kind for one in crossing).items())),
        in_domain=dict(sorted(Counter(one.kind for one in in_domain).items())),
        gdr=all("GDRDMA" in one.kind for one in crossing) if crossing else None,
        num_nodes=len(set(nodes)),
        lines=[one.line for one in (crossing or channels)[:SHOWN_LINES]],
    )


def off_fabric_channels(found: Transport, *, fabric: str) -> int:
    """Number of inter-node channels that do not use the promised ``fabric`` (one of :data:`FABRICS`).

    Between nodes of one NVLink domain, NVLink is promised. Channels of :func:`unknown_networks` are left out.

    Raises:
        ValueError: an unknown fabric.
    """
    if fabric not in FABRICS:
        raise ValueError(f"unknown fabric {fabric!r}; valid: {', '.join(FABRICS)}")
    between = Counter(found.inter_node) - Counter(found.in_domain)
    promised = ((between, FABRICS[fabric]), (found.in_domain, FABRICS[NVLINK]))
    unknown = {f"NET/{name}{end}" for name in unknown_networks(found) for end in ("", "/GDRDMA")}
    return sum(count for kinds, is_on in promised for kind, count in kinds.items() if not is_on(kind) and kind not in unknown)


def unknown_networks(found: Transport) -> list[str]:
    """The networks that carry inter-node channels and that no list here has: which fabric they use is not known."""
    kinds = [kind for kind in found.inter_node if kind.startswith("NET/") and not NETWORKS.fullmatch(kind)]
    return sorted({kind.removeprefix("NET/").removesuffix("/GDRDMA") for kind in kinds})


def _kind(path: str, layers: defaultdict[int, str | None]) -> str:
    net = _NET.fullmatch(path)
    if net is None:
        return path
    name = net["name"]
    if NETWORKS.fullmatch(f"NET/{name}") and name.startswith("IB") and layers[int(net["device"])] == "RoCE":
        name = "RoCE"
    return f"NET/{name}/GDRDMA" if "GDRDMA" in net["rest"] else f"NET/{name}"


def read_log() -> str:
    """This process's NCCL log so far; empty if there is none, so that all ranks raise the same error."""
    return nccl_log.log_text(nccl_log.own_log())


def _of_gloo(nodes: list[int]) -> Transport:
    """A full mesh of TCP connections: gloo has nothing else."""
    own = dist.get_rank()
    channels = [
        NcclChannel(source=own, target=peer, kind="NET/Socket", line=f"gloo: rank {own} -> rank {peer} over TCP")
        for peer in range(len(nodes))
        if peer != own
    ]
    return replace(summarise("", channels, nodes=nodes), backend=dist.get_backend(), network="Socket")


def _require_channels(found: Transport, channels: int, *, several_ranks: bool) -> None:
    """Raise on every rank alike if nothing was measured."""
    rows = [text.split() for text in gather_texts(f"{channels} {sum(found.inter_node.values())}")]
    silent = [str(rank) for rank, row in enumerate(rows) if row[0] == "0"]
    if several_ranks and silent:
        raise RuntimeError(
            f"rank {', '.join(silent)}: the NCCL log shows no channel; NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS with "
            "INIT,NET, NCCL_DEBUG_FILE and GPUCLUSTER_NCCL_LOG must be set before the process's first communicator"
        )
    if found.num_nodes > 1 and not any(int(row[1]) for row in rows):
        raise RuntimeError(f"{found.num_nodes} nodes, yet no rank's NCCL log shows a channel between two: not measured")
