"""Matrix products."""

from __future__ import annotations

import pytest

from pytest_gpucluster.measurements.gemm import gemm

pytestmark = pytest.mark.compute


@pytest.fixture(scope="session")
def gemm_bf16(cluster, recipe):
    """Dense BF16 products on every GPU at once."""
    return cluster.run(gemm, per="gpu", dtype="bfloat16", **recipe("bf16_tflops"))


def test_bf16_tflops(gemm_bf16, place, criterion):
    """The GPU reaches the dense BF16 rate at its best size."""
    rate = gemm_bf16[place]
    sizes = {f"n={size}": round(spread["median"], 1) for size, spread in rate.by_size.items()}
    criterion.require(
        gemm_bf16.repeated(place, "tflops", "bursts_tflops"),
        evidence={
            **sizes,
            "SM MHz": rate.sm_clock_mhz,
            "event reasons": rate.event_reasons,
            "C": rate.temperature_c,
            "W": rate.power_w,
        },
    )
