"""What is wrong with one machine by its own readings: only what is certain without a sibling or a second look.

A port that is down may be meant so: it is shown by ``gpucluster info``, never counted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.health.gpu import REPAIRS, advice_for
from pytest_gpucluster.health.nvlink import JOINED
from pytest_gpucluster.inventory.numa import sysfs_address
from pytest_gpucluster.inventory.reading import unavailable

LOOK = "look at the kernel log (dmesg | grep -i xid), then reboot the node"
HARD_SLOWDOWN = ("hw_thermal_slowdown", "hw_power_brake_slowdown")
NO_ADAPTER = "the kernel lists no adapter"


@dataclass(frozen=True, slots=True)
class Defect:
    """What is wrong with one part, and what to do about it."""

    part: str
    what: str
    advice: str


def find(machine: Mapping[str, Any]) -> list[Defect]:
    """All that is wrong, GPU by GPU."""
    gpus = machine["gpus"]
    found = [Defect("NVML", gpus["error"], LOOK)] if gpus["status"] == "error" else []
    return found + [Defect(f"GPU {gpu['index']}", what, advice) for gpu in gpus["gpus"] for what, advice in _of_gpu(gpu)]


def unseen(machine: Mapping[str, Any]) -> dict[str, str]:
    """The sources that do not show all, and why: ``gpus``, ``nics``."""
    found = {}
    gpus, nics = machine["gpus"], machine["nics"]
    on_bus = machine["gpus_on_pci_bus"]
    if not gpus["gpus"]:
        found["gpus"] = gpus["error"] or "NVML shows no GPU"
    if isinstance(on_bus, int) and on_bus > gpus["count"]:
        known = {sysfs_address(gpu["pci"]) for gpu in gpus["gpus"]}
        hidden = ", ".join(address for address in machine["gpu_ways"] if address not in known)
        more = f"NVML shows {gpus['count']} of the {on_bus} NVIDIA GPUs on the PCI bus, not {hidden}"
        more += " (a container may have a part of them)"
        found["gpus"] = f"{found['gpus']}; {more}" if "gpus" in found else more
    why = unavailable(nics)
    if why is not None or not nics:
        found["nics"] = f"{NO_ADAPTER}: {why}" if why and why.startswith(os.strerror(errno.ENOENT)) else why or NO_ADAPTER
    return found


def _of_gpu(gpu: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    repair, action = gpu["repair"], gpu["repair"]["recovery_action"]
    advice = advice_for(action) if isinstance(action, str) else None
    if advice is not None:
        yield f"asks for {action}", advice
    for name, (what, advised) in REPAIRS.items():
        if repair[name] is True:
            yield what, advised
    if gpu["remapped_rows_failed"] is True:
        yield "a row of its memory could not be remapped", REPAIRS["memory_unrepairable"][1]
    if gpu["remapped_rows_pending"] is True:
        yield "a remapped row waits for a reset", REPAIRS["channel_repair_pending"][1]
    errors = gpu["ecc_uncorrected_volatile"]
    if isinstance(errors, int) and errors > 0:
        yield f"{errors} uncorrected memory errors since the driver was loaded", LOOK
    if gpu["ecc_enabled"] is False:
        yield "ECC is off", "switch it on (nvidia-smi -e 1) and reboot"
    yield from _of_links(gpu)


def _of_links(gpu: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    links, fabric = gpu["nvlinks"], gpu["fabric"]
    down = [str(one["link"]) for one in links if one["is_up"] is False] if isinstance(links, list) else []
    if down and len(down) < len(links):  # a GPU alone has all of them down
        where = "look at the GPU and at the switch: nvidia-smi nvlink --status, kernel log (SXid)"
        yield f"NVLink {', '.join(down)} down", where
    if gpu["nvlink_peer"] == "switch" and unavailable(fabric) is None:
        troubles = fabric["troubles"] if isinstance(fabric["troubles"], list) else []
        wrong = [*troubles, *([fabric["error"]] if fabric["error"] else [])]
        wrong += [f"state {fabric['state']}"] if fabric["state"] not in (JOINED, "not_supported") else []
        if wrong:
            yield f"NVLink fabric: {', '.join(wrong)}", "look at the fabric manager (systemctl status nvidia-fabricmanager)"
    width, most = gpu["pcie_width"], gpu["pcie_width_max"]
    if isinstance(width, int) and isinstance(most, int) and width < most:
        yield f"PCIe x{width} of x{most}", "look at how the GPU sits; an idle link keeps its lanes"
    reasons = gpu["clocks_event_reasons"]
    slowed = [one for one in reasons if one in HARD_SLOWDOWN] if isinstance(reasons, list) else []
    if slowed:
        yield f"held back by {', '.join(slowed)}", "look at its cooling and the power supplies of the node"
