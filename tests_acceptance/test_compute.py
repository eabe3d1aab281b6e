"""Matrix products."""

from __future__ import annotations

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.agreement import suspicions
from pytest_gpucluster.measurements.digest import digests
from pytest_gpucluster.measurements.gemm import gemm
from pytest_gpucluster.measurements.sustained import sustained

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


@pytest.fixture(scope="session")
def gemm_sustained(cluster, recipe):
    """BF16 products back to back on every GPU at once."""
    return cluster.run(sustained, per="gpu", **recipe("bf16_sustained"))


def under_load(rate):
    """Why a rate is what it is."""
    return {
        "SM MHz": rate.sm_clock_mhz,
        "of peak at this clock": rate.of_peak_at_clock_ratio,
        "event reasons": rate.event_reasons,
        "C": rate.temperature_c,
        "W": rate.power_w,
    }


def test_bf16_sustained(gemm_sustained, place, criterion):
    """The GPU holds its rate: the median of the last half."""
    repeats = gemm_sustained.repeated(place, "tflops", "repeats_tflops")
    criterion.require(repeats, evidence=under_load(gemm_sustained[place]))


def test_bf16_at_clock(gemm_sustained, place, criterion):
    """The GPU does what its clock allows."""
    rate = gemm_sustained[place]
    if rate.of_peak_at_clock_ratio is None:
        raise MeasurementError(f"{place.label}: the SM clock could not be read: {rate.nvml_error or 'no NVML'}")
    criterion.require(rate.of_peak_at_clock_ratio, evidence={"TFLOPS": rate.tflops, **under_load(rate)})


@pytest.fixture(scope="session")
def computed(cluster, recipe):
    """Digests of seeded work, cold and hot: on all GPUs, whichever are selected, because they are compared."""
    return cluster.run(digests, per="gpu", places=cluster.places, **recipe("silent_corruption"))


def test_silent_corruption(computed, place, criterion):
    """The same bits in every round, cold and hot, and the same as the other GPUs of the model."""
    own = computed[place]
    measured = {one: computed[one] for one in computed if one not in computed.errors}
    models = {one: found.model for one, found in measured.items()}
    unlike = suspicions({one: found.digests for one, found in measured.items()}, models)[place]
    over_time = {f"{kind} over time": told for kind, told in own.unsteady.items()}
    criterion.require(
        len(over_time) + len(unlike),
        evidence={
            **over_time,
            **{f"{kind} among its model": told for kind, told in unlike.items()},
            "others of its model": [*models.values()].count(own.model) - 1,
            "rounds": own.rounds,
            "of them hot": own.hot_rounds,
            **own.excluded,
        },
    )
