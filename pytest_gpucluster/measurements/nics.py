"""The NICs of this worker's host, as they are now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.nics import read_nics
from pytest_gpucluster.inventory.pci_tree import read_gpu_paths, read_path, read_peer_memory
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.protocol.functions import without_device

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.nics import Nic
    from pytest_gpucluster.inventory.pci_tree import PciPath


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
    listed = [] if isinstance(nics, NotAvailable) else nics
    paths = {nic.device: nic.pci if isinstance(nic.pci, NotAvailable) else read_path(nic.pci) for nic in listed}
    return NicPaths(nics=nics, paths=paths, gpu_paths=read_gpu_paths(), peer_memory=read_peer_memory())
