"""All that the readers see of this machine, as plain data: for people who look at it. Loads no torch.

NVML is read in a child process, because a driver may hang. What could not be read is ``{"not_available": why}``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import socket
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.detect import survey_gpus
from pytest_gpucluster.inventory.host import read_host
from pytest_gpucluster.inventory.nics import read_nics
from pytest_gpucluster.inventory.pci_tree import read_gpu_paths, read_nvidia_gpus, read_path, read_peer_memory
from pytest_gpucluster.inventory.reading import NotAvailable, apply, or_none
from pytest_gpucluster.inventory.sysfs import SYS, read_text

if TYPE_CHECKING:
    from collections.abc import Callable

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


DMI = (
    "chassis_serial",
    "board_serial",
    "product_name",
    "board_name",
    "bios_version",
)
"""What the firmware says of the host. Linux gives the serials to root alone."""


def read_dmi(*, root: Path = SYS) -> dict[str, str | NotAvailable]:
    """Models and serials of chassis and board, by name; not available without root, in a container, or without such files."""
    return {name: read_text(root / "class" / "dmi" / "id" / name) for name in DMI}


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

    def in_text(text: str) -> str | NotAvailable:
        found = _CUDA.search(text)
        if found is None:
            return NotAvailable(f"no cuda ({file})")
        return found["version"] or NotAvailable("this torch is built without CUDA")

    return apply(in_text, read_text(file))


def _toolkit(file: Path) -> str | NotAvailable:
    def in_text(text: str) -> str | NotAvailable:
        try:
            return str(json.loads(text)["cuda"]["version"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return NotAvailable(f"no version of cuda: {type(error).__name__} ({file})")

    return apply(in_text, read_text(file))


PREFIXES = ("NCCL_", "CUDA_", "NVIDIA_VISIBLE", "UCX_", "FI_", "OMP_NUM")
"""Of environment variables that change what the GPUs do."""


def read_machine(*, root: Path = SYS, survey: Callable[[], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Host, GPUs, PCIe ways, adapters and software of this machine; ``root`` is where sysfs is mounted.

    ``survey`` reads NVML, by default :func:`survey_gpus` with its own deadline.
    """
    nics = read_nics(root=root)
    ways = {nic.device: apply(partial(read_path, root=root), nic.pci) for nic in or_none(nics) or ()}
    found = {
        "hostname": socket.gethostname(),
        "host": read_host(sys=root),
        "dmi": read_dmi(root=root),
        "gpus": _gpus() if survey is None else _gpus(survey),
        "gpus_on_pci_bus": apply(len, read_nvidia_gpus(root=root)),
        "gpu_ways": read_gpu_paths(root=root),
        "nics": nics,
        "nic_ways": ways,
        "peer_memory": read_peer_memory(root=root),
        "software": read_software(root=root),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIXES)},
    }
    return {name: _plain(value) for name, value in found.items()}


def _gpus(survey: Callable[[], dict[str, Any]] | None = None) -> dict[str, Any]:
    try:
        return (survey or survey_gpus)()
    except ConfigurationError as error:
        return {"status": "error", "error": str(error), "gpus": [], "count": 0, "driver_cuda": NotAvailable(str(error))}


def _plain(value: Any) -> Any:
    """Data classes as mappings; a reading that is not available as its reason, also where NVML's child wrote it."""
    if isinstance(value, NotAvailable):
        return {"not_available": value.why}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {"not_available": value["why"]} if value.keys() == {"why"} else {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
