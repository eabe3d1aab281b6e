"""Versions of what GPUs run with: installed packages, torch's CUDA, kernel modules. Read from files; nothing is imported."""

from __future__ import annotations

import json
import platform
import re
from importlib import metadata
from pathlib import Path

from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.sysfs import SYS, read_text

PACKAGES = ("pytest-gpucluster", "pytest", "torch", "transformers", "peft", "nvidia-ml-py")
WHEELS = ("nvidia-nccl", "nvidia-cuda-runtime")
"""Wheels whose name may end in their CUDA: ``nvidia-nccl-cu12``."""
MODULES = ("nvidia", "mlx5_core")
TOOLKIT = Path("/usr/local/cuda/version.json")
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(?:'(?P<version>[^'\n]+)'|None)", re.MULTILINE)


def read_software(*, root: Path = SYS, toolkit: Path = TOOLKIT) -> dict[str, str | NotAvailable]:
    """Versions by name. ``root`` is where sysfs is mounted, ``toolkit`` the file in which the CUDA toolkit names itself.

    ``module_nvidia`` is the driver that is loaded. ``module_mlx5_core`` is the release of OFED, or not available where
    the adapters' driver is the kernel's own.
    """
    found: dict[str, str | NotAvailable] = {"python": platform.python_version()}
    found.update({name: _version(name) for name in PACKAGES})
    found["torch_cuda"] = _torch_cuda()
    for name in WHEELS:
        installed = {str(one.name): one.version for one in metadata.distributions() if str(one.name).startswith(name)}
        found.update(installed)
        if not installed:
            found[name] = NotAvailable("not installed as a wheel")
    found["cuda_toolkit"] = _toolkit(toolkit)
    found.update({f"module_{name}": read_text(root / "module" / name / "version") for name in MODULES})
    return found


def _version(name: str) -> str | NotAvailable:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return NotAvailable("not installed")


def _torch_cuda() -> str | NotAvailable:
    """The CUDA that torch was built for, by its ``torch/version.py``."""
    try:
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    except metadata.PackageNotFoundError:
        return NotAvailable("torch is not installed")
    text = read_text(file)
    if isinstance(text, NotAvailable):
        return text
    found = _CUDA.search(text)
    if found is None:
        return NotAvailable(f"no cuda ({file})")
    return found["version"] or NotAvailable("this torch is built without CUDA")


def _toolkit(file: Path) -> str | NotAvailable:
    text = read_text(file)
    if isinstance(text, NotAvailable):
        return text
    try:
        return str(json.loads(text)["cuda"]["version"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return NotAvailable(f"no version of cuda: {type(error).__name__} ({file})")
