"""GPUs by the kernel's list of PCI devices, which does not need their driver.

In a container this is the host's list: it holds GPUs that the container was not given. So the count is evidence for whoever
misses a GPU, and nothing to judge by.
"""

from __future__ import annotations

from pathlib import Path

from pytest_gpucluster.inventory.reading import NotAvailable

SYS = Path("/sys")
NVIDIA = "0x10de"
GPU_CLASSES = ("0x0300", "0x0302")
"""VGA controller and 3D controller. A GPU's audio device and an NVSwitch are of other classes."""


def count_nvidia_gpus(*, root: Path = SYS) -> int | NotAvailable:
    """How many NVIDIA GPUs the kernel lists on the PCI bus."""
    folder = root / "bus" / "pci" / "devices"
    try:
        return sum(is_nvidia_gpu(device) for device in folder.iterdir())
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({folder})")


def is_nvidia_gpu(device: Path) -> bool:
    """Whether a device of sysfs is one.

    Raises:
        OSError: its vendor or class cannot be read.
    """
    if (device / "vendor").read_text(encoding="ascii").strip() != NVIDIA:
        return False
    return (device / "class").read_text(encoding="ascii").startswith(GPU_CLASSES)
