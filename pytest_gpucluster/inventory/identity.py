"""Identity of a worker: host, GPU and software versions. Each worker reads it when it says hello."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from pytest_gpucluster.protocol.rank import own_hostname

Value = TypeVar("Value")

READ = ("NCCL_", "TORCH_NCCL_", "CUDA_", "CUBLAS_", "OMP_NUM_THREADS", "PYTORCH_", "UCX_", "GLOO_")
SWITCH = "GPUCLUSTER_SWITCH"
"""The variable by which a site names the leaf switch of each node, where Slurm does not know it."""
NOT_READ = ("NCCL_DEBUG", "NCCL_RAS_ADDR", "CUDA_VISIBLE_DEVICES")
"""Beginnings of names of variables. What ``CUDA_VISIBLE_DEVICES`` does is read by :func:`read_hidden`."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NOT_INSTALLED = "not installed"
VERSIONED = ("pytest-gpucluster", "torch", "pytest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Host, ranks, versions and GPU of one worker. GPU fields are None without CUDA.

    Attributes:
        nvml_gpus: how many GPUs NVML lists on this node; None where it was not read.
        hidden_gpus: how many of them ``CUDA_VISIBLE_DEVICES`` hides from this rank.
        gpu_number: which of the shown GPUs it is in the order of the PCI bus, for one whose PCI address nothing gives.
        variables: the environment variables of this rank that may change what is measured.
        board: which part the GPU is, as far as NVML gives it (:func:`~pytest_gpucluster.inventory.nvml.read_board`).
        fabric: what the GPUs of its NVLink fabric have in common, if that spans nodes.
        switch: the leaf switch of the node, if anything says it (:func:`read_switch`).
        ports_gb_s: what all ports of the node's adapters carry one way, in 10^9 bytes/s; None where that is not known.
        boot_id: the kernel's id of this boot of the host; None where it cannot be read.
        stack: the versions below torch, by name: driver, CUDA, NCCL, as far as they could be read. They may differ.
    """

    hostname: str
    group_rank: int
    local_rank: int
    versions: dict[str, str]
    torch_gpus: int
    gpu_name: str | None = None
    uuid: str | None = None
    serial: str | None = None
    pci: str | None = None
    nvml_gpus: int | None = None
    hidden_gpus: int | None = None
    gpu_number: int | None = None
    variables: dict[str, str] = field(default_factory=dict)
    stack: dict[str, str] = field(default_factory=dict)
    board: dict[str, str] = field(default_factory=dict)
    fabric: str | None = None
    switch: str | None = None
    boot_id: str | None = None
    ports_gb_s: float | None = None


def identity(*, device: str) -> Identity:
    """Describe this worker; ``device`` is ``cuda`` or ``cpu``."""
    import torch

    from pytest_gpucluster.inventory.nics import read_ports_gb_s

    local_rank = int(os.environ["LOCAL_RANK"])
    torch_gpus = torch.cuda.device_count() if device == "cuda" else 0
    gpu: dict[str, Any] = {}
    known: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch_gpus)]
    if local_rank < torch_gpus:
        properties = known[local_rank]
        pci = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        gpu = {"gpu_name": properties.name, "uuid": f"GPU-{properties.uuid}", "pci": pci}
    elif device == "cuda":
        gpu = _label_of_rank(local_rank, [f"GPU-{one.uuid}" for one in known])
    nvml_gpus, hidden_gpus = read_hidden() if device == "cuda" else (None, None)
    return Identity(
        hostname=own_hostname(),
        group_rank=int(os.environ["GROUP_RANK"]),
        local_rank=local_rank,
        versions=read_versions(),
        torch_gpus=torch_gpus,
        nvml_gpus=nvml_gpus,
        hidden_gpus=hidden_gpus,
        variables=read_variables(os.environ),
        stack=read_stack() if device == "cuda" else {},
        switch=read_switch(os.environ),
        boot_id=read_boot_id(),
        ports_gb_s=read_ports_gb_s() if device == "cuda" else None,
        **{**read_by_uuid(gpu.get("uuid")), **gpu},
    )


def _by_nvml(read: Callable[[], Value], otherwise: Value) -> Value:
    """What ``read`` finds in a session of NVML; ``otherwise`` where NVML is silent."""
    from pytest_gpucluster.inventory import nvml_calls

    try:
        with nvml_calls.session():
            return read()
    except nvml_calls.NvmlError:
        return otherwise


def _label_of_rank(local_rank: int, taken: list[str]) -> dict[str, Any]:
    """NVML's label of the GPU that this place should have, and its number where no address is known; empty without NVML.

    ``taken``: the GPUs of the ranks for which torch has one.
    """
    from pytest_gpucluster.inventory import gpu_index

    def read() -> dict[str, Any]:
        uuids = gpu_index.read_uuids()
        index = gpu_index.expected_index(uuids, local_rank, taken)
        if index is None:
            return {}
        shown = sorted(gpu_index.visible_gpus(uuids, os.environ.get("CUDA_VISIBLE_DEVICES")))
        return {**gpu_index.read_label(index), "gpu_number": shown.index(index)}

    return _by_nvml(read, {})


def read_hidden() -> tuple[int, int] | tuple[None, None]:
    """How many GPUs NVML lists here, and how many of them ``CUDA_VISIBLE_DEVICES`` hides; None where NVML is silent."""
    from pytest_gpucluster.inventory import gpu_index

    uuids = _by_nvml(gpu_index.read_uuids, None)
    if uuids is None:
        return None, None
    return len(uuids), len(uuids) - len(gpu_index.visible_gpus(uuids, os.environ.get("CUDA_VISIBLE_DEVICES")))


def read_stack() -> dict[str, str]:
    """The versions of driver, CUDA and NCCL, as far as they can be read."""
    import torch

    from pytest_gpucluster.inventory import gpu_index, nvml_calls

    nccl: Any = getattr(torch.cuda, "nccl", None)
    has_nccl = torch.distributed.is_nccl_available() and nccl is not None
    found = {
        "driver": nvml_calls.value_or_none(gpu_index.read_driver_version),
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, nccl.version())) if has_nccl else None,
    }
    return {name: version for name, version in found.items() if version is not None}


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may change what a rank measures. Those of a log are left out."""
    chosen = (name for name in sorted(environment) if name.startswith(READ) and not name.startswith(NOT_READ))
    return {name: environment[name] for name in chosen}


def read_switch(environment: Mapping[str, str]) -> str | None:
    """The leaf switch of this node: what the site's own :data:`SWITCH` says, else Slurm's topology; None where neither does.

    Slurm gives each step ``SLURM_TOPOLOGY_ADDR``, such as ``spine1.leaf3.node7``, and what each part of it is in
    ``SLURM_TOPOLOGY_ADDR_PATTERN``, such as ``switch.switch.node`` (manual of srun).
    """
    said = environment.get(SWITCH, "").strip()
    if said:
        return said
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(names) != len(kinds) or len(kinds) < 2 or kinds[-1] != "node":
        return None
    return names[-2] or None


def read_boot_id(file: Path | None = None) -> str | None:
    """The kernel's random id of this boot (random(4)); None where it cannot be read, or is none."""
    try:
        return str(UUID((file or BOOT_ID).read_text(encoding="ascii").strip()))
    except (OSError, ValueError):
        return None


def read_versions() -> dict[str, str]:
    """The versions that must agree on every node."""
    packages = {name: version_of(name) for name in VERSIONED}
    return {"python": platform.python_version(), "pytest-gpucluster's files": digest_of_package(), **packages}


def version_of(package: str) -> str:
    """The version of a package as it was installed; a checkout may be run without that."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


@functools.cache
def digest_of_package() -> str:
    """A digest of this package's own Python files: two checkouts may have one version and measure differently."""
    folder = Path(__file__).resolve().parents[1]
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(str(file.relative_to(folder)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:12]


def read_by_uuid(uuid: str | None) -> dict[str, Any]:
    """``serial``, ``board`` and ``fabric`` of a GPU, as :class:`Identity` has them; what NVML does not give is left out."""
    if uuid is None:
        return {}
    from pytest_gpucluster.inventory import gpu_index, nvlinks, nvml, nvml_calls

    readers = {"serial": gpu_index.read_serial, "board": nvml.read_board, "fabric": nvlinks.read_fabric_between_nodes}

    def read() -> dict[str, Any]:
        handle = gpu_index.handle_of(uuid)
        found = {name: nvml_calls.value_or_none(reader, handle) for name, reader in readers.items()}
        return {name: value for name, value in found.items() if value is not None}

    return _by_nvml(read, {})
