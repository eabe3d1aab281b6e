"""The view of the links: each NVLink, and how near GPUs and adapters are, as ``nvidia-smi topo -m`` names it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from pytest_gpucluster.commands.info_views import show
from pytest_gpucluster.inventory import machine
from tests.support.nvml_simulator import environment
from tests.support.sysfs import GPU_CLASS, MadeSys, infiniband

if TYPE_CHECKING:
    from pathlib import Path

BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
"""Of the simulated GPUs."""
NO_GPUS = {"status": "no_library", "error": "NVML Shared Library Not Found", "gpus": [], "count": 0}


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSys:
    """A machine without adapters, and without a driver until one is planted."""
    monkeypatch.setattr(machine, "_gpus", lambda _nvml_s: NO_GPUS)
    return MadeSys(tmp_path / "sys")


def with_gpus(monkeypatch: pytest.MonkeyPatch, library: Path, scenario: str) -> dict[str, Any]:
    """What NVML's child tells of simulated GPUs; the made machine has them from now on."""
    for name, value in environment(library, scenario).items():
        monkeypatch.setenv(name, value)
    found = machine.survey_gpus()
    monkeypatch.setattr(machine, "_gpus", lambda _nvml_s: found)
    return found


def shown(sysfs: MadeSys, *, width: int = 80) -> list[list[str]]:
    """The words of each line of the view."""
    output = io.StringIO()
    console = Console(file=output, width=width, highlight=False, markup=False)
    for part in show(machine.read_machine(root=sysfs.root), "links"):
        console.print(part)
    text = output.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines()), default=0) <= width
    return [line.split() for line in text.splitlines() if line.strip()]


def matrix(sysfs: MadeSys) -> dict[str, list[str]]:
    """The rows of the matrix by name, that of its heading included."""
    lines = shown(sysfs)
    head = next(number for number, words in enumerate(lines) if words[-1] == "NUMA")
    return {"": lines[head], **{words[0]: words[1:] for words in lines[head + 1 :]}}


def test_each_way_by_the_pci_tree(sysfs: MadeSys) -> None:
    """Below one switch, over several bridges, below one host bridge, of one NUMA node, of two, not known."""
    sysfs.add(infiniband(0))
    sysfs.add(infiniband(1))
    below = sysfs.add_pci("0000:1b:00.0", bus=0x10, slot=1, files=GPU_CLASS)
    far = sysfs.add_pci("0000:5b:00.0", bus=0x50, files={**GPU_CLASS, "numa_node": "1"})
    assert matrix(sysfs) == {
        "": ["1b:00", "5b:00", "NUMA"],
        "1b:00": ["X", "SYS", "0"],
        "5b:00": ["SYS", "X", "1"],
        "mlx5_0": ["PIX", "SYS", "0"],
        "mlx5_1": ["NODE", "SYS", "0"],
    }
    (far / "numa_node").write_text("-1\n")
    found = matrix(sysfs)
    assert found["mlx5_0"] == ["PIX", "-", "0"]
    assert found["5b:00"] == ["-", "X", "-"]
    move(sysfs, below, "0000:10:01.0/0000:11:00.0/0000:12:07.0/0000:15:00.0/0000:16:00.0/0000:1b:00.0")
    assert matrix(sysfs)["mlx5_0"][0] == "PXB"
    move(sysfs, below, "0000:10:03.0/0000:1b:00.0")
    assert matrix(sysfs)["mlx5_0"][0] == "PHB"


def move(sysfs: MadeSys, device: Path, path: str) -> None:
    """Put a device elsewhere below the host bridge ``pci0000:10``."""
    listed = sysfs.root / "bus" / "pci" / "devices" / device.name
    moved = sysfs.root / "devices" / "pci0000:10" / path
    moved.parent.mkdir(parents=True, exist_ok=True)
    listed.resolve().rename(moved)
    listed.unlink()
    listed.symlink_to(moved)


def test_a_virtual_machine_shows_no_bridges(sysfs: MadeSys) -> None:
    """What the host hides is not known: no host bridge is claimed."""
    sysfs.add(infiniband(0))
    gpu = sysfs.add_pci("0000:1b:00.0", bus=0x10, slot=1, files={**GPU_CLASS, "numa_node": "-1"})
    nic = (sysfs.root / "class" / "infiniband" / "mlx5_0" / "device").resolve()
    for device in (gpu, nic):
        (device / "numa_node").write_text("-1\n")
        move(sysfs, device, device.name)
    adapter = sysfs.root / "class" / "infiniband" / "mlx5_0"
    moved = sysfs.root / "devices" / "pci0000:10" / nic.name
    adapter.unlink()
    adapter.symlink_to(moved / "infiniband" / "mlx5_0")
    (moved / "infiniband" / "mlx5_0" / "device").unlink()
    (moved / "infiniband" / "mlx5_0" / "device").symlink_to(moved)
    assert matrix(sysfs)["mlx5_0"] == ["-", "-"]


def test_gpus_below_an_nvswitch(library: Path, sysfs: MadeSys, monkeypatch: pytest.MonkeyPatch) -> None:
    """NV and a number, that of the GPU with fewer links; eight GPUs and twelve adapters fit 80 columns."""
    with_gpus(monkeypatch, library, "2.nvlink.7 0")
    for number, bus in enumerate(BUSES):
        sysfs.add_pci(f"0000:{bus:02x}:00.0", bus=0x10 * (number + 1), slot=8, files={**GPU_CLASS, "numa_node": "0"})
    for number in range(12):
        sysfs.add(infiniband(number, name=f"rdmap{number}s27"))
    found = matrix(sysfs)
    assert found[""] == [*(f"GPU{number}" for number in range(8)), "NUMA"]
    assert found["GPU0"] == ["X", "NV18", "NV17", *["NV18"] * 5, "0"]
    assert found["GPU2"] == ["NV17", "NV17", "X", *["NV17"] * 5, "0"]
    assert found["rdmap1s27"] == ["NODE", "PIX", *["NODE"] * 6, "0"]
    assert len(found) == 1 + 8 + 12
    rows = {words[0]: words[1:] for words in shown(sysfs)}
    assert rows["NVLink"] == found[""][:-1]
    assert rows["0-6"] == rows["8-17"] == ["26.562"] * 8
    assert rows["7"] == ["26.562", "26.562", "down", *["26.562"] * 5]


def test_gpus_linked_directly(library: Path, sysfs: MadeSys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which link leads to which GPU is not read: the way over PCIe is shown. A link without a rate is up."""
    with_gpus(monkeypatch, library, "count 2\n0.nvlink.end 0\n1.nvlink.end 0\n1.nvlink.3.speed 0")
    found = matrix(sysfs)
    assert found["GPU0"] == ["X", "-", "-"]
    for bus in BUSES[:2]:
        sysfs.add_pci(f"0000:{bus:02x}:00.0", bus=0x10, slot=bus, files=GPU_CLASS)
    assert matrix(sysfs)["GPU0"] == ["X", "PIX", "0"]


def test_gpus_without_nvlink_and_a_lost_one(library: Path, sysfs: MadeSys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that NVML cannot read stays in the matrix by its address; without NVLink there is no table of them."""
    refused = "\n".join(f"{index}.err.nvmlDeviceGetNvLinkState 3" for index in range(3))
    found = with_gpus(monkeypatch, library, f"count 3\n1.err 15\n{refused}")
    assert found["status"] == "error"
    for bus in BUSES[:3]:
        sysfs.add_pci(f"0000:{bus:02x}:00.0", bus=0x10, slot=bus, files=GPU_CLASS)
    assert matrix(sysfs)[""] == ["GPU0", "GPU2", "43:00", "NUMA"]
    assert matrix(sysfs)["43:00"] == ["PIX", "PIX", "X", "0"]
    assert not any(words[0] == "NVLink" for words in shown(sysfs))


def test_a_gpu_alone_has_no_matrix(sysfs: MadeSys) -> None:
    """Nor has a machine with adapters alone."""
    sysfs.add(infiniband(0))
    assert shown(sysfs) == []
    sysfs.remove("mlx5_0")
    sysfs.add_pci("0000:1b:00.0", bus=0x10, slot=1, files=GPU_CLASS)
    assert shown(sysfs) == []
