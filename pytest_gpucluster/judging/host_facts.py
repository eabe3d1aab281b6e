"""The facts of hosts, GPUs and NICs that should be alike in a cluster. Pure: readings in, facts out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.drift import Fact

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_gpucluster.inventory.nics import Nic
    from pytest_gpucluster.inventory.nvml import GpuState
    from pytest_gpucluster.measurements.host import HostState

OF_HOST: Mapping[str, str] = {
    "kernel": "kernel",
    "operating_system": "operating system",
    "cpu_model": "CPU model",
    "sockets": "CPU sockets",
    "cores": "CPU cores",
    "cpus": "CPUs",
    "smt": "SMT",
    "governors": "CPU governor",
    "idle_states": "CPU idle states",
    "numa_nodes": "NUMA nodes",
    "numa_balancing": "NUMA balancing",
    "iommu": "IOMMU",
    "memory_gib": "memory GiB",
    "huge_pages": "huge pages",
    "transparent_huge_pages": "transparent huge pages",
    "memlock": "memlock limit",
    "ipc_lock": "right to lock memory",
    "nofile": "open files limit",
    "shm_gib": "shared memory GiB",
    "mlx5_driver": "mlx5 driver",
}
"""The fields of ``HostFacts``, each with its name in words."""
OF_GPU: Mapping[str, str] = {
    "vbios": "VBIOS",
    "board_part_number": "GPU board",
    "driver": "driver",
    "memory_gib": "GPU memory GiB",
    "ecc_enabled": "ECC",
    "mig": "MIG",
    "persistence": "persistence mode",
    "power_limit_w": "power limit W",
    "pcie_gen_max": "PCIe generation",
    "pcie_width_max": "PCIe lanes",
}
"""The fields of ``GpuState``, each with its name in words."""
OF_NIC: Mapping[str, str] = {"firmware": "NIC firmware", "board_id": "NIC board", "driver": "NIC driver"}
"""The fields of ``Nic``, each with its name in words."""
UNSET = "unset"
OF_ONE_HOST = ("NCCL_HOSTID",)
"""Variables that name their host, so that no two are alike."""


def facts_of_hosts(states: Mapping[str, HostState]) -> Iterator[Fact]:
    """The facts of each host by its node's id. A variable or version that some hosts have is ``unset`` on the others."""
    for node, state in states.items():
        for field, name in OF_HOST.items():
            value = getattr(state.facts, field)
            yield Fact(
                kind="host", name=name, node=node, part=node, value=", ".join(value) if isinstance(value, list) else value
            )
    tables = {"": {node: state.versions for node, state in states.items()}}
    tables["variable "] = {
        node: {name: value for name, value in state.variables.items() if name not in OF_ONE_HOST}
        for node, state in states.items()
    }
    for prefix, table in tables.items():
        for key in dict.fromkeys(key for one in table.values() for key in one):
            for node, one in table.items():
                yield Fact(kind="host", name=f"{prefix}{key}", node=node, part=node, value=one.get(key, UNSET))


def facts_of_gpus(node: str, states: Mapping[str, GpuState]) -> Iterator[Fact]:
    """The facts of the GPUs of a node, by the GPU's id, among GPUs of their model."""
    for part, state in states.items():
        yield Fact(kind="gpu", name="GPU model", node=node, part=part, value=state.name)
        for field, name in OF_GPU.items():
            yield Fact(kind="gpu", name=name, node=node, part=part, value=getattr(state, field), among=state.name)


def facts_of_nics(node: str, nics: list[Nic] | NotAvailable) -> Iterator[Fact]:
    """The facts of the NICs of a node, among adapters of their type, and how many of each type the host has."""
    if isinstance(nics, NotAvailable):
        yield Fact(kind="host", name="NICs", node=node, part=node, value=nics)
        return
    kinds = [str(nic.hca_type) for nic in nics]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted({*kinds}))
    yield Fact(kind="host", name="NICs", node=node, part=node, value=counts or "none")
    for nic, kind in zip(nics, kinds, strict=True):
        for field, name in OF_NIC.items():
            yield Fact(kind="nic", name=name, node=node, part=f"{node} {nic.device}", value=getattr(nic, field), among=kind)
