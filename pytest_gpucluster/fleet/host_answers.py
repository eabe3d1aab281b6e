"""What a host of a simulated fleet answers of itself: its facts, clock, memory, file systems, launches and NICs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.fleet.asked import made
from pytest_gpucluster.fleet.hardware import spread
from pytest_gpucluster.inventory.host import HostFacts, Mount
from pytest_gpucluster.inventory.nics import Nic, NicPort
from pytest_gpucluster.inventory.pci_tree import PciNode, PciPath
from pytest_gpucluster.inventory.reading import healthy
from pytest_gpucluster.protocol.plain_data import to_plain

if TYPE_CHECKING:
    from pytest_gpucluster.fleet.asked import Asked

UPDATES = 10
SHARED_GB_S = 12.0
SMALL_FILES_S = 4000.0
LAUNCH_US = 5.0
LATE_S = 2.5
"""By so much a clock is late where that is planted."""
ADAPTERS = 8
UNPLUGGED = 3
"""The adapter whose port has no link, where that is planted."""
SIMULATED = "simulated"


def host_state(asked: Asked) -> Any:
    """Two sockets, set as they should be; another kernel and less memory where that is planted."""
    planted: dict[str, Any] = {"kernel": "6.5.0-simulated"} if asked.has("odd") else {}
    planted |= {"memory_gib": 1511.0} if asked.has("dimm") else {}
    facts = to_plain(healthy(HostFacts, **planted))
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
    return to_plain(Mount(folder=folder, kind=kind, source=source))


# --- NICs: eight adapters with one port each ---


def nic_state(asked: Asked) -> Any:
    """Every adapter of the rank's node."""
    return made("measurements.nics:NicState", nics=to_plain(_nics(asked)))


def nic_paths(asked: Asked) -> Any:
    """The way of every adapter of the rank's node, and of every GPU: each below a switch of its own."""
    nics = _nics(asked)
    gpus = [f"0000:{0x13 + 0x10 * gpu:02x}:00.0" for gpu in range(asked.hardware.simulation.gpus_per_node)]
    paths = {nic.device: _path(str(nic.pci), number) for number, nic in enumerate(nics)}
    gpu_paths = {address: _path(address, number) for number, address in enumerate(gpus)}
    return made(
        "measurements.nics:NicPaths",
        nics=to_plain(nics),
        paths=to_plain(paths),
        gpu_paths=to_plain(gpu_paths),
        peer_memory=True,
    )


def _path(address: str, number: int) -> PciPath:
    addresses = (address, f"0000:{0x11 + 0x10 * number:02x}:01.0")
    return PciPath(numa_node="0", nodes=[healthy(PciNode, address=one) for one in addresses])


def _nics(asked: Asked) -> list[Nic]:
    return [
        healthy(
            Nic,
            device=f"mlx5_{number}",
            pci=f"0000:{0x12 + 0x10 * number:02x}:00.0",
            firmware=SIMULATED,
            board_id=SIMULATED,
            guid=f"0000:0000:0000:00{number:02x}",
            ports=[_port(number, has_link=number != UNPLUGGED or not asked.has("cable"))],
        )
        for number in range(ADAPTERS)
    ]


def _port(number: int, *, has_link: bool) -> NicPort:
    no_link = {"state": "DOWN", "physical_state": "Polling", "rate": "10 Gb/sec (4X SDR)", "rate_gbit_s": 10.0}
    guid = f"0000:0000:0000:01{number:02x}"
    return healthy(NicPort, number=1, guid=guid, netdevs=[f"ib{number}"], **({} if has_link else no_link))
