"""What a kernel has counted of errors in memory and on PCIe ways: readings of a made sysfs, and their judgement."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.health.growth import read_limits
from pytest_gpucluster.health.hosts import judge_host_errors
from pytest_gpucluster.inventory.host import MachineChecks, read_machine_checks, read_memory_controllers, read_pcie_errors
from pytest_gpucluster.inventory.pci_tree import read_addresses
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.finding import HERE
from pytest_gpucluster.measurements.host import HostErrors
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpucluster.judging.finding import Finding

GPU, NIC = "0000:13:00.0", "0000:23:00.0"
LIMITS = read_limits(packaged().criteria(packaged().profiles["h200-sxm"])["host_errors"].recipe["limits"])
ENDS = {"aer_dev_fatal": "FATAL", "aer_dev_nonfatal": "NONFATAL", "aer_dev_correctable": "COR"}


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Two memory controllers and two devices that have counted nothing."""
    for number in (0, 1):
        folder = tmp_path / "devices" / "system" / "edac" / "mc" / f"mc{number}"
        folder.mkdir(parents=True)
        (folder / "ue_count").write_text("0\n")
        (folder / "ce_count").write_text("0\n")
    (tmp_path / "devices" / "system" / "edac" / "mc" / "power").mkdir()
    for address in (GPU, NIC):
        folder = tmp_path / "bus" / "pci" / "devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
        for file in ENDS:
            count(tmp_path, address, file, 0)
    return tmp_path


def count(sys: Path, part: str, file: str, number: int | None) -> None:
    """A counter of a part; None: it cannot be read."""
    folder = sys / "devices" / "system" / "edac" / "mc" / part if part.startswith("mc") else sys / "bus/pci/devices" / part
    text = f"{number}\n" if file.endswith("_count") else f"Undefined 0\nDLP 0\nTOTAL_ERR_{ENDS.get(file)} {number}\n"
    (folder / file).write_text(text if number is not None else "")


def judged(sys: Path, *changes: tuple[str, str, int | None], seconds: float = 60.0) -> Finding | None:
    """What is found if counters change between two readings of the host."""

    def errors() -> HostErrors:
        return HostErrors(memory=read_memory_controllers(root=sys), pcie=read_pcie_errors([GPU, NIC, GPU], root=sys))

    first = errors()
    for change in changes:
        count(sys, *change)
    return judge_host_errors(first, errors(), seconds=seconds, limits=LIMITS)


def test_a_host_that_counts_nothing(sys: Path) -> None:
    """Nothing is bad, and nothing is unknown."""
    found = judged(sys)
    assert found is not None
    assert (found.count, found.unknown, found.remark, found.kind) == (0, {}, None, "host")


@pytest.mark.parametrize(
    ("part", "file", "name"),
    [
        ("mc1", "ue_count", "memory_uncorrected"),
        (GPU, "aer_dev_fatal", "pcie_fatal"),
        (NIC, "aer_dev_nonfatal", "pcie_nonfatal"),
    ],
)
def test_an_error_that_nothing_corrected(sys: Path, part: str, file: str, name: str) -> None:
    """The part is named; where the count cannot be read at the end, nothing is known of it."""
    found = judged(sys, (part, file, 1))
    assert found is not None
    assert list(found.bad) == [part]
    assert f"{name} +1" in found.bad[part][0]
    count(sys, part, file, 0)
    unread = judged(sys, (part, file, None))
    assert unread is not None
    assert (unread.count, list(unread.unknown)) == (0, [part])


def test_corrected_errors_are_shown(sys: Path) -> None:
    """They have no limit."""
    found = judged(sys, ("mc0", "ce_count", 7), (GPU, "aer_dev_correctable", 9))
    assert found is not None
    assert found.count == 0
    assert any("memory_corrected +7" in text for text in found.evidence["within"])
    assert any("pcie_corrected +9" in text for text in found.evidence["within"])


def test_what_was_counted_before(sys: Path) -> None:
    """Of PCIe it is a remark; an uncorrected error of memory is bad whenever it was, and once more if it grows."""
    count(sys, GPU, "aer_dev_fatal", 2)
    found = judged(sys)
    assert found is not None
    assert (found.count, found.remark) == (0, f"counted before the run: {GPU} pcie_fatal 2")
    count(sys, "mc0", "ue_count", 2)
    found = judged(sys)
    assert found is not None
    assert found.facts == ("mc0: memory_uncorrected 2 before the run",)
    grown = judged(sys, ("mc0", "ue_count", 3))
    assert grown is not None
    assert len(grown.bad["mc0"]) == 2


def checks(folder: Path, exceptions: str) -> list[MachineChecks] | NotAvailable:
    """What is read of a made /proc/interrupts with these machine check exceptions on four processors."""
    others = "      CPU0 CPU1\n 24: 1 0 IO-APIC\nMCP:  7  7  7  7   Machine check polls\n"
    (folder / "interrupts").write_text(others + exceptions)
    return read_machine_checks(proc=folder)


def test_machine_checks(tmp_path: Path) -> None:
    """Growth is bad, polls are none; a host that shows nothing but processors without a report shows nothing."""
    none = checks(tmp_path, "MCE:  0  0  0  0   Machine check exceptions\nDFR:  1  0  0  0   Deferred errors\n")
    some = checks(tmp_path, "MCE:  0  1  0  1   Machine check exceptions\n")
    assert not isinstance(none, NotAvailable)
    assert not isinstance(some, NotAvailable)
    assert [(one.exceptions, one.deferred) for one in none] == [(0, 1)]
    first, last = (HostErrors(memory=[], pcie=[], cpus=one) for one in (none, some))
    assert judge_host_errors(first, first, seconds=60.0, limits=LIMITS) is None
    found = judge_host_errors(first, last, seconds=60.0, limits=LIMITS)
    assert found is not None
    assert "machine_checks +2" in found.bad["CPUs"][0]
    old = judge_host_errors(last, last, seconds=60.0, limits=LIMITS)
    assert old is not None
    assert (old.count, old.remark) == (0, "counted before the run: CPUs machine_checks 2")


def test_machine_checks_that_are_not_counted(tmp_path: Path) -> None:
    """Arm and containers without the file: none, or a reason."""
    assert checks(tmp_path, "") == []
    assert isinstance(read_machine_checks(proc=tmp_path / "no"), NotAvailable)


def test_parts_that_come_and_go(sys: Path) -> None:
    """Nothing is known of a part that shows its counts at one end only, or whose counts were reset."""
    count(sys, "mc0", "ue_count", 2)
    found = judged(sys, ("mc0", "ue_count", 0))
    assert found is not None
    assert list(found.unknown) == ["mc0"]
    every = read_memory_controllers(root=sys)
    assert not isinstance(every, NotAvailable)
    for seen in ((every, every[:1]), (every[:1], every)):
        part = judge_host_errors(*(HostErrors(memory=one, pcie=[]) for one in seen), seconds=60.0, limits=LIMITS)
        assert part is not None
        assert list(part.unknown) == ["mc1"]


def test_a_host_that_shows_nothing(tmp_path: Path) -> None:
    """A virtual machine: the criterion does not apply."""
    assert read_memory_controllers(root=tmp_path) == read_pcie_errors([GPU], root=tmp_path) == []
    assert read_addresses(root=tmp_path) == []
    nothing = HostErrors(memory=[], pcie=[])
    assert judge_host_errors(nothing, nothing, seconds=60.0, limits=LIMITS) is None


@pytest.mark.parametrize("path", ["devices/system/edac/mc", "bus/pci/devices", "class/infiniband"])
def test_a_folder_that_cannot_be_listed(sys: Path, path: str) -> None:
    """It is not empty: what it counts is unknown, at whichever end, and no error that is known is lost."""
    (sys / "class").mkdir()
    good = HostErrors(memory=read_memory_controllers(root=sys), pcie=read_pcie_errors([GPU], root=sys))
    count(sys, "mc1", "ue_count", 1)
    count(sys, GPU, "aer_dev_fatal", 1)
    shutil.rmtree(sys / path, ignore_errors=True)
    (sys / path).write_text("no folder")
    addresses = read_addresses(root=sys)
    counts = addresses if isinstance(addresses, NotAvailable) else read_pcie_errors([GPU], root=sys)
    unread = HostErrors(memory=read_memory_controllers(root=sys), pcie=counts)
    assert isinstance(unread.memory, NotAvailable) is ("edac" in path)
    assert isinstance(unread.pcie, NotAvailable) is ("edac" not in path)
    for both in ((good, unread), (unread, good), (unread, unread)):
        found = judge_host_errors(*both, seconds=60.0, limits=LIMITS)
        assert found is not None
        assert any("cannot be" in text or "Not a directory" in text for text in found.unknown[HERE])
    grown = judge_host_errors(good, unread, seconds=60.0, limits=LIMITS)
    assert grown is not None
    assert grown.count == 1, "what can still be read counts"


def test_the_ways_are_listed_without_a_reading_of_them(tmp_path: Path) -> None:
    """Of GPUs and adapters, with all bridges above; a soft adapter has no way, and other devices do not count."""
    tree = tmp_path / "devices" / "pci0000:10" / "0000:10:01.0"
    for address, vendor in ((GPU, "0x10de"), (NIC, "0x15b3"), ("0000:33:00.0", "0x8086")):
        folder = tree / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text("0x030200\n")
        listed = tmp_path / "bus" / "pci" / "devices" / address
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.symlink_to(folder)
    for name in ("mlx5_0", "rxe0"):
        (tmp_path / "class" / "infiniband" / name).mkdir(parents=True)
    (tmp_path / "class" / "infiniband" / "mlx5_0" / "device").symlink_to(tree / NIC)
    assert read_addresses(root=tmp_path) == ["0000:10:01.0", GPU, NIC]
    (tmp_path / "bus" / "pci" / "devices" / GPU / "vendor").unlink()
    assert isinstance(read_addresses(root=tmp_path), NotAvailable)


def test_a_file_of_another_form(sys: Path) -> None:
    """A total that is none is not zero."""
    (sys / "bus" / "pci" / "devices" / GPU / "aer_dev_fatal").write_text("TOTAL_ERR_FATAL many\n")
    (one, _) = read_pcie_errors([GPU, NIC], root=sys)
    assert isinstance(one.fatal, NotAvailable)
