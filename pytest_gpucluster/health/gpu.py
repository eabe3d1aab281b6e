"""What a GPU needs by its own account, in words, and what to do about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.inventory.nvml import GpuRepair

HEALTHY = "none"
ADVICE: Mapping[str, str] = {
    "gpu_reset": "end all processes on the GPU and reset it (nvidia-smi --gpu-reset)",
    "node_reboot": "reboot the node: the fault may have left its operating system inconsistent",
    "drain_p2p": "end all processes that use peer-to-peer traffic; NVML then says what else is needed",
    "drain_and_reset": "the GPU runs at reduced capacity: start nothing new on it, and reset it when its work has ended",
    "recover_imex_domain": "recover the IMEX domain of the node",
    "bus_reset": "reset the GPU's PCIe bus",
    "system_reboot": "reboot the whole system",
}
"""What NVML's recovery actions ask for, after NVIDIA's GPU memory error management guide and nvml.h."""
UNKNOWN_ACTION = "look up this recovery action in the documentation of the driver"
RESET = "reset the GPU (nvidia-smi --gpu-reset), which repairs it"
DIAGNOSE = "take the GPU out of service and run NVIDIA's field diagnostic, which decides on its replacement"
REPAIRS: Mapping[str, tuple[str, str]] = {
    "memory_unrepairable": ("its memory cannot be repaired", DIAGNOSE),
    "sram_threshold_exceeded": ("its SRAM has had too many uncorrectable errors", DIAGNOSE),
    "channel_repair_pending": ("a channel of its memory waits for a repair", RESET),
    "tpc_repair_pending": ("a processing cluster (TPC) waits for a repair", RESET),
}
"""Each flag of a GPU in words, and what to do; the worst first."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a GPU needs (``facts``), what to do about the worst of it, and which flags are not known."""

    facts: tuple[str, ...]
    advice: str | None
    unknown: tuple[str, ...]


def advice_for(action: str) -> str | None:
    """What to do about a recovery action; None where none is needed."""
    return None if action == HEALTHY else ADVICE.get(action, UNKNOWN_ACTION)


def needs_of(repair: GpuRepair) -> Needs:
    """The repairs that a GPU waits for."""
    flags = {name: getattr(repair, name) for name in REPAIRS}
    unknown = tuple(f"{name} is {flag}" for name, flag in flags.items() if isinstance(flag, NotAvailable))
    raised = [REPAIRS[name] for name, flag in flags.items() if flag is True]
    return Needs(tuple(fact for fact, _ in raised), raised[0][1] if raised else None, unknown)
