"""Limits, settings and variables of a host: each planted fault, and a healthy host."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pytest_gpucluster.health.hosts import HINTS, HostMinimum, judge_limits, judge_settings, judge_shared_link, judge_variables
from pytest_gpucluster.inventory.host import HostFacts
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.places import Inventory, Place
from tests.support.findings import NOTHING, said

HIDDEN = NotAvailable("Permission denied")
LEAST = HostMinimum(nofile=1024, shm_gib=1, memlock_gib=16)
HEALTHY = HostFacts(
    kernel="6.8", operating_system="Ubuntu", cpu_model="Xeon", sockets=2, cores=112, cpus=224, smt=True,
    governors=["performance"], idle_states=["POLL"], numa_nodes=2, numa_balancing=False, iommu="identity",
    translated=[], memory_gib=2015.0,
    huge_pages=0, transparent_huge_pages="madvise",
    memlock="unlimited", ipc_lock=False, nofile=1048576, shm_gib=1007.0, mlx5_driver=HIDDEN,
    cpu_faults=[], perf_events=2, gpu_counters="root", gdrcopy=HIDDEN,
)  # fmt: skip


def changed(**changes: Any) -> HostFacts:
    """The healthy host with other values."""
    return dataclasses.replace(HEALTHY, **changes)


@pytest.mark.parametrize("fabric", ["infiniband", "roce", "sockets", "none"])
def test_a_healthy_host(fabric: str) -> None:
    """Nothing is wrong, and all is known."""
    assert said(judge_limits(HEALTHY, LEAST, fabric=fabric)) == said(judge_settings(HEALTHY)) == NOTHING


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nofile": 1023}, "a process may open 1023 files, and 1024 are needed"),
        ({"shm_gib": 0.0625}, "shared memory has 64 MiB, and 1 GiB are needed"),
        ({"memlock": 65536}, "64 KiB may be locked in memory, and RDMA needs more"),
        ({"memlock": 8192}, "docker run --ulimit memlock=-1; in a Pod the capability IPC_LOCK"),
    ],
)
def test_limits_that_are_too_low(changes: dict[str, Any], text: str) -> None:
    """Each is one, in words."""
    (wrong,) = judge_limits(changed(**changes), LEAST, fabric="infiniband").facts
    assert text in wrong


@pytest.mark.parametrize("changes", [{"nofile": 1024}, {"nofile": "unlimited"}, {"shm_gib": 1.0}, {"memlock": 16 << 30}])
def test_limits_that_are_just_enough(changes: dict[str, Any]) -> None:
    """Pass."""
    assert said(judge_limits(changed(**changes), LEAST, fabric="infiniband")) == NOTHING


@pytest.mark.parametrize(("fabric", "count"), [("infiniband", 1), ("roce", 1), ("sockets", 0), ("none", 0)])
def test_locked_memory_is_for_rdma(fabric: str, count: int) -> None:
    """Without it nobody locks."""
    assert len(judge_limits(changed(memlock=65536), LEAST, fabric=fabric).facts) == count


@pytest.mark.parametrize(("nodes", "count"), [(1, 0), (2, 1)])
def test_one_node_needs_no_rdma(nodes: int, count: int) -> None:
    """A node alone is judged as without a fabric, whatever its profile promises."""
    inventory = Inventory(num_nodes=nodes, gpus_per_node=8, device="cuda", fabric="infiniband")
    assert len(judge_limits(changed(memlock=65536), LEAST, fabric=inventory.fabric_between_nodes).facts) == count


@pytest.mark.parametrize(("may", "count"), [(True, 0), (False, 1), (HIDDEN, 1)])
def test_who_may_lock_needs_no_limit(may: Any, count: int) -> None:
    """The kernel does not ask for the limit of a process with CAP_IPC_LOCK."""
    assert len(judge_limits(changed(memlock=65536, ipc_lock=may), LEAST, fabric="infiniband").facts) == count


def test_shared_memory_that_is_hidden() -> None:
    """Not known, so neither good nor bad."""
    found = judge_limits(changed(shm_gib=HIDDEN), LEAST, fabric="none")
    assert (found.judged, found.doubts) == (None, ("shared memory: not available: Permission denied",))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"governors": ["performance", "powersave"]}, "CPU governor performance, powersave"),
        ({"numa_balancing": True}, "NUMA balancing is on"),
        ({"iommu": "DMA-FQ, identity"}, "IOMMU translates (DMA-FQ, identity)"),
        ({"iommu": "DMA-FQ", "translated": ["0000:13:00.0"]}, "IOMMU translates (DMA-FQ) for 0000:13:00.0: copies"),
        ({"transparent_huge_pages": "never"}, "transparent huge pages are off"),
    ],
)
def test_settings_that_cost_speed(changes: dict[str, Any], text: str) -> None:
    """Each is one, with advice."""
    (wrong,) = judge_settings(changed(**changes)).facts
    assert text in wrong
    assert "; " in wrong


@pytest.mark.parametrize("changes", [{"governors": HIDDEN}, {"iommu": HIDDEN}, {"iommu": "off"}])
def test_settings_of_a_virtual_machine(changes: dict[str, Any]) -> None:
    """It has no governor and may have no IOMMU: nothing to judge."""
    assert said(judge_settings(changed(**changes))) == NOTHING


@pytest.mark.parametrize("name", ["numa_balancing", "transparent_huge_pages"])
def test_settings_that_are_hidden(name: str) -> None:
    """Every kernel has them, so silence is not health."""
    assert len(judge_settings(changed(**{name: HIDDEN})).doubts) == 1


SHOWN = {"NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "LOC", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_NCHANNELS": "4",
         "NCCL_NET_GDR_LEVEL": "LOC", "NCCL_LAUNCH_MODE": "GROUP", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0",
         "NCCL_NET_GDR_READ": "0"}  # fmt: skip


@pytest.mark.parametrize("hint", HINTS, ids=lambda hint: hint.variable)
def test_each_hint(hint: Any) -> None:
    """Given for its value on its fabric, and for no other value."""
    fabric = hint.fabrics[0] if hint.fabrics else "none"
    value = SHOWN.get(hint.variable, "1")
    assert judge_variables({hint.variable: value}, fabric=fabric).facts == (f"{hint.variable}={value}: {hint.advice}",)
    assert judge_variables({hint.variable: ""}, fabric=fabric).count == 0
    if hint.fabrics:
        assert judge_variables({hint.variable: value}, fabric="none").count == 0


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NCCL_ALGO": "NVLS,Ring"},
        {"NCCL_SOCKET_IFNAME": "eth0"},
        {"NCCL_P2P_LEVEL": "NVL"},
        {"NCCL_IB_DISABLE": "0"},
        {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
    ],
)
def test_variables_that_are_right(variables: dict[str, str]) -> None:
    """No hint; nor for what a run sets by itself."""
    assert judge_variables(variables, fabric="infiniband").count == 0


# Links to the host that are all slow.

WAYS = ("host to device", "device to host")


def links(*rates: tuple[float, float], node: int = 0) -> dict[Place, tuple[float, float]]:
    """The GPUs of one host, with their rates in the judged direction and in the other one."""
    return {Place(id=f"node{node}-gpu{gpu}", node=node, gpu=gpu, hostname="h"): rate for gpu, rate in enumerate(rates)}


def blamed(rates: dict[Place, tuple[float, float]]) -> tuple[str, ...]:
    """Who is blamed for the first GPU's link, beside the GPU itself, at a limit of 50 GB/s."""
    found = judge_shared_link(next(iter(rates)), rates, holds=lambda rate: rate > 50, ways=WAYS)
    assert (found.kind == "node") is bool(found.bad)
    return tuple(place.id for place in found.culprits(()))


@pytest.mark.parametrize(
    ("rates", "names"),
    [
        (links((45.5, 54.6), (45.6, 54.6)), ("node0",)),
        (links(*[(45.5, 45.0)] * 8), ("node0",)),
        (links((45.5, 54.6), (55.0, 54.6)), ()),
        (links((45.5, 54.6), (45.5, 54.6), (50.5, 54.6)), ()),
        (links((45.5, 54.6)), ()),
        (links((55.5, 54.6), (55.5, 54.6)), ()),
        (links((45.5, 54.6)) | links((45.5, 54.6), node=1), ()),
        (links((45.5, 54.6), (45.5, 54.6)) | links((55.5, 54.6), node=1), ("node0",)),
    ],
)
def test_a_host_whose_links_are_all_slow_is_to_blame(rates: dict[Place, tuple[float, float]], names: tuple[str, ...]) -> None:
    """All GPUs of one host in one direction: the host. One alone, one that holds, or GPUs of different hosts: the GPU."""
    assert blamed(rates) == names


def test_both_directions_stand_in_the_finding() -> None:
    """With what to look at, and what a virtual machine cannot see."""
    rates = links((45.5, 54.6), (45.6, 54.7))
    found = judge_shared_link(next(iter(rates)), rates, holds=lambda rate: rate > 50, ways=WAYS)
    (fact,) = found.facts
    assert "all 2 GPUs of this host are slow host to device 45.5 to 45.6 GB/s; device to host 54.6 to 54.7 GB/s" in fact
    assert "PCIe root" in str(found.advice)
    assert "virtual machine" in str(found.advice)
