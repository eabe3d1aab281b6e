"""Every reader of files on a kernel that shows something else: each file, in turn, is absent, unreadable, or full of garbage.

A reader never raises, and what it says is never what it says of a healthy host.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.inventory import (
    host,
    host_load,
    identity,
    kubernetes,
    machine,
    nics,
    numa,
    pci_tree,
    program,
    slurm,
    watched_node,
)
from pytest_gpucluster.inventory.driver_events import KernelLog
from pytest_gpucluster.inventory.host_load import HostWatch
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.sysfs import MOST_BYTES, read_text
from pytest_gpucluster.measurements import host_parts
from tests.support.sysfs import GPU_CLASS, MadeSys, infiniband, write
from tests.unit.health.test_host_parts import structure

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GPU = "0000:40:00.0"
CPUS = "sys/devices/system/cpu"
FILES = {
    f"{CPUS}/online": "0",
    f"{CPUS}/smt/active": "1",
    f"{CPUS}/cpu0/topology/physical_package_id": "0",
    f"{CPUS}/cpu0/topology/core_id": "0",
    f"{CPUS}/cpu0/topology/thread_siblings_list": "0-1",
    f"{CPUS}/cpu0/cpufreq/scaling_governor": "performance",
    f"{CPUS}/cpu0/cpuidle/state0/name": "POLL",
    f"{CPUS}/vulnerabilities/meltdown": "Vulnerable",
    "sys/kernel/iommu_groups/0/type": "DMA-FQ",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/module/mlx5_core/version": "24.10-0.7.0",
    "sys/module/gdrdrv/version": "2.4",
    "sys/module/nvidia/version": "570.86.10",
    "sys/module/kvm_intel/parameters/nested": "Y",
    "sys/devices/system/node/node0/cpulist": "0",
    "sys/devices/system/node/node0/distance": "10",
    "sys/devices/system/node/node0/meminfo": "".join(
        f"Node 0 {name}: 10 kB\n" for name in ("MemTotal", "MemFree", "Active(file)", "Inactive(file)")
    ),
    "sys/devices/system/edac/mc/mc0/ue_count": "0",
    "sys/devices/system/edac/mc/mc0/ce_count": "0",
    **{f"sys/class/nvme/nvme0/{name}": name for name in ("model", "serial", "firmware_rev", "state")},
    **{f"sys/class/dmi/id/{name}": name for name in machine.DMI},
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/speed": "1000",
    "proc/cpuinfo": "model name\t: Xeon",
    "proc/meminfo": "MemTotal: 2113536 kB\nMemAvailable: 5 kB\nHugePages_Total: 16",
    "proc/self/status": "CapEff:\t000001ffffffffff",
    "proc/self/cgroup": "0::/job_1/step",
    "proc/sys/kernel/numa_balancing": "0",
    "proc/sys/kernel/perf_event_paranoid": "2",
    "proc/sys/kernel/random/boot_id": "0b5cbd4e-6f3f-4d4b-9d1c-5a6c3f1f2e11",
    "dev/kmsg": "6,1,1,-;NVRM: loading NVIDIA UNIX Open Kernel Module\n",
    "proc/driver/nvidia/params": "RmProfilingAdminOnly: 1",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  570",
    "proc/driver/nvidia-nvswitch/devices/0000:05:00.0/information": "BIOS Version: 96.10.57.00.01",
    "proc/interrupts": "CPU0\nMCE:  1  Machine check exceptions\nDFR:  1  Deferred",
    "proc/1/comm": "dcgm-exporter",
    "proc/stat": "cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10",
    "proc/loadavg": "0.1 0.1 0.1 3/100 5",
    "proc/pressure/memory": "some avg10=0 total=1",
    "proc/mounts": "36 35 98:0 / / rw,noatime shared:1 - ext4 /dev/sda rw",
    "cgroups/job_1/step/memory.max": "1000",
    "resctrl/mon_data/mon_L3_00/mbm_total_bytes": "5",
    "version.json": '{"cuda": {"version": "13.1.0"}}',
    "os-release": 'PRETTY_NAME="Ubuntu"',
}


def watched(root: Path) -> Any:
    """The load of a host, beside nothing."""
    with HostWatch(proc=root / "proc", resctrl=root / "resctrl", own_pid=1) as watch:
        pass
    return watch.load


def logged(root: Path) -> Any:
    """What the kernel log shows, and whether that is all."""
    log = KernelLog(root / "dev/kmsg")
    return log.read(), log.why


READERS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "host": (
        lambda root: host.read_host(sys=root / "sys", proc=root / "proc", os_release=root / "os-release", shm=root),
        (f"{CPUS}/[osv]*", f"{CPUS}/cpu0/[!t]*", f"{CPUS}/cpu0/topology/[!t]*", "sys/kernel", "sys/module/[mg]*",
         "proc/cpuinfo", "proc/meminfo", "proc/self/status", "proc/sys/kernel/[np]*", "proc/driver/nvidia/params",
         "os-release"),
    ),
    "boot": (lambda root: identity.read_boot_id(root / "proc/sys/kernel/random/boot_id"), ("**/boot_id",)),
    "kernel log": (logged, ("dev/kmsg",)),
    "memory limit": (
        lambda root: host.read_memory_limit("1", own=root / "proc/self/cgroup", cgroups=root / "cgroups"),
        ("proc/self/cgroup", "cgroups"),
    ),
    "free memory": (lambda root: host.read_available_gib(proc=root / "proc"), ("proc/meminfo",)),
    "mount": (lambda root: host.read_mount(root, table=root / "proc/mounts"), ("proc/mounts",)),
    "machine checks": (lambda root: host.read_machine_checks(proc=root / "proc"), ("proc/interrupts",)),
    "memory controllers": (lambda root: host.read_memory_controllers(root=root / "sys"), ("sys/devices/system/edac",)),
    "PCIe errors": (lambda root: host.read_pcie_errors([GPU], root=root / "sys"), ("**/aer_*",)),
    "load": (watched, ("proc/stat", "proc/loadavg", "proc/pressure", "resctrl")),
    "NUMA": (lambda root: numa.read_locality(GPU, root=root / "sys"), ("sys/devices/system/node", f"**/{GPU}/numa_node")),
    "threads": (lambda root: numa.read_threads_of_core(0, root=root / "sys"), ("**/thread_siblings_list",)),
    "adapters": (
        lambda root: nics.read_nics(root=root / "sys"),
        ("**/mlx5_0/[!dp]*", "**/ports/1/[lprs]*", "**/ports/1/counters/link_downed", "**/ports/1/gid_attrs", "**/ib0/mtu"),
    ),
    "rates of ports": (lambda root: nics.read_ports_gb_s(root=root / "sys"), ("**/ports/1/rate", "**/ports/1/state")),
    "ports to watch": (lambda root: watched_node.read_ports(root=root / "sys"), ("**/ports/1/rate", "**/ports/1/state")),
    "interfaces": (lambda root: nics.read_net_interfaces(root=root / "sys"), ("sys/class/net",)),
    "GPUs on the bus": (lambda root: pci_tree.read_nvidia_gpus(root=root / "sys"), (f"**/{GPU}/vendor", f"**/{GPU}/class")),
    "way of a GPU": (lambda root: pci_tree.read_path(GPU, root=root / "sys"), (f"**/{GPU}/*_link_*", f"**/{GPU}/config")),
    "ways of GPUs": (lambda root: pci_tree.read_gpu_paths(root=root / "sys"), (f"**/{GPU}/vendor", f"**/{GPU}/numa_node")),
    "addresses": (lambda root: pci_tree.read_addresses(root=root / "sys"), (f"**/{GPU}/vendor", f"**/{GPU}/class")),
    "open driver": (lambda root: pci_tree.read_open_driver(proc=root / "proc"), ("proc/driver/nvidia/version",)),
    "software": (
        lambda root: machine.read_software(root=root / "sys", toolkit=root / "version.json"),
        ("sys/module/nvidia", "version.json"),
    ),
    "installed": (
        lambda root: machine.read_installed(
            proc=root / "proc", sys=root / "sys", toolkit=root / "version.json", path=os.devnull
        ),
        ("sys/module/mlx5_core", "version.json", "proc/driver/nvidia-nvswitch"),
    ),
    "offered": (
        lambda root: machine.read_offered(proc=root / "proc", sys=root / "sys", path=os.devnull),
        ("sys/module/kvm_intel", "proc/1/comm"),
    ),
    "firmware": (lambda root: machine.read_dmi(root=root / "sys"), ("sys/class/dmi",)),
    "modules": (lambda root: host_parts.read_modules(root=root / "sys"), ("sys/firmware",)),
    "disks": (lambda root: host_parts.read_disks(root=root / "sys"), ("sys/class/nvme",)),
}  # fmt: skip
"""Each reader, and the files that it reads."""
GARBAGE: dict[str, bytes | None] = {
    "unreadable": None,
    "absent": b"absent",
    "empty": b"",
    "binary": bytes(range(128, 256)),
    "too long a number": b"9" * 5000,
    "too long a list": b"0-4294967295",
}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host with an adapter, a GPU and a module, by the files of its kernel."""
    root = tmp_path_factory.mktemp("host")
    write(root, FILES)
    gpu = MadeSys(root / "sys", infiniband(0)).add_pci(GPU, bus=0x3E, files={**GPU_CLASS, "numa_node": "0"})
    write(gpu, dict.fromkeys(("aer_dev_fatal", "aer_dev_nonfatal", "aer_dev_correctable"), "TOTAL_ERR 0"))
    (gpu / "config").write_bytes(bytes(256) + (0x1000D).to_bytes(4, "little") + b"\0\0\x1c" + bytes(4000))
    table = root / "sys/firmware/dmi/tables/DMI"
    table.parent.mkdir(parents=True)
    table.write_bytes(structure("A1"))
    (root / "sys/kernel/iommu_groups/0/devices").mkdir()
    (root / f"sys/kernel/iommu_groups/0/devices/{GPU}").symlink_to(gpu)
    return root


def spoil(file: Path, content: bytes | None) -> None:
    """Put this in place of a file; None: what nobody, not even root, can read; ``absent``: nothing."""
    file.unlink()
    if content != GARBAGE["absent"]:
        file.mkdir() if content is None else file.write_bytes(content)


@pytest.mark.parametrize("name", READERS)
def test_no_garbage_is_a_healthy_reading(healthy: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor an exception."""
    monkeypatch.setattr(host_load.time, "sleep", lambda _: None)
    monkeypatch.setattr(host_load.time, "monotonic", lambda: 1.0)
    reader, patterns = READERS[name]
    files = sorted({file for one in patterns for found in healthy.glob(one) for file in (found, *found.rglob("*"))})
    files = [file for file in files if file.is_file() and not file.is_symlink()]
    assert files
    right = str(reader(healthy))
    for file in files:
        kept = file.read_bytes()
        for kind, content in GARBAGE.items():
            spoil(file, content)
            assert str(reader(healthy)) != right, (kind, file)
            file.rmdir() if content is None else file.unlink(missing_ok=True)
            file.write_bytes(kept)
    assert str(reader(healthy)) == right


def test_what_is_only_read_in_part_has_no_value(tmp_path: Path) -> None:
    """A longer file could have the line that is asked for behind its end."""
    file = tmp_path / "file"
    with file.open("wb") as opened:
        opened.write(b"text")
        opened.truncate(MOST_BYTES + 1)
    found = read_text(file)
    assert isinstance(found, NotAvailable)
    assert "longer than 64 MiB" in found.why


def test_machine_checks_of_many_processors(tmp_path: Path) -> None:
    """They stand behind the lines of all devices: 640 kB on a host with 256 processors."""
    zeros = "  ".join(["         0"] * 256)
    devices = "".join(f"{number:4}:  {zeros}  PCI-MSI  device\n" for number in range(200))
    counts = "  ".join(["1", *["0"] * 255])
    write(tmp_path, {"interrupts": f"            CPU0\n{devices} MCE:  {counts}  Machine check exceptions"})
    (found,) = host.read_machine_checks(proc=tmp_path)  # type: ignore[misc]
    assert found.exceptions == 1


def test_a_table_of_interrupts_that_is_none(tmp_path: Path) -> None:
    """It is not that of a host that counts no machine checks."""
    write(tmp_path, {"interrupts": "garbage"})
    assert isinstance(host.read_machine_checks(proc=tmp_path), NotAvailable)


@pytest.mark.parametrize(
    ("texts", "limit"),
    [(("1000", "max"), 1000), (("max", "max"), host.NO_LIMIT_BYTES), (("1000", "garbage"), None), (("\u0663", "max"), None)],
)
def test_a_limit_of_memory(tmp_path: Path, texts: tuple[str, str], limit: int | None) -> None:
    """The lowest one; a text that is none is no missing limit."""
    write(tmp_path, {"own": "0::/job_1/step", "job_1/memory.max": texts[0], "job_1/step/memory.max": texts[1]})
    found = host.read_memory_limit("1", own=tmp_path / "own", cgroups=tmp_path)
    assert found == limit if limit is not None else isinstance(found, NotAvailable)


LOG = '{"nvme_smart_health_information_log": {"critical_warning": 0, "available_spare": LEFT}}'
SAID = {
    "nothing": "",
    "no text": "\x80\ufffd\0",
    "a long number": f"version {'9' * 5000}",
    "a long MTU": f"hca_id:\tmlx5_0\n\t\tport:\t1\n\t\t\tactive_mtu:\t{'9' * 5000} (5)",
    "null": "null",
    "a list": "[1, 2]",
    "deep": "[" * 100_000,
    "infinite": LOG.replace("LEFT", "1e999"),
    "no number": LOG.replace("LEFT", "null"),
    "a neighbour without a name": '{"lldp": [{"interface": [{"name": "eth0", "chassis": [{}], "port": [{}]}]}]}',
    "null in a list": '{"items": [null]}',
    "another form": '{"items": {"a": 1}, "metadata": 5, "status": []}',
}
ASKED: dict[str, Callable[[], Any]] = {
    "runc and the like": machine.read_installed,
    "what is offered": machine.read_offered,
    "RDMA MTUs": nics.read_rdma_mtus,
    "cables": nics.read_neighbours,
    "disk": lambda: host_parts.read_health("/dev/nvme0"),
    "Slurm": lambda: (slurm.read_node("a", hostname="a"), slurm.read_share("1", "a"), slurm.read_config({}), slurm.read_mpi()),
    "partitions": lambda: (slurm.read_partitions(), slurm.read_block("a"), slurm.read_controller()),
    "Kubernetes": lambda: kubernetes.read_node({"NODE_NAME": "a"}, hostname="a"),
    "cluster": kubernetes.read_cluster,
}
"""Readers that ask a program."""


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("exit_code", [0, 1])
def test_what_programs_say_never_raises(name: str, exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, and however they end."""
    monkeypatch.setattr(program.shutil, "which", lambda found, **_: f"/bin/{found}")
    for text in SAID.values():
        ended = program.Ended(exit_code=exit_code, printed=text, complained="")
        monkeypatch.setattr(program, "run", lambda *_, said=ended, **__: said)
        ASKED[name]()
