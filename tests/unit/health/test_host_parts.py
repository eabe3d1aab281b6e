"""Memory modules and NVMe disks: readings of made tables, trees and answers, and their judgement."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.health.host_parts import judge_disks, judge_modules, why_no_logs, why_no_modules
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.finding import HERE
from pytest_gpucluster.measurements.host_parts import (
    Disk,
    DiskHealth,
    HostParts,
    MemoryModule,
    read_disks,
    read_health,
    read_modules,
)

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 0x7FFF
LOG = {"critical_warning": 0, "available_spare": 100, "available_spare_threshold": 10, "percentage_used": 2, "media_errors": 0}


def structure(  # noqa: PLR0913 -- the fields of a structure
    slot: str, *, size: int = SIZE, gib: int = 64, rated: int = 5600, runs: int = 5600, length: int = 0x28
) -> bytes:
    """A structure of type 17 as firmware writes it."""
    fields = bytearray(0x28)
    struct.pack_into("<BBH", fields, 0, 17, length, 1)
    struct.pack_into("<H", fields, 0x0C, size)
    fields[0x10], fields[0x1A] = 1, 2
    struct.pack_into("<H", fields, 0x15, rated)
    struct.pack_into("<I", fields, 0x1C, gib * 1024)
    struct.pack_into("<H", fields, 0x20, runs)
    return bytes(fields[:length]) + f"{slot}\0M321R8\0\0".encode()


def table(folder: Path, *structures: bytes) -> list[MemoryModule] | NotAvailable:
    """What is read of a table with these structures, between others."""
    file = folder / "firmware" / "dmi" / "tables" / "DMI"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\x01\x06\0\0ab\0\0" + b"".join(structures) + b"\x7f\x04\xfe\xff\0\0")
    return read_modules(root=folder)


def judged(found: list[MemoryModule] | NotAvailable) -> Any:
    """The finding of modules that were read."""
    assert not isinstance(found, NotAvailable)
    return judge_modules(found)


def test_modules_alike(tmp_path: Path) -> None:
    """All fields are there, an empty slot is none, and nothing is wrong."""
    found = table(tmp_path, structure("A1"), structure("A2"), structure("B1", size=0, runs=0, rated=0))
    assert not isinstance(found, NotAvailable)
    assert found[0] == MemoryModule(slot="A1", size_gib=64.0, rated_mt_s=5600, runs_at_mt_s=5600, part="M321R8")
    finding = judged(found)
    assert (finding.count, finding.unknown, finding.remark) == (0, {}, None)
    assert finding.evidence == {"modules": {"64 GiB": 2}, "slots": 3, "MT/s": [5600]}


def test_a_module_that_is_slower(tmp_path: Path) -> None:
    """Named by its slot, with both speeds; sizes and a lower speed than rated are remarks."""
    finding = judged(table(tmp_path, structure("A1"), structure("A2"), structure("B1", gib=32, runs=4800)))
    assert finding.facts == ("B1: runs at 4800 MT/s, and 2 others at 5600",)
    assert finding.remark == "modules of several sizes: 2 x 64 GiB, 1 x 32 GiB"
    slow = judged(table(tmp_path, structure("A1", runs=4400), structure("A2", runs=4400)))
    assert (slow.count, slow.remark) == (0, "2 of 2 modules run below their rated speed")


MIXED = [
    ((5600, 4800), "1 x 5600, 1 x 4800"),
    ((5600, 5600, 4800, 4800), "2 x 5600, 2 x 4800"),
    ((5600, 4800, 4400), "1 x 5600, 1 x 4800, 1 x 4400"),
]


@pytest.mark.parametrize(("speeds", "said"), MIXED)
def test_modules_of_which_most_are_not_alike(tmp_path: Path, speeds: tuple[int, ...], said: str) -> None:
    """The host fails, and no module is named: nobody can say which one is right."""
    finding = judged(table(tmp_path, *(structure(f"A{at}", runs=one) for at, one in enumerate(speeds))))
    assert list(finding.bad) == [HERE]
    assert f"modules run at different speeds: {said} MT/s" in finding.facts[0]


def test_a_module_that_is_faster(tmp_path: Path) -> None:
    """It makes no slower one of all the others."""
    finding = judged(table(tmp_path, structure("A1", runs=4800), structure("A2", runs=4800), structure("B1")))
    assert (finding.count, finding.remark) == (0, "B1 faster than the others")


def test_a_module_without_a_speed_beside_others(tmp_path: Path) -> None:
    """Nothing is known of it; where none has a speed, the criterion does not apply."""
    finding = judged(table(tmp_path, structure("A1"), structure("A2", runs=0)))
    assert list(finding.unknown) == ["A2"]
    nothing = table(tmp_path, structure("DIMM 0", runs=0, rated=0), structure("DIMM 1", length=0x15))
    assert why_no_modules(HostParts(modules=nothing, disks=[])) == "the firmware reports no speed of a memory module"
    assert why_no_modules(HostParts(modules=table(tmp_path, structure("A1")), disks=[])) is None


@pytest.mark.parametrize(("size", "gib"), [(16384, 16.0), (0x8000 | 1024, 1 / 1024), (0xFFFF, None), (0, 0.0)])
def test_sizes_of_older_firmware(tmp_path: Path, size: int, gib: float | None) -> None:
    """MiB, KiB, unknown and empty."""
    found = table(tmp_path, structure("A1", size=size))
    assert not isinstance(found, NotAvailable)
    assert (None if isinstance(found[0].size_gib, NotAvailable) else found[0].size_gib) == gib


def test_a_table_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file (a container), no right, a cut table, and one without memory: each with a reason."""
    assert "No such file" in str(read_modules(root=tmp_path))
    assert "not whole" in str(table(tmp_path, b"\x11\x28\0\0"))
    assert "no memory module" in str(table(tmp_path))

    def refuse(*_: Any) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "read_bytes", refuse)
    why = why_no_modules(HostParts(modules=read_modules(root=tmp_path), disks=[]))
    assert why is not None
    assert why.startswith("Permission denied")


def tool(folder: Path, name: str, printed: str, *, exit_code: int = 0) -> None:
    """A program on the PATH that prints this."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.out").write_text(f"{printed}\n")
    program = folder / name
    lines = f"while read -r line; do printf '%s\\n' \"$line\"; done < {folder}/{name}.out"
    program.write_text(f"#!/bin/sh\n{lines}\nexit {exit_code}\n")
    program.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def disk(folder: Path, name: str = "nvme0", **files: str) -> None:
    """A disk in a made sysfs."""
    own = folder / "class" / "nvme" / name
    own.mkdir(parents=True)
    healthy = {"model": "MZ", "serial": "S1", "firmware_rev": "1", "state": "live", "transport": "pcie"}
    for file, text in {**healthy, **files}.items():
        (own / file).write_text(f"{text}\n")


def smart(**changes: Any) -> str:
    """The answer of smartctl."""
    return json.dumps({"smart_status": {"passed": True}, "nvme_smart_health_information_log": {**LOG, **changes}})


def test_a_healthy_disk_by_each_tool(tmp_path: Path, path: Path) -> None:
    """The same log by the names of either tool."""
    log = {"critical_warning": {"value": 0}, "avail_spare": 100, "spare_thresh": 10, "percent_used": 2, "media_errors": 0}
    tool(path, "nvme", json.dumps(log))
    by_nvme = read_health("/dev/nvme0")
    tool(path, "smartctl", smart())
    by_smartctl = read_health("/dev/nvme0")
    assert isinstance(by_nvme, DiskHealth)
    assert isinstance(by_smartctl, DiskHealth)
    assert replace(by_nvme, tool="smartctl", passed=True) == by_smartctl
    disk(tmp_path)
    found = read_disks(root=tmp_path)
    assert isinstance(found, list)
    finding = judge_disks(found)
    assert (finding.count, finding.unknown, finding.remark) == (0, {}, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"critical_warning": 4}, "nvme0: it loses reliability"),
        ({"critical_warning": 8}, "nvme0: it can only be read"),
        ({"available_spare": 5}, "nvme0: 5 % of its spare blocks are left, and 10 % are the least"),
        ({"percentage_used": 101}, "nvme0: 101 % of its life are used"),
    ],
)
def test_a_disk_that_fails(tmp_path: Path, path: Path, changes: dict[str, int], said: str) -> None:
    """By its own log, whose exit code has bits of findings."""
    tool(path, "smartctl", smart(**changes), exit_code=8)
    disk(tmp_path)
    found = read_disks(root=tmp_path)
    assert isinstance(found, list)
    assert judge_disks(found).facts == (said,)


def test_a_disk_whose_state_is_not_live(tmp_path: Path, path: Path) -> None:
    """Seen without any tool, which is a remark; a disk of a fabric is none of the host's, media errors are shown."""
    disk(tmp_path, state="dead")
    disk(tmp_path, "nvme1", transport="tcp", state="connecting")
    found = read_disks(root=tmp_path)
    assert isinstance(found, list)
    finding = judge_disks(found)
    assert finding.facts == ("nvme0: the kernel calls it dead",)
    assert finding.remark == "health log of 1 of 1 disks not read: neither smartctl nor nvme is installed"
    tool(path, "smartctl", smart(media_errors=3))
    again = read_disks(root=tmp_path)
    assert isinstance(again, list)
    assert judge_disks(again).remark == "nvme0 has counted 3 errors of its medium"
    assert read_disks(root=tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("printed", "exit_code", "why"),
    [
        ('{"smartctl": {"messages": [{"string": "Permission denied"}]}}', 2, "smartctl: Permission denied"),
        ("no JSON at all", 0, "smartctl printed no health log"),
        ("{}", 0, "smartctl printed no health log"),
        ("[]", 0, "smartctl printed no health log"),
        ('{"nvme_smart_health_information_log": {"critical_warning": "x"}}', 0, "smartctl printed no health log"),
    ],
)
def test_a_log_that_cannot_be_read(path: Path, printed: str, exit_code: int, why: str) -> None:
    """The reason is the tool's own, and never a healthy disk."""
    tool(path, "smartctl", printed, exit_code=exit_code)
    found = read_health("/dev/nvme0")
    assert isinstance(found, NotAvailable)
    assert found.why.startswith(why)


LIVE = Disk(name="nvme0", model="MZ", serial="S1", firmware="1", state="live", health=NotAvailable("none"))
GOOD = DiskHealth(
    tool="nvme", passed=None, critical_warning=0, spare_percent=99, spare_threshold_percent=9, used_percent=1, media_errors=0
)
CLOSED = (
    "neither smartctl nor nvme is installed",
    "smartctl: Smartctl open device: /dev/nvme0 failed: Permission denied",
    "nvme printed no health log: JSONDecodeError('...'); exit code 1: /dev/nvme0: Operation not permitted",
    "smartctl: Smartctl open device: /dev/nvme0 failed: No such file or directory",
)
SILENT = ("smartctl did not end within 20 s", "smartctl printed no health log: KeyError('x')", "smartctl: Input/output error")


@pytest.mark.parametrize("why", CLOSED)
def test_a_log_that_nobody_can_ask_for(why: str) -> None:
    """It does not apply, whatever is told as the reason: a good state alone is not green, and a bad one fails."""
    disks = [replace(LIVE, health=NotAvailable(why)), replace(LIVE, name="nvme1", health=NotAvailable(why))]
    assert why in str(why_no_logs(disks))
    dead = [*disks, replace(LIVE, name="nvme2", state="dead", health=NotAvailable(why))]
    assert (why_no_logs(dead), judge_disks(dead).judged) == (None, 1)
    odd = [*disks, replace(LIVE, name="nvme2", state=NotAvailable("I/O error"), health=NotAvailable(why))]
    assert (why_no_logs(odd), judge_disks(odd).judged) == (None, None)
    part = [*disks, replace(LIVE, name="nvme2", health=GOOD)]
    assert (why_no_logs(part), judge_disks(part).judged, why in str(judge_disks(part).remark)) == (None, 0, True)


@pytest.mark.parametrize("why", SILENT)
@pytest.mark.parametrize("other", [GOOD, NotAvailable(CLOSED[0])])
def test_a_log_that_was_asked_for_and_not_read(why: str, other: DiskHealth | NotAvailable) -> None:
    """Its disk may fail: unknown, and never green."""
    disks = [replace(LIVE, health=other), replace(LIVE, name="nvme1", health=NotAvailable(why))]
    found = judge_disks(disks)
    assert (why_no_logs(disks), found.judged) == (None, None)
    assert found.doubts == (f"nvme1: its health log was not read: {why}",)
