"""What a host of a simulated fleet answers of itself: its facts, clock, memory, file systems and launches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.fleet.asked import made
from pytest_gpucluster.fleet.hardware import spread

if TYPE_CHECKING:
    from pytest_gpucluster.fleet.asked import Asked

UPDATES = 10
SHARED_GB_S = 12.0
SMALL_FILES_S = 4000.0
LAUNCH_US = 5.0
LATE_S = 2.5
"""By so much a clock is late where that is planted."""


def host_state(asked: Asked) -> Any:
    """Two sockets, set as they should be; another kernel and less memory where that is planted."""
    odd = asked.has("odd")
    facts = made(
        "inventory.host:HostFacts",
        kernel="6.5.0-simulated" if odd else "6.8.0-simulated", operating_system="simulated", cpu_model="simulated",
        sockets=2, cores=112, cpus=224, smt=True, governors=["performance"], idle_states=["POLL", "C1"], numa_nodes=2,
        numa_balancing=False, iommu="identity", memory_gib=1511.0 if asked.has("dimm") else 2015.0, huge_pages=0,
        transparent_huge_pages="madvise",
        memlock="unlimited", ipc_lock=False, nofile=1048576, shm_gib=1007.0, mlx5_driver="simulated",
    )  # fmt: skip
    return made("measurements.host:HostState", facts=facts, versions={"driver": "simulated"}, variables={})


def node_sxids(_asked: Asked) -> Any:
    """A kernel log that has no error of an NVSwitch."""
    return made("measurements.sxids:NodeSxids", seen=[], before=[], kernel_log_why=None)


def host_clock(asked: Asked) -> Any:
    """This machine's clock, or one that is late where that is planted."""
    return made("measurements.host:HostClock", shown_s=time.time() - LATE_S * asked.has("clock"))


def dcgm_program(_asked: Asked) -> Any:
    """Not installed: the model has no diagnostic of NVIDIA's."""
    return made("measurements.dcgm:DcgmProgram", path=None)


def leave_mark(asked: Asked) -> Any:
    """A file in the rank's own folder."""
    return made(
        "measurements.shared_paths:PathMark",
        problem=None,
        mount=_mount("nfs4", asked.kwargs["path"], "simulated:/export"),
        folder=_folder(asked),
        digest="simulated",
        free_gib=1000.0,
        free_inodes=1 << 30,
        leftovers=[],
    )


def read_marks(_asked: Asked) -> Any:
    """Every file is seen at once."""
    return made("measurements.shared_paths:MarksSeen", slowest_s=0.004, missed={}, absent=[])


def count_under_lock(asked: Asked) -> Any:
    """Each host counts in turn, and no update is lost."""
    parties = asked.kwargs["parties"]
    if _folder(asked) not in parties:
        return None
    last = UPDATES * (parties.index(_folder(asked)) + 1)
    return made("measurements.shared_paths:LockCount", updates=UPDATES, last=last, waited=3, problem=None, absent=[])


def small_files(asked: Asked) -> Any:
    """All that were asked for."""
    files = asked.kwargs["count"]
    return made("measurements.shared_paths:SmallFiles", files_s=SMALL_FILES_S, files=files, seconds=files / SMALL_FILES_S)


def clear_path(_asked: Asked) -> None:
    """There is nothing to remove."""


def file_rates(asked: Asked) -> Any:
    """A local disk where no path is named, else a shared file system."""
    path = asked.kwargs["path"]
    is_local = path is None
    write, read = (asked.hardware.rate(asked.rank, quantity) if is_local else SHARED_GB_S for quantity in ("write", "read"))
    return made(
        "measurements.file_rates:FileRates",
        write_gb_s=write,
        read_gb_s=read,
        written_bytes=asked.kwargs["size_bytes"],
        files=asked.kwargs["files"],
        cache="O_DIRECT",
        path=path or "/tmp",  # noqa: S108 -- nothing is written there
        mount=_mount("ext4", "/", "/dev/md0") if is_local else _mount("nfs4", path, "simulated:/export"),
    )


def host_memory(asked: Asked) -> Any:
    """Two sockets, alike."""
    rate = asked.hardware.rate(asked.rank, "triad")
    repeats = spread(rate, asked.kwargs["repeats"])
    nodes = [
        made("measurements.host_memory:NumaRate", node=node, triad_gb_s=rate, repeats_gb_s=repeats, cpus=cpus)
        for node, cpus in enumerate(("0-55", "56-111"))
    ]
    return made(
        "measurements.host_memory:HostMemory",
        triad_gb_s=rate,
        repeats_gb_s=repeats,
        nodes=nodes,
        not_measured=[],
        cpus_allowed="0-111",
        size_bytes=asked.kwargs["size_bytes"],
    )


def launch_latency(asked: Asked) -> Any:
    """The same on every GPU."""
    repeats = spread(LAUNCH_US, asked.kwargs["repeats"])
    return made(
        "measurements.launch:LaunchLatency",
        launch_us=LAUNCH_US,
        round_trip_us=2 * LAUNCH_US,
        repeats_us=repeats,
        device=asked.device,
    )


def _folder(asked: Asked) -> str:
    return f"simulated-rank{asked.rank}"


def _mount(kind: str, folder: str, source: str) -> Any:
    return made("inventory.mounts:Mount", folder=folder, kind=kind, source=source)
