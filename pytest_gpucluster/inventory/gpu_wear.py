"""What a GPU has used up of its spare memory rows, and for how long its clocks were held back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pynvml

from pytest_gpucluster.inventory.nvml_calls import newer, optional
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Mapping

SPARE_ROWS = ("max", "high", "partial", "low", "none")
"""How many of its spare rows a bank of memory still has (``nvmlRowRemapperHistogramValues_t``)."""
LIMITERS: Mapping[str, int] = {
    "power": pynvml.NVML_PERF_POLICY_POWER,
    "heat": pynvml.NVML_PERF_POLICY_THERMAL,
    "sync boost": pynvml.NVML_PERF_POLICY_SYNC_BOOST,
    "board": pynvml.NVML_PERF_POLICY_BOARD_LIMIT,
    "reliability": pynvml.NVML_PERF_POLICY_RELIABILITY,
}
"""What can hold the clocks back (``nvmlPerfPolicyType_t``). Low utilization, which is no limit, is left out."""
NS_PER_S = 1e9


def read_spare_row_banks(handle: Any) -> dict[str, int] | NotAvailable:
    """The number of banks of memory by how many spare rows each has left; inside a session of NVML.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    found: dict[str, int] | NotAvailable = newer("nvmlDeviceGetRowRemapperHistogram", handle, convert=_banks)
    return found


def _banks(histogram: Any) -> dict[str, int]:
    return {name: int(getattr(histogram, name)) for name in SPARE_ROWS}


def read_held_back_s(handle: Any) -> dict[str, float] | NotAvailable:
    """Seconds, since the driver was loaded, in which each limiter held the clocks back; inside a session of NVML.

    A limiter that NVML does not tell is left out; if it tells none, why. The header gives nanoseconds.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    read = {name: optional(pynvml.nvmlDeviceGetViolationStatus, handle, policy) for name, policy in LIMITERS.items()}
    told = {name: one.violationTime / NS_PER_S for name, one in read.items() if not isinstance(one, NotAvailable)}
    whys = [one for one in read.values() if isinstance(one, NotAvailable)]
    return told or whys[0]
