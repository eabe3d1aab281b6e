"""The NVLinks of a GPU: their state and rate, their error counters, and the fabric that they end in."""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass
from typing import Any

import pynvml

from pytest_gpucluster.inventory.nvml_calls import Nvml, NvmlField, NvmlFieldsByName, NvmlPart
from pytest_gpucluster.inventory.reading import EVIDENCE, NotAvailable, apply, judged, row, split, word_of, yes_or_no

MB_PER_GB = 1000

GENERATION_5 = {
    "symbol errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS,
    "effective errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS,
    "recoveries": pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS,
    "integrity errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS,
    "malformed packets": pynvml.NVML_FI_DEV_NVLINK_COUNT_MALFORMED_PACKET_ERRORS,
    "dropped packets": pynvml.NVML_FI_DEV_NVLINK_COUNT_BUFFER_OVERRUN_ERRORS,
    "packets with errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS,
    "packets with remote errors": pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_REMOTE_ERRORS,
    "packets with wrong headers": pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_GENERAL_ERRORS,
}
"""The fields by name: those that DCGM watches on NVLinks of generation 5 (its modules/health/DcgmHealthWatch.cpp)."""
PEERS = {0: "gpu", 1: "npu", 2: "switch"}
STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
JOINED = "completed"
SUMMARIES = {2: "unhealthy", 3: "limited capacity"}
"""The summaries of a fabric's health that are not good; 0 says nothing, 1 is healthy."""
TROUBLES = (
    (0, 3, 1, "degraded bandwidth"),
    (2, 3, 1, "route recovery in progress"),
    (4, 3, 1, "route unhealthy"),
    (6, 3, 1, "access timeout recovery"),
    (12, 3, 2, "no partition assigned"),
    (14, 3, 2, "global fabric manager disconnected"),
)
"""Shift and mask of each part of the health mask, the bad value, and what it says (nvml.h); 0 says nothing, 3 is no value."""
CONFIGURATION_SHIFT, CONFIGURATION_MASK = 8, 0xF
CONFIGURATIONS = {
    2: "incorrect system GUID",
    3: "incorrect serial number of the chassis",
    4: "no partition",
    5: "insufficient NVLinks",
    6: "incompatible firmware",
    7: "invalid location",
    8: "invalid state of the GPU",
}
FABRIC_VERSIONS = (0x3000028, 0x2000024)
"""Of the structure, the newest first: with a summary of the health, and without."""

GROWTH = "nvlink_errors, gpu_errors_soak"
SPEED = NvmlField(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED)
EFFECTIVE_BER = NvmlField(pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER)
SYMBOL_BER = NvmlField(pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER)


def not_supported(number: int) -> NotAvailable:
    """How a healthy GPU refuses a numbered field that its generation does not have."""
    return NotAvailable(f"Not Supported (nvmlDeviceGetFieldValues, field {number})")


def _errors(counter: int) -> Nvml:
    return Nvml("nvmlDeviceGetNvLinkErrorCounter", (counter,))


def _ber(packed: float) -> float:
    """A bit error rate as nvml.h packs it: the exponent in bits 0 to 7, the mantissa in bits 8 to 11."""
    return float(f"{int(packed) >> 8 & 0xF}e-{int(packed) & 0xFF}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink. ``speed_gb_s`` is that of one way, in 10^9 bytes a second, as NVML states it.

    ``effective_ber`` and ``symbol_ber`` are bit error rates, after correction and of symbols; Hopper does not give them.
    """

    link: int = judged(EVIDENCE, "of `nvlink_links`; which link it is")
    is_up: bool | NotAvailable = row(Nvml("nvmlDeviceGetNvLinkState"), 1, "nvlink_links", convert=yes_or_no)
    speed_gb_s: float | NotAvailable = row(SPEED, 26562, "nvlink_links", convert=lambda mb_s: mb_s / MB_PER_GB)
    effective_ber: float | NotAvailable = row(
        EFFECTIVE_BER,
        not_supported(EFFECTIVE_BER.number),
        "nvlink_ber[effective]",
        "of generation 5 (Blackwell); skipped by rule where the GPU's spec says that NVML gives none (`nvlink_ber: null`)",
        convert=_ber,
    )
    symbol_ber: float | NotAvailable = row(
        SYMBOL_BER, not_supported(SYMBOL_BER.number), "nvlink_ber[symbol]", "as `effective_ber`", convert=_ber
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCounters:
    """Errors that one NVLink has counted since the driver was loaded.

    ``recoveries`` counts how often the link had to be trained again. ``nvlink5`` is what NVLinks of generation 5 (Blackwell)
    count in place of these, by name; not available on others.
    """

    link: int = judged(EVIDENCE, "of `nvlink_errors`; which link it is")
    replays: int | NotAvailable = row(_errors(pynvml.NVML_NVLINK_ERROR_DL_REPLAY), 0, GROWTH)
    recoveries: int | NotAvailable = row(_errors(pynvml.NVML_NVLINK_ERROR_DL_RECOVERY), 0, GROWTH)
    crc_flits: int | NotAvailable = row(_errors(pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT), 0, GROWTH)
    crc_data: int | NotAvailable = row(_errors(pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA), 0, GROWTH, "grows on healthy links")
    nvlink5: dict[str, int | NotAvailable] | NotAvailable = row(
        NvmlFieldsByName(GENERATION_5),
        not_supported(GENERATION_5["symbol errors"]),
        GROWTH,
        "of generation 5, in place of the others: every growth counts, as in DCGM",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFabric:
    """Where a GPU stands in its NVLink fabric.

    ``error`` is NVML's text for a registration that failed, else None. ``troubles`` are the parts of its health that are not
    good; empty where all are, or where the fabric says nothing. GPUs of one clique reach each other.
    """

    state: str = judged("fabric_state")
    error: str | None = judged("fabric_state")
    cluster_uuid: str = judged("fabric_state")
    clique: int = judged("fabric_state")
    troubles: list[str] | NotAvailable = judged("fabric_state")


ALONE = GpuFabric(state=JOINED, error=None, cluster_uuid="00000000-0000-0000-0000-000000000000", clique=0, troubles=[])
"""The fabric of a healthy GPU on HGX, where NVLink ends at the node."""


def read_fabric(part: NvmlPart) -> GpuFabric | NotAvailable:
    """The fabric of a GPU; inside a session of NVML.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    answer: Any = None
    for version in FABRIC_VERSIONS:
        answer = part.fill("nvmlDeviceGetGpuFabricInfoV", _FabricInfo(version=version))
        if not isinstance(answer, NotAvailable):
            break
    return apply(_fabric, answer)


def _fabric(info: _FabricInfo) -> GpuFabric | NotAvailable:
    return apply(
        lambda state: GpuFabric(
            state=state,
            error=None if info.status == pynvml.NVML_SUCCESS else str(pynvml.NVMLError(info.status)),
            cluster_uuid=str(uuid.UUID(bytes=bytes(info.cluster_uuid))),
            clique=info.clique,
            troubles=_troubles(info.health_mask, info.health_summary),
        ),
        word_of(STATES, "its state")(info.state),
    )


def read_fabric_between_nodes(handle: Any) -> str | None:
    """What all GPUs of a fabric have in common that spans nodes: the UUID of the cluster and the clique.

    None where the GPU has not joined one: on HGX, where NVLink ends at the node, NVML gives zeros as the UUID (seen on H100
    and H200). Never run on a GB200.

    Raises:
        NvmlError: NVML cannot read the GPU.
    """
    fabric = read_fabric(NvmlPart(handle))
    if isinstance(fabric, NotAvailable) or fabric.state != JOINED or uuid.UUID(fabric.cluster_uuid).int == 0:
        return None
    return f"{fabric.cluster_uuid}/{fabric.clique}"


def read_nvlink_peer(part: NvmlPart) -> str | NotAvailable:
    """What the NVLinks end at: ``gpu``, ``switch``. Not available where no link says it; one that is down may not.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    name = "nvmlDeviceGetNvLinkRemoteDeviceType"
    known, refused = split(part.call_by_link(name))
    first = next(iter([*known.values(), *refused.values()]), NotAvailable(f"NVML shows no NVLink ({name})"))
    return apply(word_of(PEERS, "what NVLinks end at:"), first)


class _FabricInfo(ctypes.Structure):
    """``nvmlGpuFabricInfo_v3_t``, of which version 2 lacks the last member."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health_mask", ctypes.c_uint),
        ("health_summary", ctypes.c_ubyte),
    )


def _troubles(mask: int, summary: int) -> list[str] | NotAvailable:
    found = [text for shift, bits, bad, text in TROUBLES if mask >> shift & bits == bad]
    configuration = mask >> CONFIGURATION_SHIFT & CONFIGURATION_MASK
    if configuration > 1:
        found.append(CONFIGURATIONS.get(configuration, f"incorrect configuration {configuration}"))
    found += [SUMMARIES[summary]] if summary in SUMMARIES else []
    is_known = summary <= max(SUMMARIES) and not any(mask >> shift & bits == bits for shift, bits, _, _ in TROUBLES)
    return found if found or is_known else NotAvailable(f"its summary is {summary} and its mask {mask:#x}: not known here")
