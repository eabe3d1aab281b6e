"""Error counters of one GPU: memory, PCIe link, NVLinks. What is judged is how far they grow during a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pynvml

from pytest_gpucluster.inventory.nvlinks import read_link_states
from pytest_gpucluster.inventory.nvml_calls import optional, read_fields
from pytest_gpucluster.inventory.reading import NotAvailable

NVLINK5 = {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCounters:
    """Errors that one NVLink has counted since the driver was loaded.

    ``crc_data`` grows slowly on healthy links too; ``recoveries`` counts how often the link had to be trained again.
    ``nvlink5`` is what NVLinks of generation 5 (Blackwell) count in place of these, by name; not available on others.
    """

    link: int
    replays: int | NotAvailable
    recoveries: int | NotAvailable
    crc_flits: int | NotAvailable
    crc_data: int | NotAvailable
    nvlink5: dict[str, int | NotAvailable] | NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCounters:
    """Error counters of one GPU at one moment, each since the driver was loaded.

    ``pcie_errors`` are those of :data:`PCIE` that NVML tells, by name. ``nvlinks`` is :class:`NotAvailable` for a GPU whose
    links NVML refuses all: one without NVLink.
    """

    ecc_uncorrected: int | NotAvailable
    ecc_corrected: int | NotAvailable
    pcie_replays: int | NotAvailable
    pcie_errors: dict[str, int]
    nvlinks: list[LinkCounters] | NotAvailable


def read_counters(handle: Any) -> GpuCounters:
    """The counters of the GPU with this handle; inside a session of NVML.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: NVML cannot read the GPU for another reason.
    """
    count_errors, since = pynvml.nvmlDeviceGetTotalEccErrors, pynvml.NVML_VOLATILE_ECC
    return GpuCounters(
        ecc_uncorrected=optional(count_errors, handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, since),
        ecc_corrected=optional(count_errors, handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, since),
        pcie_replays=optional(pynvml.nvmlDeviceGetPcieReplayCounter, handle),
        pcie_errors=_read_pcie(handle),
        nvlinks=_read_links(handle),
    )


def _read_links(handle: Any) -> list[LinkCounters] | NotAvailable:
    states = read_link_states(handle)
    return states if isinstance(states, NotAvailable) else [_read_link(handle, link) for link in range(len(states))]


def _read_pcie(handle: Any) -> dict[str, int]:
    read = zip(PCIE, read_fields(handle, *((field, 0) for field in PCIE.values())), strict=True)
    return {name: int(value) for name, value in read if not isinstance(value, NotAvailable)}


def _read_nvlink5(handle: Any, link: int) -> dict[str, int | NotAvailable] | NotAvailable:
    """The counters of :data:`NVLINK5`; not available where NVML refuses all of them."""
    read = dict(zip(NVLINK5, read_fields(handle, *((field, link) for field in NVLINK5.values())), strict=True))
    found = {name: value if isinstance(value, NotAvailable) else int(value) for name, value in read.items()}
    refused = [value for value in found.values() if isinstance(value, NotAvailable)]
    return found if len(refused) < len(found) else refused[0]


def _read_link(handle: Any, link: int) -> LinkCounters:
    count = pynvml.nvmlDeviceGetNvLinkErrorCounter
    return LinkCounters(
        link=link,
        replays=optional(count, handle, link, pynvml.NVML_NVLINK_ERROR_DL_REPLAY),
        recoveries=optional(count, handle, link, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY),
        crc_flits=optional(count, handle, link, pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
        crc_data=optional(count, handle, link, pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA),
        nvlink5=_read_nvlink5(handle, link),
    )
