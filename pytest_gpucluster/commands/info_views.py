"""A machine as tables for the terminal. Pure: the plain data of ``read_machine`` in, rich's renderables out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from rich.table import Table
from rich.text import Text

from pytest_gpucluster.commands.info_findings import unavailable
from pytest_gpucluster.judging.forecast import counted
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Machine: TypeAlias = Mapping[str, Any]
    Shown: TypeAlias = Table | Text

NOTHING = "-"
UNITS = {"memlock": "memlock_bytes", "nofile": "nofile_files"}
"""Names of facts that lack their unit."""
VENDOR = "NVIDIA "
SAME_SWITCH_BRIDGES = 2
"""Bridges of a device up to the switch that it shares with another one: its own port and the switch's upward port."""


def cell(value: Any, form: str = "{}") -> str:
    """A value in ``form``; ``-`` where it is not available."""
    if value is None or unavailable(value) is not None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return one_line(", ".join(map(str, value))) or "none"
    return one_line(form.format(value))


def _title(words: str) -> Text:
    return Text(words, style="bold")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """A plain table; what is too wide is cut, never wrapped. Without a row not even a heading is shown."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    found = list(rows)
    for column in columns if found else ():
        table.add_column(column, no_wrap=True, overflow="ellipsis", justify="right" if column in right else "left")
    for row in found:
        table.add_row(*map(Text, row))
    return table


def _pairs(pairs: Iterable[tuple[str, str]]) -> Table:
    """Names and values without a heading; a long value goes on in the next line."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), Text(value))
    return table


def summary(machine: Machine) -> list[Shown]:
    """The machine in eight lines."""
    host, gpus, nics = machine["host"], machine["gpus"]["gpus"], machine["nics"]
    names = {gpu["name"]: sum(one["name"] == gpu["name"] for one in gpus) for gpu in gpus}
    lost = machine["gpus"]["count"] - len(gpus)
    shown = [f"{count} x {one_line(name)}" for name, count in names.items()] + ([f"{lost} unreadable"] if lost else [])
    drivers = sorted({gpu["driver"] for gpu in gpus})
    ports = [port for nic in nics for port in _ports(nic)] if isinstance(nics, list) else []
    active = [port for port in ports if port["state"] == "ACTIVE"]
    cpus = ", ".join(
        counted(host[name], word) if isinstance(host[name], int) else f"{NOTHING} {word}s"
        for name, word in (("sockets", "socket"), ("cores", "core"), ("cpus", "CPU"))
    )
    software = machine["software"]
    return [
        _pairs(
            [
                (
                    "host",
                    f"{one_line(machine['hostname'])}, {cell(host['operating_system'])}, kernel {one_line(host['kernel'])}",
                ),
                ("CPU", f"{cell(host['cpu_model'])}: {cpus}"),
                ("memory", f"{cell(host['memory_gib'], '{:.0f}')} GiB, {counted(host['numa_nodes'], 'NUMA node')}"),
                ("GPUs", ", ".join(shown) or "none"),
                ("driver", ", ".join(map(one_line, drivers)) or NOTHING),
                ("NVLinks", _nvlinks_of_all(gpus)),
                ("adapters", f"{len(active)} of {len(ports)} ports active" if ports else "none"),
                ("software", f"torch {cell(software['torch'])}, pytest-gpucluster {cell(software['pytest-gpucluster'])}"),
            ]
        )
    ]


def _nvlinks_of_all(gpus: Sequence[Mapping[str, Any]]) -> str:
    """``18 of 18 up`` where all GPUs are alike, else the range."""
    found = [gpu["nvlinks"] for gpu in gpus if isinstance(gpu["nvlinks"], list)]
    if not found:
        return NOTHING
    up = [sum(link["is_up"] is True for link in links) for links in found]
    most = max(map(len, found))
    return f"{min(up)} to {max(up)} of {most} up" if min(up) != max(up) else f"{up[0]} of {most} up"


def gpu(machine: Machine) -> list[Shown]:
    """How each GPU runs, then which one it is."""
    gpus = machine["gpus"]["gpus"]
    running = [
        (
            str(one["index"]),
            one_line(one["name"]).removeprefix(VENDOR),
            f"{one['memory_used_gib']:.1f}/{one['memory_gib']:.1f}",
            cell(one["temperature_c"]),
            cell(one["memory_temperature_c"], "{:.0f}"),
            cell(one["power_w"], "{:.0f}"),
            cell(one["sm_clock_mhz"]),
            cell(one["ecc_uncorrected_volatile"]),
            cell(one["repair"]["recovery_action"]),
            cell(one["clocks_event_reasons"]),
        )
        for one in gpus
    ]
    numbers = ("GPU", "GiB", "C", "mem C", "W", "MHz", "ECC")
    names = ("GPU", "name", "GiB", "C", "mem C", "W", "MHz", "ECC", "recovery", "held by")
    which = [(str(one["index"]), one_line(one["pci"]), cell(one["serial"]), one_line(one["uuid"])) for one in gpus]
    board = [(str(one["index"]), cell(one["board_part_number"]), cell(one["vbios"]), cell(one["module_id"])) for one in gpus]
    shown: list[Shown] = [
        _table(names, running, right=numbers),
        Text(""),
        _table(("GPU", "PCI", "serial", "UUID"), which, right=("GPU",)),
        Text(""),
        _table(("GPU", "board", "VBIOS", "module"), board, right=("GPU", "module")),
    ]
    return shown if gpus else []


def links(machine: Machine) -> list[Shown]:
    """The links of each GPU, and which adapter is near which GPU."""
    gpus = machine["gpus"]["gpus"]
    rows = []
    for one in gpus:
        found = one["nvlinks"]
        speeds = sorted({cell(link["speed_gb_s"], "{:g}") for link in found}) if isinstance(found, list) else [NOTHING]
        rows.append(
            (
                str(one["index"]),
                _nvlinks_of_all([one]),
                ", ".join(speeds),
                cell(one["nvlink_peer"]),
                NOTHING if unavailable(one["fabric"]) is not None else one_line(one["fabric"]["state"]),
                f"{cell(one['pcie_gen'])}/{cell(one['pcie_gen_max'])}",
                f"x{cell(one['pcie_width'])}/x{cell(one['pcie_width_max'])}",
                cell(one["pcie_replay_count"]),
            )
        )
    names = ("GPU", "NVLinks", "GB/s each", "to", "fabric", "PCIe gen", "lanes", "replays")
    return [_table(names, rows, right=("GPU", "replays")), *_affinity(machine)]


def _affinity(machine: Machine) -> list[Shown]:
    """As ``nvidia-smi topo -m`` names it: PIX below one switch, PXB over several bridges, NODE of one NUMA node, SYS."""
    ways, nics = machine["gpu_ways"], machine["nic_ways"]
    if not nics or unavailable(ways) is not None:
        return []
    rows = [(address, *(_distance(way, other) for other in nics.values())) for address, way in ways.items()]
    return [Text(""), _table(("GPU at", *map(one_line, nics)), rows)]


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if unavailable(one) is not None or unavailable(other) is not None:
        return NOTHING
    above = [[node["address"] for node in way["nodes"][1:]] for way in (one, other)]
    shared = [address for address in above[0] if address in above[1]]
    if shared:
        return "PIX" if max(up.index(shared[0]) for up in above) < SAME_SWITCH_BRIDGES else "PXB"
    numa = [way["numa_node"] for way in (one, other)]
    if any(unavailable(node) is not None or str(node) == "-1" for node in numa):
        return NOTHING
    return "NODE" if numa[0] == numa[1] else "SYS"


def ib(machine: Machine) -> list[Shown]:
    """Every port of every adapter, with what it counted since its driver was loaded."""
    nics = machine["nics"]
    if not isinstance(nics, list):
        return []
    rows = [
        (
            f"{one_line(nic['device'])}:{port['number']}",
            cell(port["fabric"]),
            cell(port["state"]),
            cell(port["physical_state"]),
            cell(port["rate_gbit_s"], "{:g}"),
            cell(port["netdevs"]),
            _counter(port, "link_downed"),
            _counter(port, "symbol_error"),
        )
        for nic in nics
        for port in _ports(nic)
    ]
    names = ("port", "fabric", "state", "cable", "Gb/s", "netdev", "downs", "symbols")
    kinds = [
        [one_line(nic["device"]), *(cell(nic[key]) for key in ("pci", "hca_type", "board_id", "firmware"))] for nic in nics
    ]
    adapters = _table(("adapter", "PCI", "type", "board", "firmware"), kinds)
    return [_table(names, rows, right=("Gb/s", "downs", "symbols")), Text(""), adapters]


def _ports(nic: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return nic["ports"] if isinstance(nic["ports"], list) else []


def _counter(port: Mapping[str, Any], name: str) -> str:
    counters = port["counters"]
    return cell(counters.get(name)) if isinstance(counters, dict) else NOTHING


def host(machine: Machine) -> list[Shown]:
    """Every fact of the host."""
    return [_pairs((UNITS.get(name, name), _or_why(value)) for name, value in machine["host"].items())]


def software(machine: Machine) -> list[Shown]:
    """Versions, and the variables that change what GPUs do."""
    gpus = machine["gpus"]["gpus"]
    driver = {"driver": gpus[0]["driver"]} if gpus else {}
    pairs = {**driver, **machine["software"], "nvidia_peermem": machine["peer_memory"], **machine["variables"]}
    return [_pairs((one_line(name), _or_why(value)) for name, value in pairs.items())]


def _or_why(value: Any) -> str:
    why = unavailable(value)
    return cell(value, "{:.4g}" if isinstance(value, float) else "{}") if why is None else f"{NOTHING}  ({one_line(why)})"


VIEWS: Mapping[str, Callable[[Machine], list[Shown]]] = {
    "summary": summary,
    "gpu": gpu,
    "links": links,
    "ib": ib,
    "host": host,
    "software": software,
}


def show(machine: Machine, view: str) -> list[Shown]:
    """One view; ``all`` has each under its name."""
    if view != "all":
        return VIEWS[view](machine)
    lines: list[Shown] = []
    for name, made in VIEWS.items():
        lines += [*([Text("")] if lines else []), _title(name), *made(machine)]
    return lines
