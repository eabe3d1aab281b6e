"""The network interfaces of a host that can carry sockets, by the kernel's sysfs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.sysfs import SYS, list_names, read_number, read_text

if TYPE_CHECKING:
    from pathlib import Path

LOOPBACK = "lo"
GBIT_PER_MBIT = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class NetInterface:
    """An interface that is up. ``rate_gbit_s`` is what the kernel says of its link; a virtual one may have none."""

    name: str
    rate_gbit_s: float | NotAvailable


def read_net_interfaces(*, root: Path = SYS) -> list[NetInterface] | NotAvailable:
    """The interfaces that are up and belong to a device; without any of these, those that are neither loopback nor bridge."""
    folder = root / "class" / "net"
    names = list_names(folder)
    if isinstance(names, NotAvailable):
        return names
    up = [name for name in sorted(names) if name != LOOPBACK and read_text(folder / name / "operstate") == "up"]
    of_devices = [name for name in up if (folder / name / "device").exists()]
    chosen = of_devices or [name for name in up if not (folder / name / "bridge").exists()]
    return [NetInterface(name=name, rate_gbit_s=_rate(read_number(folder / name / "speed"))) for name in chosen]


def _rate(mbit_s: int | NotAvailable) -> float | NotAvailable:
    if isinstance(mbit_s, NotAvailable):
        return mbit_s
    return mbit_s * GBIT_PER_MBIT if mbit_s > 0 else NotAvailable(f"the kernel says {mbit_s} Mb/s")
