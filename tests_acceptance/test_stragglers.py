"""A GPU that is slower than its siblings, the other GPUs of its model in the whole cluster, though it passes the floor.

What is compared, why with these tolerances, and how slow a GPU has to be to be found: docs/decisions/0011.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.judging.outliers import FEWEST_SIBLINGS, shortfalls


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The fixture and the field that hold a quantity; ``way`` is the direction of a host link."""

    fixture: str
    field: str
    mark: pytest.MarkDecorator
    way: str | None = None


compute, links = pytest.mark.compute, pytest.mark.links
COMPARED = {
    "bf16_tflops": Compared(fixture="gemm_bf16", field="tflops", mark=compute),
    "bf16_sustained": Compared(fixture="gemm_sustained", field="tflops", mark=compute),
    "fp32_tflops": Compared(fixture="gemm_fp32", field="tflops", mark=compute),
    "bf16_at_clock": Compared(fixture="gemm_sustained", field="of_peak_at_clock_ratio", mark=compute),
    "hbm_bandwidth": Compared(fixture="hbm", field="tb_s", mark=pytest.mark.memory),
    "host_to_device": Compared(fixture="host_link_alone", field="h2d_gb_s", mark=links, way="h2d"),
    "device_to_host": Compared(fixture="host_link_alone", field="d2h_gb_s", mark=links, way="d2h"),
}
"""Not the host link with all GPUs at once: GPUs that share a switch are slower."""


@pytest.fixture
def siblings(request, quantity):
    """The values of every GPU, whichever are selected: see ``compared_places``."""
    return request.getfixturevalue(COMPARED[quantity].fixture)


@pytest.mark.parametrize("quantity", [pytest.param(name, marks=one.mark) for name, one in COMPARED.items()])
def test_straggler(quantity, siblings, place, recipe, criterion):
    """The GPU lies no further below the median of its siblings than healthy GPUs differ."""
    own, field, way = siblings[place], COMPARED[quantity].field, COMPARED[quantity].way
    measured = {one: siblings[one] for one in siblings if one not in siblings.errors}
    rates = {one: rate for one, found in measured.items() if (rate := getattr(found, field)) is not None}
    if place not in rates:
        raise MeasurementError(f"{place.label}: {quantity} has no value here, so nothing can be compared", culprits=(place,))
    models = {one: found.device for one, found in measured.items()}
    short = shortfalls(rates, group_of=models, **recipe(f"straggler[{quantity}]")).get(place)
    if short is None or not short.is_judged:
        alike = 0 if short is None else short.siblings
        why = f"of its siblings ({own.device}) {alike} could be measured, and it takes {FEWEST_SIBLINGS} to say who is slow"
        raise MeasurementError(f"{place.label}: {why}")
    criterion.require(
        short.unexplained_percent,
        evidence={
            "own": rates[place],
            "median of siblings": short.median,
            "their MAD": short.mad,
            "% below": short.percent,
            "robust sigmas": short.score,
            "siblings": short.siblings,
            "not measured": len(siblings) - len(rates),
            **(own.evidence if way is None else own.evidence(way)),
        },
    )
