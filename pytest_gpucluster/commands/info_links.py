"""The links of a machine as tables: each GPU's, each NVLink, and how near GPUs and adapters are to each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.text import Text

from pytest_gpucluster.commands.info_findings import unavailable
from pytest_gpucluster.commands.info_tables import NOTHING, cell, table
from pytest_gpucluster.inventory.numa import sysfs_address
from pytest_gpucluster.inventory.pci_tree import NO_NUMA_NODE, Position, nearness
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.commands.info_tables import Machine, Shown

SELF = "X"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU or an adapter in the matrix. ``way`` is a PciPath as plain data; ``nvlinks`` counts links up to a switch."""

    name: str
    way: Any
    nvlinks: int = 0


def links(machine: Machine) -> list[Shown]:
    """The links of each GPU, each NVLink, and the matrix."""
    gpus = machine["gpus"]["gpus"]
    rows = [
        (
            str(one["index"]),
            nvlinks_of_all([one]),
            ", ".join(sorted({cell(link["speed_gb_s"], "{:g}") for link in _links_of(one)})) or NOTHING,
            cell(one["nvlink_peer"]),
            NOTHING if unavailable(one["fabric"]) is not None else one_line(one["fabric"]["state"]),
            f"{cell(one['pcie_gen'])}/{cell(one['pcie_gen_max'])}",
            f"x{cell(one['pcie_width'])}/x{cell(one['pcie_width_max'])}",
            cell(one["pcie_replay_count"]),
        )
        for one in gpus
    ]
    names = ("GPU", "NVLinks", "GB/s each", "to", "fabric", "PCIe gen", "lanes", "replays")
    return [table(names, rows, right=("GPU", "replays")), *_each_nvlink(gpus), *_matrix(machine)]


def nvlinks_of_all(gpus: Sequence[Mapping[str, Any]]) -> str:
    """``18 of 18 up`` where all GPUs are alike, else the range."""
    found = [known for known in map(_links_of, gpus) if known]
    if not found:
        return NOTHING
    up = [sum(link["is_up"] is True for link in known) for known in found]
    most = max(map(len, found))
    return f"{min(up)} to {max(up)} of {most} up" if min(up) != max(up) else f"{up[0]} of {most} up"


def _links_of(gpu: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return gpu["nvlinks"] if isinstance(gpu["nvlinks"], list) else []


def _each_nvlink(gpus: Sequence[Mapping[str, Any]]) -> list[Shown]:
    """The rate of each link of each GPU; links whose rows are alike share one."""
    count = max((len(_links_of(one)) for one in gpus), default=0)
    rows = [tuple(_link(_links_of(one), number) for one in gpus) for number in range(count)]
    shown = []
    for row, group in groupby(range(count), key=rows.__getitem__):
        numbers = list(group)
        shown.append((str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}", *row))
    columns = [f"GPU{one['index']}" for one in gpus]
    return [Text(""), table(("NVLink", *columns), shown, right=columns)] if shown else []


def _link(found: Sequence[Mapping[str, Any]], number: int) -> str:
    """``26.562`` (GB/s of one way), ``down``; a link that is up and tells no rate is ``up``."""
    if number >= len(found):
        return NOTHING
    link = found[number]
    if link["is_up"] is not True:
        return "down" if link["is_up"] is False else NOTHING
    rate = cell(link["speed_gb_s"], "{:g}")
    return "up" if rate == NOTHING else rate


def _matrix(machine: Machine) -> list[Shown]:
    """As ``nvidia-smi topo -m`` names the ways, GPUs and adapters down, GPUs across."""
    gpus, nics = _gpus(machine), [Device(name=one_line(name), way=way) for name, way in machine["nic_ways"].items()]
    if not gpus or len(gpus) + len(nics) < 2:
        return []
    rows = [(one.name, *(_nearness(one, other) for other in gpus), _numa_node(one) or NOTHING) for one in (*gpus, *nics)]
    return [Text(""), table(("", *(gpu.name for gpu in gpus), "NUMA"), rows, right=("NUMA",))]


def _gpus(machine: Machine) -> list[Device]:
    """The GPUs of NVML by index, then those that only the PCI bus shows, by address."""
    ways = {} if unavailable(machine["gpu_ways"]) is not None else dict(machine["gpu_ways"])
    seen = []
    for one in machine["gpus"]["gpus"]:
        up = sum(link["is_up"] is True for link in _links_of(one)) if one["nvlink_peer"] == "switch" else 0
        seen.append(Device(name=f"GPU{one['index']}", way=ways.pop(sysfs_address(one["pci"]), None), nvlinks=up))
    return [*seen, *(Device(name=_short(address), way=way) for address, way in ways.items())]


def _short(address: str) -> str:
    return one_line(address).removeprefix("0000:").removesuffix(".0")


def _nearness(one: Device, other: Device) -> str:
    if one is other:
        return SELF
    return nearness(_position(one), _position(other)) or NOTHING


def _position(device: Device) -> Position:
    way = tuple(node["address"] for node in device.way["nodes"]) if _is_known(device) else None
    return Position(addresses=way, numa_node=_numa_node(device), nvlinks=device.nvlinks)


def _is_known(device: Device) -> bool:
    return device.way is not None and unavailable(device.way) is None


def _numa_node(device: Device) -> str | None:
    """None where the firmware does not tell."""
    node = device.way["numa_node"] if _is_known(device) else None
    return None if node is None or unavailable(node) is not None or str(node) == NO_NUMA_NODE else one_line(node)
