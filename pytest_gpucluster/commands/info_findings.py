"""What is wrong with a machine by what it tells of itself, without any load. Pure: the plain data of ``read_machine`` in.

Only what is certain on one machine. A port that is down may be meant so, and is told, never counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.health.gpu import REPAIRS, advice_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOOK = "look at the kernel log (dmesg | grep -i xid), then reboot the node"
HARD_SLOWDOWN = ("hw_thermal_slowdown", "hw_power_brake_slowdown")
JOINED = "completed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with one part, and what to do about it."""

    part: str
    what: str
    advice: str


def unavailable(value: Any) -> str | None:
    """Why a reading is not available; None where it is."""
    return str(value["not_available"]) if isinstance(value, dict) and value.keys() == {"not_available"} else None


def find(machine: Mapping[str, Any]) -> list[Finding]:
    """All that is wrong, GPU by GPU."""
    gpus = machine["gpus"]
    found = [*_of_driver(machine)]
    for gpu in gpus["gpus"]:
        found += [Finding(f"GPU {gpu['index']}", what, advice) for what, advice in _of_gpu(gpu)]
    return found


def unseen(machine: Mapping[str, Any]) -> dict[str, str]:
    """The sources that do not show all, and why: ``gpus``, ``nics``."""
    found = {}
    gpus, nics = machine["gpus"], machine["nics"]
    on_bus = machine["gpus_on_pci_bus"]
    if not gpus["gpus"]:
        found["gpus"] = gpus["error"] or "NVML shows no GPU"
    if isinstance(on_bus, int) and on_bus > gpus["count"]:
        more = f"NVML shows {gpus['count']} of the {on_bus} NVIDIA GPUs on the PCI bus (a container may have a part of them)"
        found["gpus"] = "; ".join([*([found["gpus"]] if "gpus" in found else []), more])
    why = unavailable(nics)
    if why is not None or not nics:
        found["nics"] = why or "the kernel lists no adapter"
    return found


def _of_driver(machine: Mapping[str, Any]) -> Iterator[Finding]:
    gpus = machine["gpus"]
    if gpus["status"] == "error":
        yield Finding("NVML", gpus["error"], LOOK)


def _of_gpu(gpu: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    repair, action = gpu["repair"], gpu["repair"]["recovery_action"]
    advice = advice_for(action) if isinstance(action, str) else None
    if advice is not None:
        yield f"asks for {action}", advice
    for name, (what, asked) in REPAIRS.items():
        if repair[name] is True:
            yield what, asked
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
        yield (
            f"NVLink {', '.join(down)} down",
            "look at the GPU and at the switch: nvidia-smi nvlink --status, kernel log (SXid)",
        )
    if gpu["nvlink_peer"] == "switch" and unavailable(fabric) is None:
        wrong = [*fabric["troubles"], *([fabric["error"]] if fabric["error"] else [])]
        wrong += [f"state {fabric['state']}"] if fabric["state"] not in (JOINED, "not_supported") else []
        if wrong:
            yield f"NVLink fabric: {', '.join(wrong)}", "look at the fabric manager (systemctl status nvidia-fabricmanager)"
    width, most = gpu["pcie_width"], gpu["pcie_width_max"]
    if isinstance(width, int) and isinstance(most, int) and width < most:
        yield f"PCIe x{width} of x{most}", "look at how the GPU sits; an idle link keeps its lanes"
    reasons = gpu["clocks_event_reasons"]
    held = [one for one in reasons if one in HARD_SLOWDOWN] if isinstance(reasons, list) else []
    if held:
        yield f"held back by {', '.join(held)}", "look at its cooling and the power supplies of the node"


def must_be_seen(view: str) -> frozenset[str]:
    """The sources without which a view shows nothing."""
    return {"ib": frozenset({"nics"}), "host": frozenset[str](), "software": frozenset[str]()}.get(view, frozenset({"gpus"}))
