"""Rates of each host: memory, local scratch, launches; and hosts beside each other."""

import pytest

from pytest_gpucluster import MeasurementError, siblings
from pytest_gpucluster.measurements.file_rates import file_rates, file_requests
from pytest_gpucluster.measurements.host_rates import host_memory, launch_latency
from tests_acceptance.conftest import compared, judge_compared, measured
from tests_acceptance.test_stragglers import compare_all

pytestmark = pytest.mark.platform


memory = compared(host_memory, "host_memory", per="host", in_budget=True)
"""The triad on each NUMA node of every host."""
scratch = compared(file_rates, "scratch_write", per="host")
"""Large files in the folder for temporary files of each host, on all hosts at once: each has a disk of its own."""
launches = measured(launch_latency, "launch_latency")
"""Kernels launched on every GPU, one GPU of a node at a time."""


def test_host_memory(memory, recipe, node, criterion):
    """The slowest NUMA node of the host."""
    found, asked = memory[node], recipe("host_memory")["repeats"]
    nodes = ", ".join(map(str, found.not_measured))
    remark = f"NUMA node {nodes} was not measured: this rank may run on CPUs {found.cpus_allowed} only" if nodes else None
    if len(found.repeats_gb_s) < asked:
        fewer = f"{len(found.repeats_gb_s)} repeats instead of {asked}, to keep the budget"
        remark = "; ".join(filter(None, (remark, fewer)))
    criterion.require(memory.repeated(node, "triad_gb_s", "repeats_gb_s"), evidence=found.evidence, remark=remark)


def test_scratch_write(scratch, node, criterion):
    """Files are written and flushed."""
    criterion.require(scratch[node].write_gb_s, evidence=scratch[node].evidence)


def test_scratch_read(scratch, node, criterion):
    """The same files, read again."""
    criterion.require(scratch[node].read_gb_s, evidence=scratch[node].evidence)


requests_to_scratch = measured(file_requests, "scratch_iops", per="host")
"""Small requests to the folder for temporary files of each host, on all hosts at once."""


def test_scratch_iops(requests_to_scratch, node, criterion):
    """Random reads; writes and times beside them."""
    criterion.require(requests_to_scratch[node].read.iops, evidence=requests_to_scratch[node].evidence)


def test_launch_latency(launches, place, criterion):
    """One launch of many in a row."""
    found = launches[place]
    load = {} if found.host_load is None else {"host load": found.host_load.text}
    evidence = {"round trip us": found.round_trip_us, **load}
    criterion.require(launches.repeated(place, "launch_us", "repeats_us"), evidence=evidence)


COMPARED = {
    "host_memory": ("memory", "triad_gb_s"),
    "scratch_write": ("scratch", "write_gb_s"),
    "scratch_read": ("scratch", "read_gb_s"),
}
"""The fixture and the field that hold a quantity."""


@pytest.fixture
def rates_of_all(request, quantity):
    """The values of every host, whichever are selected: see ``compared_places``."""
    return request.getfixturevalue(COMPARED[quantity][0])


@pytest.fixture
def comparison(rates_of_all, quantity, recipe, possible, criterion):
    """The rates of the hosts, each beside the others, and by host the error of a rate that no hardware can give."""
    healthy = siblings.Healthy(**recipe(f"slow_host[{quantity}]"))
    return compare_all(rates_of_all, COMPARED[quantity][1], healthy, criterion.limit, possible(quantity).error)


@pytest.mark.compares
@pytest.mark.parametrize("quantity", COMPARED)
def test_slow_host(quantity, rates_of_all, comparison, node, criterion):  # noqa: ARG001 -- quantity is a fixture's
    """The host lies no further below the median of the others than the limit, or than their own spread explains."""
    own, rates, compared = rates_of_all[node], comparison.rates, comparison.compared.get(node)
    if node in comparison.wrong:
        raise comparison.wrong[node]
    if compared is None or compared.shortfall.siblings < siblings.FEWEST_SIBLINGS:
        raise MeasurementError(f"{node.label}: of the other hosts {len(rates) - 1} could be measured, too few to compare")
    evidence = {"own": rates[node], **compared.evidence, **own.evidence}
    judge_compared(criterion, own, compared, evidence)
