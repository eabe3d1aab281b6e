"""A host by /proc, /sys and system calls: processors, memory, settings, limits, mounts, errors. No tool and no root is needed.

In a container the kernel's values (processors, memory, governor, IOMMU) are the host's; the operating system's name, limits
and /dev/shm are the container's. Errors are counted in memory (EDAC) and on PCIe ways (AER). A virtual machine shows neither,
as the hypervisor has them. Each value stands alone: one that is hidden is "not available: why".
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pytest_gpucluster.inventory import numa, reading
from pytest_gpucluster.inventory.pci_tree import is_nvidia_gpu
from pytest_gpucluster.inventory.reading import EVIDENCE, NotAvailable, all_or_why, apply, judged, matching, or_none, read, row
from pytest_gpucluster.inventory.sysfs import PROC, SYS, SysfsFile, list_if_there, list_names, read_at, read_number, read_text

OS_RELEASE = Path("/etc/os-release")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- read, never written
GIB = 2**30
UNLIMITED = "unlimited"
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
NO_LIMIT_BYTES = 1 << 62
"""Version 1 of the cgroups writes the greatest number of whole pages for no limit."""
MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs")
SETTINGS, LIMITS, FACT = "host_settings, drift", "host_limits, drift", "drift"
TWO_SOCKETS = [[socket, core] for socket in range(2) for core in range(56)]
_CAP_IPC_LOCK = 14
_ESCAPED = re.compile(r"\\([0-7]{3})")

_first_number = matching(r"(\d{1,20})(?!\S)", "number", int)
_balances = partial(reading.yes_or_no, most=3)
"""1 is usual, 2 between tiers of memory, 3 both, by the kernel's page on numa_balancing."""
_signed = matching(r"-?\d{1,9}\Z", "number", int)


@dataclass(frozen=True, slots=True)
class _Roots:
    """Where the files of a host are."""

    proc: Path
    sys: Path
    os_release: Path
    shm: Path

    @property
    def cpu(self) -> Path:
        """The folder of the processors."""
        return self.sys / "devices" / "system" / "cpu"


# --- Facts ---


def _proc(name: str, how: Callable[[Path], Any] = read_text) -> Callable[[_Roots], Any]:
    """A source: a file of ``/proc``."""
    return lambda host: how(host.proc / name)


def _sys(name: str, how: Callable[[Path], Any] = read_text) -> Callable[[_Roots], Any]:
    """A source: a file or folder of ``/sys``."""
    return lambda host: how(host.sys / name)


def _field(name: str, file: Path, *, sign: str = ":") -> str | NotAvailable:
    """What stands after ``name:`` in the first such line, without quotes."""

    def in_text(text: str) -> str | NotAvailable:
        lines = (line.partition(sign) for line in text.splitlines())
        found = next((value.strip().strip("\"'") for key, _, value in lines if key.strip() == name), "")
        return found or NotAvailable(f"no {name!r} ({file})")

    return apply(in_text, read_text(file))


def read_available_gib(*, proc: Path = PROC) -> float | NotAvailable:
    """The memory of this host that is free for programs, in GiB (2^30 bytes), as the kernel estimates it."""
    return apply(_gib, _field("MemAvailable", proc / "meminfo"))


def _gib(size_kib: str) -> float | NotAvailable:
    return apply(lambda number: number * 1024 / GIB, _first_number(size_kib))


def _cpu_folders(host: _Roots) -> list[Path] | NotAvailable:
    """The folder of each processor that is online."""
    online = numa.read_cpulist(host.cpu / "online")
    return apply(lambda numbers: [host.cpu / f"cpu{number}" for number in sorted(numbers)], online)


def _places(host: _Roots) -> list[list[int]] | NotAvailable:
    """Socket and core of each processor that is online."""
    names = ("physical_package_id", "core_id")
    return apply(
        lambda folders: all_or_why(all_or_why(read_number(cpu / "topology" / name) for name in names) for cpu in folders),
        _cpu_folders(host),
    )


def _governors(host: _Roots) -> list[str] | NotAvailable:
    """Of every processor; a virtual machine has none, and a missing one is said."""
    found = apply(lambda cpus: all_or_why(read_text(cpu / "cpufreq" / "scaling_governor") for cpu in cpus), _cpu_folders(host))
    return apply(lambda names: sorted({*names}), found)


def _idle_states(host: _Roots) -> list[str] | NotAvailable:
    folder = host.cpu / "cpu0" / "cpuidle"
    used = apply(lambda names: [one for one in names if read_text(folder / one / "disable") != "1"], list_names(folder))
    return apply(lambda names: all_or_why(read_text(folder / one / "name") for one in names), used)


def _iommu(host: _Roots) -> str | NotAvailable:
    """The kinds of the groups with a GPU or an RDMA adapter; where no group has one, those of half of the groups or more."""
    folder = host.sys / "kernel" / "iommu_groups"

    def kinds(groups: list[str]) -> str:
        types = {group: str(read_text(folder / group / "type")) for group in groups}
        near = {kind for group, kind in types.items() if _has_gpu_or_adapter(folder / group / "devices")}
        usual = {kind for kind, number in Counter(types.values()).items() if 2 * number >= len(types)}
        return ", ".join(sorted(near or usual or {*types.values()})) or "off"

    return apply(kinds, list_names(folder))


def _translated(host: _Roots) -> list[str] | NotAvailable:
    """The GPUs and adapters by PCI address whose group the IOMMU translates."""
    folder = host.sys / "kernel" / "iommu_groups"

    def devices(groups: list[str]) -> list[str]:
        dma = [folder / group / "devices" for group in groups if "DMA" in str(read_text(folder / group / "type"))]
        return sorted(name for one in dma if _has_gpu_or_adapter(one) for name in or_none(list_names(one)) or ())

    return apply(devices, list_names(folder))


def _has_gpu_or_adapter(devices: Path) -> bool:
    names = or_none(list_names(devices)) or []
    try:
        return any((devices / name / "infiniband").exists() or is_nvidia_gpu(devices / name) for name in names)
    except OSError:
        return False


def _chosen(text: str) -> str | NotAvailable:
    """``madvise`` of ``always [madvise] never``."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else NotAvailable(f"{text[:80]!r} chooses nothing")


def _cpu_faults(host: _Roots) -> list[str] | NotAvailable:
    """Faults of the processors (``vmscape``) for which this kernel has no mend in effect, by its own words."""

    def open_ones(names: list[str]) -> list[str] | NotAvailable:
        known, refused = reading.split({name: read_text(host.cpu / "vulnerabilities" / name) for name in names})
        return next(iter(refused.values()), [name for name, text in known.items() if text.startswith("Vulnerable")])

    return apply(open_ones, list_names(host.cpu / "vulnerabilities"))


def _gdrcopy(host: _Roots) -> str | NotAvailable:
    """The version of the module gdrdrv. A host without it differs from one that has it; it is not unread."""
    file = host.sys / "module" / "gdrdrv" / "version"
    return apply(lambda names: read_text(file) if "gdrdrv" in names else "not loaded", list_names(host.sys / "module"))


def _profilers(params: str) -> str | NotAvailable:
    """Who may read a GPU's performance counters, by the parameters of the NVIDIA driver."""
    found = re.search(r"^RmProfilingAdminOnly: ([01])$", params, re.MULTILINE)
    return ("all users", "root")[int(found[1])] if found else NotAvailable("the driver does not show RmProfilingAdminOnly")


def _limit(kind: int, _host: _Roots) -> int | str:
    soft, _ = resource.getrlimit(kind)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _may_lock(capabilities: str) -> bool | NotAvailable:
    """Whether this process has CAP_IPC_LOCK in effect."""
    try:
        return bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1)
    except ValueError:
        return NotAvailable(f"{capabilities[:80]!r} are no capabilities")


def _size_gib(host: _Roots) -> float | NotAvailable:
    found = read_at(host.shm, lambda: os.statvfs(host.shm))
    return apply(lambda known: known.f_blocks * known.f_frsize / GIB, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One host at one moment. :class:`NotAvailable`: this kernel, container or permission does not give the value.

    ``governors`` are those of all processors, each once; ``idle_states`` those that the first processor may enter.
    ``iommu`` is ``off``, or the kinds of the groups of GPUs and adapters: ``DMA-FQ`` translates, ``identity`` does not.
    ``memlock`` and ``nofile`` are this process's soft limits, in bytes and files, or ``unlimited``; with ``ipc_lock``
    (CAP_IPC_LOCK) the first does not count. ``cpu_faults`` are those of the processors that the kernel calls vulnerable.
    ``perf_events`` is the kernel's ``perf_event_paranoid``, ``gpu_counters`` who may profile a GPU: ``root`` or ``all users``.
    """

    kernel: str = row(lambda _: platform.release(), "6.8.0-simulated", "drift, known_versions")
    operating_system: str | NotAvailable = row(lambda host: _field("PRETTY_NAME", host.os_release, sign="="), "simulated", FACT)
    cpu_model: str | NotAvailable = row(_proc("cpuinfo", partial(_field, "model name")), "simulated", FACT)
    sockets: int | NotAvailable = row(_places, TWO_SOCKETS, FACT, convert=lambda places: len({socket for socket, _ in places}))
    cores: int | NotAvailable = row(_places, TWO_SOCKETS, FACT, convert=lambda places: len({tuple(place) for place in places}))
    cpus: int | NotAvailable = row(_cpu_folders, [Path()] * 224, FACT, convert=len)
    smt: bool | NotAvailable = row(_sys("devices/system/cpu/smt/active", read_number), 1, FACT, convert=reading.yes_or_no)
    governors: list[str] | NotAvailable = row(_governors, ["performance"], SETTINGS)
    idle_states: list[str] | NotAvailable = row(_idle_states, ["POLL", "C1"], FACT)
    numa_nodes: int | NotAvailable = row(lambda host: numa.read_node_numbers(root=host.sys), [0, 1], FACT, convert=len)
    numa_balancing: bool | NotAvailable = row(_proc("sys/kernel/numa_balancing", read_number), 0, SETTINGS, convert=_balances)
    iommu: str | NotAvailable = row(_iommu, "identity", SETTINGS)
    translated: list[str] | NotAvailable = row(_translated, [], EVIDENCE, "of `host_settings`: it names the devices")
    memory_gib: float | NotAvailable = row(
        _proc("meminfo", partial(_field, "MemTotal")), f"{2015 * GIB // 1024} kB", FACT, convert=_gib
    )
    huge_pages: int | NotAvailable = row(_proc("meminfo", partial(_field, "HugePages_Total")), "0", FACT, convert=_first_number)
    transparent_huge_pages: str | NotAvailable = row(
        _sys("kernel/mm/transparent_hugepage/enabled"), "always [madvise] never", SETTINGS, convert=_chosen
    )
    memlock: int | str = row(partial(_limit, resource.RLIMIT_MEMLOCK), UNLIMITED, LIMITS)
    ipc_lock: bool | NotAvailable = row(_proc("self/status", partial(_field, "CapEff")), "0", LIMITS, convert=_may_lock)
    nofile: int | str = row(partial(_limit, resource.RLIMIT_NOFILE), 1048576, LIMITS)
    shm_gib: float | NotAvailable = row(_size_gib, 1007.0, LIMITS)
    mlx5_driver: str | NotAvailable = row(_sys("module/mlx5_core/version"), "simulated", FACT)
    cpu_faults: list[str] | NotAvailable = row(_cpu_faults, [], FACT)
    perf_events: int | NotAvailable = row(_proc("sys/kernel/perf_event_paranoid"), "2", FACT, convert=_signed)
    gpu_counters: str | NotAvailable = row(_proc("driver/nvidia/params"), "RmProfilingAdminOnly: 1", FACT, convert=_profilers)
    gdrcopy: str | NotAvailable = row(_gdrcopy, "2.4", FACT)


def read_host(*, proc: Path = PROC, sys: Path = SYS, os_release: Path = OS_RELEASE, shm: Path = SHARED_MEMORY) -> HostFacts:
    """This host, as this process sees it."""
    return read(HostFacts, _Roots(proc, sys, os_release, shm))


# --- The memory that the cgroups of a Slurm job leave to this process ---


def read_memory_limit(job: str, *, own: Path = OWN_CGROUPS, cgroups: Path = CGROUPS) -> int | NotAvailable:
    """The lowest limit in bytes from the job's cgroup down to this process; :data:`NO_LIMIT_BYTES` where none is set.

    A process whose cgroup is another one than the job's is not held by the job. Where only the root is shown (``/``), a
    namespace may hide the job's cgroup: then nothing is known.
    """
    text = read_text(own)
    if isinstance(text, NotAvailable):
        return text
    groups = _memory_groups(text, cgroups)
    for root, path in groups:
        parts = Path(path).parts
        if f"job_{job}" in parts:
            first = parts.index(f"job_{job}") + 1
            folders = [root.joinpath(*(part for part in parts[:end] if part != "/")) for end in range(first, len(parts) + 1)]
            return _lowest(folders)
    if any(path != "/" for _, path in groups):
        return NO_LIMIT_BYTES
    return NotAvailable(f"no cgroup of job {job} is shown here: a container may hide it")


def _memory_groups(text: str, cgroups: Path) -> list[tuple[Path, str]]:
    """Where the controller of memory lies, and the path below: version 1 by its name, then version 2 (``0::/path``)."""
    lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    first = [(cgroups / "memory", path) for _, names, path in lines if "memory" in names.split(",")]
    return [*first, *((cgroups, path) for number, names, path in lines if (number, names) == ("0", ""))]


def _lowest(folders: list[Path]) -> int | NotAvailable:
    texts = [read_text(folder / name) for folder in folders for name in ("memory.max", "memory.limit_in_bytes")]
    limits = [text for text in texts if isinstance(text, str)]
    if not limits:
        return NotAvailable(f"no limit of memory can be read ({folders[0]})")
    sizes = all_or_why(_first_number(text) for text in limits if text != "max")
    if isinstance(sizes, NotAvailable):
        return NotAvailable(f"a limit of memory is no number ({folders[0]})")
    return min([NO_LIMIT_BYTES, *sizes])


# --- The file system below a path ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mounted file system: where it is mounted, its type (``nfs4``, ``ext4``) and its source (``server:/export``)."""

    folder: str
    kind: str
    source: str

    @property
    def is_in_memory(self) -> bool:
        """Whether no disk lies below: what is written stays in the memory of the host."""
        return self.kind in IN_MEMORY

    def __str__(self) -> str:
        """``nfs4 server:/export at /mnt/shared``, for the evidence of a report."""
        return f"{self.kind} {self.source} at {self.folder}"


def read_mount(path: Path, *, table: Path = MOUNTS) -> Mount | NotAvailable:
    """The file system that holds ``path``, links resolved. Of mounts over each other the last one counts."""
    try:
        lines = table.read_text(encoding="utf-8", errors="backslashreplace").splitlines()
        real = path.resolve()
    except OSError as error:
        return NotAvailable(str(error))
    mounts = [mount for line in lines if (mount := _parse(line)) is not None and real.is_relative_to(mount.folder)]
    if not mounts:
        return NotAvailable(f"{table} has no mount for {real}")
    return max(reversed(mounts), key=lambda mount: len(Path(mount.folder).parts))


def _parse(line: str) -> Mount | None:
    """One line of the table: ``36 35 98:0 /root /mnt rw,noatime shared:1 - ext4 /dev/sda rw``. None for another form."""
    before, _, after = line.partition(" - ")
    of_folder, of_source = before.split(" "), after.split(" ")
    if len(of_folder) < 6 or len(of_source) < 2:
        return None
    return Mount(folder=_plain(of_folder[4]), kind=_plain(of_source[0]), source=_plain(of_source[1]))


def _plain(text: str) -> str:
    r"""The text with ``\040`` for a blank, as the kernel writes it, undone."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


# --- Errors that the kernel has counted ---

NO_LIMIT = "of `host_errors`: nobody publishes a limit"


def _total(file: Path) -> int | NotAvailable:
    """The last line of a file of AER: ``TOTAL_ERR_FATAL 0``."""
    text = read_text(file)
    if isinstance(text, NotAvailable):
        return text
    number = or_none(_first_number(text.splitlines()[-1].rpartition(" ")[2]))
    return NotAvailable(f"{text[-80:]!r} has no total ({file})") if number is None else number


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryController:
    """What a memory controller of the host has counted since its driver was loaded."""

    name: str = judged(EVIDENCE, "of `host_errors`: it names the part")
    uncorrected: int | NotAvailable = row(SysfsFile("ue_count", read_number), 0, "host_errors")
    corrected: int | NotAvailable = row(SysfsFile("ce_count", read_number), 0, EVIDENCE, NO_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieErrors:
    """What a PCIe device or bridge has counted since the host was booted."""

    name: str = judged(EVIDENCE, "of `host_errors`: it names the part")
    fatal: int | NotAvailable = row(SysfsFile("aer_dev_fatal", _total), 0, "host_errors")
    nonfatal: int | NotAvailable = row(SysfsFile("aer_dev_nonfatal", _total), 0, "host_errors")
    corrected: int | NotAvailable = row(SysfsFile("aer_dev_correctable", _total), 0, EVIDENCE, NO_LIMIT)


def _interrupts(kind: str, text: str) -> int | NotAvailable:
    """The interrupts of a kind on all processors together: a line ``MCE:  0  0   Machine check exceptions``."""
    found = re.search(rf"^\s*{kind}:((?:[ \t]+\d+\b)*)", text, re.MULTILINE)
    return sum(map(int, found[1].split())) if found else NotAvailable(f"the kernel counts no {kind} here")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineChecks:
    """What the processors of the host have reported since it was booted (x86; other processors report by the firmware)."""

    name: str = judged(EVIDENCE, "of `host_errors`: it names the part")
    exceptions: int | NotAvailable = row(partial(_interrupts, "MCE"), 0, "host_errors")
    deferred: int | NotAvailable = row(partial(_interrupts, "DFR"), 0, EVIDENCE, NO_LIMIT)


def read_machine_checks(*, proc: Path = PROC) -> list[MachineChecks] | NotAvailable:
    """The counts of the processors; none where the kernel keeps none, as in most virtual machines."""

    def checks(text: str) -> list[MachineChecks] | NotAvailable:
        if not text.startswith("CPU"):
            return NotAvailable(f"{text[:80]!r} is no table of interrupts ({proc / 'interrupts'})")
        found = read(MachineChecks, text, name="CPUs")
        return [found] if not isinstance(found.exceptions, NotAvailable) else []

    return apply(checks, read_text(proc / "interrupts"))


def read_memory_controllers(*, root: Path = SYS) -> list[MemoryController] | NotAvailable:
    """The memory controllers that the kernel shows, by name; none without EDAC."""
    folder = root / "devices" / "system" / "edac" / "mc"

    def controllers(names: list[str]) -> list[MemoryController]:
        own = [name for name in names if name.startswith("mc") and name[2:].isdecimal()]
        return [read(MemoryController, folder / name, name=name) for name in own]

    return apply(controllers, list_if_there(folder))


def read_pcie_errors(addresses: Iterable[str], *, root: Path = SYS) -> list[PcieErrors]:
    """The counts of these PCI addresses; those for which the kernel keeps none are left out."""
    folders = {address: root / "bus" / "pci" / "devices" / address for address in sorted({*addresses})}
    return [read(PcieErrors, folder, name=name) for name, folder in folders.items() if _has_counts(folder)]


def _has_counts(folder: Path) -> bool:
    """Whether the kernel counts there; where that cannot be seen, the counts say why."""
    try:
        return (folder / "aer_dev_fatal").exists()
    except OSError:
        return True
