"""InfiniBand, RoCE and EFA adapters by the kernel's sysfs: no library, no tool and no root is needed.

Each value stands alone. What one port refuses to give is "not available: why" there, and leaves the other ports as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.sysfs import SYS, list_names, read_number, read_numbers, read_text

if TYPE_CHECKING:
    from pathlib import Path

NicFabric: TypeAlias = Literal["infiniband", "roce", "efa"]
AMAZON = "0x1d0f"
EFA_DEVICES = "0xefa"
NOT_COUNTERS = ("lifespan",)
"""Settings that lie among the hw_counters."""
_LAYERS: dict[str, NicFabric] = {"InfiniBand": "infiniband", "Ethernet": "roce"}
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")
_STATE = re.compile(r"\d+: *(?P<word>\S.*)")
_RATE = re.compile(r"(?P<rate>\d+(?:\.\d+)?) Gb/sec\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class NicPort:
    """One port of an adapter.

    ``state`` is the link's state (``ACTIVE``, ``INIT``, ``DOWN``), ``physical_state`` that of its cable (``LinkUp``,
    ``Polling``, ``Disabled``). ``rate_gbit_s`` is what the link was negotiated to, in 10^9 bits/s; ``rate`` the kernel's words
    for it (``400 Gb/sec (4X NDR)``). ``counters`` and ``hw_counters`` are counted since the driver was loaded, or since
    somebody cleared them. ``carrier_changes`` counts how often the port's network interfaces came up or went down.
    """

    number: int
    fabric: NicFabric | NotAvailable
    state: str | NotAvailable
    physical_state: str | NotAvailable
    rate: str | NotAvailable
    rate_gbit_s: float | NotAvailable
    guid: str | NotAvailable
    netdevs: list[str] | NotAvailable
    carrier_changes: int | NotAvailable
    counters: dict[str, int | NotAvailable] | NotAvailable
    hw_counters: dict[str, int | NotAvailable] | NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One adapter. ``device`` is its RDMA name (``mlx5_2``), ``pci`` its address (``0000:1a:00.0``).

    ``is_virtual``: a virtual function, which has no cable of its own.
    """

    device: str
    pci: str | NotAvailable
    is_virtual: bool
    driver: str | NotAvailable
    firmware: str | NotAvailable
    board_id: str | NotAvailable
    hca_type: str | NotAvailable
    guid: str | NotAvailable
    ports: list[NicPort] | NotAvailable


def read_nics(*, root: Path = SYS) -> list[Nic] | NotAvailable:
    """Every RDMA adapter that the kernel knows, by name; not available where it has no such class at all."""
    folder = root / "class" / "infiniband"
    names = list_names(folder)
    if isinstance(names, NotAvailable):
        return names
    return [_read_nic(folder / name) for name in sorted(names, key=_naturally)]


def _read_nic(folder: Path) -> Nic:
    device = folder / "device"
    is_efa = _is_efa(device)
    numbers = list_names(folder / "ports")
    ports: list[NicPort] | NotAvailable
    if isinstance(numbers, NotAvailable):
        ports = numbers
    else:
        ports = [_read_port(folder, int(name), is_efa=is_efa) for name in sorted(numbers, key=_naturally) if name.isdecimal()]
    return Nic(
        device=folder.name,
        pci=_address(device),
        is_virtual=(device / "physfn").exists(),
        driver=_target(device / "driver"),
        firmware=read_text(folder / "fw_ver"),
        board_id=read_text(folder / "board_id"),
        hca_type=read_text(folder / "hca_type"),
        guid=read_text(folder / "node_guid"),
        ports=ports,
    )


def _read_port(adapter: Path, number: int, *, is_efa: bool) -> NicPort:
    folder = adapter / "ports" / str(number)
    rate = read_text(folder / "rate")
    netdevs = _netdevs_of(adapter / "device", number)
    return NicPort(
        number=number,
        fabric="efa" if is_efa else _fabric(read_text(folder / "link_layer")),
        state=_word(read_text(folder / "state")),
        physical_state=_word(read_text(folder / "phys_state")),
        rate=rate,
        rate_gbit_s=_gbit_s(rate),
        guid=_port_guid(read_text(folder / "gids" / "0")),
        netdevs=netdevs,
        carrier_changes=_carrier_changes(adapter / "device", netdevs),
        counters=read_numbers(folder / "counters"),
        hw_counters=_hw_counters(folder),
    )


def _is_efa(device: Path) -> bool:
    vendor, model = read_text(device / "vendor"), read_text(device / "device")
    return vendor == AMAZON and isinstance(model, str) and model.startswith(EFA_DEVICES)


def _fabric(layer: str | NotAvailable) -> NicFabric | NotAvailable:
    if isinstance(layer, NotAvailable):
        return layer
    return _LAYERS.get(layer, NotAvailable(f"link layer {layer!r} is neither InfiniBand nor Ethernet"))


def _word(text: str | NotAvailable) -> str | NotAvailable:
    """``ACTIVE`` of ``4: ACTIVE``."""
    if isinstance(text, NotAvailable):
        return text
    found = _STATE.fullmatch(text)
    return found["word"] if found else NotAvailable(f"{text[:80]!r} is no state such as '4: ACTIVE'")


def _gbit_s(rate: str | NotAvailable) -> float | NotAvailable:
    if isinstance(rate, NotAvailable):
        return rate
    found = _RATE.match(rate)
    return float(found["rate"]) if found else NotAvailable(f"{rate[:80]!r} is no rate such as '400 Gb/sec (4X NDR)'")


def _port_guid(gid: str | NotAvailable) -> str | NotAvailable:
    """The lower half of a port's first GID."""
    if isinstance(gid, NotAvailable):
        return gid
    parts = gid.split(":")
    return ":".join(parts[4:]) if len(parts) == 8 else NotAvailable(f"{gid[:80]!r} is no GID")


def _netdevs_of(device: Path, number: int) -> list[str] | NotAvailable:
    """The network interfaces of a port. Several ports of one PCI function tell theirs apart by ``dev_port``."""
    names = list_names(device / "net")
    if isinstance(names, NotAvailable):
        return names
    ports = {name: read_number(device / "net" / name / "dev_port") for name in names}
    several = len({port for port in ports.values() if isinstance(port, int)}) > 1
    return [name for name in names if not several or ports[name] == number - 1]


def _carrier_changes(device: Path, netdevs: list[str] | NotAvailable) -> int | NotAvailable:
    if isinstance(netdevs, NotAvailable):
        return netdevs
    if not netdevs:
        return NotAvailable("no network interface belongs to this port")
    total = 0
    for name in netdevs:
        changes = read_number(device / "net" / name / "carrier_changes")
        if isinstance(changes, NotAvailable):
            return changes
        total += changes
    return total


def _hw_counters(folder: Path) -> dict[str, int | NotAvailable] | NotAvailable:
    found = read_numbers(folder / "hw_counters")
    if isinstance(found, NotAvailable):
        return found
    return {name: value for name, value in found.items() if name not in NOT_COUNTERS}


def _address(device: Path) -> str | NotAvailable:
    """The PCI address of the device that ``device`` links to."""
    name = _target(device)
    if isinstance(name, NotAvailable) or _PCI.match(name):
        return name
    return NotAvailable(f"{name!r} is no PCI device ({device})")


def _target(link: Path) -> str | NotAvailable:
    """The name of what a link leads to."""
    try:
        return link.resolve(strict=True).name
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        return NotAvailable(f"{getattr(error, 'strerror', error)} ({link})")


def _naturally(name: str) -> tuple[str | int, ...]:
    """Sort ``mlx5_10`` after ``mlx5_9``."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name))
