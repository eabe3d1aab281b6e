"""GPUs as NVML (the driver's management library) sees them, read through nvidia-ml-py without torch: the table of readings."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any, TypeVar

import pynvml

from pytest_gpucluster.inventory.gpu_index import read_uuids, visible_gpus
from pytest_gpucluster.inventory.nvlinks import ALONE, GROWTH, GpuFabric, LinkCounters, NvLink, read_fabric, read_nvlink_peer
from pytest_gpucluster.inventory.nvml_calls import Nvml, NvmlField, NvmlPart, attempt, naming, read_links, read_part, required
from pytest_gpucluster.inventory.reading import (
    EVIDENCE,
    NOBODY,
    THE_RUN,
    NotAvailable,
    apply,
    healthy,
    judged,
    row,
    rows,
    split,
    word_of,
    yes_or_no,
)
from pytest_gpucluster.text import one_line

Value = TypeVar("Value")
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
COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
ACTIONS = dict(enumerate((
    "none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain", "bus_reset", "system_reboot",
)))  # fmt: skip
"""``nvmlDeviceGpuRecoveryAction_t``."""
RECOVERY_ACTION = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; older versions of the binding do not name it."""
SOFTWARE_THERMAL, HARDWARE_THERMAL, POWER_BRAKE = 269, 270, 271
"""NVML_FI_DEV_CLOCKS_EVENT_REASON_..., which nvidia-smi shows as clocks_event_reasons_counters; in nanoseconds (nvml.h)."""
SPARE_ROWS = ("max", "high", "partial", "low", "none")
"""How many of its spare rows a bank of memory still has (``nvmlRowRemapperHistogramValues_t``)."""
LIMITERS: Mapping[str, int] = {
    "power": pynvml.NVML_PERF_POLICY_POWER,
    "heat": pynvml.NVML_PERF_POLICY_THERMAL,
    "sync boost": pynvml.NVML_PERF_POLICY_SYNC_BOOST,
    "board": pynvml.NVML_PERF_POLICY_BOARD_LIMIT,
    "reliability": pynvml.NVML_PERF_POLICY_RELIABILITY,
}
"""What can throttle the clocks (``nvmlPerfPolicyType_t``). Low utilization, which is no limit, is left out."""
PCIE = {
    "correctable errors": pynvml.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS,
    "non-fatal errors": pynvml.NVML_FI_DEV_PCIE_COUNT_NON_FATAL_ERROR,
    "fatal errors": pynvml.NVML_FI_DEV_PCIE_COUNT_FATAL_ERROR,
    "receiver errors": pynvml.NVML_FI_DEV_PCIE_COUNT_RECEIVER_ERROR,
    "lane errors": pynvml.NVML_FI_DEV_PCIE_COUNT_LANE_ERROR,
    "wrong checksums": pynvml.NVML_FI_DEV_PCIE_COUNT_LCRC_ERROR,
    "bad packets": pynvml.NVML_FI_DEV_PCIE_COUNT_BAD_TLP,
    "bad packets of the link": pynvml.NVML_FI_DEV_PCIE_COUNT_BAD_DLLP,
    "packets refused here": pynvml.NVML_FI_DEV_PCIE_COUNT_NAKS_SENT,
    "packets refused there": pynvml.NVML_FI_DEV_PCIE_COUNT_NAKS_RECEIVED,
    "unsupported requests": pynvml.NVML_FI_DEV_PCIE_COUNT_UNSUPPORTED_REQ,
    "recoveries": pynvml.NVML_FI_DEV_PCIE_L0_TO_RECOVERY_COUNTER,
}
"""The fields of a PCIe link by name, besides its replays: packets are TLPs, those of the link DLLPs."""
REPAIRED = "errors that were repaired: they foretell, and no limit has a source yet"
IDLE = "of an idle GPU; `clocks_under_load` judges them under load"
IDLE_LINK = "an idle link slows down; `pcie_link` judges it under load"
NS_PER_S = 1e9
GIB = 2**30
PLATFORM_VERSION_2 = 0x200002C
SRAM_VERSION_1 = 0x1000068


# --- What is made of NVML's answers ---


def event_reason_names(bits: int) -> list[str]:
    """Names of the set bits, lowest first; a bit NVML has not documented is shown as ``unknown_0x...``."""
    single = [1 << shift for shift in range(bits.bit_length()) if bits >> shift & 1]
    return [EVENT_REASONS.get(bit, f"unknown_{bit:#x}") for bit in single]


def fault_reasons(names: list[str]) -> list[str]:
    """The names that are in :data:`FAULT_REASONS`."""
    return [name for name in names if name in FAULT_REASONS]


def _gib(size_bytes: int) -> float:
    return round(int(size_bytes) / GIB, 3)


def _watts(power_mw: int) -> float:
    return power_mw / 1000


def _seconds(time_ns: float) -> float:
    return time_ns / NS_PER_S


def _flag(at: int) -> Callable[[Sequence[int]], bool | NotAvailable]:
    """The flag at this place of an answer. Of modes the first is that of now, and the second that after the next reboot."""
    return lambda answer: yes_or_no(answer[at])


def _action(number: float) -> str:
    return ACTIONS.get(int(number), f"unknown_{number:g}")


def _read_pcie(part: NvmlPart) -> dict[str, int]:
    """Those that NVML gives."""
    known, _ = split(part.fields([*PCIE.values()]))
    return {name: int(known[number]) for name, number in PCIE.items() if number in known}


def _read_spare_rows(part: NvmlPart) -> dict[str, int] | NotAvailable:
    """The number of banks of memory by how many spare rows each has left."""
    histogram = part.call("nvmlDeviceGetRowRemapperHistogram")
    return apply(lambda known: {name: int(getattr(known, name)) for name in SPARE_ROWS}, histogram)


def _read_throttled_s(part: NvmlPart) -> dict[str, float] | NotAvailable:
    """A limiter that NVML does not give is left out; if it gives none, why. The header gives nanoseconds."""
    by_limiter = {name: part.call("nvmlDeviceGetViolationStatus", policy) for name, policy in LIMITERS.items()}
    known, refused = split(by_limiter)
    return {name: one.violationTime / NS_PER_S for name, one in known.items()} or next(iter(refused.values()))


class _SramStatus(ctypes.Structure):
    """``nvmlEccSramErrorStatus_v1_t``; older versions of the binding do not have it."""

    _fields_ = (("version", ctypes.c_uint), ("counters", ctypes.c_ulonglong * 11), ("threshold_exceeded", ctypes.c_uint))


def _read_sram(part: NvmlPart) -> bool | NotAvailable:
    answer = part.fill("nvmlDeviceGetSramEccErrorStatus", _SramStatus(version=SRAM_VERSION_1))
    return apply(lambda status: yes_or_no(status.threshold_exceeded), answer)


class _PlatformInfo(ctypes.Structure):
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


NO_CHASSIS = NotAvailable("it names no chassis (nvmlDeviceGetPlatformInfo)")


def _read_platform(part: NvmlPart) -> GpuPlatform | NotAvailable:
    """Not available where no chassis is named, as on HGX.

    An H100 and an H200 answer with an empty serial number, slot 0, tray 0 and host 1; nvidia-smi shows N/A for them.
    """
    info = part.fill("nvmlDeviceGetPlatformInfo", _PlatformInfo(version=PLATFORM_VERSION_2))
    if isinstance(info, NotAvailable):
        return info
    serial = bytes(info.chassis_serial).partition(b"\0")[0].decode("utf-8", "replace")
    if not serial.strip():
        return NO_CHASSIS
    return GpuPlatform(chassis_serial=one_line(serial), slot=info.slot, tray=info.tray, host=info.host)


# --- The table ---


def _ecc_errors(kind: int, since: int = pynvml.NVML_VOLATILE_ECC) -> Nvml:
    return Nvml("nvmlDeviceGetTotalEccErrors", (kind, since))


def _links(kind: type[Value]) -> list[Value]:
    """The links of a healthy H200."""
    return [healthy(kind, link=link) for link in LINKS_OF_AN_H200]


EVENT_REASONS_NOW = Nvml("nvmlDeviceGetCurrentClocksEventReasons", older="nvmlDeviceGetCurrentClocksThrottleReasons")
CORRECTED = _ecc_errors(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)
UNCORRECTED = _ecc_errors(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
UNCORRECTED_EVER = _ecc_errors(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC)
PCIE_REPLAYS = Nvml("nvmlDeviceGetPcieReplayCounter")
PCI = Nvml("nvmlDeviceGetPciInfo", required=True)
MEMORY = Nvml("nvmlDeviceGetMemoryInfo", required=True)
MEMORY_OF_AN_H200 = SimpleNamespace(total=150754820096, used=604 << 20)
LINKS_OF_AN_H200 = range(18)
REMAPPED_ROWS, NO_ROWS = Nvml("nvmlDeviceGetRemappedRows"), (0, 0, 0, 0)
REPAIRS, NO_REPAIRS = Nvml("nvmlDeviceGetRepairStatus"), (0, 0)
THIS_GPU = "which GPU it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlatform:
    """Where in a rack a GPU sits. Slot, tray and host (the node of a tray) are numbers of the platform."""

    chassis_serial: str = judged(THE_RUN, "where in the rack the GPU is; a Hopper names no chassis")
    slot: int = judged(THE_RUN, "as `chassis_serial`")
    tray: int = judged(THE_RUN, "as `chassis_serial`")
    host: int = judged(THE_RUN, "as `chassis_serial`")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRepair:
    """What NVML says that a GPU needs. ``recovery_action`` is ``none`` for a healthy one.

    A channel of the memory or a processing cluster (TPC) is repaired at the next reset. ``sram_threshold_exceeded``: the SRAM
    has had as many uncorrectable errors as NVIDIA's field diagnostic allows.
    """

    recovery_action: str | NotAvailable = row(NvmlField(RECOVERY_ACTION), 0, "recovery_action", convert=_action)
    channel_repair_pending: bool | NotAvailable = row(REPAIRS, NO_REPAIRS, "memory_repair", convert=_flag(0))
    tpc_repair_pending: bool | NotAvailable = row(REPAIRS, NO_REPAIRS, "memory_repair", convert=_flag(1))
    memory_unrepairable: bool | NotAvailable = row(
        Nvml("nvmlDeviceGetUnrepairableMemoryFlag_v1"), 0, "memory_repair", convert=yes_or_no
    )
    sram_threshold_exceeded: bool | NotAvailable = row(_read_sram, healthy=False, judged="memory_repair")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU at one moment. :class:`NotAvailable`: this GPU, driver or permission does not give the value; NVML says why.

    ``index`` is NVML's, which is PCI order; ``cuda_index`` is what CUDA calls the GPU under this process's
    ``CUDA_VISIBLE_DEVICES``, None where that hides it (``visible`` false). ``spare_row_banks``: how many banks of memory
    have most, or none, of their spare rows left; ``throttled_s``: seconds, since the driver was loaded, by limiter.
    """

    index: int = judged(THE_RUN, THIS_GPU)
    uuid: str = row(Nvml("nvmlDeviceGetUUID", required=True), "GPU-00000000-0000-0000-0000-000000000000", THE_RUN, THIS_GPU)
    serial: str | NotAvailable = row(Nvml("nvmlDeviceGetSerial"), "1654024000000", THE_RUN, THIS_GPU)
    pci: str = row(PCI, SimpleNamespace(busId="00000000:1B:00.0"), THE_RUN, THIS_GPU, convert=attrgetter("busId"))
    name: str = row(Nvml("nvmlDeviceGetName", required=True), "NVIDIA H200", "gpu_model")
    visible: bool = judged(NOBODY, "false where `cuda_index` is None")
    cuda_index: int | None = judged(THE_RUN, "hidden GPUs are counted by it")
    driver: str = row(lambda _: required(pynvml.nvmlSystemGetDriverVersion), "570.133.20", "drift")
    vbios: str | NotAvailable = row(Nvml("nvmlDeviceGetVbiosVersion"), "96.00.A5.00.01", "drift")
    board_part_number: str | NotAvailable = row(Nvml("nvmlDeviceGetBoardPartNumber"), "692-2G520-0282-001", "drift")
    module_id: int | NotAvailable = row(
        Nvml("nvmlDeviceGetModuleId"), 1, THE_RUN, "which part to replace: `hardware` of results.json, BAD PARTS"
    )
    platform: GpuPlatform | NotAvailable = row(_read_platform, NO_CHASSIS, THE_RUN, "as `module_id`")
    memory_gib: float = row(MEMORY, MEMORY_OF_AN_H200, "gpu_memory", convert=lambda memory: _gib(memory.total))
    memory_used_gib: float = row(
        MEMORY,
        MEMORY_OF_AN_H200,
        NOBODY,
        "`no_foreign_process` reads it before the run, as `Occupancy`",
        convert=lambda memory: _gib(memory.used),
    )
    ecc_enabled: bool | NotAvailable = row(Nvml("nvmlDeviceGetEccMode"), (1, 1), "ecc_enabled, gpu_worsened", convert=_flag(0))
    ecc_uncorrected_volatile: int | NotAvailable = row(UNCORRECTED, 0, "ecc_uncorrected")
    ecc_uncorrected_aggregate: int | NotAvailable = row(UNCORRECTED_EVER, 0, EVIDENCE, "of `ecc_uncorrected`")
    ecc_corrected_volatile: int | NotAvailable = row(CORRECTED, 0, NOBODY, REPAIRED)
    remapped_rows_correctable: int | NotAvailable = row(REMAPPED_ROWS, NO_ROWS, NOBODY, REPAIRED, convert=itemgetter(0))
    remapped_rows_uncorrectable: int | NotAvailable = row(REMAPPED_ROWS, NO_ROWS, NOBODY, REPAIRED, convert=itemgetter(1))
    remapped_rows_pending: bool | NotAvailable = row(REMAPPED_ROWS, NO_ROWS, "remapped_rows, gpu_worsened", convert=_flag(2))
    remapped_rows_failed: bool | NotAvailable = row(REMAPPED_ROWS, NO_ROWS, "remapped_rows, gpu_worsened", convert=_flag(3))
    spare_row_banks: dict[str, int] | NotAvailable = row(
        _read_spare_rows,
        {**dict.fromkeys(SPARE_ROWS, 0), "max": 2560},
        EVIDENCE,
        "of `remapped_rows`; banks of memory by how many of their spare rows are left",
    )
    pcie_gen: int | NotAvailable = row(Nvml("nvmlDeviceGetCurrPcieLinkGeneration"), 5, NOBODY, IDLE_LINK)
    pcie_gen_max: int | NotAvailable = row(Nvml("nvmlDeviceGetMaxPcieLinkGeneration"), 5, "drift")
    pcie_width: int | NotAvailable = row(Nvml("nvmlDeviceGetCurrPcieLinkWidth"), 16, NOBODY, IDLE_LINK)
    pcie_width_max: int | NotAvailable = row(Nvml("nvmlDeviceGetMaxPcieLinkWidth"), 16, "drift")
    pcie_replay_count: int | NotAvailable = row(PCIE_REPLAYS, 0, NOBODY, "`pcie_replays` judges its growth")
    nvlinks: list[NvLink] | NotAvailable = row(partial(read_links, NvLink), _links(NvLink), "nvlink_links, gpu_worsened")
    clocks_event_reasons: list[str] | NotAvailable = row(EVENT_REASONS_NOW, 0, NOBODY, IDLE, convert=event_reason_names)
    sm_clock_mhz: int | NotAvailable = row(Nvml("nvmlDeviceGetClockInfo", (pynvml.NVML_CLOCK_SM,)), 1980, NOBODY, IDLE)
    temperature_c: int | NotAvailable = row(Nvml("nvmlDeviceGetTemperature", (pynvml.NVML_TEMPERATURE_GPU,)), 41, NOBODY, IDLE)
    power_w: float | NotAvailable = row(Nvml("nvmlDeviceGetPowerUsage"), 115200, NOBODY, IDLE, convert=_watts)
    power_limit_w: float | NotAvailable = row(
        Nvml("nvmlDeviceGetEnforcedPowerLimit"), 700000, "power_limit, drift", convert=_watts
    )
    power_limit_default_w: float | NotAvailable = row(
        Nvml("nvmlDeviceGetPowerManagementDefaultLimit"), 700000, "power_limit", convert=_watts
    )
    mig: bool | NotAvailable = row(Nvml("nvmlDeviceGetMigMode"), (0, 0), "mig_disabled, gpu_worsened", convert=_flag(0))
    persistence: bool | NotAvailable = row(Nvml("nvmlDeviceGetPersistenceMode"), 1, "persistence", convert=yes_or_no)
    compute_mode: str | NotAvailable = row(
        Nvml("nvmlDeviceGetComputeMode"), 0, "compute_mode, gpu_worsened", convert=word_of(COMPUTE_MODES, "compute mode")
    )
    memory_temperature_c: float | NotAvailable = row(
        NvmlField(pynvml.NVML_FI_DEV_MEMORY_TEMP), 42, NOBODY, "no limit has a source yet"
    )
    throttled_s: dict[str, float] | NotAvailable = row(
        _read_throttled_s,
        dict.fromkeys(LIMITERS, 0.0),
        EVIDENCE,
        "of `gpu_worsened`: by how much it grew during the run, by limiter",
    )
    repair: GpuRepair = row(partial(read_part, GpuRepair), healthy(GpuRepair), "recovery_action, memory_repair, gpu_worsened")
    nvlink_peer: str | NotAvailable = row(read_nvlink_peer, "switch", "fabric_state, gpu_worsened")
    fabric: GpuFabric | NotAvailable = row(read_fabric, ALONE, "fabric_state, gpu_worsened")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCounters:
    """Error counters of one GPU at one moment, each since the driver was loaded. What is judged is how far they grow.

    ``ecc_uncorrected_aggregate`` is of the GPU's whole life.

    ``pcie_errors`` are those of :data:`PCIE` that NVML gives, by name. ``nvlinks`` is :class:`NotAvailable` for a GPU whose
    links NVML refuses all: one without NVLink.
    """

    ecc_uncorrected: int | NotAvailable = row(UNCORRECTED, 0, "ecc_growth, gpu_errors_soak")
    ecc_uncorrected_aggregate: int | NotAvailable = row(UNCORRECTED_EVER, 0, "ecc_growth")
    ecc_corrected: int | NotAvailable = row(CORRECTED, 0, EVIDENCE, "of `ecc_growth`; nobody publishes a limit")
    pcie_replays: int | NotAvailable = row(PCIE_REPLAYS, 0, "pcie_replays, gpu_errors_soak")
    pcie_errors: dict[str, int] = row(
        _read_pcie,
        dict.fromkeys(PCIE, 0),
        EVIDENCE,
        "of `pcie_replays`: errors of the link that grew, from fatal to corrected; nobody publishes limits",
    )
    power_brake_s: float | NotAvailable = row(NvmlField(POWER_BRAKE), 0, "gpu_held_back", convert=_seconds)
    hardware_thermal_s: float | NotAvailable = row(NvmlField(HARDWARE_THERMAL), 0, "gpu_held_back", convert=_seconds)
    software_thermal_s: float | NotAvailable = row(NvmlField(SOFTWARE_THERMAL), 0, "gpu_held_back", convert=_seconds)
    thermal_s: float | NotAvailable = row(
        NvmlField(pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL), 0, "gpu_held_back", "older drivers give no other", convert=_seconds
    )
    nvlinks: list[LinkCounters] | NotAvailable = row(partial(read_links, LinkCounters), _links(LinkCounters), GROWTH)

    @property
    def held_back_s(self) -> dict[str, float]:
        """Seconds by what held the clocks back; what the driver does not give is left out."""
        names = [name for name, one in rows(GpuCounters).items() if "gpu_held_back" in one.judged]
        known, _ = split({name: getattr(self, name) for name in names})
        return known


# --- The readers ---


def read_gpu(index: int) -> GpuState:
    """The GPU with this NVML index; inside :func:`session`.

    Raises:
        GpuLostError: it has fallen off the bus.
        NvmlError: NVML cannot read it for another reason.
    """
    with naming(f"GPU {index}"):
        part = NvmlPart(required(pynvml.nvmlDeviceGetHandleByIndex, index))
        shown = visible_gpus(read_uuids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        cuda_index = shown.index(index) if index in shown else None
        return read_part(GpuState, part, index=index, visible=index in shown, cuda_index=cuda_index)


def read_counters(handle: Any) -> GpuCounters:
    """The counters of the GPU with this handle; inside a session of NVML.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    return read_part(GpuCounters, NvmlPart(handle))


def read_board(handle: Any) -> dict[str, str]:
    """What a spare-parts desk needs: part number, VBIOS, module, place in the rack; inside a session of NVML.

    What NVML does not give is left out.
    """
    part = NvmlPart(handle)
    names = {"part_number": "board_part_number", "vbios": "vbios", "module": "module_id", "platform": "platform"}
    found, _ = split({name: attempt(rows(GpuState)[of_state].read, part) for name, of_state in names.items()})
    found |= dataclasses.asdict(found.pop("platform")) if "platform" in found else {}
    return {name: one_line(str(value)) for name, value in found.items() if value != ""}
