"""GPUs and their ways by the kernel's PCIe tree: from a device up to its root port, how wide each link is, what is near.

A virtual machine shows no bridges: then the way is the device alone. In a container the list of devices is the host's: it
holds GPUs that the container was not given. So a GPU that NVML does not list is missing or hidden: only a stated number of
GPUs tells which.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.inventory import sysfs
from pytest_gpucluster.inventory.numa import sysfs_address
from pytest_gpucluster.inventory.reading import EVIDENCE, NotAvailable, all_or_why, apply, judged, matching, or_none, read, row

OPEN_DRIVER = "Open Kernel Module"
NVIDIA = "0x10de"
GPU_CLASSES = ("0x0300", "0x0302")
"""VGA controller and 3D controller. A GPU's audio device and an NVSwitch are of other classes."""
NO_DRIVER = "no driver"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")
_ID = re.compile(r"0x[0-9a-fA-F]+")
NO_WIDTH = (63, 255)
"""What the kernel reads of a device that does not answer."""
FIRST_CAPABILITY = 0x100
NO_ANSWER = b"\xff\xff"
"""What the bus reads as the vendor of nobody."""
ACCESS_CONTROL = 0x000D
REDIRECTS = 0b11100
"""Redirection of requests and completions between peers, and their way over the root."""
MOST_CAPABILITIES = 64
SAME_SWITCH_BRIDGES = 2
"""Bridges of a device up to the switch that it shares with another one: its own port and the switch's upward port."""
NO_NUMA_NODE = "-1"
GENERATION_5 = "32.0 GT/s PCIe"
_speed = matching(r"(\d+(?:\.\d+)?) GT/s", f"speed such as '{GENERATION_5}'", float)


def _width(lanes: int) -> int | NotAvailable:
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
    if data.startswith(NO_ANSWER):
        return NotAvailable(f"the device does not answer ({file})")
    at = FIRST_CAPABILITY
    for _ in range(MOST_CAPABILITIES):
        header = int.from_bytes(data[at : at + 4], "little")
        if header & 0xFFFF == ACCESS_CONTROL:
            return bool(int.from_bytes(data[at + 6 : at + 8], "little") & REDIRECTS)
        at = header >> 20
        if at < FIRST_CAPABILITY:
            break
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class PciNode:
    """A device or bridge with the link that it is an end of. Speeds are in 10^9 transfers a second and lane.

    ``redirects_peers``: access control (ACS) sends traffic between two devices below it up to the root. It can be read as
    root only.
    """

    address: str = judged(EVIDENCE, "of `nic_pcie`: it names the link")
    speed_gt_s: float | NotAvailable = row(sysfs.SysfsFile("current_link_speed"), GENERATION_5, "nic_pcie", convert=_speed)
    max_speed_gt_s: float | NotAvailable = row(sysfs.SysfsFile("max_link_speed"), GENERATION_5, "nic_pcie", convert=_speed)
    width: int | NotAvailable = row(sysfs.SysfsFile("current_link_width", sysfs.read_number), 16, "nic_pcie", convert=_width)
    max_width: int | NotAvailable = row(sysfs.SysfsFile("max_link_width", sysfs.read_number), 16, "nic_pcie", convert=_width)
    redirects_peers: bool | NotAvailable = row(
        sysfs.SysfsFile("config", _redirects_peers), healthy=False, judged="nic_redirection"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PciPath:
    """The way from a device up to its root port: the device first. ``numa_node`` is -1 where the firmware does not say."""

    numa_node: str | NotAvailable = judged(EVIDENCE, "of `nic_pcie`: the GPUs near an adapter")
    nodes: list[PciNode] = judged("nic_pcie")


def read_nvidia_gpus(*, root: Path = sysfs.SYS) -> dict[str, str] | NotAvailable:
    """The NVIDIA GPUs that the kernel lists on the PCI bus: the name of its driver by address, :data:`NO_DRIVER` for none."""
    folder = root / "bus" / "pci" / "devices"
    found = sysfs.read_at(folder, lambda: [device for device in sorted(folder.iterdir()) if is_nvidia_gpu(device)])
    return apply(lambda gpus: {gpu.name: or_none(sysfs.target_of(gpu / "driver")) or NO_DRIVER for gpu in gpus}, found)


def is_nvidia_gpu(device: Path) -> bool:
    """Whether a device of sysfs is one; a virtual function is a part of one.

    Raises:
        OSError: its vendor or class cannot be read.
    """
    if _id(device / "vendor") != NVIDIA or (device / "physfn").exists():
        return False
    return _id(device / "class").startswith(GPU_CLASSES)


def _id(file: Path) -> str:
    text = file.read_bytes()[:80].decode("ascii", "replace").strip()
    if not _ID.fullmatch(text):
        raise OSError(errno.EINVAL, f"{text!r} is no number such as {NVIDIA}", str(file))
    return text


def read_path(pci: str, *, root: Path = sysfs.SYS) -> PciPath | NotAvailable:
    """The way of the device with this PCI address; of a virtual function, that of the device that has it.

    Raises:
        ValueError: ``pci`` is no PCI address.
    """

    def of_folders(folders: list[Path]) -> PciPath:
        numa_node = sysfs.read_text(folders[0] / "numa_node") if folders else NotAvailable(f"{pci} is no PCI device")
        return PciPath(numa_node=numa_node, nodes=[read(PciNode, folder, address=folder.name) for folder in folders])

    return apply(of_folders, _way_up(root / "bus" / "pci" / "devices" / sysfs_address(pci)))


def _way_up(link: Path) -> list[Path] | NotAvailable:
    """The folders of the PCI device that a link leads to and of all above it; of a virtual function, those of its device."""
    device = sysfs.read_at(link, lambda: (link / "physfn" if (link / "physfn").exists() else link).resolve(strict=True))
    return apply(lambda lowest: [one for one in (lowest, *lowest.parents) if _ADDRESS.match(one.name)], device)


def read_addresses(*, root: Path = sysfs.SYS) -> list[str] | NotAvailable:
    """The PCI addresses on the ways of all NVIDIA GPUs and RDMA adapters, without a reading of what is there.

    None where the kernel shows no such device. A device that cannot be looked at makes the whole not available: what lies on
    its way is not known.
    """
    devices, adapters = root / "bus" / "pci" / "devices", root / "class" / "infiniband"
    listed = all_or_why(map(sysfs.list_if_there, (devices, adapters)))
    if isinstance(listed, NotAvailable):
        return listed
    on_bus, of_class = listed
    try:
        links = [devices / name for name in on_bus if _ADDRESS.match(name) and is_nvidia_gpu(devices / name)]
        links += [link for name in of_class if (link := adapters / name / "device").exists()]
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({error.filename})")
    return apply(lambda ways: sorted({one.name for way in ways for one in way}), all_or_why(map(_way_up, links)))


def read_gpu_paths(*, root: Path = sysfs.SYS) -> dict[str, PciPath | NotAvailable] | NotAvailable:
    """The way of every NVIDIA GPU that the kernel lists, by address."""
    return apply(lambda gpus: {address: read_path(address, root=root) for address in gpus}, read_nvidia_gpus(root=root))


def read_peer_memory(*, root: Path = sysfs.SYS) -> bool | NotAvailable:
    """Whether nvidia_peermem is loaded, one of two ways to GPUDirect RDMA; the other, dma_buf, needs no module of its own."""
    return apply(lambda names: "nvidia_peermem" in names, sysfs.list_names(root / "module"))


def read_open_driver(*, proc: Path = sysfs.PROC) -> bool | NotAvailable:
    """Whether NVIDIA's driver that is loaded is the open one, which alone can lend GPU memory by dma_buf."""
    return apply(lambda text: OPEN_DRIVER in text.splitlines()[0], sysfs.read_text(proc / "driver" / "nvidia" / "version"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a device is.

    ``addresses`` is its way up the PCIe tree, its own address first; None where that is not known. ``numa_node`` is None
    where the firmware does not say. ``nvlinks`` counts those that lead up to a switch.
    """

    addresses: tuple[str, ...] | None
    numa_node: str | None = None
    nvlinks: int = 0


def position(path: PciPath | NotAvailable | None, *, nvlinks: int = 0) -> Position:
    """The position of a device with this way up the PCIe tree; None: the tree does not list it."""
    if path is None or isinstance(path, NotAvailable):
        return Position(addresses=None, nvlinks=nvlinks)
    addresses, numa_node = tuple(node.address for node in path.nodes), or_none(path.numa_node)
    return Position(addresses=addresses, numa_node=None if numa_node == NO_NUMA_NODE else numa_node, nvlinks=nvlinks)


def nearness(one: Position, other: Position) -> str | None:
    """``NV18`` where NVLinks lead from both to a switch, else the way over PCIe; None where that is not known.

    PIX below one switch, PXB over several bridges, PHB below one host bridge, NODE of one NUMA node, SYS of two.
    """
    nvlinks = min(one.nvlinks, other.nvlinks)
    if nvlinks:
        return f"NV{nvlinks}"
    if one.addresses is None or other.addresses is None:
        return None
    above = one.addresses[1:], other.addresses[1:]
    shared = [address for address in above[0] if address in above[1]]
    if shared:
        return "PIX" if max(up.index(shared[0]) for up in above) < SAME_SWITCH_BRIDGES else "PXB"
    if all(above) and _bus(above[0][-1]) == _bus(above[1][-1]):
        return "PHB"
    if one.numa_node is None or other.numa_node is None:
        return None
    return "NODE" if one.numa_node == other.numa_node else "SYS"


def _bus(address: str) -> str:
    """Domain and bus; the root ports of a host bridge are on one bus."""
    return address.rpartition(":")[0]
