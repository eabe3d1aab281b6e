"""Clocks event reasons: why a GPU does not run at its highest clock, as NVML says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pynvml

from pytest_gpucluster.inventory.nvml_calls import optional
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Mapping

EVENT_REASONS: Mapping[int, str] = {
    pynvml.nvmlClocksEventReasonGpuIdle: "gpu_idle",
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "applications_clocks_setting",
    pynvml.nvmlClocksEventReasonSwPowerCap: "sw_power_cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display_clock_setting",
}
"""Names of the bits that say why a GPU does not run at its highest clock (``nvmlClocksEventReasons``)."""
FAULT_REASONS = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})
"""Reasons that show a fault of the GPU, its cooling or its power supply. The power cap is normal under a large GEMM."""


def event_reason_names(bits: int) -> list[str]:
    """Names of the set bits, lowest first; a bit NVML has not documented is shown as ``unknown_0x...``."""
    single = [1 << shift for shift in range(bits.bit_length()) if bits >> shift & 1]
    return [EVENT_REASONS.get(bit, f"unknown_{bit:#x}") for bit in single]


def fault_reasons(names: list[str]) -> list[str]:
    """The names that are in :data:`FAULT_REASONS`."""
    return [name for name in names if name in FAULT_REASONS]


def read_event_reasons(handle: Any) -> int | NotAvailable:
    """Bits of the clocks event reasons right now, under either name the drivers have given them."""
    bits: int | NotAvailable = optional(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle, convert=int)
    if isinstance(bits, NotAvailable):
        older: int | NotAvailable = optional(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle, convert=int)
        return bits if isinstance(older, NotAvailable) else older
    return bits
