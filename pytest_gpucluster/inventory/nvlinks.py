"""The NVLinks of one GPU: which are up, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pynvml

from pytest_gpucluster.inventory.nvml_calls import NvmlError, optional, read_fields
from pytest_gpucluster.inventory.reading import NotAvailable

MB_PER_GB = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink. ``speed_gb_s`` is that of one way, in 10^9 bytes a second, as NVML states it."""

    link: int
    is_up: bool | NotAvailable
    speed_gb_s: float | NotAvailable


def read_nvlinks(handle: Any) -> list[NvLink] | NotAvailable:
    """Every NVLink of a GPU; not available where NVML refuses all of them."""
    states = read_link_states(handle)
    if isinstance(states, NotAvailable):
        return states
    speeds = read_fields(handle, *((pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, link) for link in range(len(states))))
    return [
        NvLink(
            link=link,
            is_up=state if isinstance(state, NotAvailable) else bool(state),
            speed_gb_s=speed if isinstance(speed, NotAvailable) else speed / MB_PER_GB,
        )
        for link, (state, speed) in enumerate(zip(states, speeds, strict=True))
    ]


def read_link_states(handle: Any) -> list[int | NotAvailable] | NotAvailable:
    """1 for each NVLink that is up, 0 for one that is not; not available where NVML refuses all of them.

    NVML refuses the first link number beyond the last one.
    """
    states: list[int | NotAvailable] = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(optional(pynvml.nvmlDeviceGetNvLinkState, handle, link))
        except NvmlError as error:
            if error.code != pynvml.NVML_ERROR_INVALID_ARGUMENT:
                raise
            break
    refused = [state for state in states if isinstance(state, NotAvailable)]
    if len(refused) < len(states):
        return states
    return refused[0] if refused else NotAvailable("NVML shows no NVLink")
