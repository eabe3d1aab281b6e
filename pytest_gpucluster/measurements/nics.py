"""The NICs of this worker's host, as they are now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.nics import read_nics
from pytest_gpucluster.protocol.functions import without_device

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.nics import Nic
    from pytest_gpucluster.inventory.reading import NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class NicState:
    """Every RDMA adapter of a host."""

    nics: list[Nic] | NotAvailable


@without_device
def nic_state() -> NicState:
    """Read every RDMA adapter of this host. A value that cannot be read says why, and leaves the others."""
    return NicState(nics=read_nics())
