"""Parts of a host that wear out or are put in wrong: memory modules by the firmware's table, NVMe disks by their health log.

The table (SMBIOS, structure 17) is read from sysfs, so no dmidecode is needed; root alone may read it. A disk's state stands in
sysfs for everybody. Its health log asks for root and for ``smartctl`` or ``nvme``. What cannot be read is "not available: why".
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.inventory import program
from pytest_gpucluster.inventory.program import ProgramError
from pytest_gpucluster.inventory.reading import NotAvailable, apply, or_none
from pytest_gpucluster.inventory.sysfs import SYS, list_if_there, read_at, read_text
from pytest_gpucluster.protocol.functions import without_device

MEMORY_DEVICE = 17
SIZE_AT, LOCATOR_AT, SPEED_AT, PART_AT, EXTENDED_AT, CONFIGURED_AT = 0x0C, 0x10, 0x15, 0x1A, 0x1C, 0x20
"""Where a structure of type 17 has these fields (SMBIOS 3.7, 7.18); what an older one is too short for is not told."""
IN_KIB, EXTENDED, UNKNOWN = 0x8000, 0x7FFF, 0xFFFF
MIB_IN_GIB = 1024
DEADLINE_S = 20.0
"""For one disk's health log. A disk that hangs costs this, and the others are still read."""
OPEN_FAILED = 0b11
"""Of smartctl's exit code: the command line was wrong, or the disk could not be opened. Other bits are findings."""

YES_OR_NO = {"True": True, "False": False}
"""The two words of JSON, by how Python writes them: 0 and 1 are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModule:
    """A slot for a memory module. ``size_gib`` is 0 in an empty one; speeds are in MT/s, rated and as it runs."""

    slot: str
    size_gib: float | NotAvailable
    rated_mt_s: int | NotAvailable
    runs_at_mt_s: int | NotAvailable
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskHealth:
    """What a disk's own log says (NVMe, log page 2). ``passed`` is smartctl's verdict, None by another tool."""

    tool: str
    passed: bool | None
    critical_warning: int
    spare_percent: int
    spare_threshold_percent: int
    used_percent: int
    media_errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A local NVMe disk. ``state`` is the kernel's: ``live`` where it works."""

    name: str
    model: str | NotAvailable
    serial: str | NotAvailable
    firmware: str | NotAvailable
    state: str | NotAvailable
    health: DiskHealth | NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """The memory modules and the NVMe disks of a host."""

    modules: list[MemoryModule] | NotAvailable
    disks: list[Disk] | NotAvailable


@without_device
def host_parts() -> HostParts:
    """Read this host's memory modules and disks. A value that cannot be read says why, and leaves the others."""
    return HostParts(modules=read_modules(), disks=read_disks())


def read_modules(*, root: Path = SYS) -> list[MemoryModule] | NotAvailable:
    """Every slot for a memory module, by the firmware's table."""
    file = root / "firmware" / "dmi" / "tables" / "DMI"
    table = read_at(file, file.read_bytes)
    if isinstance(table, NotAvailable):
        return table
    try:
        found = [_module(fields, texts) for kind, fields, texts in _structures(table) if kind == MEMORY_DEVICE]
    except (IndexError, ValueError, struct.error) as error:
        return NotAvailable(f"the table is not whole: {error} ({file})")
    return found or NotAvailable(f"the table has no memory module ({file})")


def _structures(table: bytes) -> Iterator[tuple[int, bytes, list[str]]]:
    """Each structure: its type, its fields, and the texts behind it, which fields count from 1."""
    at = 0
    while at + 4 <= len(table):
        kind, length = table[at], table[at + 1]
        end = table.index(b"\0\0", at + length)
        texts = table[at + length : end].split(b"\0")
        yield kind, table[at : at + length], [text.decode("ascii", "replace").strip() for text in texts]
        at = end + 2


def _module(fields: bytes, texts: list[str]) -> MemoryModule:
    def number(at: int, form: str) -> int | NotAvailable:
        is_there = at + struct.calcsize(form) <= len(fields)
        value = struct.unpack_from(form, fields, at)[0] if is_there else 0
        return value if value not in (0, UNKNOWN) else NotAvailable("the firmware does not say it")

    def text(at: int) -> str:
        place = fields[at] if at < len(fields) else 0
        return texts[place - 1] if 0 < place <= len(texts) else ""

    return MemoryModule(
        slot=text(LOCATOR_AT),
        size_gib=_size_gib(struct.unpack_from("<H", fields, SIZE_AT)[0], or_none(number(EXTENDED_AT, "<I")) or 0),
        rated_mt_s=number(SPEED_AT, "<H"),
        runs_at_mt_s=number(CONFIGURED_AT, "<H"),
        part=text(PART_AT),
    )


def _size_gib(size: int, extended_mib: int) -> float | NotAvailable:
    if size == UNKNOWN:
        return NotAvailable("the firmware does not say it")
    if size == EXTENDED:
        return extended_mib / MIB_IN_GIB
    return (size & ~IN_KIB) / MIB_IN_GIB**2 if size & IN_KIB else size / MIB_IN_GIB


def read_disks(*, root: Path = SYS) -> list[Disk] | NotAvailable:
    """Every NVMe disk of the host; those of a fabric are left out. None where the kernel has no NVMe."""
    folder = root / "class" / "nvme"

    def disks(names: list[str]) -> list[Disk]:
        return [_disk(folder / name) for name in names if or_none(read_text(folder / name / "transport")) in (None, "pcie")]

    return apply(disks, list_if_there(folder))


def _disk(folder: Path) -> Disk:
    names = {"model": "model", "serial": "serial", "firmware": "firmware_rev", "state": "state"}
    return Disk(
        name=folder.name,
        health=read_health(f"/dev/{folder.name}"),
        **{field: read_text(folder / file) for field, file in names.items()},
    )


def read_health(device: str) -> DiskHealth | NotAvailable:
    """The health log of a disk, by ``smartctl`` (smartmontools 7), else by ``nvme`` (nvme-cli)."""
    for tool, arguments in (("smartctl", ("--json", "--all", device)), ("nvme", ("smart-log", "--output-format=json", device))):
        path = shutil.which(tool)
        if path is not None:
            return _health_by(tool, path, arguments)
    return NotAvailable("neither smartctl nor nvme is installed")


def _health_by(tool: str, path: str, arguments: tuple[str, ...]) -> DiskHealth | NotAvailable:
    try:
        ended = program.run(path, arguments, within_s=DEADLINE_S, environment={**os.environ, "LC_ALL": "C"})
        answer = json.loads(ended.printed)
        if ended.exit_code & OPEN_FAILED or (tool == "nvme" and ended.exit_code):
            messages = [one["string"] for one in answer.get("smartctl", {}).get("messages", ())]
            return NotAvailable(f"{tool}: {'; '.join(messages) or ended.gist}")
        return _health(tool, answer)
    except ProgramError as error:
        return NotAvailable(str(error))
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        return NotAvailable(f"{tool} printed no health log: {error!r}; {ended.gist}")


def _health(tool: str, answer: dict[str, Any]) -> DiskHealth:
    """The log by the names of either tool."""
    log = answer["nvme_smart_health_information_log"] if tool == "smartctl" else answer
    names = ("available_spare", "available_spare_threshold", "percentage_used")
    if tool == "nvme":
        names = ("avail_spare", "spare_thresh", "percent_used")
    warning = log["critical_warning"]
    return DiskHealth(
        tool=tool,
        passed=YES_OR_NO[repr(answer["smart_status"]["passed"])] if "smart_status" in answer else None,
        critical_warning=int(warning["value"] if isinstance(warning, dict) else warning),
        spare_percent=int(log[names[0]]),
        spare_threshold_percent=int(log[names[1]]),
        used_percent=int(log[names[2]]),
        media_errors=int(log["media_errors"]),
    )
