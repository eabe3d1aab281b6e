"""All that the readers see of this machine, as plain data: for people who look at it. Loads no torch.

NVML is read in a child process, because a driver may hang. What could not be read is ``{"not_available": why}``.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.detect import survey_gpus
from pytest_gpucluster.inventory.host import read_host
from pytest_gpucluster.inventory.identity import NOT_INSTALLED, version_of
from pytest_gpucluster.inventory.kubernetes import read_kubernetes
from pytest_gpucluster.inventory.nics import read_nics
from pytest_gpucluster.inventory.pci_tree import read_gpu_paths, read_nvidia_gpus, read_path, read_peer_memory
from pytest_gpucluster.inventory.program import Ended, run_by_name
from pytest_gpucluster.inventory.reading import CLOSED, EVIDENCE, NOBODY, NONE, NotAvailable, apply, as_plain, read, row
from pytest_gpucluster.inventory.sysfs import PROC, SYS, list_if_there, list_names, read_at, read_text, target_of

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
    versions = {name: version_of(name) for name in PACKAGES}
    found.update({name: NotAvailable(one) if one == NOT_INSTALLED else one for name, one in versions.items()})
    found["torch_cuda"] = _torch_cuda()
    for name in WHEELS:
        # By the names of folders: to read the metadata of all that is installed takes most of a second.
        files = (file for folder in sys.path for file in Path(folder).glob(f"{name.replace('-', '_')}*.dist-info/METADATA"))
        installed: dict[str, Any] = dict(file.parent.stem.replace("_", "-").rsplit("-", 1) for file in files)
        found |= installed or {name: NotAvailable("not installed as a wheel")}
    found["cuda_toolkit"] = apply(_cuda_version, read_text(toolkit))
    found.update({f"module_{name}": read_text(root / "module" / name / "version") for name in MODULES})
    return found


PROGRAMS = (os.defpath, "/usr/local/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")
"""Where administrators' programs are, besides the search path of this process."""
ANSWER_S = 10.0
KNOWN, OF_CONTAINERS = "known_versions", "container_versions"
_DOCKER = r"^Docker version (?:[^,\s]+, build (?=\d+\.\d+\.\d+[-+~]))?([^,\s]+)"
"""A distribution has its own version where Docker has the number of the commit."""
_SWITCH_BIOS = re.compile(r"^BIOS Version:\s*(\S+)", re.MULTILINE)

KVM_NESTED = {NONE: NONE, "Y": "allowed", "1": "allowed", "N": "not allowed", "0": "not allowed"}


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where versions are read. ``path`` is the search path of programs."""

    proc: Path
    sys: Path
    toolkit: Path
    path: str


def _by_program(pattern: str, *commands: str) -> Callable[[_Sources], str | NotAvailable]:
    """A source: the version that the first of these commands says that is installed; :data:`NONE` where none is."""

    def version(where: _Sources) -> str | NotAvailable:
        for program, *arguments in map(str.split, commands):
            if shutil.which(program, path=where.path) is not None:
                said = run_by_name(program, arguments, within_s=ANSWER_S, path=where.path)
                return apply(partial(_version_in, pattern, program), said)
        return NONE

    return version


def _version_in(pattern: str, program: str, ended: Ended) -> str | NotAvailable:
    found = re.search(pattern, ended.printed, re.MULTILINE) if ended.exit_code == 0 else None
    return found[1] if found else NotAvailable(f"{program} says no version: {ended.gist}")


def _if_there(file: Path, convert: Any = str) -> Any:
    """What a file says; :data:`NONE` where there is none, and the folder above its own is shown."""
    try:
        file.parent.parent.stat()
        file.stat()
    except FileNotFoundError as error:
        return NONE if error.filename == str(file) else NotAvailable(f"{error.strerror} ({error.filename})")
    except OSError:
        pass
    return apply(convert, read_text(file))


def _ofed(where: _Sources) -> str | NotAvailable:
    """By its program, otherwise by the adapters' driver; the kernel's own driver has no version."""
    found = _by_program(r"^(\S*?\d+\.\d+-\S*?):?$", "ofed_info -s")(where)
    return found if found != NONE else _if_there(where.sys / "module" / "mlx5_core" / "version")


def _switches(where: _Sources) -> dict[str, str | NotAvailable] | NotAvailable:
    """The BIOS of each NVSwitch by its PCI address; empty on a host without."""

    def bios(text: str) -> str | NotAvailable:
        found = _SWITCH_BIOS.search(text)
        return found[1] if found else NotAvailable(f"{text[:80]!r} has no BIOS version")

    folder = where.proc / "driver" / "nvidia-nvswitch" / "devices"
    return apply(
        lambda names: {name: apply(bios, read_text(folder / name / "information")) for name in names}, list_if_there(folder)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions of a host that neither torch nor NVML knows; ``none`` where it has no such thing.

    In a container these are the container's own, but those of kernel modules and NVSwitches are the host's. Old releases of the
    container toolkit have its library alone, without the command.
    """

    machine: str = row(lambda _: platform.machine(), "x86_64", EVIDENCE, "of `known_versions`: some faults are of ARM alone")
    cuda_toolkit: str | NotAvailable = row(lambda where: _if_there(where.toolkit, _cuda_version), "13.1.0", KNOWN)
    ofed: str | NotAvailable = row(_ofed, "MLNX_OFED_LINUX-24.10-3.2.5.0", KNOWN)
    nvswitches: dict[str, str | NotAvailable] | NotAvailable = row(_switches, {}, KNOWN)
    runc: str | NotAvailable = row(
        _by_program(r"^runc version (\S+)", "runc --version"), NONE, OF_CONTAINERS, "not there, not judged"
    )
    docker: str | NotAvailable = row(_by_program(_DOCKER, "docker --version"), NONE, OF_CONTAINERS, "of its command, as `runc`")
    container_toolkit: str | NotAvailable = row(
        _by_program(r"version:? (\S+)", "nvidia-ctk --version", "nvidia-container-cli --version"),
        NONE,
        OF_CONTAINERS,
        "as `runc`",
    )


def read_installed(*, proc: Path = PROC, sys: Path = SYS, toolkit: Path = TOOLKIT, path: str | None = None) -> Software:
    """The versions of this host; ``path`` is where programs are searched (by default this process's and those of root)."""
    return read(Software, _Sources(proc, sys, toolkit, _searched(path)))


def _searched(path: str | None) -> str:
    return os.pathsep.join((os.environ.get("PATH", ""), *PROGRAMS)) if path is None else path


MONITORS = ("dcgm-exporter", "node_exporter", "nv-hostengine", "prometheus", "telegraf", "otelcol", "alloy", "gpud")
"""Programs that watch a host, as the kernel names their processes (15 characters)."""
_VBOOST = re.compile(r"^\|\s*(\d+)\s*\|?\s*vboost\s*\|?\s*(\d+)\s*\|?\s*(\d+)", re.MULTILINE)


def _vboost(where: _Sources) -> str | NotAvailable:
    """``0 of 4`` by GPU: the slider between the clocks of SMs and memory. A driver that hangs is left after a while."""
    said = run_by_name("nvidia-smi", ("boost-slider", "-l"), within_s=ANSWER_S, path=where.path)

    def in_text(ended: Ended) -> str | NotAvailable:
        found = _VBOOST.findall(ended.printed)
        return ", ".join(f"GPU {gpu}: {now} of {most}" for gpu, now, most in found) or NotAvailable(
            f"nvidia-smi shows no vboost: {ended.gist}"
        )

    return apply(in_text, said)


def _monitors(where: _Sources) -> str | NotAvailable:
    def running(names: list[str]) -> str:
        found = {str(read_text(where.proc / pid / "comm")) for pid in names if pid.isdecimal()}
        return ", ".join(one for one in MONITORS if one[:15] in found) or NONE

    return apply(running, list_names(where.proc))


def _modules(_: _Sources) -> str | NotAvailable:
    """Lmod as a login shell shows it; its folder where this is none."""
    if version := os.environ.get("LMOD_VERSION"):
        return version
    folder = os.environ.get("MODULESHOME")
    return f"in {folder}" if folder else NotAvailable("neither LMOD_VERSION nor MODULESHOME is set: ask in a login shell")


def _nested(where: _Sources) -> str | NotAvailable:
    """Whether KVM here may start guests in guests, by its module; ``none`` without KVM."""
    folder = where.sys / "module"

    def of_modules(names: list[str]) -> str | NotAvailable:
        loaded = [name for name in ("kvm_intel", "kvm_amd") if name in names]
        said = read_text(folder / loaded[0] / "parameters" / "nested") if loaded else NONE
        return apply(lambda text: KVM_NESTED.get(text, NotAvailable(f"{text[:80]!r} is neither Y nor N")), said)

    return apply(of_modules, list_names(folder))


def _command_queues(where: _Sources) -> str | NotAvailable:
    """The units of Grace's command queues for guests (CMDQV) that have a driver; ``none`` on other machines."""
    folder = where.sys / "bus" / "platform" / "drivers" / "tegra241_cmdqv"
    return apply(lambda names: ", ".join(one for one in names if ":" in one) or NONE, list_if_there(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What a host offers its users, and how it is watched; ``none`` where it has no such thing. No value of it is bad."""

    apptainer: str | NotAvailable = row(
        _by_program(r"version (\S+)", "apptainer --version", "singularity --version"), NONE, NOBODY, "or Singularity"
    )
    helm: str | NotAvailable = row(_by_program(r"\A(v\d\S*)", "helm version --short"), NONE, NOBODY, "of its command")
    modules: str | NotAvailable = row(_modules, NONE, NOBODY, "Lmod or environment modules, by variables")
    monitors: str | NotAvailable = row(_monitors, NONE, NOBODY, "programs of known names that run here")
    vboost: str | NotAvailable = row(_vboost, NONE, NOBODY, "never run on a GPU; its table is that of NVIDIA's manual")
    nested_guests: str | NotAvailable = row(_nested, NONE, NOBODY, "whether a guest may start guests")
    smmu_queues: str | NotAvailable = row(_command_queues, NONE, NOBODY, "never run on a Grace")


def read_offered(*, proc: Path = PROC, sys: Path = SYS, path: str | None = None) -> Offered:
    """What this host offers; ``path`` is where programs are searched, as in :func:`read_installed`."""
    return read(Offered, _Sources(proc, sys, TOOLKIT, _searched(path)))


MANAGED = "host_management"
BMC_DRIVERS = ("cdc_ether", "cdc_ncm", "rndis_host")
"""Drivers of network interfaces over USB, by which a BMC offers Redfish to its host (Redfish Host Interface, DSP0270)."""


def _open_devices(pattern: str, roots: tuple[Path, Path]) -> str | NotAvailable:
    """Which device files of a kind this process may open for writing; ``none`` where there are none, else ``closed``."""
    devices, _ = roots
    found = read_at(devices, lambda: sorted(file for file in devices.iterdir() if re.fullmatch(pattern, file.name)))
    if isinstance(found, NotAvailable):
        return found
    opened = [str(file) for file in found if os.access(file / "misc" if file.is_dir() else file, os.R_OK | os.W_OK)]
    return ", ".join(opened) or (CLOSED if found else NONE)


def _bmc_networks(roots: tuple[Path, Path]) -> list[str] | NotAvailable:
    """The network interfaces over USB: on a server they lead to the BMC."""
    folder = roots[1] / "class" / "net"
    return apply(
        lambda names: [name for name in names if target_of(folder / name / "device" / "driver") in BMC_DRIVERS],
        list_if_there(folder),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Management:
    """Ways from the host to what manages it. A device file is ``none``, ``closed`` to this process, or named.

    In a container the device files are the container's: those of the host that it was not given are no way from here.
    """

    bmc: str | NotAvailable = row(partial(_open_devices, r"ipmi\d+"), NONE, MANAGED, "the kernel's way to the BMC (IPMI)")
    bmc_networks: list[str] | NotAvailable = row(_bmc_networks, [], MANAGED, "network interfaces over USB")
    rshim: str | NotAvailable = row(partial(_open_devices, r"rshim\d+"), NONE, MANAGED, "the console and boot of a BlueField")


def read_management(*, devices: Path = Path("/dev"), sys: Path = SYS) -> Management:
    """Ways from this host, as this process has them, to its BMC and DPUs."""
    return read(Management, (devices, sys))


DMI = ("chassis_serial", "board_serial", "product_name", "board_name", "bios_version")
"""What the firmware says of the host. Linux gives the serials to root alone."""


def read_dmi(*, root: Path = SYS) -> dict[str, str | NotAvailable]:
    """Models and serials of chassis and board, by name; not available without root, in a container, or without such files."""
    return {name: read_text(root / "class" / "dmi" / "id" / name) for name in DMI}


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


def _cuda_version(text: str) -> str | NotAvailable:
    """Of the text of the toolkit's own ``version.json``."""
    try:
        return str(json.loads(text)["cuda"]["version"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return NotAvailable(f"no version of cuda: {type(error).__name__}")


PREFIXES = ("NCCL_", "CUDA_", "NVIDIA_VISIBLE", "UCX_", "FI_", "OMP_NUM")
"""Of environment variables that change what the GPUs do."""


def read_machine(*, root: Path = SYS, nvml_s: float | None = None) -> dict[str, Any]:
    """Host, GPUs, PCIe ways, adapters and software of this machine.

    ``root`` is where sysfs is mounted; ``nvml_s`` is the deadline of NVML, by default that of :func:`survey_gpus`.
    """
    nics = read_nics(root=root)
    known = [] if isinstance(nics, NotAvailable) else nics
    found = {
        "hostname": socket.gethostname(),
        "host": read_host(sys=root),
        "dmi": read_dmi(root=root),
        "gpus": _gpus(nvml_s),
        "gpus_on_pci_bus": apply(len, read_nvidia_gpus(root=root)),
        "gpu_ways": read_gpu_paths(root=root),
        "nics": nics,
        "nic_ways": {nic.device: apply(partial(read_path, root=root), nic.pci) for nic in known},
        "peer_memory": read_peer_memory(root=root),
        "software": read_software(root=root),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIXES)},
    }
    return {name: as_plain(value) for name, value in found.items()}


def read_surroundings() -> dict[str, Any]:
    """What this machine offers its users, and what Kubernetes says of it, if it can be asked; programs of the host are run."""
    offered = {"docker": as_plain(read_installed().docker), **as_plain(read_offered())}
    return {"offered": offered, "kubernetes": as_plain(read_kubernetes(socket.gethostname()))}


def _gpus(nvml_s: float | None) -> dict[str, Any]:
    try:
        return survey_gpus(nvml_s)
    except ConfigurationError as error:
        return {"status": "error", "error": str(error), "gpus": [], "count": 0, "driver_cuda": NotAvailable(str(error))}
