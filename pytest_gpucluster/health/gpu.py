"""What a GPU needs by its own account, what to do about it, and what it showed under load. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.numa import sysfs_address
from pytest_gpucluster.inventory.reading import WATCHED, NotAvailable, apply, split
from pytest_gpucluster.judging.finding import HERE, Finding

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.nvml import GpuRepair
    from pytest_gpucluster.inventory.telemetry import Telemetry
    from pytest_gpucluster.measurements.health import GpuHealth

__all__ = ["judge_clocks", "judge_gpu_count", "judge_pcie_width", "judge_recovery", "judge_repair"]

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


def advice_for(action: str) -> str | None:
    """What to do about a recovery action; None where none is needed."""
    return None if action == HEALTHY else ADVICE.get(action, UNKNOWN_ACTION)


def judge_gpu_count(state: GpuHealth, *, is_stated: bool) -> Finding:
    """How many GPUs of a node NVML lists, beside its PCI bus.

    ``is_stated``: somebody said how many there should be. If nobody did, NVML's list is no measure of itself: a GPU that only
    the bus shows is missing, or belongs to another container.
    """
    listed, on_bus = state.nvml_device_count, state.pci_gpus
    if listed is None:
        return Finding(unknown={HERE: ("there is no NVML to count GPUs with",)}, unknown_kind="unknown")
    state_it = f"say --gpucluster-expect gpus_per_node=N if {listed} is right or wrong"
    if isinstance(on_bus, NotAvailable):
        found = Finding(value=listed, evidence={"NVIDIA GPUs on the PCI bus": str(on_bus)})
        doubt = f"nobody stated how many GPUs there are, and the PCI bus is {on_bus}; {state_it}"
        return found if is_stated else replace(found, unknown={HERE: (doubt,)}, unknown_kind="unknown")
    found = Finding(value=listed, evidence={"NVIDIA GPUs on the PCI bus": len(on_bus)})
    if len(on_bus) <= listed:
        return found
    known = {*map(sysfs_address, state.nvml_pci)}
    hidden = ", ".join(f"{address} ({driver})" for address, driver in on_bus.items() if address not in known)
    advice = f"look in the kernel log for the GPU that NVML does not list: {hidden}"
    text = f"NVML lists {listed} of the {len(on_bus)} NVIDIA GPUs on the PCI bus; not {hidden}"
    if is_stated:
        return replace(found, remark=text, advice=advice, evidence={**found.evidence, "not in NVML": hidden})
    doubt = f"{text}. A container or job may have a part of them: {state_it}"
    return replace(found, unknown={HERE: (doubt,)}, unknown_kind="unknown")


def judge_recovery(repair: GpuRepair) -> Finding:
    """A recovery action that NVML asks for: a reset, a reboot and the like."""
    action = repair.recovery_action
    if isinstance(action, NotAvailable):
        return Finding(unknown={HERE: (f"recovery_action is {action}",)}, kind="gpu", unknown_kind="unknown")
    bad = () if action == HEALTHY else (f"NVML asks for {action}",)
    return Finding(bad={HERE: bad}, kind="gpu", advice=advice_for(action), evidence={"recovery action": action})


def judge_repair(repair: GpuRepair) -> Finding:
    """The repairs that a GPU waits for."""
    flags, unread = split({name: getattr(repair, name) for name in REPAIRS})
    raised = [REPAIRS[name] for name, flag in flags.items() if flag is True]
    return Finding(
        bad={HERE: [fact for fact, _ in raised]},
        unknown={HERE: [f"{name} is {why}" for name, why in unread.items()]},
        kind="gpu",
        unknown_kind="unknown",
        advice=raised[0][1] if raised else None,
    )


def judge_clocks(telemetry: Telemetry | NotAvailable) -> Finding:
    """What held the clocks of a GPU under load: heat, hardware or the power supply. The power cap is normal.

    Where fewer than :data:`WATCHED` of the due samples were read, the rest of the load is unknown.
    """
    reasons = apply(lambda seen: seen.fault_reasons, telemetry)
    if isinstance(telemetry, NotAvailable) or isinstance(reasons, NotAvailable):
        return Finding(unknown={HERE: (f"clocks event reasons are {reasons}",)}, unknown_kind="unknown")
    unknown = _rest_of_the_load(telemetry, "clocks event reasons were")
    return Finding(bad={HERE: reasons}, unknown={HERE: unknown}, kind="gpu", unknown_kind="unknown")


def _rest_of_the_load(telemetry: Telemetry, what: str) -> list[str]:
    """Why a part of the load is unknown, where too few of the due samples were read."""
    read, due = telemetry.samples, telemetry.due
    why = f"{what} read {read} of {due} times under load, and {100 * WATCHED:g} % are needed"
    return [why] if read < WATCHED * due else []


def judge_pcie_width(telemetry: Telemetry | NotAvailable, most: Mapping[str, int]) -> Finding:
    """The PCIe link of a GPU under load beside the generation (``gen``) and the ``lanes`` that it should have."""
    if isinstance(telemetry, NotAvailable):
        return Finding(unknown={HERE: (f"telemetry is {telemetry}",)}, unknown_kind="unknown")
    known, refused = split({"gen": telemetry.pcie_gen_max, "lanes": telemetry.pcie_width_min})
    unknown = [*(f"PCIe {name} is {why}" for name, why in refused.items()), *_rest_of_the_load(telemetry, "the PCIe link was")]
    return Finding(
        bad={HERE: [f"{name} {value} of {most[name]}" for name, value in known.items() if value < most[name]]},
        unknown={HERE: unknown},
        unknown_kind="unknown",
        evidence={**known, **{f"{name} promised": value for name, value in most.items()}},
    )
