"""The PCIe tree by the kernel's sysfs: the way from a device to its root port, and how wide each link of it is.

A virtual machine shows no bridges: then the way is the device alone.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.numa import sysfs_address
from pytest_gpucluster.inventory.pci import is_nvidia_gpu
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.sysfs import SYS, list_names, read_number, read_text

if TYPE_CHECKING:
    from pathlib import Path

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")
_SPEED = re.compile(r"(?P<speed>\d+(?:\.\d+)?) GT/s")
NO_WIDTH = (63, 255)
"""What the kernel reads of a device that does not answer."""
FIRST_CAPABILITY = 0x100
ACCESS_CONTROL = 0x000D
REDIRECTS = 0b11100
"""Redirection of requests and completions between peers, and their way over the root."""
MOST_CAPABILITIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PciNode:
    """A device or bridge with the link that it is an end of. Speeds are in 10^9 transfers a second and lane.

    ``redirects_peers``: access control (ACS) sends traffic between two devices below it up to the root.
    """

    address: str
    speed_gt_s: float | NotAvailable
    max_speed_gt_s: float | NotAvailable
    width: int | NotAvailable
    max_width: int | NotAvailable
    redirects_peers: bool | NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class PciPath:
    """The way from a device up to its root port: the device first. ``numa_node`` is -1 where the firmware does not say."""

    numa_node: str | NotAvailable
    nodes: list[PciNode]


def read_path(pci: str, *, root: Path = SYS) -> PciPath | NotAvailable:
    """The way of the device with this PCI address.

    Raises:
        ValueError: ``pci`` is no PCI address.
    """
    listed = root / "bus" / "pci" / "devices" / sysfs_address(pci)
    try:
        device = listed.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        return NotAvailable(f"{getattr(error, 'strerror', error)} ({listed})")
    folders = [folder for folder in (device, *device.parents) if _ADDRESS.match(folder.name)]
    return PciPath(numa_node=read_text(device / "numa_node"), nodes=[_read_node(folder) for folder in folders])


def read_gpu_paths(*, root: Path = SYS) -> dict[str, PciPath | NotAvailable] | NotAvailable:
    """The way of every NVIDIA GPU that the kernel lists, by address."""
    folder = root / "bus" / "pci" / "devices"
    names = list_names(folder)
    if isinstance(names, NotAvailable):
        return names
    try:
        return {name: read_path(name, root=root) for name in names if _ADDRESS.match(name) and is_nvidia_gpu(folder / name)}
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({folder})")


def read_peer_memory(*, root: Path = SYS) -> bool | NotAvailable:
    """Whether nvidia_peermem is loaded, one of two ways to GPUDirect RDMA; the other, dma_buf, needs no module of its own."""
    names = list_names(root / "module")
    return names if isinstance(names, NotAvailable) else "nvidia_peermem" in names


def _read_node(folder: Path) -> PciNode:
    return PciNode(
        address=folder.name,
        speed_gt_s=_speed(read_text(folder / "current_link_speed")),
        max_speed_gt_s=_speed(read_text(folder / "max_link_speed")),
        width=_width(read_number(folder / "current_link_width")),
        max_width=_width(read_number(folder / "max_link_width")),
        redirects_peers=_redirects_peers(folder / "config"),
    )


def _speed(text: str | NotAvailable) -> float | NotAvailable:
    if isinstance(text, NotAvailable):
        return text
    found = _SPEED.match(text)
    return float(found["speed"]) if found else NotAvailable(f"{text[:80]!r} is no speed such as '32.0 GT/s PCIe'")


def _width(lanes: int | NotAvailable) -> int | NotAvailable:
    return NotAvailable(f"{lanes} lanes: the device does not answer") if lanes in NO_WIDTH else lanes


def _redirects_peers(file: Path) -> bool | NotAvailable:
    """By the capability of access control in the config space, of which root alone may read that part."""
    try:
        with file.open("rb", buffering=0) as config:
            data = os.read(config.fileno(), 4096)
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({file})")
    if len(data) <= FIRST_CAPABILITY:
        return NotAvailable(f"{len(data)} bytes of the config space can be read ({file})")
    at = FIRST_CAPABILITY
    for _ in range(MOST_CAPABILITIES):
        header = int.from_bytes(data[at : at + 4], "little")
        if header & 0xFFFF == ACCESS_CONTROL:
            return bool(int.from_bytes(data[at + 6 : at + 8], "little") & REDIRECTS)
        at = header >> 20
        if at < FIRST_CAPABILITY:
            break
    return False
