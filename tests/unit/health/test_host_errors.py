"""What a kernel has counted of errors in memory and on PCIe ways: readings of a made sysfs, and their judgement."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.health.growth import read_limits
from pytest_gpucluster.health.hosts import judge_host_errors
from pytest_gpucluster.inventory.host_errors import read_memory_controllers, read_pcie_errors
from pytest_gpucluster.inventory.reading import NotAvailable
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
        (tmp_path / "bus" / "pci" / "devices" / address).mkdir(parents=True)
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

    def both() -> list[object]:
        return [*read_memory_controllers(root=sys), *read_pcie_errors([GPU, NIC, GPU], root=sys)]

    first = both()
    for change in changes:
        count(sys, *change)
    return judge_host_errors(first, both(), seconds=seconds, limits=LIMITS)  # type: ignore[arg-type]


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
    """It is a remark, and no failure of this run."""
    count(sys, "mc0", "ue_count", 2)
    found = judged(sys)
    assert found is not None
    assert (found.count, found.remark) == (0, "counted before the run: mc0 memory_uncorrected 2")


def test_parts_that_come_and_go(sys: Path) -> None:
    """Nothing is known of a part that shows its counts at one end only, or whose counts were reset."""
    count(sys, "mc0", "ue_count", 2)
    found = judged(sys, ("mc0", "ue_count", 0))
    assert found is not None
    assert list(found.unknown) == ["mc0"]
    first = [*read_memory_controllers(root=sys)]
    for seen in ((first, first[:1]), (first[:1], first)):
        part = judge_host_errors(*seen, seconds=60.0, limits=LIMITS)
        assert part is not None
        assert list(part.unknown) == ["mc1"]


def test_a_host_that_shows_nothing(tmp_path: Path) -> None:
    """A virtual machine: the criterion does not apply."""
    assert read_memory_controllers(root=tmp_path) == read_pcie_errors([GPU], root=tmp_path) == []
    assert judge_host_errors([], [], seconds=60.0, limits=LIMITS) is None


def test_a_file_of_another_form(sys: Path) -> None:
    """A total that is none is not zero."""
    (sys / "bus" / "pci" / "devices" / GPU / "aer_dev_fatal").write_text("TOTAL_ERR_FATAL many\n")
    (one, _) = read_pcie_errors([GPU, NIC], root=sys)
    assert isinstance(one.fatal, NotAvailable)
