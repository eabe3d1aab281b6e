"""What the kernel has counted of errors of a host: in its memory (EDAC), and on the PCIe ways of its GPUs and adapters (AER).

A virtual machine shows neither, as the hypervisor has them. A container shows its host's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.reading import EVIDENCE, NotAvailable, apply, judged, read, row
from pytest_gpucluster.inventory.sysfs import SYS, SysfsFile, list_if_there, read_number, read_text

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

NO_LIMIT = "of `host_errors`: nobody publishes a limit"


def _total(file: Path) -> int | NotAvailable:
    """The last line of a file of AER: ``TOTAL_ERR_FATAL 0``."""
    text = read_text(file)
    if isinstance(text, NotAvailable):
        return text
    number = text.splitlines()[-1].rpartition(" ")[2]
    return int(number) if number.isascii() and number.isdecimal() else NotAvailable(f"{text[-80:]!r} has no total ({file})")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryController:
    """What a memory controller of the host has counted since its driver was loaded."""

    name: str = judged(EVIDENCE, "of `host_errors`: it names the part")
    uncorrected: int | NotAvailable = row(SysfsFile("ue_count", read_number), 0, "host_errors")
    corrected: int | NotAvailable = row(SysfsFile("ce_count", read_number), 0, EVIDENCE, NO_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieErrors:
    """What a PCIe device or bridge has counted since the host was booted."""

    name: str = judged(EVIDENCE, "of `host_errors`: it names the part")
    fatal: int | NotAvailable = row(SysfsFile("aer_dev_fatal", _total), 0, "host_errors")
    nonfatal: int | NotAvailable = row(SysfsFile("aer_dev_nonfatal", _total), 0, "host_errors")
    corrected: int | NotAvailable = row(SysfsFile("aer_dev_correctable", _total), 0, EVIDENCE, NO_LIMIT)


def read_memory_controllers(*, root: Path = SYS) -> list[MemoryController] | NotAvailable:
    """The memory controllers that the kernel shows, by name; none without EDAC."""
    folder = root / "devices" / "system" / "edac" / "mc"

    def controllers(names: list[str]) -> list[MemoryController]:
        own = [name for name in names if name.startswith("mc") and name[2:].isdecimal()]
        return [read(MemoryController, folder / name, name=name) for name in own]

    return apply(controllers, list_if_there(folder))


def read_pcie_errors(addresses: Iterable[str], *, root: Path = SYS) -> list[PcieErrors]:
    """The counts of these PCI addresses; those for which the kernel keeps none are left out."""
    folders = {address: root / "bus" / "pci" / "devices" / address for address in sorted({*addresses})}
    return [read(PcieErrors, folder, name=name) for name, folder in folders.items() if _counts(folder)]


def _counts(folder: Path) -> bool:
    """Whether the kernel counts there; where that cannot be seen, the counts say why."""
    try:
        return (folder / "aer_dev_fatal").exists()
    except OSError:
        return True
