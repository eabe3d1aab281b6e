"""InfiniBand, RoCE and EFA adapters, and network interfaces, by the kernel's sysfs: no library, no tool, no root is needed.

Each value stands alone. What one port refuses to give is "not available: why" there, and leaves the other ports as they are.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pytest_gpucluster.inventory.program import run_by_name
from pytest_gpucluster.inventory.reading import EVIDENCE, NOBODY, NotAvailable, all_or_why, apply, judged, matching, read, row
from pytest_gpucluster.inventory.sysfs import (
    SYS,
    SysfsFile,
    is_there,
    list_if_there,
    list_names,
    read_number,
    read_numbers,
    read_statistics,
    read_text,
    target_of,
)

Reader: TypeAlias = "Callable[[str], str | NotAvailable]"
NicFabric: TypeAlias = Literal["infiniband", "roce", "efa"]
AMAZON = "0x1d0f"
EFA_DEVICES = "0xefa"
NVSWITCH = b"SW_MNG"
"""What the vital product data of an NVSwitch's own adapter say; NVIDIA's Fabric Manager finds it so (its start script)."""
ROCE_V2, IPV4 = "RoCE v2", "0000:0000:0000:0000:0000:ffff:"
MOST_GIDS = 32
"""Of the 256 entries of a port's table, whose used ones come first."""
NO_PKEY = "0x0000"
NOT_COUNTERS = ("lifespan",)
"""Settings that lie among the hw_counters."""
COUNTERS = (
    "excessive_buffer_overrun_errors", "link_downed", "link_error_recovery", "local_link_integrity_errors", "port_rcv_errors",
    "port_xmit_data", "port_xmit_discards", "symbol_error",
)  # fmt: skip
"""What a healthy port has counted nothing of."""
PORT, GROWTH = "nic_ports, nic_errors", "nic_errors, nic_flaps_soak"
ADAPTER, RAIL = "nic_ports, nic_pcie, nic_errors", "slow_rail[bandwidth], slow_rail[latency]"
RATE = "400 Gb/sec (4X NDR)"
LOOPBACK = "lo"
GBIT_PER_MBIT = 1e-3
BITS_PER_BYTE = 8
_LAYERS: dict[str, NicFabric] = {"InfiniBand": "infiniband", "Ethernet": "roce"}
_PAUSE = re.compile(r"[rt]x_prio\d_pause(_duration|_transition)?|tx_pause_storm_(warning|error)_events")
"""Names of mlx5 (Linux' page on its counters). Other drivers have other names, and show none here."""
_pci: Reader = matching(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z", "PCI device")
_pkey: Reader = matching(r"0x[0-9a-fA-F]{4}\Z", "partition key such as '0xffff'", str.lower)
_word: Reader = matching(r"\d+: *(?!<?(?i:unknown))(\S.*)\Z", "state such as '4: ACTIVE'")
_rate: Callable[[str], float | NotAvailable] = matching(r"(\d+(?:\.\d+)?) Gb/sec\b", f"rate such as '{RATE}'", float)
MOST_GBIT_S = 4800.0
"""12 lanes of GDR. No adapter has a faster port."""


def _fabric(port: Path) -> NicFabric | NotAvailable:
    device = port.parent.parent / "device"
    vendor, model = read_text(device / "vendor"), read_text(device / "device")
    if vendor == AMAZON and isinstance(model, str) and model.startswith(EFA_DEVICES):
        return "efa"
    return apply(
        lambda layer: _LAYERS.get(layer, NotAvailable(f"link layer {layer!r} is neither InfiniBand nor Ethernet")),
        read_text(port / "link_layer"),
    )


def _gbit_s(text: str) -> float | NotAvailable:
    def possible(rate: float) -> float | NotAvailable:
        return NotAvailable(f"{text[:80]!r} is more than any port carries") if rate > MOST_GBIT_S else rate

    return apply(possible, _rate(text))


def _port_guid(gid: str) -> str | NotAvailable:
    """The lower half of a port's first GID."""
    parts = gid.split(":")
    return ":".join(parts[4:]) if len(parts) == 8 else NotAvailable(f"{gid[:80]!r} is no GID")


def _roce_gid(port: Path) -> str | NotAvailable:
    """The first entry of RoCE v2 with an IPv4 address, by which routed RoCE and NCCL_IB_GID_INDEX go."""

    def first(names: list[str]) -> str | NotAvailable:
        for name in _sorted(names)[:MOST_GIDS]:
            gid = read_text(port / "gids" / name)
            if isinstance(gid, NotAvailable):
                return gid
            if gid.startswith(IPV4) and read_text(port / "gid_attrs" / "types" / name) == ROCE_V2:
                return f"{ROCE_V2} IPv4 at {name}"
        return f"no {ROCE_V2} IPv4"

    return apply(first, list_names(port / "gids"))


def _netdevs(port: Path) -> list[str] | NotAvailable:
    """The network interfaces of a port. Several ports of one PCI function differ in ``dev_port``."""
    folder = port.parent.parent / "device" / "net"
    names = list_names(folder)
    if isinstance(names, NotAvailable):
        return names
    ports = {name: read_number(folder / name / "dev_port") for name in names}
    several = len({number for number in ports.values() if isinstance(number, int)}) > 1
    return [name for name in names if not several or ports[name] == int(port.name) - 1]


def _of_interfaces(port: Path, name: str, combined: Callable[[list[int]], int]) -> int | NotAvailable:
    """A number of the port's network interfaces, of several combined."""
    folder = port.parent.parent / "device" / "net"
    found = apply(lambda interfaces: all_or_why(read_number(folder / one / name) for one in interfaces), _netdevs(port))
    return apply(lambda known: combined(known) if known else NotAvailable("no network interface belongs to this port"), found)


def _ecn(port: Path) -> list[int] | NotAvailable:
    """The priorities for which the port both marks congestion and slows down (DCQCN); OFED's driver alone shows them."""

    def of_interface(name: str) -> list[int] | NotAvailable:
        folder = port.parent.parent / "device" / "net" / name / "ecn"
        ends = all_or_why(read_numbers(folder / end / "enable") for end in ("roce_np", "roce_rp"))
        return apply(lambda both: [int(one) for one in both[0] if both[0][one] == 1 == both[1].get(one)], ends)

    every = apply(lambda names: all_or_why(map(of_interface, names)), _netdevs(port))
    return apply(lambda lists: sorted({one for found in lists for one in found}), every)


def _pauses(port: Path) -> dict[str, int] | NotAvailable:
    """The pause counters of priorities (PFC) and of the receiver's storm guard, of the port's interfaces together."""

    def of_interface(name: str) -> dict[str, int] | NotAvailable:
        return apply(lambda every: {one: every[one] for one in every if _PAUSE.fullmatch(one)}, read_statistics(name))

    every = apply(lambda names: all_or_why(map(of_interface, names)), _netdevs(port))
    return apply(lambda found: {one: sum(some.get(one, 0) for some in found) for one in sorted(set().union(*found))}, every)


def _gid_types(port: Path) -> list[str] | NotAvailable:
    """The kinds of the port's GIDs (``RoCE v2``); the kernel refuses to read the kind of an empty entry."""
    folder = port / "gid_attrs" / "types"

    def kinds(names: list[str]) -> list[str] | NotAvailable:
        read = [read_text(folder / name) for name in _sorted(names)[:MOST_GIDS]]
        known = sorted({one for one in read if isinstance(one, str)})
        refused = [one for one in read if isinstance(one, NotAvailable) and not one.why.startswith(os.strerror(errno.EINVAL))]
        return refused[0] if refused and ROCE_V2 not in known else known

    return apply(kinds, list_names(folder))


def _pkeys(folder: Path) -> list[str] | NotAvailable:
    """The partition keys of a port in the order of its table, without the empty entries."""
    entries = apply(
        lambda names: all_or_why(apply(_pkey, read_text(folder / one)) for one in _sorted(names)), list_names(folder)
    )
    return apply(lambda keys: [key for key in keys if key != NO_PKEY], entries)


def _without_settings(counters: dict[str, int | NotAvailable]) -> dict[str, int | NotAvailable]:
    return {name: value for name, value in counters.items() if name not in NOT_COUNTERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class NicPort:
    """One port of an adapter.

    ``state`` is the link's state (``ACTIVE``, ``INIT``, ``DOWN``), ``physical_state`` that of its cable (``LinkUp``,
    ``Polling``, ``Disabled``). ``rate_gbit_s`` is what the link was negotiated to, in 10^9 bits/s; ``rate`` the kernel's words
    for it (``400 Gb/sec (4X NDR)``). ``counters`` and ``hw_counters`` are counted since the driver was loaded, or since
    somebody cleared them. ``carrier_changes`` counts how often the port's network interfaces came up or went down.
    """

    number: int = judged(EVIDENCE, "of `nic_ports`")
    fabric: NicFabric | NotAvailable = row(_fabric, "infiniband", PORT)
    state: str | NotAvailable = row(SysfsFile("state"), "4: ACTIVE", PORT, convert=_word)
    physical_state: str | NotAvailable = row(SysfsFile("phys_state"), "5: LinkUp", PORT, convert=_word)
    rate: str | NotAvailable = row(SysfsFile("rate"), RATE, EVIDENCE, "of `nic_ports`")
    rate_gbit_s: float | NotAvailable = row(SysfsFile("rate"), RATE, PORT, convert=_gbit_s)
    guid: str | NotAvailable = row(
        SysfsFile("gids/0"), "fe80:0:0:0:0:0:0:100", NOBODY, "for the fabric's own tools", convert=_port_guid
    )
    roce_gid: str | NotAvailable = row(_roce_gid, "no RoCE v2 IPv4", "drift", "of RoCE ports that are up")
    pkeys: list[str] | NotAvailable = row(
        SysfsFile("pkeys", _pkeys), ["0xffff"], "drift", "partition keys, of InfiniBand ports that are up"
    )
    gid_types: list[str] | NotAvailable = row(_gid_types, ["IB/RoCE v1"], "nic_settings", "of RoCE ports that are up")
    mtu: int | NotAvailable = row(
        partial(_of_interfaces, name="mtu", combined=min),
        4092,
        "drift, nic_settings",
        "bytes of the network interface; NCCL uses the RDMA MTU",
    )
    ecn: list[int] | NotAvailable = row(_ecn, [], "drift", "priorities with congestion control, of RoCE ports that are up")
    pauses: dict[str, int] | NotAvailable = row(_pauses, {}, GROWTH, "PFC, as evidence where it grew")
    netdevs: list[str] | NotAvailable = row(_netdevs, ["ib0"], NOBODY, "for the fabric's own tools")
    carrier_changes: int | NotAvailable = row(
        partial(_of_interfaces, name="carrier_changes", combined=sum), 2, GROWTH, "what they grew by"
    )
    counters: dict[str, int | NotAvailable] | NotAvailable = row(
        SysfsFile("counters", read_numbers),
        dict.fromkeys(COUNTERS, 0),
        GROWTH,
        "what they grew by; `out_of_sequence` and its like are evidence",
    )
    hw_counters: dict[str, int | NotAvailable] | NotAvailable = row(
        SysfsFile("hw_counters", read_numbers), {}, GROWTH, "as `counters`", convert=_without_settings
    )


def _ports(adapter: Path) -> list[NicPort] | NotAvailable:
    folder = adapter / "ports"
    return apply(
        lambda names: [read(NicPort, folder / name, number=int(name)) for name in _sorted(names) if name.isdecimal()],
        list_names(folder),
    )


DEVICES = Path("/dev")
OPEN = "open"


def _verbs(adapter: Path, devices: Path | None = None) -> str | NotAvailable:
    """``open``, or why this process cannot open the adapter, as NCCL would: ``/dev/infiniband/uverbs0: Permission denied``."""
    folder = adapter / "device" / "infiniband_verbs"
    names = list_if_there(folder)
    if isinstance(names, NotAvailable):
        return names
    if not names:
        return "the kernel has no device for it (module ib_uverbs)"
    file = (devices or DEVICES) / "infiniband" / names[0]
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"{file}: {error.strerror}"
    return OPEN


def _is_virtual(adapter: Path) -> bool:
    return is_there(adapter / "device" / "physfn")


def _is_nvswitch(adapter: Path) -> bool | NotAvailable:
    """By the adapter's vital product data, which root alone may read; an adapter without any has no NVSwitch."""
    file = adapter / "device" / "vpd"
    try:
        with file.open("rb", buffering=0) as data:
            return NVSWITCH in data.read(4096)
    except FileNotFoundError:
        return False
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({file})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One adapter. ``device`` is its RDMA name (``mlx5_2``), ``pci`` its address (``0000:1a:00.0``).

    ``is_virtual``: a virtual function, which has no cable of its own. ``is_nvswitch``: the adapter by which the host manages an
    NVSwitch (HGX B200 and B300); it leads to no network.
    """

    device: str = judged(EVIDENCE, "of `nic_ports`; which adapter it is")
    pci: str | NotAvailable = row(SysfsFile("device", target_of), "0000:12:00.0", EVIDENCE, "as `device`", convert=_pci)
    is_virtual: bool = row(_is_virtual, healthy=False, judged=ADAPTER, remark="a virtual function has no cable of its own")
    is_nvswitch: bool | NotAvailable = row(
        _is_nvswitch, healthy=False, judged=ADAPTER, remark="its ports are none of the fabric"
    )
    driver: str | NotAvailable = row(SysfsFile("device/driver", target_of), "mlx5_core", "drift")
    firmware: str | NotAvailable = row(SysfsFile("fw_ver"), "28.46.3048", "drift, known_versions")
    board_id: str | NotAvailable = row(SysfsFile("board_id"), "MT_0000000838", "drift")
    hca_type: str | NotAvailable = row(SysfsFile("hca_type"), "MT4129", "drift")
    verbs: str | NotAvailable = row(_verbs, OPEN, "nic_settings", "an adapter that this process may not open is none for NCCL")
    guid: str | NotAvailable = row(SysfsFile("node_guid"), "0000:0000:0000:0000", NOBODY, "whose adapter it is")
    ports: list[NicPort] | NotAvailable = row(_ports, [], "nic_ports")


def read_nics(*, root: Path = SYS) -> list[Nic] | NotAvailable:
    """Every RDMA adapter that the kernel knows, by name; not available where it has no such class at all."""
    folder = root / "class" / "infiniband"
    return apply(lambda names: [read(Nic, folder / name, device=name) for name in _sorted(names)], list_names(folder))


def read_ports_gb_s(*, root: Path = SYS) -> float | None:
    """What all ports of this host that are up carry together, one way, in 10^9 bytes a second, by the rates of their links.

    Virtual functions count where there is no physical port. None where no port is up, or the rate of one is not known.
    """
    rates: dict[bool, list[float | NotAvailable]] = {False: [], True: []}
    for port in (root / "class" / "infiniband").glob("*/ports/*"):
        if str(read_text(port / "state")).endswith(" ACTIVE"):
            rates[_is_virtual(port.parent.parent)].append(apply(_gbit_s, read_text(port / "rate")))
    known = all_or_why(rates[False] or rates[True])
    return sum(known) / BITS_PER_BYTE if not isinstance(known, NotAvailable) and known else None


def _sorted(names: list[str]) -> list[str]:
    """``mlx5_10`` after ``mlx5_9``."""
    return sorted(names, key=lambda name: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)])


def _gbit_s_of(mbit_s: int) -> float | NotAvailable:
    return mbit_s * GBIT_PER_MBIT if mbit_s > 0 else NotAvailable(f"the kernel says {mbit_s} Mb/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetInterface:
    """An interface that is up. ``rate_gbit_s`` is what the kernel says of its link; a virtual one may have none."""

    name: str = judged(RAIL, "for sockets; which ones are measured")
    rate_gbit_s: float | NotAvailable = row(
        SysfsFile("speed", read_number), 50000, RAIL, "only equal rates are compared", convert=_gbit_s_of
    )


def read_net_interfaces(*, root: Path = SYS) -> list[NetInterface] | NotAvailable:
    """The interfaces that are up and belong to a device; without any of these, those that are neither loopback nor bridge."""
    folder = root / "class" / "net"
    names = list_names(folder)
    if isinstance(names, NotAvailable):
        return names
    up = [name for name in sorted(names) if name != LOOPBACK and read_text(folder / name / "operstate") == "up"]
    of_devices = [name for name in up if is_there(folder / name / "device")]
    chosen = of_devices or [name for name in up if not is_there(folder / name / "bridge")]
    return [read(NetInterface, folder / name, name=name) for name in chosen]


# --- What tools say of ports and cables ---

ANSWER_S = 10.0
ROCE_HEADERS_BYTES = 96
"""What the kernel takes off an interface's MTU: headers of GRH, UDP, BTH, XRC and atomics, and ICRC (rdma/ib_addr.h)."""
RDMA_MTUS = (4096, 2048, 1024, 512, 256)
_HCA = re.compile(r"^hca_id:\s*(\S+)", re.MULTILINE)
_PORT_MTU = re.compile(r"^\s+port:\s*(\d+)$.*?^\s+active_mtu:\s*(\d{1,6})\b", re.MULTILINE | re.DOTALL)


def roce_mtu(interface_bytes: int) -> int | NotAvailable:
    """The RDMA MTU in bytes that the kernel makes of that of an Ethernet interface."""
    fitting = (size for size in RDMA_MTUS if size <= interface_bytes - ROCE_HEADERS_BYTES)
    return next(fitting, NotAvailable(f"an MTU of {interface_bytes} bytes is too small for RoCE"))


def _said_by(program: str, *arguments: str, path: str | None) -> str | NotAvailable:
    """What a program prints, or why it says nothing."""
    ended = run_by_name(program, arguments, within_s=ANSWER_S, path=path)
    return apply(lambda it: it.printed if it.exit_code == 0 else NotAvailable(f"{program}: {it.gist}"), ended)


def read_rdma_mtus(*, path: str | None = None) -> dict[str, int] | NotAvailable:
    """The active MTU of ports in bytes by name (``mlx5_0:1``), by ibv_devinfo: sysfs does not show it."""

    def in_text(text: str) -> dict[str, int]:
        parts = _HCA.split(text)[1:]
        adapters = zip(parts[::2], parts[1::2], strict=True)
        return {f"{name}:{port}": int(size) for name, body in adapters for port, size in _PORT_MTU.findall(body)}

    return apply(in_text, _said_by("ibv_devinfo", path=path))


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPort:
    """The far end of a cable, as the switch announces itself by LLDP."""

    switch: str = judged("cabling")
    port: str = judged(EVIDENCE, "of `cabling`")


def read_neighbours(*, path: str | None = None) -> dict[str, SwitchPort] | NotAvailable:
    """The switch port at the other end of each network interface, by lldpd; without those that announce nothing."""

    def in_text(text: str) -> dict[str, SwitchPort] | NotAvailable:
        try:
            found = {name: _switch_port(one) for name, one in _interfaces(json.loads(text)["lldp"])}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, StopIteration) as error:
            return NotAvailable(f"lldpcli: its answer has another form ({type(error).__name__})")
        return {name: one for name, one in found.items() if one is not None}

    return apply(in_text, _said_by("lldpcli", "-f", "json0", "show", "neighbors", path=path))


def _interfaces(lldp: Any) -> Iterator[tuple[str, Any]]:
    """The interfaces with their names, in both forms: json0 has lists and names, json has names as keys, and no list of one."""
    for part in lldp if isinstance(lldp, list) else [lldp]:
        listed = part.get("interface", [])
        for one in listed if isinstance(listed, list) else [listed]:
            yield from [(one["name"], one)] if isinstance(one.get("name"), str) else one.items()


def _switch_port(interface: Any) -> SwitchPort | None:
    """None where the neighbour gives neither a name nor an address."""
    (chassis, *_), (port, *_) = _listed(interface["chassis"]), _listed(interface["port"])
    named = chassis.get("name", chassis.get("id"))
    switch = next(iter(chassis)) if named is None else _listed(named)[0]["value"]
    (number, *_) = _listed(port["id"])
    return SwitchPort(switch=str(switch), port=str(number["value"])) if switch else None


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]
