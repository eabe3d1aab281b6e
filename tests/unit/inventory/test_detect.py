"""Finding the GPUs of this machine."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory import detect, program
from tests.support.sysfs import MadeSys

if TYPE_CHECKING:
    from pathlib import Path


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML that never answers is a broken machine, reported within the deadline, even if its process cannot be ended."""
    asleep = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(detect, "DEADLINE_S", 0.2)
    monkeypatch.setattr(program.subprocess, "Popen", lambda *_args, **_options: asleep)
    monkeypatch.setattr(program, "kill_group", lambda _pid: None)  # as in state D
    with pytest.raises(ConfigurationError, match="the driver hangs"):
        detect.detect_gpus()
    assert asleep.poll() is None
    asleep.terminate()
    asleep.wait(timeout=120)


def without_library(monkeypatch: pytest.MonkeyPatch, signs: str | None) -> detect.Detected:
    """What a machine without NVML's library is taken for, where the kernel shows this of GPUs."""
    survey = {"status": "no_library", "error": "NVML Shared Library Not Found (nvmlInit_v2)", "gpus": [], "count": 0}
    monkeypatch.setattr(detect, "survey_gpus", lambda: survey)
    monkeypatch.setattr(detect, "signs_of_gpus", lambda: signs)
    return detect.detect_gpus()


def test_no_library_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine to rehearse on."""
    assert without_library(monkeypatch, None) == detect.Detected(names=())


def test_no_library_beside_gpus_is_no_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without the driver's libraries: refused, with the signs and the way to a rehearsal."""
    with pytest.raises(ConfigurationError) as refused:
        without_library(monkeypatch, "the kernel shows NVIDIA GPUs (8 in /dev)")
    assert "(8 in /dev), and NVML is missing: NVML Shared Library Not Found" in str(refused.value)
    for words in ("docker run --gpus all", "nvidia.com/gpu", "NVIDIA_DRIVER_CAPABILITIES", "rehearsal"):
        assert words in str(refused.value)
    assert "--gpucluster-profile rehearsal" in str(refused.value)


def made(folder: Path, *, bus: int = 0, proc: int = 0, dev: int = 0) -> str | None:
    """The signs of a kernel that shows so many GPUs there."""
    made_sys = MadeSys(folder / "sys")
    for number in range(bus):
        made_sys.add_pci(
            f"0000:{0x40 + number:02x}:00.0", bus=0x10, slot=number, files={"vendor": "0x10de", "class": "0x030200"}
        )
    for number in range(proc):
        (folder / "proc" / "driver" / "nvidia" / "gpus" / f"0000:{number:02x}:00.0").mkdir(parents=True)
    (folder / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(dev))):
        (folder / "dev" / name).touch()
    return detect.signs_of_gpus(sys=made_sys.root, proc=folder / "proc", dev=folder / "dev")


def test_signs_of_gpus(tmp_path: Path) -> None:
    """The bus, the driver's folder, the device nodes: any of them; the control nodes of a driver are no GPU."""
    assert made(tmp_path / "none") is None
    assert made(tmp_path / "bus", bus=8) == "the kernel shows NVIDIA GPUs (8 on the PCI bus)"
    assert made(tmp_path / "proc", proc=1) == "the kernel shows NVIDIA GPUs (1 in /proc/driver/nvidia)"
    assert made(tmp_path / "dev", bus=2, dev=1) == "the kernel shows NVIDIA GPUs (2 on the PCI bus, 1 in /dev)"
