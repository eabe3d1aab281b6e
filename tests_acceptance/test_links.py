"""Collectives inside a node."""

from __future__ import annotations

import pytest

from pytest_gpucluster import Finding, GpuLocalizer
from pytest_gpucluster.measurements.pair_matrix import pair_matrix
from tests_acceptance.conftest import evidence_of, judge_collective, measure_collective, remark_on

pytestmark = pytest.mark.links

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
PAIRS = {"size_bytes": 256 << 20, "small_bytes": 8, "iterations": 5, "warmup": 2, "deadline_s": 60.0}
"""As gpu_pairs measures them: each pair one way, disjoint pairs at once, some seconds for a node."""


@pytest.fixture(scope="session")
def gpu_localizer(cluster):
    """Searches the GPU that slows an all-reduce in a node."""
    return GpuLocalizer(cluster, pair_matrix, PAIRS)


def in_node(operation):
    """A fixture: a collective over the GPUs of each node, all nodes at once."""

    @pytest.fixture(scope="session")
    def measured(cluster, recipe, budget):  # noqa: ANN202 - a fixture, known by the name that it is given below
        key = f"busbw[{operation}]"
        return measure_collective(cluster, operation, recipe(key), per="node", budget_s=budget(key))

    return measured


all_reduce_in_node = in_node("all_reduce")
all_gather_in_node = in_node("all_gather")
reduce_scatter_in_node = in_node("reduce_scatter")
all_to_all_in_node = in_node("all_to_all")
broadcast_in_node = in_node("broadcast")
send_recv_in_node = in_node("send_recv")


@pytest.fixture(scope="session")
def smallest_all_reduce(cluster, recipe, budget):
    """All-reduce of so few bytes that only its latency counts; beside it the sizes above those of busbw."""
    key = "latency[all_reduce]"
    return measure_collective(cluster, "all_reduce", recipe(key), per="node", budget_s=budget(key))


@pytest.mark.parametrize("collective", OPERATIONS)
def test_busbw(collective, node, request, gpu_localizer, criterion):
    """Bus bandwidth as nccl-tests counts it, what arrived verified; of a slow all_reduce the culprit is searched."""
    measured, sizes = request.getfixturevalue(f"{collective}_in_node")
    is_searched = collective == "all_reduce"
    culprit = gpu_localizer.search(criterion, measured[node].busbw_gb_s, node) if is_searched else Finding()
    judge_collective(criterion, measured, node, lambda: sizes[node], culprit)


@pytest.mark.parametrize("collective", ["all_reduce"])
def test_latency(collective, smallest_all_reduce, node, criterion):
    """Time of the smallest all-reduce, the slowest rank's."""
    measured, sizes = {"all_reduce": smallest_all_reduce}[collective]
    evidence = evidence_of(measured[node], lambda: sizes[node])
    criterion.require(measured[node].time_us, evidence=evidence, remark=remark_on(evidence))
