"""Error counters of one GPU: memory, PCIe link, NVLinks. What is judged is how far they grow during a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pynvml

from pytest_gpucluster.inventory.nvml_calls import NvmlError, optional
from pytest_gpucluster.inventory.reading import NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCounters:
    """Errors that one NVLink has counted since the driver was loaded.

    ``crc_data`` grows slowly on healthy links too; ``recoveries`` counts how often the link had to be trained again.
    """

    link: int
    replays: int | NotAvailable
    recoveries: int | NotAvailable
    crc_flits: int | NotAvailable
    crc_data: int | NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCounters:
    """Error counters of one GPU at one moment, each since the driver was loaded.

    ``nvlinks`` is :class:`NotAvailable` for a GPU whose links NVML refuses all: one without NVLink.
    """

    ecc_uncorrected: int | NotAvailable
    ecc_corrected: int | NotAvailable
    pcie_replays: int | NotAvailable
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
        nvlinks=_read_links(handle),
    )


def read_link_states(handle: Any) -> list[int | NotAvailable]:
    """1 for each NVLink that is up, 0 for one that is not. NVML refuses the first link number beyond the last one."""
    states: list[int | NotAvailable] = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(optional(pynvml.nvmlDeviceGetNvLinkState, handle, link))
        except NvmlError as error:
            if error.code != pynvml.NVML_ERROR_INVALID_ARGUMENT:
                raise
            break
    return states


def _read_links(handle: Any) -> list[LinkCounters] | NotAvailable:
    states = read_link_states(handle)
    if all(isinstance(state, NotAvailable) for state in states):
        return next((state for state in states if isinstance(state, NotAvailable)), NotAvailable("NVML shows no NVLink"))
    return [_read_link(handle, link) for link in range(len(states))]


def _read_link(handle: Any, link: int) -> LinkCounters:
    count = pynvml.nvmlDeviceGetNvLinkErrorCounter
    return LinkCounters(
        link=link,
        replays=optional(count, handle, link, pynvml.NVML_NVLINK_ERROR_DL_REPLAY),
        recoveries=optional(count, handle, link, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY),
        crc_flits=optional(count, handle, link, pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
        crc_data=optional(count, handle, link, pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA),
    )
