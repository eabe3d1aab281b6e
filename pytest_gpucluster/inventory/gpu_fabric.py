"""The NVLink fabric that a GPU belongs to: whether it has joined, and the health that the fabric manager reports."""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass
from typing import Any

import pynvml

from pytest_gpucluster.inventory.nvml_calls import NvmlError, newer
from pytest_gpucluster.inventory.reading import NotAvailable

STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
JOINED = "completed"
PEERS = {0: "gpu", 1: "npu", 2: "switch"}
SUMMARIES = {2: "unhealthy", 3: "limited capacity"}
"""The summaries of the health that are not good; 0 is not told, 1 healthy."""
TROUBLES = (
    (0, 3, 1, "degraded bandwidth"),
    (2, 3, 1, "route recovery in progress"),
    (4, 3, 1, "route unhealthy"),
    (6, 3, 1, "access timeout recovery"),
    (12, 3, 2, "no partition assigned"),
    (14, 3, 2, "global fabric manager disconnected"),
)
"""Shift and mask of each part of the health mask, the value that is not good, and what it says (nvml.h); 0: not told."""
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
VERSIONS = (0x3000028, 0x2000024)
"""Of the structure, the newest first: with a summary of the health, and without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFabric:
    """Where a GPU stands in its NVLink fabric.

    ``error`` is NVML's text for a registration that failed, else None. ``troubles`` are the parts of its health that are not
    good; empty where all are, or where the fabric tells none. GPUs of one clique reach each other.
    """

    state: str
    error: str | None
    cluster_uuid: str
    clique: int
    troubles: list[str]


def read_fabric(handle: Any) -> GpuFabric | NotAvailable:
    """The fabric of the GPU with this handle; inside a session of NVML.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    answer: Any = None
    for version in VERSIONS:
        info = _Info(version=version)
        answer = newer("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
        if not isinstance(answer, NotAvailable):
            return GpuFabric(
                state=STATES.get(info.state, f"unknown_{info.state}"),
                error=None if info.status == pynvml.NVML_SUCCESS else str(pynvml.NVMLError(info.status)),
                cluster_uuid=str(uuid.UUID(bytes=bytes(info.cluster_uuid))),
                clique=info.clique,
                troubles=_troubles(info.health_mask, info.health_summary),
            )
    assert isinstance(answer, NotAvailable)
    return answer


def fabric_between_nodes(fabric: GpuFabric | NotAvailable) -> str | None:
    """What all GPUs of a fabric have in common that spans nodes: the UUID of the cluster and the clique.

    None where the GPU has not joined one: on HGX, where NVLink ends at the node, NVML gives zeros as the UUID (seen on H100
    and H200). Never run on a GB200.
    """
    if isinstance(fabric, NotAvailable) or fabric.state != JOINED or uuid.UUID(fabric.cluster_uuid).int == 0:
        return None
    return f"{fabric.cluster_uuid}/{fabric.clique}"


def read_nvlink_peer(handle: Any) -> str | NotAvailable:
    """What the NVLinks end at: ``gpu``, ``switch``. Not available where no link tells it; one that is down may not.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    name = "nvmlDeviceGetNvLinkRemoteDeviceType"
    answer: str | NotAvailable = NotAvailable(f"NVML shows no NVLink ({name})")
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            answer = newer(name, handle, link, convert=lambda kind: PEERS.get(kind, f"unknown_{kind}"))
        except NvmlError as error:
            if error.code != pynvml.NVML_ERROR_INVALID_ARGUMENT:
                raise
        if not isinstance(answer, NotAvailable):
            break
    return answer


class _Info(ctypes.Structure):
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


def _troubles(mask: int, summary: int) -> list[str]:
    found = [text for shift, bits, bad, text in TROUBLES if mask >> shift & bits == bad]
    configuration = mask >> CONFIGURATION_SHIFT & CONFIGURATION_MASK
    if configuration > 1:
        found.append(CONFIGURATIONS.get(configuration, f"incorrect configuration {configuration}"))
    return [*found, SUMMARIES[summary]] if summary in SUMMARIES else found
