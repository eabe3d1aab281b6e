"""Versions by files: the CUDA of torch, wheels, the toolkit, kernel modules."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.inventory.machine import read_software
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
    monkeypatch.setattr(metadata, "distributions", list)
    found = read(tmp_path)
    assert [name for name, value in found.items() if not isinstance(value, NotAvailable)] == ["python"]
    assert found["torch"] == NotAvailable("not installed")
    assert found["nvidia-nccl"] == found["nvidia-cuda-runtime"] == NotAvailable("not installed as a wheel")


def test_wheels_by_their_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CUDA that stands in them; a distribution without a name is no trouble."""
    wheels = [("nvidia-nccl-cu12", "2.27.5"), ("nvidia-cuda-runtime", "13.0.96"), (None, "1")]
    monkeypatch.setattr(metadata, "distributions", lambda: [SimpleNamespace(name=name, version=text) for name, text in wheels])
    found = read(tmp_path)
    assert found["nvidia-nccl-cu12"] == "2.27.5"
    assert found["nvidia-cuda-runtime"] == "13.0.96"
    assert "nvidia-nccl" not in found


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
