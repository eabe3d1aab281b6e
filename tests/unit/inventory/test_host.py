"""A host's facts by made /proc and /sys: a whole host, a virtual machine, a container that hides them."""

from __future__ import annotations

import os
import resource
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.inventory import host as module
from pytest_gpucluster.inventory.host import HostFacts, read_available_gib, read_host
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from pathlib import Path

MEMINFO = "MemTotal:       2113536 kB\nMemFree:  1 kB\nHugePages_Total:      16\n"
CPUINFO = "processor\t: 0\nmodel name\t: Xeon Platinum 8480C\nmodel name\t: another\n"
TOPOLOGY = {cpu: (cpu // 2 % 2, cpu // 4) for cpu in range(8)}
"""Socket and core of each CPU: two sockets with two cores of two threads."""


def write(file: Path, text: str) -> None:
    """A file with its folders."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Path]:
    """A host with two sockets, as Linux 6.8 shows it."""
    sys, proc = tmp_path / "sys", tmp_path / "proc"
    cpus = sys / "devices" / "system" / "cpu"
    write(cpus / "online", "0-7\n")
    write(cpus / "smt" / "active", "1\n")
    for cpu, (socket, core) in TOPOLOGY.items():
        write(cpus / f"cpu{cpu}" / "topology" / "physical_package_id", f"{socket}\n")
        write(cpus / f"cpu{cpu}" / "topology" / "core_id", f"{core}\n")
        write(cpus / f"cpu{cpu}" / "cpufreq" / "scaling_governor", "performance\n")
    for number, (name, disable) in enumerate((("POLL", "0"), ("C1", "0"), ("C6", "1"))):
        write(cpus / "cpu0" / "cpuidle" / f"state{number}" / "name", f"{name}\n")
        write(cpus / "cpu0" / "cpuidle" / f"state{number}" / "disable", f"{disable}\n")
    for group, kind in enumerate(("identity", "identity")):
        write(sys / "kernel" / "iommu_groups" / str(group) / "type", f"{kind}\n")
    write(sys / "kernel" / "mm" / "transparent_hugepage" / "enabled", "always [madvise] never\n")
    write(sys / "module" / "mlx5_core" / "version", "24.10-0.7.0\n")
    write(sys / "module" / "gdrdrv" / "version", "2.4.4\n")
    for name, text in (("meltdown", "Not affected"), ("vmscape", "Mitigation: IBPB before exit to userspace")):
        write(cpus / "vulnerabilities" / name, f"{text}\n")
    write(proc / "driver" / "nvidia" / "params", "ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\nDmaRemapPeerMmio: 1\n")
    write(proc / "sys" / "kernel" / "perf_event_paranoid", "2\n")
    for node in range(2):
        write(sys / "devices" / "system" / "node" / f"node{node}" / "cpulist", f"{node}\n")
    write(proc / "cpuinfo", CPUINFO)
    write(proc / "meminfo", MEMINFO)
    write(proc / "self" / "status", "Name:\tpython\nCapEff:\t000001ffffffffff\n")
    write(proc / "sys" / "kernel" / "numa_balancing", "0\n")
    write(tmp_path / "os-release", 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.1 LTS"\n')
    return {"sys": sys, "proc": proc, "os_release": tmp_path / "os-release", "shm": tmp_path}


def test_a_whole_host(made: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value, each by its file."""
    limits = {resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY, resource.RLIMIT_NOFILE: 1048576}
    monkeypatch.setattr(module.resource, "getrlimit", lambda kind: (limits[kind], -1))
    monkeypatch.setattr(module.platform, "release", lambda: "6.8.0-45-generic")
    found = read_host(**made)
    disk = os.statvfs(made["shm"])
    assert found.shm_gib == pytest.approx(disk.f_blocks * disk.f_frsize / 2**30, rel=0.1)
    assert found == HostFacts(
        kernel="6.8.0-45-generic",
        operating_system="Ubuntu 24.04.1 LTS",
        cpu_model="Xeon Platinum 8480C",
        sockets=2,
        cores=4,
        cpus=8,
        smt=True,
        governors=["performance"],
        idle_states=["POLL", "C1"],
        numa_nodes=2,
        numa_balancing=False,
        iommu="identity",
        translated=[],
        memory_gib=2113536 / 2**20,
        huge_pages=16,
        transparent_huge_pages="madvise",
        memlock="unlimited",
        ipc_lock=True,
        nofile=1048576,
        shm_gib=found.shm_gib,
        mlx5_driver="24.10-0.7.0",
        cpu_faults=[],
        perf_events=2,
        gpu_counters="root",
        gdrcopy="2.4.4",
    )


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("sys/devices/system/cpu/cpu5/cpufreq/scaling_governor", "powersave", {"governors": ["performance", "powersave"]}),
        ("sys/devices/system/cpu/online", "0-3,6", {"cpus": 5}),
        ("sys/devices/system/cpu/smt/active", "0", {"smt": False}),
        ("sys/kernel/iommu_groups/1/type", "DMA-FQ", {"iommu": "DMA-FQ, identity"}),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]", {"transparent_huge_pages": "never"}),
        ("proc/self/status", "CapEff:\t00000000a80425fb", {"ipc_lock": False}),
        ("proc/sys/kernel/numa_balancing", "1", {"numa_balancing": True}),
        ("sys/devices/system/cpu/vulnerabilities/vmscape", "Vulnerable", {"cpu_faults": ["vmscape"]}),
        ("sys/devices/system/cpu/vulnerabilities/mds", "Vulnerable: No microcode", {"cpu_faults": ["mds"]}),
        ("proc/sys/kernel/perf_event_paranoid", "-1", {"perf_events": -1}),
        ("proc/driver/nvidia/params", "RmProfilingAdminOnly: 0", {"gpu_counters": "all users"}),
    ],
)
def test_what_differs(tmp_path: Path, made: dict[str, Path], file: str, text: str, expected: dict[str, Any]) -> None:
    """One file changes one value."""
    write(tmp_path / file, f"{text}\n")
    found = read_host(**made)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("sys/devices/system/cpu/online", ("sockets", "cores", "cpus", "governors")),
        ("sys/devices/system/cpu/cpu3/topology/core_id", ("sockets", "cores")),
        ("sys/devices/system/cpu/cpu3/cpufreq/scaling_governor", ("governors",)),
        ("sys/devices/system/cpu/cpu0/cpuidle/state1/name", ("idle_states",)),
        ("proc/meminfo", ("memory_gib", "huge_pages")),
        ("proc/self/status", ("ipc_lock",)),
        ("proc/cpuinfo", ("cpu_model",)),
        ("proc/sys/kernel/numa_balancing", ("numa_balancing",)),
        ("proc/sys/kernel/perf_event_paranoid", ("perf_events",)),
        ("proc/driver/nvidia/params", ("gpu_counters",)),
        ("sys/module/gdrdrv/version", ("gdrcopy",)),
        ("os-release", ("operating_system",)),
    ],
)
def test_one_file_that_is_hidden(tmp_path: Path, made: dict[str, Path], file: str, fields: tuple[str, ...]) -> None:
    """Its values are not available, with the reason; the others stay. An empty file says as little."""
    healthy = read_host(**made)
    for spoil in (lambda: write(tmp_path / file, ""), (tmp_path / file).unlink):
        spoil()
        found = read_host(**made)
        silent = {name for name in HostFacts.__slots__ if isinstance(getattr(found, name), NotAvailable)}
        assert silent == {*fields}
        same = set(HostFacts.__slots__) - silent - {"shm_gib"}
        assert all(getattr(found, name) == getattr(healthy, name) for name in same)


def test_a_module_that_is_not_loaded(tmp_path: Path, made: dict[str, Path]) -> None:
    """It is known to be absent: a host without it differs from its siblings, and is not unread."""
    shutil.rmtree(tmp_path / "sys/module/gdrdrv")
    assert read_host(**made).gdrcopy == "not loaded"


def test_a_container_that_hides_all(tmp_path: Path) -> None:
    """Nothing is zero, nothing raises; limits and the kernel's name come by system calls."""
    found = read_host(proc=tmp_path / "no", sys=tmp_path / "no", os_release=tmp_path / "no", shm=tmp_path / "no")
    read = {name for name in HostFacts.__slots__ if not isinstance(getattr(found, name), NotAvailable)}
    assert read == {"kernel", "numa_nodes", "memlock", "nofile"}


def iommu_groups(sys: Path, kinds: list[str], **devices: int) -> None:
    """Groups of these kinds; ``devices``: which group a GPU, an adapter and a disk are in."""
    files = {
        "gpu": {"vendor": "0x10de", "class": "0x030200"},
        "adapter": {"vendor": "0x15b3", "class": "0x020700", "infiniband/mlx5_0/fw_ver": "28"},
        "disk": {"vendor": "0x144d", "class": "0x010802"},
    }
    for number, kind in enumerate(kinds):
        write(sys / "kernel" / "iommu_groups" / str(number) / "type", f"{kind}\n")
    for name, group in devices.items():
        device = sys / "devices" / name
        for file, text in files[name].items():
            write(device / file, f"{text}\n")
        folder = sys / "kernel" / "iommu_groups" / str(group) / "devices"
        folder.mkdir(exist_ok=True)
        (folder / name).symlink_to(device)


@pytest.mark.parametrize(
    ("kinds", "devices", "found"),
    [
        (["DMA", *["identity"] * 30], {}, "identity"),
        (["DMA-FQ", *["identity"] * 30], {"gpu": 3, "adapter": 4, "disk": 0}, "identity"),
        (["DMA-FQ", *["identity"] * 30], {"gpu": 0}, "DMA-FQ"),
        (["DMA-FQ", *["identity"] * 30], {"adapter": 0, "gpu": 1}, "DMA-FQ, identity"),
        (["identity", *["DMA-FQ"] * 30], {}, "DMA-FQ"),
        (["identity", *["DMA-FQ"] * 30], {"gpu": 7, "disk": 0}, "DMA-FQ"),
    ],
)
def test_the_iommu_of_gpus_and_adapters(
    tmp_path: Path, made: dict[str, Path], kinds: list[str], devices: dict[str, int], found: str
) -> None:
    """One group that translates among others (Grace, a disk that needs it) says nothing of the host."""
    for group in (tmp_path / "sys" / "kernel" / "iommu_groups").iterdir():
        (group / "type").unlink()
        group.rmdir()
    iommu_groups(tmp_path / "sys", kinds, **devices)
    assert read_host(**made).iommu == found


def test_no_iommu(tmp_path: Path, made: dict[str, Path]) -> None:
    """An empty folder says that it is off."""
    for group in ("0", "1"):
        (tmp_path / "sys" / "kernel" / "iommu_groups" / group / "type").unlink()
        (tmp_path / "sys" / "kernel" / "iommu_groups" / group).rmdir()
    assert read_host(**made).iommu == "off"


def test_this_machine() -> None:
    """Whatever it hides, its kernel has a name."""
    assert read_host().kernel


def test_free_memory(tmp_path: Path) -> None:
    """In GiB, as the kernel estimates it; where it says nothing, the reading says why."""
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable:    3145728 kB\n", encoding="ascii")
    assert read_available_gib(proc=tmp_path) == 3.0
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\n", encoding="ascii")
    assert "MemAvailable" in str(read_available_gib(proc=tmp_path))
