"""Versions by files: the CUDA of torch, wheels, the toolkit, kernel modules."""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.inventory.machine import WHEELS, Software, read_installed, read_offered, read_software
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path) -> dict[str, str | NotAvailable]:
    """With sysfs and the toolkit in a folder of the test."""
    return read_software(root=folder, toolkit=folder / "version.json")


def install_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """A torch with this ``version.py``; without one for None."""
    file = folder / "torch" / "version.py"
    file.parent.mkdir(exist_ok=True)
    if text is not None:
        file.write_text(text)
    found: Any = SimpleNamespace(version="2.9.0", locate_file=lambda path: folder / path)
    monkeypatch.setattr(metadata, "distribution", lambda name: found)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__all__ = ['cuda']\n__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "12.8"),
        ("cuda = '11.8'\n", "11.8"),
    ],
)
def test_the_cuda_of_torch(text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's build wrote it, in its older and newer form."""
    install_torch(tmp_path, monkeypatch, text)
    assert read(tmp_path)["torch_cuda"] == version


@pytest.mark.parametrize(
    ("text", "why"),
    [("cuda: Optional[str] = None\n", "without CUDA"), ("hip = '6'\n", "no cuda"), ("", "empty"), (None, "No such file")],
)
def test_a_torch_that_tells_no_cuda(text: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own reason."""
    install_torch(tmp_path, monkeypatch, text)
    found = read(tmp_path)["torch_cuda"]
    assert isinstance(found, NotAvailable)
    assert why in found.why


def test_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every version says why it is not there, and Python's is."""

    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "none")])
    found = read(tmp_path)
    assert [name for name, value in found.items() if not isinstance(value, NotAvailable)] == ["python"]
    assert found["torch"] == NotAvailable("not installed")
    assert found["nvidia-nccl"] == found["nvidia-cuda-runtime"] == NotAvailable("not installed as a wheel")


def test_wheels_by_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CUDA that stands in them; a folder that a broken removal left is no wheel."""
    wheels = ("nvidia_nccl_cu12-2.27.5", "nvidia_cuda_runtime-13.0.96", "nvidia_nccl_cu13-2.28.9")
    for name in wheels:
        (tmp_path / f"{name}.dist-info").mkdir()
    for name in wheels[:2]:
        (tmp_path / f"{name}.dist-info" / "METADATA").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "none"), str(tmp_path)])
    found = read(tmp_path)
    assert {name: version for name, version in found.items() if name.startswith(WHEELS)} == {
        "nvidia-nccl-cu12": "2.27.5", "nvidia-cuda-runtime": "13.0.96",
    }  # fmt: skip


def test_the_wheels_of_this_environment(tmp_path: Path) -> None:
    """Are those that their own metadata name."""
    wheels = {one.name: one.version for one in metadata.distributions() if str(one.name).startswith(WHEELS)}
    found = read(tmp_path)
    assert {name: version for name, version in found.items() if name.startswith(WHEELS) and name not in WHEELS} == wheels


def test_kernel_modules_and_toolkit(tmp_path: Path) -> None:
    """The driver that is loaded, the release of OFED, the toolkit."""
    for name, text in (("nvidia", "570.86.15\n"), ("mlx5_core", "24.10-1.1.4\n")):
        (tmp_path / "module" / name).mkdir(parents=True)
        (tmp_path / "module" / name / "version").write_text(text)
    (tmp_path / "version.json").write_text('{"cuda": {"name": "CUDA SDK", "version": "12.8.1"}}')
    found = read(tmp_path)
    assert found["module_nvidia"] == "570.86.15"
    assert found["module_mlx5_core"] == "24.10-1.1.4"
    assert found["cuda_toolkit"] == "12.8.1"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cuda": null}', "\udc80", "[" * 60_000])
def test_a_toolkit_that_is_no_toolkit(text: str, tmp_path: Path) -> None:
    """Any content of the file is an answer."""
    (tmp_path / "version.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    found = read(tmp_path)["cuda_toolkit"]
    assert isinstance(found, NotAvailable)
    assert "no version of cuda" in found.why


SAID = {
    "runc": "runc version 1.1.12\ncommit: v1.1.12-0-g51d5e946\nspec: 1.0.2-dev\ngo: go1.20.13\n",
    "nvidia-ctk": "NVIDIA Container Toolkit CLI version 1.14.3\ncommit: 53b24618a542025b108239fe602e66e912b7d6e2\n",
    "docker": "Docker version 27.5.1, build 9f9e405\n",
    "ofed_info": "OFED-internal-24.04-0.7.0:\n",
}
OLD_TOOLKIT = "cli-version: 1.13.5\nlib-version: 1.13.5\nbuild date: 2023-07-18\n"


def put(folder: Path, name: str, said: str, *, code: int = 0, mode: int = 0o755) -> None:
    """A program that prints this."""
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{said}END\nexit {code}\n")
    file.chmod(mode)


def installed(folder: Path) -> Software:
    """What is read of a host whose files lie in a folder of the test."""
    (folder / "proc").mkdir(exist_ok=True)
    (folder / "sys" / "module").mkdir(parents=True, exist_ok=True)
    path = str(folder / "bin")
    return read_installed(proc=folder / "proc", sys=folder / "sys", toolkit=folder / "cuda" / "version.json", path=path)


def test_what_is_installed(tmp_path: Path) -> None:
    """By the programs' own words, and by files."""
    for name, said in SAID.items():
        put(tmp_path, name, said)
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "version.json").write_text('{"cuda": {"name": "CUDA SDK", "version": "12.4.1"}}')
    switch = tmp_path / "proc/driver/nvidia-nvswitch/devices/0000:05:00.0"
    switch.mkdir(parents=True)
    (switch / "information").write_text("BIOS Version: 96.10.57.00.01\n")
    found = installed(tmp_path)
    assert (found.runc, found.docker, found.container_toolkit) == ("1.1.12", "27.5.1", "1.14.3")
    assert found.ofed == "OFED-internal-24.04-0.7.0"
    assert (found.cuda_toolkit, found.nvswitches) == ("12.4.1", {"0000:05:00.0": "96.10.57.00.01"})


def test_what_is_not_installed(tmp_path: Path) -> None:
    """A virtual machine or a container: nothing is there, and that is known."""
    found = installed(tmp_path)
    assert {found.runc, found.docker, found.container_toolkit, found.ofed, found.cuda_toolkit} == {"none"}
    assert found.nvswitches == {}


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("Docker version 20.10.24+dfsg1, build 297e128\n", "20.10.24+dfsg1"),
        ("Docker version 24.0.7, build 24.0.7-0ubuntu4.1\n", "24.0.7-0ubuntu4.1"),
        ("Docker version 28.2.2\n", "28.2.2"),
    ],
)
def test_builds_of_docker(said: str, version: str, tmp_path: Path) -> None:
    """A distribution's own number counts, as it may have the mend."""
    put(tmp_path, "docker", said)
    assert installed(tmp_path).docker == version


def offered(folder: Path) -> Any:
    """What a host offers whose files lie in a folder of the test."""
    (folder / "proc").mkdir(exist_ok=True)
    (folder / "sys" / "module").mkdir(parents=True, exist_ok=True)
    return read_offered(proc=folder / "proc", sys=folder / "sys", path=str(folder / "bin"))


BOOSTS = """\
+-------------------------------------------------+
| Boost Slider                                    |
| GPU     Slider     Current Value   Max Value    |
|=================================================|
|   0     vboost     0               4            |
|   1     vboost     2               4            |
+-------------------------------------------------+
"""


def test_what_a_host_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its program, file or process; the older name of Apptainer counts too."""
    monkeypatch.setenv("LMOD_VERSION", "8.7.14")
    put(tmp_path, "singularity", "singularity-ce version 4.1.0\n")
    put(tmp_path, "helm", "v3.16.2+g13654a5\n")
    put(tmp_path, "nvidia-smi", BOOSTS)
    for pid, name in (("7", "dcgm-exporter"), ("8", "bash"), ("9", "node_exporter")):
        (tmp_path / "proc" / pid).mkdir(parents=True)
        (tmp_path / "proc" / pid / "comm").write_text(f"{name}\n")
    kvm = tmp_path / "sys/module/kvm_amd/parameters"
    kvm.mkdir(parents=True)
    (kvm / "nested").write_text("1\n")
    (tmp_path / "sys/bus/platform/drivers/tegra241_cmdqv/NVDA200C:00").mkdir(parents=True)
    found = offered(tmp_path)
    assert (found.apptainer, found.helm, found.modules) == ("4.1.0", "v3.16.2+g13654a5", "8.7.14")
    assert (found.monitors, found.vboost) == ("dcgm-exporter, node_exporter", "GPU 0: 0 of 4, GPU 1: 2 of 4")
    assert (found.nested_guests, found.smmu_queues) == ("allowed", "NVDA200C:00")
    (kvm / "nested").write_text("N\n")
    assert offered(tmp_path).nested_guests == "not allowed"
    (kvm / "nested").write_text("2\n")
    assert isinstance(offered(tmp_path).nested_guests, NotAvailable)


def test_a_host_that_offers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known not to be there is none; what nobody can say has a reason."""
    monkeypatch.delenv("LMOD_VERSION", raising=False)
    monkeypatch.delenv("MODULESHOME", raising=False)
    found = offered(tmp_path)
    assert {found.apptainer, found.helm, found.monitors, found.nested_guests} == {"none"}
    assert isinstance(found.vboost, NotAvailable)
    assert isinstance(found.modules, NotAvailable)
    put(tmp_path, "nvidia-smi", "Boost slider is not supported\n")
    assert "Boost slider is not supported" in str(offered(tmp_path).vboost)


def test_an_old_container_toolkit_and_the_driver_of_ofed(tmp_path: Path) -> None:
    """Old releases have the library's command alone; without ofed_info the module names its release."""
    put(tmp_path, "nvidia-container-cli", OLD_TOOLKIT)
    (tmp_path / "sys/module/mlx5_core").mkdir(parents=True)
    (tmp_path / "sys/module/mlx5_core/version").write_text("23.10-1.1.9\n")
    found = installed(tmp_path)
    assert (found.container_toolkit, found.ofed) == ("1.13.5", "23.10-1.1.9")


@pytest.mark.parametrize(("said", "code"), [("", 0), ("error: no permission\n", 1), ("runc: who knows\n", 0)])
def test_a_program_that_says_no_version(tmp_path: Path, said: str, code: int) -> None:
    """Its words are the reason."""
    put(tmp_path, "runc", said, code=code)
    found = installed(tmp_path).runc
    assert isinstance(found, NotAvailable)
    assert found.why.startswith("runc says no version: ")


def test_files_that_refuse(tmp_path: Path) -> None:
    """A file that cannot be read, or has another form, has its reason."""
    for name in ("cuda/version.json", "sys/module/mlx5_core/version", "proc/driver/nvidia-nvswitch/devices/0/information"):
        (tmp_path / name).mkdir(parents=True)
    found = installed(tmp_path)
    assert all(isinstance(one, NotAvailable) for one in (found.cuda_toolkit, found.ofed, *dict(found.nvswitches).values()))  # type: ignore[arg-type]
    (tmp_path / "proc/driver/nvidia-nvswitch/devices/0/information").rmdir()
    (tmp_path / "proc/driver/nvidia-nvswitch/devices/0/information").write_text("nothing\n")
    assert "has no BIOS version" in str(installed(tmp_path).nvswitches)
