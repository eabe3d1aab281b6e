"""NUMA nodes by the kernel's sysfs: the node of a PCI device, and the CPUs and memory of each node.

Nothing is guessed: a value that sysfs does not give, or gives in an unknown form, is None.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.inventory.reading import NotAvailable, apply, or_none
from pytest_gpucluster.inventory.sysfs import SYS, list_if_there, number_in, read_text
from pytest_gpucluster.protocol.rank import spans

_PCI = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])\Z")
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?\Z", re.ASCII)
_GIVEABLE = ("MemFree", "Active(file)", "Inactive(file)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node.

    ``available_bytes`` are the free pages and the page cache of files, which the kernel drops when memory is needed.
    ``distances`` are the firmware's (SLIT) by node number, 10 to itself. Empty or None: sysfs does not say.
    """

    number: int
    cpus: frozenset[int]
    memory_bytes: int | None
    available_bytes: int | None
    distances: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """Where a PCI device is: ``node`` is the number of one of ``nodes``; None where sysfs does not say."""

    node: int | None
    nodes: tuple[NumaNode, ...]

    @property
    def memory_nodes(self) -> list[int]:
        """Numbers of the nodes that have memory."""
        return [node.number for node in self.nodes if node.memory_bytes]

    @property
    def farthest(self) -> int | None:
        """The node farthest from the device; the lowest of several, None without another node or for an unknown place.

        A node without CPUs is no other part of the host: a GPU's own memory may be such a node.
        """
        near = next((node for node in self.nodes if node.number == self.node), None)
        others = [node for node in self.nodes if node.memory_bytes and node.cpus and node.number != self.node]
        if near is None or not others:
            return None
        return max(others, key=lambda node: (near.distances.get(node.number, 0), -node.number)).number

    def cpus_of(self, number: int | None) -> frozenset[int]:
        """CPUs of a node; none for None and for a number that no node has."""
        return next((node.cpus for node in self.nodes if node.number == number), frozenset())

    def available_bytes(self, number: int | None) -> int | None:
        """Available bytes of a node, for None of all nodes; None if sysfs does not give them."""
        nodes = [node for node in self.nodes if number in (None, node.number)]
        sizes = [node.available_bytes for node in nodes if node.available_bytes is not None]
        return sum(sizes) if sizes and len(sizes) == len(nodes) else None

    def room_bytes(self, number: int | None) -> int:
        """As :meth:`available_bytes`; of all nodes, the only one, or an unknown one at least what the kernel counts as free.

        In a virtual machine that grows (memory hotplug), the numbers of its node leave out what was added.
        """
        available = self.available_bytes(number)
        if number is not None and available is not None and self.memory_nodes != [number]:
            return available
        return max(available or 0, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def read_locality(pci: str | None, *, root: Path = SYS) -> Locality:
    """Where the device with this PCI address is, among the nodes of this machine; None: no device, only the nodes.

    Raises:
        ValueError: ``pci`` is no PCI address.
    """
    nodes = read_nodes(root=root)
    number = None if pci is None else read_node_of(pci, root=root)
    is_known = number in {node.number for node in nodes}
    return Locality(node=number if is_known else None, nodes=nodes)


def read_node_of(pci: str, *, root: Path = SYS) -> int | None:
    """NUMA node of a PCI device; None for a device that is not there, and where the firmware does not say (-1).

    Raises:
        ValueError: ``pci`` is no PCI address.
    """
    return number_in(_read(root / "bus" / "pci" / "devices" / sysfs_address(pci) / "numa_node") or "")


def read_nodes(*, root: Path = SYS) -> tuple[NumaNode, ...]:
    """Every NUMA node of this machine by number; none on a kernel without NUMA."""
    folder, numbers = root / "devices" / "system" / "node", or_none(read_node_numbers(root=root)) or []
    return tuple(_read_node(folder / f"node{number}", number, numbers) for number in numbers)


def read_node_numbers(*, root: Path = SYS) -> list[int] | NotAvailable:
    """The numbers of the NUMA nodes of this machine; none on a kernel without NUMA."""
    found = list_if_there(root / "devices" / "system" / "node")
    numbers = apply(lambda names: [number_in(name.removeprefix("node")) for name in names if name.startswith("node")], found)
    return apply(lambda known: sorted(one for one in known if one is not None), numbers)


def read_threads_of_core(cpu: int, *, root: Path = SYS) -> frozenset[int]:
    """The CPUs (hardware threads) of the core of a CPU, itself included; itself alone where sysfs does not say."""
    known = read_cpulist(root / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list")
    return (or_none(known) or frozenset()) | {cpu}


def sysfs_address(pci: str) -> str:
    """A PCI address as sysfs spells it: ``0000:1b:00.0`` for NVML's ``00000000:1B:00.0``.

    Raises:
        ValueError: it is no PCI address.
    """
    found = _PCI.match(pci.lower())
    if found is None:
        raise ValueError(f"{pci!r} is no PCI address such as 0000:1b:00.0")
    domain, bus, device, function = found.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}"


def parse_cpulist(text: str) -> frozenset[int]:
    """The numbers in a list as the kernel writes it: ``0-3,8``.

    Raises:
        ValueError: it is no such list.
    """
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        found = _RANGE.match(part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{text.strip()!r} is no list of numbers such as 0-3,8")
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(numbers)


def read_cpulist(file: Path) -> frozenset[int] | NotAvailable:
    """The numbers in a file as :func:`parse_cpulist` reads them."""
    try:
        return apply(parse_cpulist, read_text(file))
    except ValueError as error:
        return NotAvailable(str(error))


def format_cpulist(cpus: Iterable[int]) -> str:
    """Numbers as the kernel writes them, ``0-3,8``."""
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans(cpus))


def _read_node(folder: Path, number: int, numbers: list[int]) -> NumaNode:
    sizes_kb = _read_meminfo_kb(folder)
    total_kb = sizes_kb.get("MemTotal")
    return NumaNode(
        number=number,
        cpus=or_none(read_cpulist(folder / "cpulist")) or frozenset(),
        memory_bytes=None if total_kb is None else 1024 * total_kb,
        available_bytes=1024 * sum(map(sizes_kb.__getitem__, _GIVEABLE)) if sizes_kb.keys() >= {*_GIVEABLE} else None,
        distances=_read_distances(folder, numbers),
    )


def _read_meminfo_kb(folder: Path) -> dict[str, int]:
    """``Node 0 MemFree:  1024 kB`` as name and number; lines of another form are left out."""
    lines = [line.split() for line in (_read(folder / "meminfo") or "").splitlines()]
    sizes = {words[2].rstrip(":"): number_in(words[3]) for words in lines if len(words) > 3}
    return {name: size for name, size in sizes.items() if size is not None}


def _read_distances(folder: Path, numbers: list[int]) -> dict[int, int]:
    found = [number_in(word) for word in (_read(folder / "distance") or "").split()]
    known = [one for one in found if one is not None]
    return dict(zip(numbers, known, strict=True)) if len(numbers) == len(found) == len(known) else {}


def _read(file: Path) -> str | None:
    """Text of a file; None if this process cannot read the file, or it is empty."""
    return or_none(read_text(file))
