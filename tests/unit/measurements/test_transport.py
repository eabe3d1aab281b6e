"""The channels in a log of NCCL, and which of them do not use the promised fabric."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest

from pytest_gpucluster.health.nics import NodeTraffic, judge_transport
from pytest_gpucluster.measurements import transport
from pytest_gpucluster.places import Place
from pytest_gpucluster.thresholds.schema import Fabric
from tests_acceptance.test_fabric import promised_domains

# Logs in the format of NCCL 2.2x at NCCL_DEBUG=INFO (its init.cc, net.cc, p2p.cc), composed for these tests, not
# recorded: this project has not run on InfiniBand yet. Ranks 0 and 1 are on one node, 2 and 3 on another.
INFINIBAND_LOG = """\
gpu-node-0:4242:4242 [1] NCCL INFO cudaDriverVersion 12080
gpu-node-0:4242:4242 [1] NCCL INFO Bootstrap: Using eth0:10.0.0.5<0>
gpu-node-0:4242:4301 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB/SHARP [RO]; OOB eth0:10.0.0.5<0>
gpu-node-0:4242:4301 [1] NCCL INFO Using network IB
gpu-node-0:4242:4301 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM/read
gpu-node-0:4242:4310 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1/GDRDMA
gpu-node-0:4242:4310 [1] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [send] via NET/IB/0(0)/GDRDMA
gpu-node-0:4242:4310 [1] NCCL INFO Channel 00/0 : 3[1] -> 1[1] [receive] via NET/IB/1/GDRDMA/Shared
gpu-node-0:4242:4301 [1] NCCL INFO Connected all rings
"""
SOCKET_LOG = """\
gpu-node-0:4242:4301 [1] NCCL INFO NET/IB : No device found.
gpu-node-0:4242:4301 [1] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
gpu-node-0:4242:4301 [1] NCCL INFO Using network Socket
gpu-node-0:4242:4301 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via SHM/direct/direct
gpu-node-0:4242:4310 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
gpu-node-0:4242:4310 [1] NCCL INFO Channel 01 : 1[1b000] -> 2[43000] [send] via NET/Socket/0 comm 0x7f3c nRanks 04
"""
ONE_NODE_LOG = """\
gpu-node-0:4242:4301 [1] NCCL INFO Using network Socket
gpu-node-0:4242:4301 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/direct pointer/read
gpu-node-0:4242:4301 [1] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/IPC
"""
TWO_NODES = [0, 0, 1, 1]


def summary(log: str, nodes: list[int]) -> transport.Transport:
    """The result of rank 1 for this log."""
    return transport.summarise(log, transport.parse_nccl_log(log), nodes=nodes)


def test_infiniband_log() -> None:
    """Channels between nodes are counted apart from those inside a node; all use RDMA."""
    found = summary(INFINIBAND_LOG, TWO_NODES)
    assert found.network == "IB"
    assert found.devices == ["mlx5_0:1/IB", "mlx5_1:1/IB"]
    assert found.kinds == {"NET/IB/GDRDMA": 3, "P2P/CUMEM/read": 1}
    assert found.inter_node == {"NET/IB/GDRDMA": 3}
    assert (found.gdr, found.num_nodes) == (True, 2)
    assert transport.off_fabric_channels(found, fabric="infiniband") == 0
    assert transport.off_fabric_channels(found, fabric="sockets") == 3
    assert all("NET/IB" in line for line in found.lines)


def test_sockets_where_infiniband_was_promised() -> None:
    """Sockets are counted as what they are, in both spellings of the line."""
    found = summary(SOCKET_LOG, TWO_NODES)
    assert found.network == "Socket"
    assert found.inter_node == {"NET/Socket": 2}
    assert found.gdr is False
    assert transport.off_fabric_channels(found, fabric="infiniband") == 2
    assert transport.off_fabric_channels(found, fabric="sockets") == 0


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("/GDRDMA", "", "NET/IB"),
        ("mlx5_1:1/IB/SHARP", "mlx5_1:1/RoCE", "NET/RoCE/GDRDMA"),
    ],
)
def test_infiniband_without_rdma_to_the_gpu_or_roce_is_not_the_promised_fabric(old: str, new: str, kind: str) -> None:
    """NET/IB alone is not enough: GPUDirect RDMA and the link layer count."""
    found = summary(INFINIBAND_LOG.replace(old, new), TWO_NODES)
    assert found.inter_node[kind] >= 2
    assert transport.off_fabric_channels(found, fabric="infiniband") >= 2


def test_plugins_names_are_understood() -> None:
    """Network plugins have names with versions and blanks."""
    plugin = summary(INFINIBAND_LOG.replace("NET/IB/", "NET/IBext_v10/"), TWO_NODES)
    assert transport.off_fabric_channels(plugin, fabric="infiniband") == 0
    other = summary(INFINIBAND_LOG.replace("NET/IB/", "NET/AWS Libfabric/"), TWO_NODES)
    assert other.inter_node == {"NET/AWS Libfabric/GDRDMA": 3}
    assert transport.off_fabric_channels(other, fabric="infiniband") == 3


@pytest.mark.parametrize(
    ("path", "fabric"),
    [
        ("NET/AWS Libfabric/1/GDRDMA", "efa"),  # recorded on two hosts of 8 H200: NVIDIA/nccl, issue 1597
        ("NET/AWS Libfabric/7/GDRDMA/Shared", "efa"),
        ("NET/Libfabric/0/GDRDMA", "efa"),  # the plugin's name since it dropped AWS
        ("NET/Libfabric/15/GDRDMA/Shared", "efa"),
        ("NET/Libfabric/3(2)/GDRDMA/flush=None", "efa"),
        ("NET/Libfabric/0", None),
        ("NET/Libfabric/0/Shared", None),
        ("P2P/MNNVL", "nvlink"),  # the form of NCCL's transport/p2p.cc
        ("P2P/MNNVL/read", "nvlink"),
        ("NET/AWS Libfabric/1", None),  # through the host's memory, or libfabric over TCP
        ("P2P/IPC", None),  # no way between hosts
        ("NET/gIB/3/GDRDMA", "roce"),  # recorded on Google's A3 Ultra: RoCE by a plugin of its own
        ("NET/gIB/3", None),
        ("NET/GPUDirectTCPX_v7/0/GDRDMA", "tcpx"),  # the plugins' names as recorded, in the form of NCCL's net.cc
        ("NET/FasTrak/0/GDRDMA", "tcpxo"),
        ("NET/FastSocket/0", None),  # Google's plugin for plain TCP
    ],
)
def test_what_carries_each_fabric(path: str, fabric: str | None) -> None:
    """Every channel between nodes is on the one promised fabric that it belongs to, and on no other one."""
    found = summary(f"gpu:1:2 [0] NCCL INFO Channel 05/0 : 1[1] -> 2[0] [send] via {path}\n", TWO_NODES)
    assert sum(found.inter_node.values()) == 1
    assert {name for name in transport.FABRICS if not transport.off_fabric_channels(found, fabric=name)} == {fabric} - {None}


@pytest.mark.parametrize("fabric", transport.FABRICS)
@pytest.mark.parametrize("end", ["", "/GDRDMA", "/GDRDMA/Shared"])
@pytest.mark.parametrize(
    "name", ["UCX", "Slingshot", "My Plugin v2", "AINIC", "Ibext", "IBGDA", "IB Plugin", "OFI", "libfabric", "Socket2"]
)
def test_an_unknown_network_is_nobody_s_fault(name: str, end: str, fabric: str) -> None:
    """A plugin that no list has: it is named, and its channels are neither on the fabric nor off it."""
    found = summary(INFINIBAND_LOG.replace("NET/IB/1/GDRDMA", f"NET/{name}/1{end}"), TWO_NODES)
    assert transport.unknown_networks(found) == [name]
    assert transport.off_fabric_channels(found, fabric=fabric) == (0 if fabric == "infiniband" else 1)
    judged = judge_transport({"node0": NodeTraffic(3, 0)}, transport.unknown_networks(found))
    assert judged.doubts == (f"unknown network {name}: it is not known which fabric carries it",)
    assert judged.bad == {}


@pytest.mark.parametrize(
    "kind", ["IB", "IBext_v10", "gIB", "AWS Libfabric", "Libfabric", "GPUDirectTCPX_v7", "FasTrak", "Socket"]
)
def test_known_networks(kind: str) -> None:
    """As recorded: none of them is a doubt."""
    assert transport.unknown_networks(summary(INFINIBAND_LOG.replace("NET/IB/", f"NET/{kind}/"), TWO_NODES)) == []


def test_a_cluster_uuid_alone_is_no_nvlink_domain() -> None:
    """HGX may tell the same UUID on each node, though NVLink ends there: the profile's number of nodes a domain decides."""
    gpus = [Place(id=f"node{node}-gpu0", node=node, gpu=0, rank=node, fabric="3f0c11de/0") for node in (0, 1)]
    hgx, rack = (SimpleNamespace(places=gpus, promised=SimpleNamespace(nodes_per_domain=nodes)) for nodes in (1, 18))
    assert promised_domains(hgx) == {}
    assert promised_domains(rack) == {"domains": ["3f0c11de/0"] * 2}


ROCE_LISTS = {
    "recorded, NVIDIA/aicr, issue 1413": "Using [0]rocep161s0_dma:1/RoCE [1]rocep202s0_dma:1/RoCE [RO]; OOB eth0:10.0.0.5<0>",
    "recorded, with merged ports": "Using [0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} [1]={[0] mlx5_2:1/RoCE} [RO]; OOB eth0<0>",
    "NCCL 2.30's net_ib/init.cc, with rail and plane": "Using [0]mlx5_0:1:0:1/RoCE [1]mlx5_1:1:1:1/RoCE [RO]; OOB eth0<0>",
}


@pytest.mark.parametrize("listed", ROCE_LISTS.values(), ids=ROCE_LISTS.keys())
def test_roce_in_every_form_of_the_list_of_adapters(listed: str) -> None:
    """NCCL calls RoCE ``NET/IB`` too: the list of adapters alone tells, also where ports are merged."""
    using = "Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB/SHARP [RO]; OOB eth0:10.0.0.5<0>"
    found = summary(INFINIBAND_LOG.replace(using, listed), TWO_NODES)
    assert found.inter_node == {"NET/RoCE/GDRDMA": 3}
    assert transport.off_fabric_channels(found, fabric="roce") == 0
    assert transport.off_fabric_channels(found, fabric="infiniband") == 3
    assert len(found.devices) >= 2
    assert all(device.endswith("/RoCE") for device in found.devices)


VIRTUAL = "gpu-node-0:4242:4301 [1] NCCL INFO NET/IB : Made virtual device [{}] name={} speed=800000 ndevs=2\n"
"""NCCL 2.23 and later, where a NIC has two ports (``Made virtual device`` in its net_ib.cc); the list has the ports alone."""
PORT_LINE = "gpu-node-0:4242:4301 [1] NCCL INFO NET/IB: [{}] {}:uverbs{}:1/{} provider=Mlx5 speed=400000 context=0x1 ar=0\n"
"""NCCL 2.27's line for each port, recorded in public logs of two hosts."""


@pytest.mark.parametrize(
    ("ports", "virtual", "device", "kind"),
    [
        (("IB", "IB"), "mlx5_0+mlx5_1", 2, "NET/IB/GDRDMA"),
        (("RoCE", "RoCE"), "mlx5_0+mlx5_1", 2, "NET/RoCE/GDRDMA"),
        (("RoCE", "RoCE"), None, 2, "NET/RoCE/GDRDMA"),
        (("IB", "RoCE"), "mlx5_1", 0, "NET/RoCE/GDRDMA"),
        (("RoCE", "IB"), "mlx5_1", 0, "NET/IB/GDRDMA"),
        (("IB", "RoCE"), "mlx5_0", 5, "NET/IB/GDRDMA"),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_a_channel_over_a_virtual_device(
    ports: tuple[str, str], virtual: str | None, device: int, kind: str, *, listed: bool
) -> None:
    """Its number is not that of a port: the ports that it is made of tell the link layer, or the one layer that there is."""
    using = "".join(f"[{number}]mlx5_{number}:1/{layer} " for number, layer in enumerate(ports))
    lines = "".join(PORT_LINE.format(number, f"mlx5_{number}", number, layer) for number, layer in enumerate(ports))
    log = f"gpu-node-0:4242:4301 [1] NCCL INFO NET/IB : Using {using}[RO]; OOB eth0:10.0.0.5<0>\n" if listed else lines
    log += VIRTUAL.format(device, virtual) if virtual else ""
    found = summary(f"{log}gpu:1:2 [0] NCCL INFO Channel 05/0 : 1[1] -> 2[0] [send] via NET/IB/{device}/GDRDMA\n", TWO_NODES)
    assert found.inter_node == {kind: 1}
    assert found.devices == [f"mlx5_{number}:1/{layer}" for number, layer in enumerate(ports)]
    on = [name for name in ("infiniband", "roce") if not transport.off_fabric_channels(found, fabric=name)]
    assert on == ["roce" if "RoCE" in kind else "infiniband"]


IN_RACK = "gpu:1:2 [0] NCCL INFO Channel 05/0 : 1[1] -> 2[0] [send] via {}\n"
BETWEEN_RACKS = "gpu:1:2 [0] NCCL INFO Channel 06/0 : 1[1] -> 4[0] [send] via {}\n"


@pytest.mark.parametrize(
    ("in_rack", "between", "astray"),
    [
        ("P2P/MNNVL", "NET/IB/0/GDRDMA", 0),
        ("NET/IB/0/GDRDMA", "NET/IB/0/GDRDMA", 1),  # NVLink between nodes is off, and nothing else would tell
        ("P2P/MNNVL", "NET/Socket/0", 1),
        ("NET/Socket/0", "NET/Socket/0", 2),
    ],
)
def test_nodes_of_one_nvlink_domain_talk_by_nvlink(in_rack: str, between: str, astray: int) -> None:
    """Between nodes of a domain NVLink is promised, whatever the fabric between domains is."""
    log, domains = IN_RACK.format(in_rack) + BETWEEN_RACKS.format(between), ["a/1"] * 4 + ["b/1"] * 2
    channels = transport.parse_nccl_log(log)
    found = transport.summarise(log, channels, nodes=[0, 0, 1, 1, 2, 2], domains=domains)
    assert sum(found.inter_node.values()) == 2
    assert sum(found.in_domain.values()) == 1
    assert transport.off_fabric_channels(found, fabric="infiniband") == astray


def test_a_node_of_no_domain_is_not_in_one() -> None:
    """Two nodes without a fabric of NVLink have none in common."""
    log = IN_RACK.format("NET/IB/0/GDRDMA")
    found = transport.summarise(log, transport.parse_nccl_log(log), nodes=TWO_NODES, domains=[None] * 4)
    assert found.in_domain == {}
    assert transport.off_fabric_channels(found, fabric="infiniband") == 0


def test_every_fabric_can_be_promised() -> None:
    """The profile's word and what the log is held against are the same list."""
    assert {*transport.FABRICS, "none"} == {*get_args(Fabric)}


def test_one_node_has_no_channel_between_nodes() -> None:
    """P2P within a node is no inter-node channel."""
    found = summary(ONE_NODE_LOG, [0, 0])
    assert found.kinds == {"P2P/IPC": 1, "P2P/direct pointer/read": 1}
    assert (found.inter_node, found.gdr, found.num_nodes) == ({}, None, 1)


def test_unknown_fabric_is_refused() -> None:
    """An unknown fabric is an error."""
    with pytest.raises(ValueError, match="unknown fabric 'token ring'; valid: infiniband"):
        transport.off_fabric_channels(summary(SOCKET_LOG, TWO_NODES), fabric="token ring")
