"""A GPU that is slower than its siblings, the other GPUs of its model in the whole cluster, though it passes the floor.

What is compared, why with these tolerances, and how slow a GPU has to be to be found: docs/decisions/0011.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from pytest_gpucluster import MeasurementError, Place, siblings
from tests_acceptance.conftest import impossible_training, judge_compared, values_of


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """The fixture and the field that hold a quantity; ``way`` is the direction of a host link."""

    fixture: str
    field: str
    mark: pytest.MarkDecorator
    way: str | None = None


compute, links, training = pytest.mark.compute, pytest.mark.links, pytest.mark.training
COMPARED = {
    "bf16_tflops": Quantity(fixture="gemm_bf16", field="tflops", mark=compute),
    "bf16_sustained": Quantity(fixture="gemm_sustained", field="tflops", mark=compute),
    "fp32_tflops": Quantity(fixture="gemm_fp32", field="tflops", mark=compute),
    "bf16_at_clock": Quantity(fixture="gemm_sustained", field="of_peak_at_clock_ratio", mark=compute),
    "hbm_bandwidth": Quantity(fixture="hbm", field="tb_s", mark=pytest.mark.memory),
    "training_throughput_gpu": Quantity(fixture="trained_alone", field="tokens_per_s_per_gpu", mark=training),
    "host_to_device": Quantity(fixture="host_link_alone", field="h2d_gb_s", mark=links, way="h2d"),
    "device_to_host": Quantity(fixture="host_link_alone", field="d2h_gb_s", mark=links, way="d2h"),
}
"""Not the host link with all GPUs at once: GPUs that share a switch are slower."""


@pytest.fixture
def rates_of_all(request, quantity):
    """The values of every GPU, whichever are selected: see ``compared_places``."""
    return request.getfixturevalue(COMPARED[quantity].fixture)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All GPUs beside their siblings. A GPU in ``rates`` alone has none; those in ``wrong`` have values that no GPU has."""

    rates: dict[Place, float]
    wrong: dict[Place, MeasurementError]
    compared: dict[Place, siblings.Compared]


@pytest.fixture(scope="session")
def compare(recipe, possible):
    """Compares the GPUs by a quantity: made once for what was measured, and not for every GPU."""
    made: dict[str, tuple[Any, Comparison]] = {}

    def once(quantity, results, limit):  # noqa: ANN202 - as in all of this suite
        if quantity not in made or made[quantity][0] is not results:
            healthy, field = siblings.Healthy(**recipe(f"straggler[{quantity}]")), COMPARED[quantity].field
            made[quantity] = results, compare_all(results, field, healthy, limit, error_at(quantity, results, possible))
        return made[quantity][1]

    return once


def error_at(quantity, results, possible):
    """Says why a rate at a place is none, or None. The products of a training take no more than the dense BF16 rate."""
    if COMPARED[quantity].mark is not training:
        return possible(quantity).error
    return lambda _rate, *, where: impossible_training(results[where], possible, where=where)


def compare_all(results, field, healthy, limit, error):
    """Compare the GPUs that have a value which hardware can give; a wrong one says nothing of the others."""
    measured = values_of(results)
    known = {one: rate for one, found in measured.items() if (rate := getattr(found, field)) is not None}
    wrong = {one: why for one, rate in known.items() if (why := error(rate, where=one)) is not None}
    rates = {one: rate for one, rate in known.items() if one not in wrong}
    alike = siblings.Siblings(
        rates=rates,
        models={one: getattr(found, "device", "host") for one, found in measured.items()},
        hosts={one: one.node for one in rates},
    )
    return Comparison(rates=rates, wrong=wrong, compared=siblings.compare(alike, healthy, limit_percent=limit.value))


@pytest.fixture
def comparison(rates_of_all, quantity, compare, criterion):
    """The GPUs' comparison by this quantity."""
    return compare(quantity, rates_of_all, criterion.limit)


@pytest.mark.compares
@pytest.mark.parametrize("quantity", [pytest.param(name, marks=one.mark) for name, one in COMPARED.items()])
def test_straggler(quantity, rates_of_all, place, comparison, criterion):
    """The GPU lies no further below the median of its siblings than healthy GPUs differ, and the siblings are alike."""
    own, way = rates_of_all[place], COMPARED[quantity].way
    if place in comparison.wrong:
        raise comparison.wrong[place].with_traceback(None)
    rates, compared = comparison.rates, comparison.compared.get(place)
    if place not in rates:
        raise MeasurementError(f"{place.label}: {quantity} has no value here, so nothing can be compared", culprits=(place,))
    not_measured = len(rates_of_all) - len(rates)
    fewest = siblings.FEWEST_SIBLINGS if not_measured else 1  # of two left of more, the lost ones might say who is slow
    found = 0 if compared is None else compared.shortfall.siblings
    if compared is None or found < fewest:
        why = f"{place.label}: of its siblings ({own.device}) {found} could be measured, and it takes {fewest} to compare"
        busy = next((one for one in rates_of_all.errors.values() if one.kind == "not_idle"), None)
        if busy is not None:  # which is measured again, and then this one too
            raise MeasurementError(f"{why}; {busy}", culprits=busy.culprits, kind="not_idle", blame=busy.blame)
        raise MeasurementError(why)
    clocks = own.evidence if way is None else own.evidence(way)
    evidence = {"own": rates[place], **compared.evidence, "not measured": not_measured, **clocks}
    if way is not None:
        compared = siblings.with_repeats(compared, getattr(own, f"repeats_{way}_gb_s"), limit_percent=criterion.limit.value)
    judge_compared(criterion, own, compared, evidence)
