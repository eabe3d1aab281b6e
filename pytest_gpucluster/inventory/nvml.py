"""GPUs as NVML (the driver's management library) sees them, read through nvidia-ml-py without torch.

``python -m pytest_gpucluster.inventory.nvml`` prints one JSON object and exits 0 whatever the state of the GPUs is, so
that another process can read them under a deadline: NVML itself may hang on a broken GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import GpuclusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ABSENT = frozenset({3, 4, 13, 21, 22})
"""NVML codes of "it does not say": NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, NO_DATA, VGPU_ECC_..."""
_INVALID_ARGUMENT = 2
_LIBRARY_NOT_FOUND = 12
_GPU_IS_LOST = 15


class NvmlError(GpuclusterError):
    """NVML answered with an error; the text is NVML's own, ``code`` its ``nvmlReturn_t`` (None: not NVML's)."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        """Keep NVML's code beside its text."""
        super().__init__(message)
        self.code = code


class NvmlLibraryNotFoundError(NvmlError):
    """There is no ``libnvidia-ml.so.1``: no NVIDIA driver on this machine."""


class GpuLostError(NvmlError):
    """The GPU has fallen off the bus or cannot be reached any more (``NVML_ERROR_GPU_IS_LOST``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventReason:
    """One bit of the clocks event reasons: why a GPU does not run at its highest clock."""

    name: str
    fault: bool
    meaning: str


EVENT_REASONS: dict[int, EventReason] = {
    0x1: EventReason(name="gpu_idle", fault=False, meaning="nothing runs"),
    0x2: EventReason(name="applications_clocks_setting", fault=False, meaning="clocks limited by a setting"),
    0x4: EventReason(name="sw_power_cap", fault=False, meaning="at its power limit: normal under a large GEMM"),
    0x8: EventReason(name="hw_slowdown", fault=True, meaning="hardware halves the clocks or worse"),
    0x10: EventReason(name="sync_boost", fault=False, meaning="held to the clock of its sync boost group"),
    0x20: EventReason(name="sw_thermal_slowdown", fault=True, meaning="above its highest operating temperature"),
    0x40: EventReason(name="hw_thermal_slowdown", fault=True, meaning="too hot: hardware halves the clocks or worse"),
    0x80: EventReason(name="hw_power_brake_slowdown", fault=True, meaning="the server asserts the power brake"),
    0x100: EventReason(name="display_clock_setting", fault=False, meaning="clocks limited by a display"),
}
"""Bits and meanings of ``nvmlClocksEventReasons`` (NVML reference); ``fault`` is ours: power capping is no fault."""


def event_reason_names(bits: int) -> list[str]:
    """Names of the set bits, lowest first; a bit NVML has not documented is shown as ``unknown_0x...``."""
    single = [1 << shift for shift in range(bits.bit_length()) if bits >> shift & 1]
    return [EVENT_REASONS[bit].name if bit in EVENT_REASONS else f"unknown_{bit:#x}" for bit in single]


def fault_reasons(names: list[str]) -> list[str]:
    """Those of ``names`` that mean something is wrong with the GPU, its cooling or its power supply."""
    faults = {reason.name for reason in EVENT_REASONS.values() if reason.fault}
    return [name for name in names if name in faults]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU at one moment. None: this GPU, driver or permission does not give the value.

    ``index`` is NVML's, which is PCI order; ``cuda_index`` is what CUDA calls the GPU under this process's
    ``CUDA_VISIBLE_DEVICES``, None where that hides it (``visible`` false).
    """

    index: int
    uuid: str
    serial: str | None
    pci: str
    name: str
    visible: bool
    cuda_index: int | None
    driver: str
    vbios: str | None
    memory_gib: float
    memory_used_gib: float
    ecc_enabled: bool | None
    ecc_uncorrected_volatile: int | None
    ecc_uncorrected_aggregate: int | None
    ecc_corrected_volatile: int | None
    remapped_rows_correctable: int | None
    remapped_rows_uncorrectable: int | None
    remapped_rows_pending: bool | None
    remapped_rows_failed: bool | None
    pcie_gen: int | None
    pcie_gen_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    pcie_replay_count: int | None
    nvlink_active_links: int | None
    clocks_event_reasons: list[str] | None
    sm_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    mig: bool | None
    persistence: bool | None


def read_gpus() -> list[GpuState]:
    """Every GPU of this machine in PCI order, hidden ones included.

    Raises:
        NvmlError: a GPU, or NVML as a whole, cannot be read; the text names the GPU and carries NVML's words.
    """
    with session():
        return [read_gpu(index) for index in range(gpu_count())]


def gpu_count() -> int:
    """Number of GPUs NVML knows; inside :func:`session`."""
    return int(_required("nvmlDeviceGetCount"))


def read_uuids() -> list[str]:
    """UUIDs by index; empty text for a GPU that does not give one, so that the others keep their numbers."""
    return [_uuid_or_nothing(index) for index in range(gpu_count())]


def read_gpu(index: int) -> GpuState:
    """The GPU with this NVML index; inside :func:`session`.

    Raises:
        GpuLostError: it has fallen off the bus.
        NvmlError: NVML cannot read it for another reason.
    """
    with _naming(f"GPU {index}"):
        handle = _required("nvmlDeviceGetHandleByIndex", index)
        uuid = _text(_required("nvmlDeviceGetUUID", handle))
        shown = visible_gpus(read_uuids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        memory = _required("nvmlDeviceGetMemoryInfo", handle)
        return GpuState(
            index=index,
            uuid=uuid,
            pci=_text(_required("nvmlDeviceGetPciInfo", handle).busId),
            name=_text(_required("nvmlDeviceGetName", handle)),
            driver=_text(_required("nvmlSystemGetDriverVersion")),
            visible=index in shown,
            cuda_index=shown.index(index) if index in shown else None,
            memory_gib=round(int(memory.total) / 2**30, 3),
            memory_used_gib=round(int(memory.used) / 2**30, 3),
            **_identity(handle),
            **_memory_faults(handle),
            **_links(handle),
            **_running(handle),
        )


def read_label(index: int) -> dict[str, str | None]:
    """Name, UUID, PCI address and serial, as far as NVML tells them: also of a GPU that is lost; inside :func:`session`."""
    handle = _if_told("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return {}
    pci = _if_told("nvmlDeviceGetPciInfo", handle)
    told = {
        "gpu_name": _if_told("nvmlDeviceGetName", handle),
        "uuid": _if_told("nvmlDeviceGetUUID", handle),
        "pci": None if pci is None else pci.busId,
        "serial": _if_told("nvmlDeviceGetSerial", handle),
    }
    return {name: None if value is None else _text(value) for name, value in told.items()}


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
            return _text(_required("nvmlSystemGetDriverVersion"))
    except NvmlLibraryNotFoundError:
        return None


@contextlib.contextmanager
def session() -> Iterator[None]:
    """NVML initialised for the length of the block; blocks may nest.

    Raises:
        NvmlLibraryNotFoundError: no driver library here.
        NvmlError: the library is there and cannot start, for example ``Driver Not Loaded``.
    """
    _required("nvmlInit")
    try:
        yield
    finally:
        _required("nvmlShutdown")


def handle_of(uuid: str) -> Any:
    """NVML's handle of the GPU with this UUID (``GPU-...``); inside :func:`session`.

    Raises:
        NvmlError: no such GPU.
    """
    uuids = read_uuids()
    if uuid not in uuids:
        raise NvmlError(f"NVML shows no GPU {uuid}")
    return _required("nvmlDeviceGetHandleByIndex", uuids.index(uuid))


def read_event_reasons(handle: Any) -> int | None:
    """Bits of the clocks event reasons right now, under either name the drivers have given them."""
    bits = _optional("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:
        bits = _optional("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if bits is None else int(bits)


def read_link(handle: Any) -> dict[str, int | None]:
    """Generation and width of the PCIe link right now; an idle link slows down to save power."""
    return {
        "pcie_gen": _optional("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        "pcie_width": _optional("nvmlDeviceGetCurrPcieLinkWidth", handle),
    }


def read_clocks(handle: Any) -> dict[str, float | None]:
    """SM clock (MHz), temperature (degrees C) and power draw (W, NVML's own average of about a second) right now."""
    power_mw = _optional("nvmlDeviceGetPowerUsage", handle)
    return {
        "sm_clock_mhz": _optional("nvmlDeviceGetClockInfo", handle, 1),
        "temperature_c": _optional("nvmlDeviceGetTemperature", handle, 0),
        "power_w": None if power_mw is None else power_mw / 1000,
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


def read_used_bytes(handle: Any) -> tuple[int, bool] | None:
    """Memory in use, and whether that holds what the driver reserves for itself (before driver 510); None: not told."""
    memory = _optional("nvmlDeviceGetMemoryInfo", handle, _binding().nvmlMemory_v2)
    if memory is not None:
        return int(memory.used), False
    memory = _optional("nvmlDeviceGetMemoryInfo", handle)
    return None if memory is None else (int(memory.used), True)


def read_compute_processes(handle: Any) -> list[tuple[int, int | None]] | None:
    """(pid, bytes) of the processes with a CUDA context on the GPU; bytes None: not told; None: no list is given.

    A list may be empty, and pids those of the host, in a container.
    """
    found = _optional("nvmlDeviceGetComputeRunningProcesses_v3", handle)
    return None if found is None else [(int(one.pid), one.usedGpuMemory) for one in found]


def read_process_name(pid: int) -> str | None:
    """The file name of the program that a process runs, None where NVML cannot see that."""
    name = _if_told("nvmlSystemGetProcessName", pid)
    words = _text(name).split() if name else []
    return words[0].rpartition("/")[2] if words else None


def read_utilization_percent(handle: Any) -> int | None:
    """Share of the last moment (a sixth of a second to one second) in which a kernel ran, None where not told."""
    rates = _optional("nvmlDeviceGetUtilizationRates", handle)
    return None if rates is None else int(rates.gpu)


def survey() -> dict[str, Any]:
    """What :func:`main` prints.

    ``status`` is ``ok``, ``no_library`` (no driver here) or ``error``; ``error`` NVML's text, with every GPU it
    concerns, or None; ``gpus`` the readable GPUs; ``count`` how many NVML knows, unreadable ones included.
    """
    answers: list[GpuState | NvmlError] = []
    count = 0
    try:
        with session():
            count = gpu_count()
            answers = [_gpu_or_error(index) for index in range(count)]
    except NvmlLibraryNotFoundError as error:
        return {"status": "no_library", "error": str(error), "gpus": [], "count": 0}
    except NvmlError as error:
        answers = [error]
    errors = [str(answer) for answer in answers if isinstance(answer, NvmlError)]
    gpus = [dataclasses.asdict(answer) for answer in answers if isinstance(answer, GpuState)]
    status = "error" if errors else "ok"
    return {"status": status, "error": "; ".join(errors) or None, "gpus": gpus, "count": count}


def main() -> int:
    """Print :func:`survey` as one line of JSON; always 0, because a broken GPU is an answer."""
    sys.stdout.write(json.dumps(survey()) + "\n")
    return 0


def _gpu_or_error(index: int) -> GpuState | NvmlError:
    try:
        return read_gpu(index)
    except NvmlError as error:
        return error


def _uuid_or_nothing(index: int) -> str:
    try:
        return _text(_required("nvmlDeviceGetUUID", _required("nvmlDeviceGetHandleByIndex", index)))
    except NvmlError:
        return ""


def _identity(handle: Any) -> dict[str, Any]:
    serial = _optional("nvmlDeviceGetSerial", handle)
    vbios = _optional("nvmlDeviceGetVbiosVersion", handle)
    mig = _optional("nvmlDeviceGetMigMode", handle)
    persistence = _optional("nvmlDeviceGetPersistenceMode", handle)
    return {
        "serial": None if serial is None else _text(serial),
        "vbios": None if vbios is None else _text(vbios),
        "mig": None if mig is None else bool(mig[0]),
        "persistence": None if persistence is None else bool(persistence),
    }


def _memory_faults(handle: Any) -> dict[str, Any]:
    enabled = _optional("nvmlDeviceGetEccMode", handle)
    rows = _optional("nvmlDeviceGetRemappedRows", handle) or (None, None, None, None)
    return {
        "ecc_enabled": None if enabled is None else bool(enabled[0]),
        "ecc_uncorrected_volatile": _optional("nvmlDeviceGetTotalEccErrors", handle, 1, 0),
        "ecc_uncorrected_aggregate": _optional("nvmlDeviceGetTotalEccErrors", handle, 1, 1),
        "ecc_corrected_volatile": _optional("nvmlDeviceGetTotalEccErrors", handle, 0, 0),
        "remapped_rows_correctable": rows[0],
        "remapped_rows_uncorrectable": rows[1],
        "remapped_rows_pending": None if rows[2] is None else bool(rows[2]),
        "remapped_rows_failed": None if rows[3] is None else bool(rows[3]),
    }


def _links(handle: Any) -> dict[str, Any]:
    return {
        **read_link(handle),
        "pcie_gen_max": _optional("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "pcie_width_max": _optional("nvmlDeviceGetMaxPcieLinkWidth", handle),
        "pcie_replay_count": _optional("nvmlDeviceGetPcieReplayCounter", handle),
        "nvlink_active_links": _active_nvlinks(handle),
    }


def _running(handle: Any) -> dict[str, Any]:
    bits = read_event_reasons(handle)
    return {"clocks_event_reasons": None if bits is None else event_reason_names(bits), **read_clocks(handle)}


def _active_nvlinks(handle: Any) -> int | None:
    """Links that are up; None where the GPU has no NVLink. NVML refuses the first link number beyond the last."""
    states: list[int] = []
    for link in range(_binding().NVML_NVLINK_MAX_LINKS):
        try:
            state = _optional("nvmlDeviceGetNvLinkState", handle, link)
        except NvmlError as error:
            if error.code != _INVALID_ARGUMENT:
                raise
            break
        if state is not None:
            states.append(state)
    return sum(states) if states else None


def _index_of(entry: str, uuids: list[str]) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [index for index, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _binding() -> Any:
    try:
        import pynvml  # noqa: PLC0415 - lazy: most processes of a run never ask NVML
    except ModuleNotFoundError as error:
        raise NvmlError("nvidia-ml-py, the Python binding of NVML, is not installed") from error
    return pynvml


def _required(function: str, *arguments: Any) -> Any:
    binding = _binding()
    try:
        return getattr(binding, function)(*arguments)
    except binding.NVMLError as error:
        kinds: dict[int, Callable[..., NvmlError]] = {
            _LIBRARY_NOT_FOUND: NvmlLibraryNotFoundError,
            _GPU_IS_LOST: GpuLostError,
        }
        raise kinds.get(error.value, NvmlError)(f"{error} ({function})", code=error.value) from error


def _if_told(function: str, *arguments: Any) -> Any:
    try:
        return _required(function, *arguments)
    except NvmlError:
        return None


def _optional(function: str, *arguments: Any) -> Any:
    try:
        return _required(function, *arguments)
    except NvmlError as error:
        if error.code in _ABSENT:
            return None
        raise


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Put the GPU's name before NVML's text."""
    try:
        yield
    except NvmlError as error:
        raise type(error)(f"{what}: {error}", code=error.code) from error


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    sys.exit(main())
