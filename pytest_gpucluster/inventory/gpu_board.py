"""Where a GPU sits: its board, and the slot and tray of a platform that knows them (GB200 and newer)."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pynvml

from pytest_gpucluster.inventory.nvml_calls import NvmlError, newer, optional, text
from pytest_gpucluster.inventory.reading import NotAvailable, or_none
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION_2 = 0x200002C


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlatform:
    """Where in a rack a GPU sits. Slot, tray and host (the node of a tray) are numbers of the platform."""

    chassis_serial: str
    slot: int
    tray: int
    host: int


def read_platform(handle: Any) -> GpuPlatform | NotAvailable:
    """Where the GPU with this handle sits; inside a session of NVML. Not available where no chassis is named, as on HGX.

    An H100 and an H200 answer with an empty serial number, slot 0, tray 0 and host 1; nvidia-smi shows N/A for them.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    info = _Info(version=VERSION_2)
    answer = newer("nvmlDeviceGetPlatformInfo", handle, ctypes.byref(info))
    if isinstance(answer, NotAvailable):
        return answer
    serial = bytes(info.chassis_serial).partition(b"\0")[0].decode("utf-8", "replace")
    if not serial.strip():
        return NotAvailable("it names no chassis (nvmlDeviceGetPlatformInfo)")
    return GpuPlatform(chassis_serial=one_line(serial), slot=info.slot, tray=info.tray, host=info.host)


def read_board(handle: Any) -> dict[str, str]:
    """What a spare-parts desk asks for: part number, VBIOS, module, place in the rack; inside a session of NVML.

    What NVML does not give is left out.
    """
    platform = _or_nothing(read_platform, handle)
    found = {
        "part_number": _or_nothing(optional, pynvml.nvmlDeviceGetBoardPartNumber, handle),
        "vbios": _or_nothing(optional, pynvml.nvmlDeviceGetVbiosVersion, handle),
        "module": _or_nothing(optional, pynvml.nvmlDeviceGetModuleId, handle),
        **({} if platform is None else dataclasses.asdict(platform)),
    }
    return {
        name: one_line(text(value) if isinstance(value, bytes) else str(value))
        for name, value in found.items()
        if value is not None and value != ""
    }


def _or_nothing(read: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return or_none(read(*arguments))
    except NvmlError:
        return None


class _Info(ctypes.Structure):
    """``nvmlPlatformInfo_v2_t``; older versions of the binding do not have it."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("ib_guid", ctypes.c_ubyte * 16),
        ("chassis_serial", ctypes.c_ubyte * 16),
        ("slot", ctypes.c_ubyte),
        ("tray", ctypes.c_ubyte),
        ("host", ctypes.c_ubyte),
        ("peer_type", ctypes.c_ubyte),
        ("module_id", ctypes.c_ubyte),
    )
