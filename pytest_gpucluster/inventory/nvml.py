"""GPUs as NVML (the driver's management library) sees them, read through nvidia-ml-py without torch.

``python -m pytest_gpucluster.inventory.nvml`` prints one JSON object and exits 0 whatever the state of the GPUs is, so
that another process can read them under a deadline: NVML itself may hang on a broken GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import pynvml

from pytest_gpucluster.inventory.event_reasons import event_reason_names, read_event_reasons
from pytest_gpucluster.inventory.gpu_board import GpuPlatform, read_platform
from pytest_gpucluster.inventory.gpu_fabric import GpuFabric, read_fabric, read_nvlink_peer
from pytest_gpucluster.inventory.gpu_repair import GpuRepair, read_repair
from pytest_gpucluster.inventory.gpu_wear import read_held_back_s, read_spare_row_banks
from pytest_gpucluster.inventory.nvlinks import NvLink, read_nvlinks
from pytest_gpucluster.inventory.nvml_calls import (
    NvmlError,
    NvmlLibraryNotFoundError,
    naming,
    newer,
    optional,
    read_fields,
    required,
    session,
    text,
    value_or_none,
)
from pytest_gpucluster.inventory.reading import NotAvailable, or_none

COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU at one moment. :class:`NotAvailable`: this GPU, driver or permission does not give the value; NVML says why.

    ``index`` is NVML's, which is PCI order; ``cuda_index`` is what CUDA calls the GPU under this process's
    ``CUDA_VISIBLE_DEVICES``, None where that hides it (``visible`` false). ``spare_row_banks``: how many banks of memory
    have most, or none, of their spare rows left; ``held_back_s``: seconds, since the driver was loaded, by limiter.
    """

    index: int
    uuid: str
    serial: str | NotAvailable
    pci: str
    name: str
    visible: bool
    cuda_index: int | None
    driver: str
    vbios: str | NotAvailable
    board_part_number: str | NotAvailable
    module_id: int | NotAvailable
    platform: GpuPlatform | NotAvailable
    memory_gib: float
    memory_used_gib: float
    ecc_enabled: bool | NotAvailable
    ecc_uncorrected_volatile: int | NotAvailable
    ecc_uncorrected_aggregate: int | NotAvailable
    ecc_corrected_volatile: int | NotAvailable
    remapped_rows_correctable: int | NotAvailable
    remapped_rows_uncorrectable: int | NotAvailable
    remapped_rows_pending: bool | NotAvailable
    remapped_rows_failed: bool | NotAvailable
    spare_row_banks: dict[str, int] | NotAvailable
    pcie_gen: int | NotAvailable
    pcie_gen_max: int | NotAvailable
    pcie_width: int | NotAvailable
    pcie_width_max: int | NotAvailable
    pcie_replay_count: int | NotAvailable
    nvlinks: list[NvLink] | NotAvailable
    clocks_event_reasons: list[str] | NotAvailable
    sm_clock_mhz: int | NotAvailable
    temperature_c: int | NotAvailable
    power_w: float | NotAvailable
    power_limit_w: float | NotAvailable
    power_limit_default_w: float | NotAvailable
    mig: bool | NotAvailable
    persistence: bool | NotAvailable
    compute_mode: str | NotAvailable
    memory_temperature_c: float | NotAvailable
    held_back_s: dict[str, float] | NotAvailable
    repair: GpuRepair
    nvlink_peer: str | NotAvailable
    fabric: GpuFabric | NotAvailable


def gpu_count() -> int:
    """Number of GPUs NVML knows; inside :func:`session`."""
    return int(required(pynvml.nvmlDeviceGetCount))


def is_in_mig_mode(index: int) -> bool:
    """Whether the GPU is divided into instances; inside :func:`session`. No for one that does not say so.

    Raises:
        NvmlError: NVML lists the GPU and cannot open it.
    """
    handle = required(pynvml.nvmlDeviceGetHandleByIndex, index)
    return optional(pynvml.nvmlDeviceGetMigMode, handle, convert=lambda modes: bool(modes[0])) is True


def read_uuids() -> list[str]:
    """UUIDs by index; empty text for a GPU that does not give one, so that the others keep their numbers."""
    return [_uuid_or_nothing(index) for index in range(gpu_count())]


def read_gpu(index: int) -> GpuState:
    """The GPU with this NVML index; inside :func:`session`.

    Raises:
        GpuLostError: it has fallen off the bus.
        NvmlError: NVML cannot read it for another reason.
    """
    with naming(f"GPU {index}"):
        handle = required(pynvml.nvmlDeviceGetHandleByIndex, index)
        uuid = text(required(pynvml.nvmlDeviceGetUUID, handle))
        shown = visible_gpus(read_uuids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        memory = required(pynvml.nvmlDeviceGetMemoryInfo, handle)
        return GpuState(
            index=index,
            uuid=uuid,
            pci=text(required(pynvml.nvmlDeviceGetPciInfo, handle).busId),
            name=text(required(pynvml.nvmlDeviceGetName, handle)),
            driver=text(required(pynvml.nvmlSystemGetDriverVersion)),
            visible=index in shown,
            cuda_index=shown.index(index) if index in shown else None,
            memory_gib=round(int(memory.total) / 2**30, 3),
            memory_used_gib=round(int(memory.used) / 2**30, 3),
            **_identity(handle),
            **_memory_faults(handle),
            **_links(handle),
            **_running(handle),
            repair=read_repair(handle),
            nvlink_peer=read_nvlink_peer(handle),
            fabric=read_fabric(handle),
        )


def read_label(index: int) -> dict[str, str | None]:
    """Name, UUID, PCI address and serial, as far as NVML gives them, of a lost GPU too; inside :func:`session`."""
    handle = value_or_none(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return {}
    pci = value_or_none(pynvml.nvmlDeviceGetPciInfo, handle)
    label = {
        "gpu_name": value_or_none(pynvml.nvmlDeviceGetName, handle),
        "uuid": value_or_none(pynvml.nvmlDeviceGetUUID, handle),
        "pci": None if pci is None else pci.busId,
        "serial": value_or_none(pynvml.nvmlDeviceGetSerial, handle),
    }
    return {name: None if value is None else text(value) for name, value in label.items()}


def read_serial(uuid: str) -> str | None:
    """The board's serial number, None if NVML does not give it; inside :func:`session`.

    Raises:
        NvmlError: no such GPU.
    """
    return or_none(optional(pynvml.nvmlDeviceGetSerial, handle_of(uuid), convert=text))


def visible_gpus(uuids: list[str], setting: str | None) -> list[int]:
    """Indices of the GPUs that CUDA shows, in CUDA's order, for this value of ``CUDA_VISIBLE_DEVICES``.

    As CUDA reads it: None shows all, the list ends at its first invalid entry, a repeated entry shows none, and a
    ``GPU-`` entry may be any unambiguous beginning of a UUID. Integers count in PCI order
    (``CUDA_DEVICE_ORDER=PCI_BUS_ID``, and the default wherever all GPUs are alike).
    """
    if setting is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for entry in setting.split(","):
        index = _index_of(entry.strip(), uuids)
        if index is None:
            break
        if index in shown:
            return []
        shown.append(index)
    return shown


def read_driver_version() -> str | None:
    """The driver's version, None on a machine without one.

    Raises:
        NvmlError: there is a driver library and it does not answer.
    """
    try:
        with session():
            return text(required(pynvml.nvmlSystemGetDriverVersion))
    except NvmlLibraryNotFoundError:
        return None


def handle_of(uuid: str) -> Any:
    """NVML's handle of the GPU with this UUID (``GPU-...``); inside :func:`session`.

    Raises:
        NvmlError: no such GPU.
    """
    uuids = read_uuids()
    if uuid not in uuids:
        raise NvmlError(f"NVML shows no GPU {uuid}")
    return required(pynvml.nvmlDeviceGetHandleByIndex, uuids.index(uuid))


def read_link(handle: Any) -> dict[str, int | NotAvailable]:
    """Generation and width of the PCIe link right now; an idle link slows down to save power."""
    return {
        "pcie_gen": optional(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "pcie_width": optional(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
    }


def read_clocks(handle: Any) -> dict[str, float | NotAvailable]:
    """SM clock (MHz), temperature (degrees C) and power draw (W, NVML's own average of about a second) right now."""
    return {
        "sm_clock_mhz": optional(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "temperature_c": optional(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        "power_w": optional(pynvml.nvmlDeviceGetPowerUsage, handle, convert=_watts),
    }


def own_index(uuid: str | None) -> int:
    """NVML index of this process's GPU: ``uuid``, else the ``LOCAL_RANK``-th that CUDA should show; inside :func:`session`.

    Raises:
        NvmlError: NVML does not show it.
    """
    uuids = read_uuids()
    if uuid is not None:
        if uuid not in uuids:
            raise NvmlError(f"torch uses GPU {uuid}, which NVML does not show")
        return uuids.index(uuid)
    shown = visible_gpus(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= len(shown):
        raise NvmlError(f"LOCAL_RANK {local_rank} has no GPU: NVML shows {len(uuids)}, CUDA may use {len(shown)}")
    return shown[local_rank]


def survey() -> dict[str, Any]:
    """What :func:`main` prints.

    ``status`` is ``ok``, ``no_library`` (no driver here) or ``error``; ``error`` NVML's text, with every GPU it
    concerns, or None; ``gpus`` the readable GPUs; ``count`` how many NVML knows, unreadable ones included;
    ``driver_cuda`` the newest CUDA that the driver runs.
    """
    answers: list[GpuState | NvmlError] = []
    count = 0
    cuda: str | NotAvailable = NotAvailable("NVML did not start")
    try:
        with session():
            cuda = newer("nvmlSystemGetCudaDriverVersion_v2", convert=lambda number: f"{number // 1000}.{number % 1000 // 10}")
            count = gpu_count()
            answers = [_gpu_or_error(index) for index in range(count)]
    except NvmlLibraryNotFoundError as error:
        return {"status": "no_library", "error": str(error), "gpus": [], "count": 0, "driver_cuda": _plain(cuda)}
    except NvmlError as error:
        answers = [error]
    errors = [str(answer) for answer in answers if isinstance(answer, NvmlError)]
    gpus = [dataclasses.asdict(answer) for answer in answers if isinstance(answer, GpuState)]
    status = "error" if errors else "ok"
    texts = "; ".join(errors) or None
    return {"status": status, "error": texts, "gpus": gpus, "count": count, "driver_cuda": _plain(cuda)}


def main() -> int:
    """Print :func:`survey` as one line of JSON; always 0, because a broken GPU is an answer."""
    sys.stdout.write(json.dumps(survey()) + "\n")
    return 0


def _plain(value: str | NotAvailable) -> Any:
    return dataclasses.asdict(value) if isinstance(value, NotAvailable) else value


def _gpu_or_error(index: int) -> GpuState | NvmlError:
    try:
        return read_gpu(index)
    except NvmlError as error:
        return error


def _uuid_or_nothing(index: int) -> str:
    try:
        return text(required(pynvml.nvmlDeviceGetUUID, required(pynvml.nvmlDeviceGetHandleByIndex, index)))
    except NvmlError:
        return ""


def _identity(handle: Any) -> dict[str, Any]:
    return {
        "serial": optional(pynvml.nvmlDeviceGetSerial, handle, convert=text),
        "vbios": optional(pynvml.nvmlDeviceGetVbiosVersion, handle, convert=text),
        "board_part_number": optional(pynvml.nvmlDeviceGetBoardPartNumber, handle, convert=text),
        "module_id": optional(pynvml.nvmlDeviceGetModuleId, handle),
        "platform": read_platform(handle),
        "mig": optional(pynvml.nvmlDeviceGetMigMode, handle, convert=lambda modes: bool(modes[0])),
        "persistence": optional(pynvml.nvmlDeviceGetPersistenceMode, handle, convert=bool),
        "compute_mode": optional(
            pynvml.nvmlDeviceGetComputeMode, handle, convert=lambda mode: COMPUTE_MODES.get(mode, f"unknown_{mode}")
        ),
    }


def _memory_faults(handle: Any) -> dict[str, Any]:
    count_errors = pynvml.nvmlDeviceGetTotalEccErrors
    corrected, uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    rows = optional(pynvml.nvmlDeviceGetRemappedRows, handle)
    correctable, uncorrectable, pending, failed = (rows,) * 4 if isinstance(rows, NotAvailable) else rows
    return {
        "ecc_enabled": optional(pynvml.nvmlDeviceGetEccMode, handle, convert=lambda modes: bool(modes[0])),
        "ecc_uncorrected_volatile": optional(count_errors, handle, uncorrected, pynvml.NVML_VOLATILE_ECC),
        "ecc_uncorrected_aggregate": optional(count_errors, handle, uncorrected, pynvml.NVML_AGGREGATE_ECC),
        "ecc_corrected_volatile": optional(count_errors, handle, corrected, pynvml.NVML_VOLATILE_ECC),
        "remapped_rows_correctable": correctable,
        "remapped_rows_uncorrectable": uncorrectable,
        "remapped_rows_pending": pending if isinstance(pending, NotAvailable) else bool(pending),
        "remapped_rows_failed": failed if isinstance(failed, NotAvailable) else bool(failed),
        "spare_row_banks": read_spare_row_banks(handle),
    }


def _links(handle: Any) -> dict[str, Any]:
    return {
        **read_link(handle),
        "pcie_gen_max": optional(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "pcie_width_max": optional(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "pcie_replay_count": optional(pynvml.nvmlDeviceGetPcieReplayCounter, handle),
        "nvlinks": read_nvlinks(handle),
    }


def _running(handle: Any) -> dict[str, Any]:
    bits = read_event_reasons(handle)
    reasons = bits if isinstance(bits, NotAvailable) else event_reason_names(bits)
    (memory_temperature,) = read_fields(handle, (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0))
    return {
        "clocks_event_reasons": reasons,
        "memory_temperature_c": memory_temperature,
        "held_back_s": read_held_back_s(handle),
        "power_limit_w": optional(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle, convert=_watts),
        "power_limit_default_w": optional(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle, convert=_watts),
        **read_clocks(handle),
    }


def _watts(power_mw: float) -> float:
    return power_mw / 1000


def _index_of(entry: str, uuids: list[str]) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [index for index, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


if __name__ == "__main__":
    sys.exit(main())
