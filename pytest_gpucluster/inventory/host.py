"""A host by /proc, /sys and system calls: processors, memory, kernel settings, limits. No tool and no root is needed.

In a container the kernel's values (processors, memory, governor, IOMMU) are the host's; the operating system's name, limits
and /dev/shm are the container's. Each value stands alone: one that is hidden is "not available: why".
"""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.inventory import numa
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.sysfs import SYS, list_names, read_number, read_text

PROC = Path("/proc")
OS_RELEASE = Path("/etc/os-release")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- read, never written
GIB = 2**30
UNLIMITED = "unlimited"
_CAP_IPC_LOCK = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One host at one moment. :class:`NotAvailable`: this kernel, container or permission does not give the value.

    ``governors`` are those of all processors, each once; ``idle_states`` those that the first processor may enter.
    ``iommu`` is ``off``, or the kinds of its groups: ``DMA-FQ`` translates, ``identity`` does not. ``memlock`` and ``nofile``
    are this process's soft limits, in bytes and files, or ``unlimited``; with ``ipc_lock`` (CAP_IPC_LOCK) the first does not
    count.
    """

    kernel: str
    operating_system: str | NotAvailable
    cpu_model: str | NotAvailable
    sockets: int | NotAvailable
    cores: int | NotAvailable
    cpus: int | NotAvailable
    smt: bool | NotAvailable
    governors: list[str] | NotAvailable
    idle_states: list[str] | NotAvailable
    numa_nodes: int
    numa_balancing: bool | NotAvailable
    iommu: str | NotAvailable
    memory_gib: float | NotAvailable
    huge_pages: int | NotAvailable
    transparent_huge_pages: str | NotAvailable
    memlock: int | str
    ipc_lock: bool | NotAvailable
    nofile: int | str
    shm_gib: float | NotAvailable
    mlx5_driver: str | NotAvailable


def read_host(*, proc: Path = PROC, sys: Path = SYS, os_release: Path = OS_RELEASE, shm: Path = SHARED_MEMORY) -> HostFacts:
    """This host, as this process sees it."""
    return HostFacts(
        kernel=platform.release(),
        operating_system=_os_name(os_release),
        cpu_model=_field(proc / "cpuinfo", "model name"),
        **_counts(sys),
        smt=_switch(sys / "devices" / "system" / "cpu" / "smt" / "active"),
        governors=_governors(sys),
        idle_states=_idle_states(sys),
        numa_nodes=len(numa.read_nodes(root=sys)),
        numa_balancing=_switch(proc / "sys" / "kernel" / "numa_balancing"),
        iommu=_iommu(sys),
        memory_gib=_memory_gib(proc),
        huge_pages=_first_number(_field(proc / "meminfo", "HugePages_Total")),
        transparent_huge_pages=_chosen(sys / "kernel" / "mm" / "transparent_hugepage" / "enabled"),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        ipc_lock=_may(_CAP_IPC_LOCK, proc),
        nofile=_limit(resource.RLIMIT_NOFILE),
        shm_gib=_size_gib(shm),
        mlx5_driver=read_text(sys / "module" / "mlx5_core" / "version"),
    )


def _os_name(file: Path) -> str | NotAvailable:
    text = read_text(file)
    if isinstance(text, NotAvailable):
        return text
    names = [line.partition("=")[2].strip("\"'") for line in text.splitlines() if line.startswith("PRETTY_NAME=")]
    return names[0] if names else NotAvailable(f"no PRETTY_NAME ({file})")


def _field(file: Path, name: str) -> str | NotAvailable:
    """What stands after ``name:`` in the first such line."""
    text = read_text(file)
    if isinstance(text, NotAvailable):
        return text
    values = [value.strip() for line in text.splitlines() for key, _, value in [line.partition(":")] if key.strip() == name]
    return values[0] if values and values[0] else NotAvailable(f"no {name!r} ({file})")


def _first_number(text: str | NotAvailable) -> int | NotAvailable:
    if isinstance(text, NotAvailable):
        return text
    word = text.split()[0]
    return int(word) if word.isascii() and word.isdecimal() else NotAvailable(f"{text[:80]!r} is no number")


def _memory_gib(proc: Path) -> float | NotAvailable:
    size_kib = _first_number(_field(proc / "meminfo", "MemTotal"))
    return size_kib if isinstance(size_kib, NotAvailable) else size_kib * 1024 / GIB


def _cpu_folders(sys: Path) -> list[Path] | NotAvailable:
    """The folder of each processor that is online."""
    folder = sys / "devices" / "system" / "cpu"
    online = read_text(folder / "online")
    if isinstance(online, NotAvailable):
        return online
    try:
        return [folder / f"cpu{number}" for number in sorted(numa.parse_cpulist(online))]
    except ValueError as error:
        return NotAvailable(str(error))


def _counts(sys: Path) -> dict[str, int | NotAvailable]:
    """Sockets, cores and hardware threads that are online."""
    folders = _cpu_folders(sys)
    if isinstance(folders, NotAvailable):
        return dict.fromkeys(("sockets", "cores", "cpus"), folders)
    places = [tuple(read_number(cpu / "topology" / name) for name in ("physical_package_id", "core_id")) for cpu in folders]
    hidden = next((number for place in places for number in place if isinstance(number, NotAvailable)), None)
    if hidden is not None:
        return {"cpus": len(folders), "sockets": hidden, "cores": hidden}
    return {"cpus": len(folders), "sockets": len({socket for socket, _ in places}), "cores": len({*places})}


def _governors(sys: Path) -> list[str] | NotAvailable:
    """Of every processor; a virtual machine has none, and a missing one is said."""
    folders = _cpu_folders(sys)
    if isinstance(folders, NotAvailable):
        return folders
    found = [read_text(cpu / "cpufreq" / "scaling_governor") for cpu in folders]
    hidden = next((one for one in found if isinstance(one, NotAvailable)), None)
    return hidden if hidden is not None else sorted({one for one in found if isinstance(one, str)})


def _idle_states(sys: Path) -> list[str] | NotAvailable:
    folder = sys / "devices" / "system" / "cpu" / "cpu0" / "cpuidle"
    names = list_names(folder)
    if isinstance(names, NotAvailable):
        return names
    enabled = [name for name in names if read_text(folder / name / "disable") != "1"]
    found = [read_text(folder / name / "name") for name in enabled]
    hidden = next((one for one in found if isinstance(one, NotAvailable)), None)
    return hidden if hidden is not None else [one for one in found if isinstance(one, str)]


def _iommu(sys: Path) -> str | NotAvailable:
    folder = sys / "kernel" / "iommu_groups"
    groups = list_names(folder)
    if isinstance(groups, NotAvailable):
        return groups
    kinds = {str(read_text(folder / group / "type")) for group in groups}
    return ", ".join(sorted(kinds)) or "off"


def _switch(file: Path) -> bool | NotAvailable:
    """A setting that is zero for off."""
    number = read_number(file)
    return number if isinstance(number, NotAvailable) else number != 0


def _chosen(file: Path) -> str | NotAvailable:
    """``madvise`` of ``always [madvise] never``."""
    text = read_text(file)
    if isinstance(text, NotAvailable):
        return text
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else NotAvailable(f"{text[:80]!r} chooses nothing ({file})")


def _limit(kind: int) -> int | str:
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _may(capability: int, proc: Path) -> bool | NotAvailable:
    """Whether this process has a capability in effect."""
    text = _field(proc / "self" / "status", "CapEff")
    if isinstance(text, NotAvailable):
        return text
    try:
        return bool(int(text, 16) >> capability & 1)
    except ValueError:
        return NotAvailable(f"{text[:80]!r} are no capabilities")


def _size_gib(folder: Path) -> float | NotAvailable:
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return NotAvailable(f"{error.strerror} ({folder})")
    return found.f_blocks * found.f_frsize / GIB
