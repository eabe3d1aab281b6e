"""The facts, software, clock and NICs of this worker's host, as they are now."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.host import HostFacts, read_host
from pytest_gpucluster.inventory.identity import read_stack, read_variables, read_versions
from pytest_gpucluster.inventory.nics import read_nics
from pytest_gpucluster.inventory.pci_tree import read_gpu_paths, read_path, read_peer_memory
from pytest_gpucluster.inventory.reading import NotAvailable, apply, or_none
from pytest_gpucluster.protocol.functions import without_device

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.nics import Nic
    from pytest_gpucluster.inventory.pci_tree import PciPath


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """A host, the versions of what runs there by name, and the variables of this rank that change what CUDA and NCCL do."""

    facts: HostFacts
    versions: dict[str, str]
    variables: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClock:
    """What the host's clock shows, in seconds since 1970."""

    shown_s: float


@without_device
def host_state() -> HostState:
    """Read this host. A value that cannot be read says why, and leaves the others."""
    return HostState(
        facts=read_host(),
        versions={**read_versions(), **read_stack()},
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

    ``peer_memory``: whether nvidia_peermem is loaded.
    """

    nics: list[Nic] | NotAvailable
    paths: dict[str, PciPath | NotAvailable]
    gpu_paths: dict[str, PciPath | NotAvailable] | NotAvailable
    peer_memory: bool | NotAvailable


@without_device
def nic_state() -> NicState:
    """Read every RDMA adapter of this host. A value that cannot be read says why, and leaves the others."""
    return NicState(nics=read_nics())


@without_device
def nic_paths() -> NicPaths:
    """Read the way of every RDMA adapter and GPU of this host through its PCIe tree."""
    nics = read_nics()
    paths = {nic.device: apply(read_path, nic.pci) for nic in or_none(nics) or ()}
    return NicPaths(nics=nics, paths=paths, gpu_paths=read_gpu_paths(), peer_memory=read_peer_memory())
