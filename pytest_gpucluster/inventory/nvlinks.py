"""The NVLinks of one GPU: which are up, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pynvml

from pytest_gpucluster.inventory.nvml_calls import NvmlError, optional, read_fields
from pytest_gpucluster.inventory.reading import NotAvailable

MB_PER_GB = 1000
FIELDS = (
    pynvml.NVML_FI_DEV_NVLINK_GET_SPEED,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER,
    pynvml.NVML_FI_DEV_NVLINK_COUNT_SYMBOL_BER,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink. ``speed_gb_s`` is that of one way, in 10^9 bytes a second, as NVML states it.

    ``effective_ber`` and ``symbol_ber`` are bit error rates, after correction and of symbols; Hopper does not tell them.
    """

    link: int
    is_up: bool | NotAvailable
    speed_gb_s: float | NotAvailable
    effective_ber: float | NotAvailable
    symbol_ber: float | NotAvailable


def read_nvlinks(handle: Any) -> list[NvLink] | NotAvailable:
    """Every NVLink of a GPU; not available where NVML refuses all of them."""
    states = read_link_states(handle)
    if isinstance(states, NotAvailable):
        return states
    speeds, effective, symbol = (read_fields(handle, *((field, link) for link in range(len(states)))) for field in FIELDS)
    return [
        NvLink(
            link=link,
            is_up=state if isinstance(state, NotAvailable) else bool(state),
            speed_gb_s=speed if isinstance(speed, NotAvailable) else speed / MB_PER_GB,
            effective_ber=_ber(effective[link]),
            symbol_ber=_ber(symbol[link]),
        )
        for link, (state, speed) in enumerate(zip(states, speeds, strict=True))
    ]


def _ber(packed: float | NotAvailable) -> float | NotAvailable:
    """A bit error rate as nvml.h packs it: the exponent in bits 0 to 7, the mantissa in bits 8 to 11."""
    if isinstance(packed, NotAvailable):
        return packed
    return float(f"{int(packed) >> 8 & 0xF}e-{int(packed) & 0xFF}")


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
