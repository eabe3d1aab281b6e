"""A number or a word that its source does not define says nothing: no reading takes it for yes, for no, or for a bad state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.health.nics import PortPromise, judge_ports
from pytest_gpucluster.inventory import host, nics, nvlinks, nvml, pci_tree
from pytest_gpucluster.inventory.reading import NotAvailable, ReadingRow, rows
from pytest_gpucluster.inventory.sysfs import SysfsFile
from pytest_gpucluster.measurements import host_parts

if TYPE_CHECKING:
    from pathlib import Path

KINDS = (nvml.GpuState, nvml.GpuRepair, nvml.GpuCounters, nvlinks.NvLink, nvlinks.LinkCounters, host.HostFacts)
OF_TEXT = {"ipc_lock"}
"""One bit of a mask, of which every value is defined."""
FLAGS = {
    f"{kind.__name__}.{name}": one
    for kind in KINDS
    for name, one in rows(kind).items()
    if one.convert is not None and isinstance(one.value_of(one.healthy), bool) and name not in OF_TEXT
}
WORDS = {
    f"{kind.__name__}.{name}": one
    for kind, name in ((nvml.GpuState, "compute_mode"), (nics.NicPort, "state"), (nics.NicPort, "physical_state"))
    for one in (rows(kind)[name],)
}


def answered(one: ReadingRow, number: int) -> Any:
    """What the row says where its source gives this number, alone or in every place of its answer."""
    healthy = one.healthy
    return one.value_of(tuple(number for _ in healthy) if isinstance(healthy, (tuple, list)) else number)


def test_the_flags_are_all_there() -> None:
    """Of GPUs, their repairs, links and hosts."""
    assert len(FLAGS) >= 10


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_0_or_1(flag: str) -> None:
    """Any other number is no value; those two are the two words."""
    assert {answered(FLAGS[flag], 0), answered(FLAGS[flag], 1)} == {False, True}
    for number in (7, 255, 2**32 - 1):
        assert isinstance(answered(FLAGS[flag], number), NotAvailable), number


def test_numa_balancing_has_more_words() -> None:
    """The kernel documents 2 (between tiers of memory) and 3 (both)."""
    of_numa = FLAGS["HostFacts.numa_balancing"]
    assert [answered(of_numa, number) for number in (2, 3)] == [True, True]


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("GpuState.compute_mode", 7),
        ("NicPort.state", "7: UNKNOWN"),
        ("NicPort.physical_state", "9: <unknown>"),
    ],
)
def test_a_number_without_a_word(word: str, answer: object) -> None:
    """Neither the good state nor a bad one."""
    assert isinstance(WORDS[word].value_of(answer), NotAvailable)


def test_a_port_of_an_unknown_state_is_no_bad_port(tmp_path: Path) -> None:
    """The kernel's own word for a state that it does not know: an ERROR, and nobody is named."""
    folder = tmp_path / "class" / "infiniband" / "mlx5_0"
    port = folder / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in {
        "state": "4: ACTIVE",
        "phys_state": "9: <unknown>",
        "rate": nics.RATE,
        "link_layer": "InfiniBand",
    }.items():
        (port / name).write_text(f"{text}\n")
    found = nics.read_nics(root=tmp_path)
    promise = PortPromise(fabric="infiniband", ports=1, gbit_s=400.0)
    judged = judge_ports({"host": found}, promise)["host"]
    assert (judged.facts, bool(judged.doubts)) == ((), True)


def test_a_device_that_does_not_answer_redirects_nothing_and_denies_nothing(tmp_path: Path) -> None:
    """All ones in the config space are the bus's word for nobody there."""
    (tmp_path / "config").write_bytes(b"\xff" * 4096)
    source = rows(pci_tree.PciNode)["redirects_peers"].source
    assert isinstance(source, SysfsFile)
    assert isinstance(source(tmp_path), NotAvailable)


@pytest.mark.parametrize("passed", ["false", 0, None, {}])
def test_a_self_test_of_a_disk_is_yes_or_no(passed: object) -> None:
    """JSON has words for both, and nothing else is one."""
    log = {
        "critical_warning": 0,
        "available_spare": 100,
        "available_spare_threshold": 10,
        "percentage_used": 1,
        "media_errors": 0,
    }
    answer = {"nvme_smart_health_information_log": log, "smart_status": {"passed": passed}}
    with pytest.raises(KeyError):
        host_parts._health("smartctl", answer)


@pytest.mark.parametrize(
    ("mask", "summary"),
    [(0x3, 0), (0x3 << 2, 0), (0x3 << 4, 0), (0x3 << 6, 0), (0x3 << 12, 0), (0x3 << 14, 0), (0, 4), (0, 255)],
)
def test_a_health_of_a_fabric_that_nobody_defined(mask: int, summary: int) -> None:
    """Each part of the mask has three words, and the summary four."""
    assert isinstance(nvlinks._troubles(mask, summary), NotAvailable)
