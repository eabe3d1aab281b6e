"""Versions of what a measurement depends on, to find the node that differs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass

from pytest_gpucluster.inventory import nvml

PREFIXES = ("NCCL_", "CUDA_", "TORCH_NCCL_")
"""Environment variables that change a collective's speed begin so."""

OF_ONE_PROCESS = frozenset({"CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE", "CUDA_CACHE_PATH"})
"""Those that rightly differ between processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareVersions:
    """Versions on one node; None: not installed, or (``driver``, ``cuda``, ``nccl``) nothing of the kind here.

    ``cuda`` and ``nccl`` are those torch was built with. ``environment`` holds the variables that begin with one of
    :data:`PREFIXES` and should be alike everywhere.
    """

    python: str
    torch: str | None
    cuda: str | None
    nccl: str | None
    driver: str | None
    kernel: str
    transformers: str | None
    peft: str | None
    pytest: str | None
    pytest_gpucluster: str | None
    environment: dict[str, str]


def read_software() -> SoftwareVersions:
    """Versions seen by this process.

    Raises:
        NvmlError: there is a GPU driver and it does not answer.
    """
    cuda, nccl = _of_torch()
    return SoftwareVersions(
        python=platform.python_version(),
        torch=_version("torch"),
        cuda=cuda,
        nccl=nccl,
        driver=nvml.read_driver_version(),
        kernel=platform.release(),
        transformers=_version("transformers"),
        peft=_version("peft"),
        pytest=_version("pytest"),
        pytest_gpucluster=_version("pytest-gpucluster"),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES) and name not in OF_ONE_PROCESS
        },
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _of_torch() -> tuple[str | None, str | None]:
    """CUDA and NCCL of torch, None each where it has none."""
    try:
        import torch  # noqa: PLC0415 - lazy: seconds to import, and the inventory works without it
    except ModuleNotFoundError:
        return None, None
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return torch.version.cuda, None
    return torch.version.cuda, ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
