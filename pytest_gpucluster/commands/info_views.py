"""A machine as tables for the terminal. Pure: the plain data of ``read_machine`` in, rich's renderables out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from pytest_gpucluster.commands.info_tables import (
    NOTHING,
    Column,
    Machine,
    Shown,
    cell,
    number,
    pairs,
    print_parts,
    table,
    table_of,
    without_gaps,
)
from pytest_gpucluster.health.defects import Defect, find
from pytest_gpucluster.inventory.numa import sysfs_address
from pytest_gpucluster.inventory.pci_tree import NO_NUMA_NODE, Position, nearness
from pytest_gpucluster.inventory.reading import unavailable
from pytest_gpucluster.reporting.lines import wrapped
from pytest_gpucluster.text import counted, one_line

if TYPE_CHECKING:
    from rich.table import Table


UNITS = {"memlock": "memlock_bytes", "nofile": "nofile_files"}
"""Names of facts that lack their unit."""
VENDOR = "NVIDIA "
SELF = "X"


def _name(gpu: Mapping[str, Any]) -> str:
    return one_line(gpu["name"]).removeprefix(VENDOR)


def _of(field: str, other: str, form: str = "{}") -> Callable[[Any], str]:
    """Two readings in one cell: ``5/5``."""
    return lambda item: "/".join(form.format(cell(item[name])) for name in (field, other))


def _rates(gpu: Mapping[str, Any]) -> str:
    return ", ".join(sorted({cell(link["speed_gb_s"], "{:g}") for link in _links_of(gpu)})) or NOTHING


def _where(gpu: Mapping[str, Any]) -> str:
    """``chassis 1821924190012, slot 3, tray 2, host 1``."""
    words = {"chassis_serial": "chassis", "slot": "slot", "tray": "tray", "host": "host"}
    return ", ".join(f"{word} {one_line(str(gpu['platform'][name]))}" for name, word in words.items())


def _counter(name: str) -> Callable[[Any], str]:
    return lambda port: cell(port["counters"].get(name)) if isinstance(port["counters"], dict) else NOTHING


INDEX = number("GPU", "index")
NAME = "name"
RUNNING = (
    INDEX,
    Column(NAME, _name),
    number("used GiB", lambda gpu: f"{gpu['memory_used_gib']:.1f}/{gpu['memory_gib']:.1f}"),
    number("°C", "temperature_c"),
    number("memory °C", "memory_temperature_c", "{:.0f}"),
    number("W", "power_w", "{:.0f}"),
    number("SM MHz", "sm_clock_mhz"),
    number("ECC errors", "ecc_uncorrected_volatile"),
    Column("recovery", "repair.recovery_action"),
    Column("held by", "clocks_event_reasons"),
)
WHICH = (INDEX, Column("PCI", "pci"), Column("serial", "serial"), Column("UUID", "uuid"))
BOARD = (
    INDEX,
    Column("board", "board_part_number"),
    Column("VBIOS", "vbios"),
    number("module", "module_id"),
    number("limit W", "power_limit_w", "{:.0f}"),
)
RACK = (INDEX, Column("in the rack", _where))
LINKS = (
    INDEX,
    Column("NVLinks", lambda gpu: _nvlinks_of_all([gpu])),
    Column("GB/s each", _rates),
    Column("to", "nvlink_peer"),
    Column("fabric", "fabric.state"),
    Column("PCIe gen", _of("pcie_gen", "pcie_gen_max")),
    Column("lanes", _of("pcie_width", "pcie_width_max", "x{}")),
    number("replays", "pcie_replay_count"),
)
PORTS = (
    Column("port", lambda port: f"{one_line(port['device'])}:{port['number']}"),
    Column("fabric", "fabric"),
    Column("state", "state"),
    Column("cable", "physical_state"),
    number("Gb/s", "rate_gbit_s", "{:g}"),
    Column("netdev", "netdevs"),
    number("downs", _counter("link_downed")),
    number("symbols", _counter("symbol_error")),
)
ADAPTERS = (
    Column("adapter", "device"),
    Column("PCI", "pci"),
    Column("type", "hca_type"),
    Column("board", "board_id"),
    Column("firmware", "firmware"),
)


def _title(words: str) -> Text:
    return Text(words, style="bold")


def summary(machine: Machine) -> list[Shown]:
    """The machine in eight lines."""
    host, gpus, nics = machine["host"], machine["gpus"]["gpus"], machine["nics"]
    names = {gpu["name"]: sum(one["name"] == gpu["name"] for one in gpus) for gpu in gpus}
    lost = machine["gpus"]["count"] - len(gpus)
    shown = [f"{count} x {one_line(name)}" for name, count in names.items()] + ([f"{lost} unreadable"] if lost else [])
    drivers = sorted({gpu["driver"] for gpu in gpus})
    ports = [port for nic in nics for port in _ports(nic)] if isinstance(nics, list) else []
    active = [port for port in ports if port["state"] == "ACTIVE"]
    *cpus, nodes = (
        counted(host[name], word) if isinstance(host[name], int) else f"{NOTHING} {word}s"
        for name, word in (("sockets", "socket"), ("cores", "core"), ("cpus", "CPU"), ("numa_nodes", "NUMA node"))
    )
    software = machine["software"]
    known = {
        "host": f"{one_line(machine['hostname'])}, {cell(host['operating_system'])}, kernel {one_line(host['kernel'])}",
        "CPU": f"{cell(host['cpu_model'])}: {', '.join(cpus)}",
        "memory": f"{cell(host['memory_gib'], '{:.0f}')} GiB, {nodes}",
        "GPUs": ", ".join(shown) or "none",
        "driver": ", ".join(map(one_line, drivers)) or NOTHING,
        "NVLinks": _nvlinks_of_all(gpus),
        "adapters": f"{len(active)} of {len(ports)} ports active" if ports else "none",
        "software": f"torch {cell(software['torch'])}, pytest-gpucluster {cell(software['pytest-gpucluster'])}",
    }
    return [pairs((name, text) for name, text in known.items() if text != NOTHING)]


def gpu(machine: Machine) -> list[Shown]:
    """How each GPU runs, then which one it is."""
    gpus = machine["gpus"]["gpus"]
    if not gpus:
        return []
    in_racks = [one for one in gpus if unavailable(one["platform"]) is None]
    names = {_name(one) for one in gpus}
    alike = [_title(f"{len(gpus)} x {names.pop()}")] if len(names) == 1 else []
    running = [column for column in RUNNING if column.heading != NAME or not alike]
    tables = (_of_gpus(machine, columns) for columns in (running, WHICH, BOARD))
    return [*alike, *(part for one in tables for part in (one, Text(""))), table_of(in_racks, RACK)]


def _of_gpus(machine: Machine, columns: Sequence[Column]) -> Table:
    """A row for each GPU; that of one with a finding is red."""
    bad = {one.part for one in find(machine)}
    return table_of(machine["gpus"]["gpus"], columns, is_bad=lambda gpu: f"GPU {gpu['index']}" in bad)


def links(machine: Machine) -> list[Shown]:
    """The links of each GPU, each NVLink, and the matrix."""
    gpus = machine["gpus"]["gpus"]
    return [_of_gpus(machine, LINKS), *_each_nvlink(gpus), *_matrix(machine)]


def ib(machine: Machine) -> list[Shown]:
    """Every port of every adapter, with what it counted since its driver was loaded."""
    nics = machine["nics"]
    if not isinstance(nics, list):
        return []
    ports = [{**port, "device": nic["device"]} for nic in nics for port in _ports(nic)]
    return [table_of(ports, PORTS), Text(""), table_of(nics, ADAPTERS)]


def _ports(nic: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return nic["ports"] if isinstance(nic["ports"], list) else []


def host(machine: Machine) -> list[Shown]:
    """Every fact of the host."""
    return [pairs((UNITS.get(name, name), _or_why(value)) for name, value in machine["host"].items())]


def software(machine: Machine) -> list[Shown]:
    """Versions, and the variables that change what GPUs do."""
    gpus, host = machine["gpus"]["gpus"], machine["host"]
    drivers = [gpu["driver"] for gpu in gpus]
    found = {
        "operating_system": host["operating_system"],
        "kernel": host["kernel"],
        "driver": sorted(set(drivers)) if drivers else {"not_available": machine["gpus"]["error"] or "NVML shows no GPU"},
        "driver_cuda": machine["gpus"]["driver_cuda"],
        **machine["software"],
        "nvidia_peermem": machine["peer_memory"],
        **machine["variables"],
    }
    return [pairs((one_line(name), _or_why(value)) for name, value in found.items())]


def offered(machine: Machine) -> list[Shown]:
    """What the host offers its users, and how it is watched."""
    return [pairs((name, _or_why(value)) for name, value in machine["offered"].items())]


def kubernetes(machine: Machine) -> list[Shown]:
    """The host, then its cluster, in the eyes of Kubernetes; one line where no cluster can be asked."""
    node, cluster = machine["kubernetes"]["node"], machine["kubernetes"]["cluster"]
    if node == cluster:
        return [pairs([("kubernetes", _or_why(node))])]
    parts = {"node": node} if unavailable(node) is not None else node
    return [pairs((name, _or_why(value)) for name, value in {**parts, **cluster}.items())]


def _or_why(value: Any) -> str:
    why = unavailable(value)
    return cell(value, "{:.4g}" if isinstance(value, float) else "{}") if why is None else f"{NOTHING}  ({one_line(why)})"


# --- Links ---


def _nvlinks_of_all(gpus: Sequence[Mapping[str, Any]]) -> str:
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
    """``26.562`` (GB/s of one way), ``down``; a link that is up and gives no rate is ``up``."""
    if number >= len(found):
        return NOTHING
    link = found[number]
    if link["is_up"] is not True:
        return "down" if link["is_up"] is False else NOTHING
    rate = cell(link["speed_gb_s"], "{:g}")
    return "up" if rate == NOTHING else rate


def _matrix(machine: Machine) -> list[Shown]:
    """As ``nvidia-smi topo -m`` names the ways, GPUs and adapters down, GPUs across."""
    gpus, nics = _gpus(machine), {one_line(name): _position(way) for name, way in machine["nic_ways"].items()}
    if not gpus or len(gpus) + len(nics) < 2:
        return []
    rows = [
        (
            name,
            *(SELF if one is other else nearness(one, other) or NOTHING for other in gpus.values()),
            one.numa_node or NOTHING,
        )
        for name, one in (*gpus.items(), *nics.items())
    ]
    return [Text(""), table(("", *gpus, "NUMA"), rows, right=("NUMA",))]


def _gpus(machine: Machine) -> dict[str, Position]:
    """The GPUs of NVML by index, then those that only the PCI bus shows, by address; NVLinks count up to a switch."""
    ways = {} if unavailable(machine["gpu_ways"]) is not None else dict(machine["gpu_ways"])
    seen = {}
    for one in machine["gpus"]["gpus"]:
        up = sum(link["is_up"] is True for link in _links_of(one)) if one["nvlink_peer"] == "switch" else 0
        seen[f"GPU{one['index']}"] = _position(ways.pop(sysfs_address(one["pci"]), None), nvlinks=up)
    return seen | {one_line(name).removeprefix("0000:").removesuffix(".0"): _position(way) for name, way in ways.items()}


def _position(way: Any, *, nvlinks: int = 0) -> Position:
    """Where a device is by its PciPath as plain data, as far as that and the firmware say."""
    if way is None or unavailable(way) is not None:
        return Position(addresses=None, nvlinks=nvlinks)
    is_known = unavailable(way["numa_node"]) is None and str(way["numa_node"]) != NO_NUMA_NODE
    addresses = tuple(node["address"] for node in way["nodes"])
    return Position(addresses=addresses, numa_node=one_line(way["numa_node"]) if is_known else None, nvlinks=nvlinks)


VIEWS = {view.__name__: view for view in (summary, gpu, links, ib, host, software, offered, kubernetes)}


def print_view(machine: Machine, view: str, *, unseen: Mapping[str, str], found: Iterable[Defect]) -> None:
    """Print one view, what could not be seen, and what is wrong."""
    width = Console().width
    texts = [f"not seen: {name}: {one_line(why)}" for name, why in unseen.items()]
    lines = (line for text in texts for line in wrapped(text, width=width, indent=""))
    below = [Text(""), *(Text(line, style="yellow") for line in lines)]
    for one in found:
        below.append(Text(f"{one.part}: {one_line(one.what)}", style="bold red"))
        below += map(Text, wrapped(f"next: {one_line(one.advice)}", width=width, indent="  ", later="    "))
    print_parts([*show(machine, view), *below])


def show(machine: Machine, view: str) -> list[Shown]:
    """One view; ``all`` has each that shows something under its name."""
    if view != "all":
        return VIEWS[view](machine)
    lines: list[Shown] = []
    for name, made in VIEWS.items():
        shown = without_gaps(made(machine))
        lines += [*([Text("")] if lines else []), _title(name), *shown] if shown else []
    return lines
