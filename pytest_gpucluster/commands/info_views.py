"""A machine as tables for the terminal. Pure: the plain data of ``read_machine`` in, rich's renderables out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from pytest_gpucluster.commands.info_findings import unavailable
from pytest_gpucluster.commands.info_links import links, nvlinks_of_all
from pytest_gpucluster.commands.info_tables import NOTHING, cell, pairs, table
from pytest_gpucluster.judging.forecast import counted
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_gpucluster.commands.info_tables import Machine, Shown

UNITS = {"memlock": "memlock_bytes", "nofile": "nofile_files"}
"""Names of facts that lack their unit."""
VENDOR = "NVIDIA "


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
    cpus = ", ".join(
        counted(host[name], word) if isinstance(host[name], int) else f"{NOTHING} {word}s"
        for name, word in (("sockets", "socket"), ("cores", "core"), ("cpus", "CPU"))
    )
    software = machine["software"]
    return [
        pairs(
            [
                (
                    "host",
                    f"{one_line(machine['hostname'])}, {cell(host['operating_system'])}, kernel {one_line(host['kernel'])}",
                ),
                ("CPU", f"{cell(host['cpu_model'])}: {cpus}"),
                ("memory", f"{cell(host['memory_gib'], '{:.0f}')} GiB, {counted(host['numa_nodes'], 'NUMA node')}"),
                ("GPUs", ", ".join(shown) or "none"),
                ("driver", ", ".join(map(one_line, drivers)) or NOTHING),
                ("NVLinks", nvlinks_of_all(gpus)),
                ("adapters", f"{len(active)} of {len(ports)} ports active" if ports else "none"),
                ("software", f"torch {cell(software['torch'])}, pytest-gpucluster {cell(software['pytest-gpucluster'])}"),
            ]
        )
    ]


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
    board = [
        (
            str(one["index"]),
            cell(one["board_part_number"]),
            cell(one["vbios"]),
            cell(one["module_id"]),
            cell(one["power_limit_w"], "{:.0f}"),
        )
        for one in gpus
    ]
    racks = [(str(one["index"]), _where(one["platform"])) for one in gpus if unavailable(one["platform"]) is None]
    shown: list[Shown] = [
        table(names, running, right=numbers),
        Text(""),
        table(("GPU", "PCI", "serial", "UUID"), which, right=("GPU",)),
        Text(""),
        table(("GPU", "board", "VBIOS", "module", "limit W"), board, right=("GPU", "module", "limit W")),
    ]
    if racks:
        shown += [Text(""), table(("GPU", "in the rack"), racks, right=("GPU",))]
    return shown if gpus else []


def _where(platform: Mapping[str, Any]) -> str:
    """``chassis 1821924190012, slot 3, tray 2, host 1``."""
    words = {"chassis_serial": "chassis", "slot": "slot", "tray": "tray", "host": "host"}
    return ", ".join(f"{word} {one_line(str(platform[name]))}" for name, word in words.items())


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
    adapters = table(("adapter", "PCI", "type", "board", "firmware"), kinds)
    return [table(names, rows, right=("Gb/s", "downs", "symbols")), Text(""), adapters]


def _ports(nic: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return nic["ports"] if isinstance(nic["ports"], list) else []


def _counter(port: Mapping[str, Any], name: str) -> str:
    counters = port["counters"]
    return cell(counters.get(name)) if isinstance(counters, dict) else NOTHING


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
