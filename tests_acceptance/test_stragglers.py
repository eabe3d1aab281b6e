"""A GPU that is slower than its siblings, the other GPUs of its model in the whole cluster, though it passes the floor.

What is compared, why with these tolerances, and how slow a GPU has to be to be found: docs/decisions/0011.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.judging.disagreement import Healthy, Siblings, compare
from pytest_gpucluster.judging.outliers import FEWEST_SIBLINGS


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
    """The GPU lies no further below the median of its siblings than healthy GPUs differ, and the siblings are alike."""
    own, field, way = siblings[place], COMPARED[quantity].field, COMPARED[quantity].way
    measured = {one: siblings[one] for one in siblings if one not in siblings.errors}
    rates = {one: rate for one, found in measured.items() if (rate := getattr(found, field)) is not None}
    if place not in rates:
        raise MeasurementError(f"{place.label}: {quantity} has no value here, so nothing can be compared", culprits=(place,))
    alike = Siblings(
        rates=rates,
        models={one: found.device for one, found in measured.items()},
        hosts={one: one.node for one in rates},
    )
    healthy = Healthy(**recipe(f"straggler[{quantity}]"))
    compared = compare(alike, healthy, limit_percent=criterion.limit.value).get(place)
    not_measured = len(siblings) - len(rates)
    fewest = FEWEST_SIBLINGS if not_measured else 1  # of two that are left of more, the lost ones might say who is slow
    found = 0 if compared is None else compared.shortfall.siblings
    if compared is None or found < fewest:
        why = f"of its siblings ({own.device}) {found} could be measured, and it takes {fewest} to compare"
        raise MeasurementError(f"{place.label}: {why}")
    clocks = own.evidence if way is None else own.evidence(way)
    criterion.require(compared, evidence={"own": rates[place], **compared.evidence, "not measured": not_measured, **clocks})
