"""GPUs on the PCI bus, in a made sysfs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.pci_tree import NO_DRIVER, read_nvidia_gpus
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from pathlib import Path

DEVICES = {
    "0000:19:00.0": ("0x10de", "0x030200"),  # an H200
    "0000:3b:00.0": ("0x10de", "0x030000"),  # a GPU with a display
    "0000:3b:00.1": ("0x10de", "0x040300"),  # its audio device
    "0000:05:00.0": ("0x10de", "0x068000"),  # an NVSwitch
    "0000:02:00.0": ("0x1a03", "0x030000"),  # the board's own display
}


def made(root: Path) -> Path:
    """These devices as sysfs shows them."""
    for address, (vendor, kind) in DEVICES.items():
        device = root / "bus" / "pci" / "devices" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    return root


def test_gpus_of_nvidia_alone(tmp_path: Path) -> None:
    """Not their audio devices, not NVSwitches, not other vendors' displays; each with the driver that has it."""
    root = made(tmp_path)
    driver = root / "bus" / "pci" / "drivers" / "nvidia"
    driver.mkdir(parents=True)
    (root / "bus" / "pci" / "devices" / "0000:19:00.0" / "driver").symlink_to(driver)
    assert read_nvidia_gpus(root=root) == {"0000:19:00.0": "nvidia", "0000:3b:00.0": NO_DRIVER}


def test_a_virtual_function_is_no_gpu_of_its_own(tmp_path: Path) -> None:
    """A host of virtual machines shows the functions of each GPU beside it."""
    root = made(tmp_path)
    devices = root / "bus" / "pci" / "devices"
    (devices / "0000:3b:00.0" / "physfn").symlink_to(devices / "0000:19:00.0")
    assert read_nvidia_gpus(root=root) == {"0000:19:00.0": NO_DRIVER}


def test_what_cannot_be_read_is_no_zero(tmp_path: Path) -> None:
    """Without sysfs, and where one device refuses to be read."""
    absent = read_nvidia_gpus(root=tmp_path)
    assert isinstance(absent, NotAvailable)
    assert "No such file or directory" in absent.why
    (made(tmp_path) / "bus" / "pci" / "devices" / "0000:19:00.0" / "class").unlink()
    assert isinstance(read_nvidia_gpus(root=tmp_path), NotAvailable)
