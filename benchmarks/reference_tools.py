"""Figures of known tools themselves, for reference.py's table: another day, another GPU of the kind.

Products of mamf-finder, triton's do_bench and the event loops ran after seconds of warm-up, at the 700 W limit, so the bursts
of our products read more; only the sustained ones compare directly. BabelStream's copy is a kernel of its own (8 bytes
a thread), ours and nvbandwidth's the driver's.
"""

from __future__ import annotations

from dataclasses import dataclass

ONE, FOUR = "2026-11-20-h200x1-peers", "2026-11-20-h200x4-peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a tool in the unit of ``quantity``; ``source`` names the record of the run on H200 that it is from."""

    quantity: str
    tool: str
    value: float
    source: str


def _of(source: str, rows: dict[str, dict[str, float]]) -> tuple[Figure, ...]:
    return tuple(
        Figure(quantity=quantity, tool=tool, value=value, source=source)
        for quantity, tools in rows.items()
        for tool, value in tools.items()
    )


FIGURES = (
    *_of(
        ONE,
        {
            "bf16_4096": {"mamf-finder mean": 721.5, "mamf-finder median": 728.3, "event loop median": 725.07},
            "bf16_8192": {
                "mamf-finder mean": 673.0,
                "mamf-finder median": 670.0,
                "event loop median": 700.5,
                "triton do_bench median": 683.67,
            },
            "bf16_16384": {"mamf-finder mean": 690.6, "mamf-finder median": 683.4, "event loop median": 702.39},
            "bf16_sustained": {"cuBLAS loop, last half": 667.94},
            "fp8_8192": {"event loop median": 1360.62},
            "fp8_16384": {"event loop median": 1335.81},
            "fp16_8192": {"event loop median": 702.24},
            "tf32_8192": {"event loop median": 356.56, "gpu-burn -tc": 361.3},
            "fp32_8192": {"event loop median": 51.12, "gpu-burn": 50.7},
            "fp64_8192": {"event loop median": 56.12},
            "int8_8192": {"event loop median": 906.72},
            "copy": {
                "nvbandwidth device_local_copy x 2 (512 MiB)": 4.16684,
                "nvbandwidth device_local_copy x 2 (2 GiB)": 4.2564,
                "BabelStream Copy 2^28": 3.99304,
            },
            "triad": {"BabelStream Triad 2^28": 4.39022},
            "read": {"BabelStream Dot 2^28": 4.54098},
            "write": {"event loop median": 4.6831},
            "h2d": {"nvbandwidth host_to_device_memcpy_ce": 55.56},
            "d2h": {"nvbandwidth device_to_host_memcpy_ce": 55.45},
        },
    ),
    *_of(FOUR, {"all_reduce": {"nccl-tests, 4 GPUs, 1 GiB, in place": 353.8}}),
)


def figures_of(quantity: str) -> list[Figure]:
    """The tools' figures for a quantity."""
    return [figure for figure in FIGURES if figure.quantity == quantity]
