"""Matrix products."""

from collections import Counter

import pytest

from pytest_gpucluster import MeasurementError, agreement
from pytest_gpucluster.measurements.digest import digests
from pytest_gpucluster.measurements.gemm import gemm
from tests_acceptance.conftest import measured, values_of

pytestmark = pytest.mark.compute


def require_rate(rates, place, criterion):
    """Judge the best size; show every size and the GPU's telemetry."""
    rate = rates[place]
    sizes = {f"n={size}": round(spread["median"], 1) for size, spread in rate.by_size.items()}
    criterion.require(rates.repeated(place, "tflops", "bursts_tflops"), evidence={**sizes, **rate.evidence})


def test_bf16_tflops(gemm_bf16, place, criterion):
    """The GPU reaches the dense BF16 rate at its best size."""
    require_rate(gemm_bf16, place, criterion)


gemm_fp16 = measured(gemm, "fp16_tflops", dtype="float16")
gemm_fp8 = measured(gemm, "fp8_tflops", dtype="float8_e4m3fn")
gemm_tf32 = measured(gemm, "tf32_tflops", dtype="tf32")
gemm_fp64 = measured(gemm, "fp64_tflops", dtype="float64")
gemm_int8 = measured(gemm, "int8_tops", dtype="int8")


def test_fp16_tflops(gemm_fp16, place, criterion):
    """The GPU reaches the dense FP16 rate."""
    require_rate(gemm_fp16, place, criterion)


def test_fp8_tflops(gemm_fp8, place, criterion):
    """The GPU reaches the dense FP8 rate."""
    require_rate(gemm_fp8, place, criterion)


def test_tf32_tflops(gemm_tf32, place, criterion):
    """The GPU reaches the dense TF32 rate."""
    require_rate(gemm_tf32, place, criterion)


def test_fp32_tflops(gemm_fp32, place, criterion):
    """The GPU reaches the FP32 rate."""
    require_rate(gemm_fp32, place, criterion)


def test_fp64_tflops(gemm_fp64, place, criterion):
    """The GPU reaches the dense FP64 rate."""
    require_rate(gemm_fp64, place, criterion)


def test_int8_tops(gemm_int8, place, criterion):
    """The GPU reaches the dense INT8 rate, in 10^12 operations a second."""
    require_rate(gemm_int8, place, criterion)


def test_bf16_sustained(gemm_sustained, place, criterion):
    """The GPU holds its rate: the median of the last half."""
    rate = gemm_sustained[place]
    criterion.require(
        gemm_sustained.repeated(place, "tflops", "repeats_tflops"),
        evidence={"of peak at this clock": rate.of_peak_at_clock_ratio, **rate.evidence},
    )


def test_bf16_at_clock(gemm_sustained, place, criterion):
    """The GPU does what its clock allows."""
    rate = gemm_sustained[place]
    if rate.of_peak_at_clock_ratio is None:
        raise MeasurementError(f"{place.label}: {rate.clock_error or 'no GPU counted its SM clock'}")
    criterion.require(rate.of_peak_at_clock_ratio, evidence={"TFLOPS": rate.counted_tflops, **rate.evidence})


computed = measured(digests, "silent_corruption", at="all")
"""Digests of seeded work, cold and hot: on all GPUs, whichever are selected, because they are compared."""


@pytest.fixture(scope="session")
def suspected(computed):
    """By GPU, the digests that are unlike those of its model: compared once and not for every GPU."""
    found = values_of(computed)
    models = {place: one.model for place, one in found.items()}
    return agreement.suspicions({place: one.digests for place, one in found.items()}, models), Counter(models.values())


def test_silent_corruption(computed, suspected, place, criterion):
    """The same bits in every round, cold and hot, and the same as the other GPUs of the model."""
    own, (unlike_of, of_model) = computed[place], suspected
    unlike, others = unlike_of[place], of_model[own.model] - 1
    remark = None if others else agreement.only_itself(own.rounds)
    over_time = {f"{kind} over time": reason for kind, reason in own.unsteady.items()}
    criterion.require(
        len(over_time) + len(unlike),
        evidence={
            **over_time,
            **{f"{kind} among its model": reason for kind, reason in unlike.items()},
            "others of its model": others,
            **({"compared": remark} if remark else {}),
            "rounds": own.rounds,
            "of them hot": own.hot_rounds,
            **own.evidence,
            **own.excluded,
        },
        remark=remark,
    )
