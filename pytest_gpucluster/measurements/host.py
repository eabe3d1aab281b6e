"""The facts, software, clock, NICs and Slurm's record of this worker's host, as they are now, and what the rank may use."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pytest_gpucluster.inventory import gpu_index, host, kubernetes, numa, pci_tree, slurm
from pytest_gpucluster.inventory.identity import read_stack, read_variables, read_versions
from pytest_gpucluster.inventory.kubernetes import KubernetesCluster, KubernetesNode
from pytest_gpucluster.inventory.machine import Management, Software, read_installed, read_management
from pytest_gpucluster.inventory.nics import Nic, SwitchPort, read_neighbours, read_nics, read_rdma_mtus
from pytest_gpucluster.inventory.nvml_calls import NvmlError, session
from pytest_gpucluster.inventory.reading import NotAvailable, apply, or_none
from pytest_gpucluster.inventory.slurm import SlurmConfig, SlurmNode, SlurmShare
from pytest_gpucluster.protocol.functions import without_device


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """A host, the versions of what runs there by name, and the variables of this rank that change what CUDA and NCCL do."""

    facts: host.HostFacts
    versions: dict[str, str]
    software: Software
    management: Management
    variables: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClock:
    """What the host's clock shows, in seconds since 1970."""

    shown_s: float


@without_device
def host_state() -> HostState:
    """Read this host. A value that cannot be read says why, and leaves the others."""
    return HostState(
        facts=host.read_host(),
        versions={**read_versions(), **read_stack()},
        software=read_installed(),
        management=read_management(),
        variables=read_variables(os.environ),
    )


@without_device
def host_clock() -> HostClock:
    """Read this host's clock."""
    return HostClock(shown_s=time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class NicState:
    """Every RDMA adapter of a host."""

    nics: list[Nic] | NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class NicPaths:
    """The ways of a host's RDMA adapters and GPUs through its PCIe tree, by name and by address.

    ``peer_memory``: whether nvidia_peermem is loaded; ``open_driver``: whether NVIDIA's driver is the open one. ``rdma_mtus``
    in bytes by adapter and port, ``neighbours`` by network interface.
    """

    nics: list[Nic] | NotAvailable
    paths: dict[str, pci_tree.PciPath | NotAvailable]
    gpu_paths: dict[str, pci_tree.PciPath | NotAvailable] | NotAvailable
    peer_memory: bool | NotAvailable
    open_driver: bool | NotAvailable
    kernel: str
    rdma_mtus: dict[str, int] | NotAvailable
    neighbours: dict[str, SwitchPort] | NotAvailable


@without_device
def nic_state() -> NicState:
    """Read every RDMA adapter of this host. A value that cannot be read says why, and leaves the others."""
    return NicState(nics=read_nics())


@without_device
def nic_paths() -> NicPaths:
    """Read the way of every RDMA adapter and GPU of this host through its PCIe tree, and what is at the adapters' ends."""
    nics = read_nics()
    paths = {nic.device: apply(pci_tree.read_path, nic.pci) for nic in or_none(nics) or ()}
    return NicPaths(
        nics=nics,
        paths=paths,
        gpu_paths=pci_tree.read_gpu_paths(),
        peer_memory=pci_tree.read_peer_memory(),
        open_driver=pci_tree.read_open_driver(),
        kernel=platform.release(),
        rdma_mtus=read_rdma_mtus(),
        neighbours=read_neighbours(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostErrors:
    """Errors that the kernel of a host has counted; all are empty in a virtual machine."""

    memory: list[host.MemoryController] | NotAvailable
    pcie: list[host.PcieErrors] | NotAvailable
    cpus: list[host.MachineChecks] | NotAvailable = field(default_factory=list)


@without_device
def host_errors() -> HostErrors:
    """Read what the kernel has counted of memory, of processors, and of the PCIe ways of GPUs and adapters."""
    pcie = apply(host.read_pcie_errors, pci_tree.read_addresses())
    return HostErrors(memory=host.read_memory_controllers(), pcie=pcie, cpus=host.read_machine_checks())


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmState:
    """A host in a job of Slurm: the controller, the host, what the job has of it, and the GPUs that NVML shows to the job.

    ``partitions`` are the states of the host's partitions by name. ``mig_gpus`` is how many GPUs are in MIG mode. ``block`` is
    what Slurm's topology/block plugin has the host in; None in none. ``config`` is how the site has set up Slurm.
    """

    controller: str | NotAvailable
    node: SlurmNode | NotAvailable
    share: SlurmShare | NotAvailable
    partitions: dict[str, str] | NotAvailable
    gpus_seen: int | NotAvailable
    mig_gpus: int
    block: str | NotAvailable | None = None
    config: SlurmConfig | NotAvailable = field(default_factory=lambda: NotAvailable("not asked"))


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesState:
    """A host, or its cluster, in Kubernetes. ``why_none``: no cluster can be asked here. ``gpus_on_bus``: by sysfs."""

    why_none: str | None
    node: KubernetesNode | NotAvailable | None = None
    cluster: KubernetesCluster | None = None
    gpus_on_bus: int | NotAvailable | None = None


@without_device
def kubernetes_node() -> KubernetesState:
    """Ask Kubernetes about this host."""
    why = kubernetes.why_none(os.environ)
    if why is not None:
        return KubernetesState(why_none=why)
    node = kubernetes.read_node(os.environ, hostname=platform.node())
    return KubernetesState(why_none=None, node=node, gpus_on_bus=apply(len, pci_tree.read_nvidia_gpus()))


@without_device
def kubernetes_cluster() -> KubernetesState:
    """Ask Kubernetes about the cluster of this host."""
    why = kubernetes.why_none(os.environ)
    return KubernetesState(why_none=why, cluster=None if why is not None else kubernetes.read_cluster())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBinding:
    """Where this rank may run: its CPUs, the first CPU of each of their cores, their NUMA nodes, and its memory in bytes."""

    cpus: str
    cores: str
    numa_nodes: str
    memory_limit_bytes: int | NotAvailable


@without_device
def slurm_state(*, job: str) -> SlurmState:
    """Ask Slurm about this host. A value that cannot be read says why, and leaves the others."""
    hostname = platform.node()
    name = os.environ.get("SLURMD_NODENAME") or hostname.partition(".")[0]
    with ThreadPoolExecutor(6) as questions:  # at once, so that a controller that is silent costs one deadline
        controller = questions.submit(slurm.read_controller)
        node = questions.submit(slurm.read_node, name, hostname=hostname)
        share = questions.submit(slurm.read_share, job, name)
        partitions = questions.submit(slurm.read_partitions)
        block = questions.submit(slurm.read_block, name)
        config = questions.submit(slurm.read_config, os.environ)
        seen, mig_gpus = _gpus()
    return SlurmState(
        controller=controller.result(),
        node=node.result(),
        share=share.result(),
        partitions=_of_host(partitions.result(), node.result()),
        gpus_seen=seen,
        mig_gpus=mig_gpus,
        block=block.result(),
        config=config.result(),
    )


def _of_host(partitions: dict[str, str] | NotAvailable, node: SlurmNode | NotAvailable) -> dict[str, str] | NotAvailable:
    """The host's partitions, of all."""
    names = apply(lambda known: known.partitions, node)
    return apply(lambda text, states: {name: states[name] for name in text.split(",") if name in states}, names, partitions)


@without_device
def rank_binding(*, job: str) -> RankBinding:
    """Read where this rank may run."""
    allowed = os.sched_getaffinity(0)
    return RankBinding(
        cpus=numa.format_cpulist(allowed),
        cores=numa.format_cpulist({min(numa.read_threads_of_core(cpu)) for cpu in allowed}),
        numa_nodes=numa.format_cpulist({node.number for node in numa.read_nodes() if node.cpus & allowed}),
        memory_limit_bytes=host.read_memory_limit(job),
    )


def _gpus() -> tuple[int | NotAvailable, int]:
    """How many GPUs NVML shows here, and how many are in MIG mode. One that is lost counts too."""
    try:
        with session():
            return gpu_index.gpu_count(), sum(map(gpu_index.is_in_mig_mode, range(gpu_index.gpu_count())))
    except NvmlError as error:
        return NotAvailable(str(error)), 0
