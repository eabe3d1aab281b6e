"""What a host of a simulated fleet answers of itself: its facts, clock, memory, file systems, launches and NICs.

What a GPU of a simulated fleet answers by itself: identity, occupancy, health, errors. Pure.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

from pytest_gpucluster.fleet.simulated_call import SimulatedCall, made, pci_of
from pytest_gpucluster.fleet.simulation import hostname_of
from pytest_gpucluster.inventory.host import HostFacts, MemoryController, Mount
from pytest_gpucluster.inventory.identity import Identity, read_versions
from pytest_gpucluster.inventory.machine import Management, Software
from pytest_gpucluster.inventory.nics import Nic, NicPort
from pytest_gpucluster.inventory.nvlinks import ALONE, LinkCounters, NvLink
from pytest_gpucluster.inventory.nvml import GpuCounters, GpuRepair, GpuState
from pytest_gpucluster.inventory.occupancy import GpuProcess, Occupancy
from pytest_gpucluster.inventory.pci_tree import PciNode, PciPath
from pytest_gpucluster.inventory.reading import NotAvailable, healthy
from pytest_gpucluster.protocol.plain_data import to_plain

UPDATES = 10
SHARED_GB_S = 12.0
SMALL_FILES_S = 4000.0
LATE_S = 2.5
"""By so much a clock is late where that is planted."""
ADAPTERS = 8
UNPLUGGED = 3
"""The adapter whose port has no link, where that is planted."""
SIMULATED = "simulated"


def host_state(call: SimulatedCall) -> Any:
    """Two sockets, set as they should be; another kernel and less memory where that is planted."""
    planted: dict[str, Any] = {"kernel": "6.5.0-simulated"} if call.has("odd") else {}
    planted |= {"memory_gib": 1511.0} if call.has("dimm") else {}
    facts = to_plain(healthy(HostFacts, **planted))
    software, versions = to_plain(healthy(Software)), {"driver": "580.159.03"}
    plain = {"facts": facts, "software": software, "management": to_plain(healthy(Management))}
    return made("measurements.host:HostState", versions=versions, variables={}, **plain)


def kubernetes_node(_call: SimulatedCall) -> Any:
    """No Kubernetes: the model has none."""
    return made("measurements.host:KubernetesState", why_none=SIMULATED, node=None, cluster=None, gpus_on_bus=None)


kubernetes_cluster = kubernetes_node


def host_errors(_call: SimulatedCall) -> Any:
    """One memory controller that has counted nothing; the model has no counts of PCIe."""
    return made("measurements.host:HostErrors", memory=to_plain([healthy(MemoryController, name="mc0")]), pcie=[], cpus=[])


def host_parts(_call: SimulatedCall) -> Any:
    """32 memory modules alike, and one disk."""
    speeds = {"rated_mt_s": 4800, "runs_at_mt_s": 4800}
    module = functools.partial(made, "measurements.host_parts:MemoryModule", size_gib=63.0, part=SIMULATED, **speeds)
    named = {"model": SIMULATED, "serial": SIMULATED, "firmware": SIMULATED}
    log = {"spare_percent": 100, "spare_threshold_percent": 10, "used_percent": 1, "media_errors": 0}
    health = made("measurements.host_parts:DiskHealth", tool=SIMULATED, passed=True, critical_warning=0, **log)
    disk = made("measurements.host_parts:Disk", name="nvme0", state="live", health=health, **named)
    modules = [module(slot=f"DIMM {number}") for number in range(32)]
    return made("measurements.host_parts:HostParts", modules=modules, disks=[disk])


def node_sxids(_call: SimulatedCall) -> Any:
    """A kernel log that has no error of an NVSwitch."""
    return made("measurements.health:NodeSxids", seen=[], before=[], kernel_log_why=None)


def host_clock(call: SimulatedCall) -> Any:
    """This machine's clock, or one that is late where that is planted."""
    return made("measurements.host:HostClock", shown_s=time.time() - LATE_S * call.has("clock"))


def dcgm_program(_call: SimulatedCall) -> Any:
    """Not installed: the model has no diagnostic of NVIDIA's."""
    return made("measurements.dcgm:DcgmProgram", path=None)


def leave_mark(call: SimulatedCall) -> Any:
    """A file in the rank's own folder."""
    return made(
        "measurements.shared_paths:PathMark",
        problem=None,
        mount=_mount("nfs4", call.kwargs["path"], "simulated:/export"),
        folder=_folder(call),
        digest="simulated",
        free_gib=1000.0,
        free_inodes=1 << 30,
        quota="none for this user",
        leftovers=[],
    )


def read_marks(_call: SimulatedCall) -> Any:
    """Every file is seen at once."""
    return made("measurements.shared_paths:MarksSeen", slowest_s=0.004, missed={}, absent=[])


def count_under_lock(call: SimulatedCall) -> Any:
    """Each host counts in turn, and no update is lost."""
    parties = call.kwargs["parties"]
    if _folder(call) not in parties:
        return None
    last = UPDATES * (parties.index(_folder(call)) + 1)
    return made("measurements.shared_paths:LockCount", updates=UPDATES, last=last, waited=3, problem=None, absent=[])


def replace_file(call: SimulatedCall) -> Any:
    """The first host replaces the file, and all see it whole."""
    parties = call.kwargs["parties"]
    if _folder(call) not in parties:
        return None
    replaced = UPDATES * (_folder(call) == parties[0])
    return made("measurements.shared_paths:Replaced", replaced=replaced, reads=90, faults={}, stale=0, problem=None)


def small_files(call: SimulatedCall) -> Any:
    """All that the caller requires."""
    files = call.kwargs["count"]
    return made("measurements.shared_paths:SmallFiles", files_s=SMALL_FILES_S, files=files, seconds=files / SMALL_FILES_S)


def file_rates(call: SimulatedCall) -> Any:
    """A local disk where no path is named, else a shared file system."""
    path = call.kwargs["path"]
    is_local = path is None
    write, read = (call.simulation.rate(call.rank, quantity) if is_local else SHARED_GB_S for quantity in ("write", "read"))
    return made(
        "measurements.file_rates:FileRates",
        write_gb_s=write,
        read_gb_s=read,
        written_bytes=call.kwargs["size_bytes"],
        files=call.kwargs["files"],
        cache="O_DIRECT",
        path=path or "/tmp",  # noqa: S108 -- nothing is written there
        mount=_mount("ext4", "/", "/dev/md0") if is_local else _mount("nfs4", path, "simulated:/export"),
    )


def file_requests(call: SimulatedCall) -> Any:
    """The same of every disk and path."""
    path = call.kwargs["path"] or "/tmp"  # noqa: S108 -- nothing is written there
    one = made("measurements.file_rates:Requests", iops=90000.0, mean_us=170.0, p99_us=400.0)
    own = {"depth": call.kwargs["depth"], "by": SIMULATED, "cache": "O_DIRECT", "path": path}
    return made("measurements.file_rates:FileRequests", read=one, write=one, mount=_mount("ext4", "/", "/dev/md0"), **own)


def _folder(call: SimulatedCall) -> str:
    return f"simulated-rank{call.rank}"


def _mount(kind: str, folder: str, source: str) -> Any:
    return to_plain(Mount(folder=folder, kind=kind, source=source))


# --- NICs: eight adapters with one port each ---


def nic_state(call: SimulatedCall) -> Any:
    """Every adapter of the rank's node."""
    return made("measurements.host:NicState", nics=to_plain(_nics(call)))


def nic_paths(call: SimulatedCall) -> Any:
    """The way of every adapter of the rank's node, and of every GPU: each below a switch of its own."""
    nics = _nics(call)
    gpus = [f"0000:{0x13 + 0x10 * gpu:02x}:00.0" for gpu in range(call.simulation.gpus_per_node)]
    paths = {nic.device: _path(str(nic.pci), number) for number, nic in enumerate(nics)}
    gpu_paths = {address: _path(address, number) for number, address in enumerate(gpus)}
    return made(
        "measurements.host:NicPaths",
        nics=to_plain(nics),
        paths=to_plain(paths),
        gpu_paths=to_plain(gpu_paths),
        peer_memory=True,
        open_driver=True,
        kernel="6.8.0-simulated",
        rdma_mtus={f"{nic.device}:1": 4096 for nic in nics},
        neighbours=to_plain(NotAvailable("lldpcli is not installed")),
    )


def _path(address: str, number: int) -> PciPath:
    addresses = (address, f"0000:{0x11 + 0x10 * number:02x}:01.0")
    return PciPath(numa_node="0", nodes=[healthy(PciNode, address=one) for one in addresses])


def _nics(call: SimulatedCall) -> list[Nic]:
    return [
        healthy(
            Nic,
            device=f"mlx5_{number}",
            pci=f"0000:{0x12 + 0x10 * number:02x}:00.0",
            board_id=SIMULATED,
            guid=f"0000:0000:0000:00{number:02x}",
            ports=[_port(number, has_link=number != UNPLUGGED or not call.has("cable"))],
        )
        for number in range(ADAPTERS)
    ]


def _port(number: int, *, has_link: bool) -> NicPort:
    no_link = {"state": "DOWN", "physical_state": "Polling", "rate": "10 Gb/sec (4X SDR)", "rate_gbit_s": 10.0}
    guid = f"0000:0000:0000:01{number:02x}"
    return healthy(NicPort, number=1, guid=guid, netdevs=[f"ib{number}"], **({} if has_link else no_link))


DEAD_LINK = 4
FALLEN = 79
LEAST_BER = 1.5e-254
"""The least bit error rate that NVML can say."""
OTHER_VERSION = "0.0.0+simulated"


def identity(call: SimulatedCall) -> Any:
    """Who the rank is. Versions are those of this machine, unless other ones are planted."""
    node, gpu = call.place
    other = call.has("versions")
    return Identity(
        hostname=hostname_of(node),
        group_rank=node,
        local_rank=gpu,
        versions={**read_versions(), **({"torch": OTHER_VERSION} if other else {})},
        torch_gpus=call.simulation.gpus_per_node,
        gpu_name=call.device,
        uuid=call.uuid,
        serial=call.serial,
        pci=call.pci,
        nvml_gpus=call.simulation.gpus_per_node,
        hidden_gpus=0,
        variables={},
        board={"vbios": SIMULATED, "module": str(gpu + 1)},
        fabric=call.simulation.domain_of(node),
        switch=call.simulation.switch_of(node),
        stack={"driver": OTHER_VERSION if other else SIMULATED, "CUDA": SIMULATED, "NCCL": SIMULATED},
    )


def read_occupancy_again(call: SimulatedCall) -> Any:
    """As before the run, but a guest has left."""
    return read_occupancy(call, has_guest=False)


def read_occupancy(call: SimulatedCall, *, has_guest: bool = True) -> Any:
    """What uses the GPU before the run: nothing, unless that is planted."""
    busy = call.has("busy") or (has_guest and call.has("guest"))
    return Occupancy(
        uuid=call.uuid,
        memory_used_gib=23.5 if busy else 0.004,
        memory_limit_gib=0.25,
        processes=[GpuProcess(pid=4711, name="python3", memory_gib=23.4)] if busy else [],
        utilization_percent=0,
    )


def gpu_state(call: SimulatedCall) -> Any:
    """NVML's view of the GPU at rest: what its data sheet says, what is planted, and for the rest what its readings answer."""
    has_errors, has_half_a_link = call.has("ecc"), call.has("pcie")
    spec, gpu = call.spec, call.place[1]
    cluster_uuid, _, clique = (call.simulation.domain_of(call.place[0]) or f"{ALONE.cluster_uuid}/0").partition("/")
    state = healthy(
        GpuState,
        index=gpu,
        cuda_index=gpu,
        visible=True,
        uuid=call.uuid,
        serial=call.serial,
        pci=call.pci,
        name=call.device,
        driver=SIMULATED,
        vbios=SIMULATED,
        board_part_number=SIMULATED,
        module_id=gpu + 1,
        memory_gib=spec.memory_gib,
        ecc_uncorrected_volatile=2 if has_errors else 0,
        ecc_uncorrected_aggregate=2 if has_errors else 0,
        remapped_rows_pending=has_errors,
        mig=call.has("mig"),
        pcie_gen=spec.pcie_gen - has_half_a_link,
        pcie_gen_max=spec.pcie_gen,
        pcie_width=spec.pcie_width,
        pcie_width_max=spec.pcie_width,
        power_limit_w=spec.power_w,
        power_limit_default_w=spec.power_w,
        nvlinks=_nvlinks(call),
        repair=healthy(GpuRepair, recovery_action="gpu_reset") if call.has("reset") else healthy(GpuRepair),
        fabric=replace(ALONE, cluster_uuid=cluster_uuid, clique=int(clique)),
    )
    count = call.simulation.gpus_per_node
    return made(
        "measurements.health:GpuHealth",
        gpu=to_plain(state),
        torch_sees=True,
        torch_device_count=count,
        nvml_device_count=count,
        pci_gpus={pci_of(gpu).removeprefix("0000"): "nvidia" for gpu in range(count)},
        nvml_pci=[pci_of(gpu) for gpu in range(count)],
        torch_device_name=call.device,
        lost=False,
        advice=None,
    )


def _nvlinks(call: SimulatedCall) -> list[NvLink]:
    """The NVLinks of the GPU; one is down where that is planted. Bit error rates are those of a GPU that gives them."""
    spec = call.spec
    rates = {} if spec.nvlink_ber is None else {"effective_ber": LEAST_BER, "symbol_ber": LEAST_BER}
    return [
        healthy(
            NvLink,
            link=link,
            is_up=link != DEAD_LINK or not call.has("nvlink"),
            speed_gb_s=spec.peer_gb_s / (spec.nvlink_links or 1),
            **rates,
        )
        for link in range(spec.nvlink_links or 0)
    ]


def gpu_counters(call: SimulatedCall) -> Any:
    """Error counters of the GPU, which do not grow."""
    links = [healthy(LinkCounters, link=link) for link in range(call.spec.nvlink_links or 0)]
    return healthy(GpuCounters, ecc_uncorrected=2 if call.has("ecc") else 0, nvlinks=links)


def gpu_xids(call: SimulatedCall) -> Any:
    """What the driver reported during the run: nothing, unless that is planted."""
    xid: dict[str, Any] = {"code": FALLEN, "pid": None, "is_own": False, "detail": None, "age_s": 0.0, "count": 1}
    heard = [made("measurements.health:XidSeen", **xid)] if call.has("xid") else []
    logged: dict[str, Any] = {name: [] for name in ("kernel_log", "before", "lost", "lost_before", "lost_elsewhere")}
    why: dict[str, Any] = {"nvml_why": None, "kernel_log_why": None}
    return made("measurements.health:GpuXids", nvml=heard, **logged, **why)
