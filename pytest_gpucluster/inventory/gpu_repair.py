"""What a GPU needs by its own account: a recovery, a repair of its memory, its replacement."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.inventory.nvml_calls import newer, read_fields
from pytest_gpucluster.inventory.reading import NotAvailable

GET_GPU_RECOVERY_ACTION = 230
"""The number of NVML's field; older versions of the binding do not name it."""
ACTIONS = {
    0: "none",
    1: "gpu_reset",
    2: "node_reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}
"""``nvmlDeviceGpuRecoveryAction_t``."""
SRAM_VERSION_1 = 0x1000068


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRepair:
    """What NVML says that a GPU needs. ``recovery_action`` is ``none`` for a healthy one.

    A channel of the memory or a processing cluster (TPC) is repaired at the next reset. ``sram_threshold_exceeded``: the SRAM
    has had as many uncorrectable errors as NVIDIA's field diagnostic allows.
    """

    recovery_action: str | NotAvailable
    channel_repair_pending: bool | NotAvailable
    tpc_repair_pending: bool | NotAvailable
    memory_unrepairable: bool | NotAvailable
    sram_threshold_exceeded: bool | NotAvailable


def read_repair(handle: Any) -> GpuRepair:
    """What the GPU with this handle needs; inside a session of NVML.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    (action,) = read_fields(handle, (GET_GPU_RECOVERY_ACTION, 0))
    pending = newer("nvmlDeviceGetRepairStatus", handle)
    channel, tpc = (pending,) * 2 if isinstance(pending, NotAvailable) else map(bool, pending)
    return GpuRepair(
        recovery_action=action if isinstance(action, NotAvailable) else ACTIONS.get(int(action), f"unknown_{action:g}"),
        channel_repair_pending=channel,
        tpc_repair_pending=tpc,
        memory_unrepairable=newer("nvmlDeviceGetUnrepairableMemoryFlag_v1", handle, convert=bool),
        sram_threshold_exceeded=_read_sram(handle),
    )


class _SramStatus(ctypes.Structure):
    """``nvmlEccSramErrorStatus_v1_t``; older versions of the binding do not have it."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("counters", ctypes.c_ulonglong * 11),
        ("threshold_exceeded", ctypes.c_uint),
    )


def _read_sram(handle: Any) -> bool | NotAvailable:
    status = _SramStatus(version=SRAM_VERSION_1)
    answer = newer("nvmlDeviceGetSramEccErrorStatus", handle, ctypes.byref(status))
    return answer if isinstance(answer, NotAvailable) else bool(status.threshold_exceeded)
