"""Collectives inside a node."""

import pytest

from pytest_gpucluster import Finding, GpuLocalizer
from pytest_gpucluster.measurements.pair_matrix import pair_matrix
from tests_acceptance.conftest import collective_by, evidence_of, judge_collective, remark_on

pytestmark = pytest.mark.links

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
PAIRS = {"size_bytes": 256 << 20, "small_bytes": 8, "iterations": 5, "warmup": 2, "deadline_s": 60.0}
"""As gpu_pairs measures them: each pair one way, disjoint pairs at once, some seconds for a node."""


@pytest.fixture(scope="session")
def gpu_localizer(cluster):
    """Searches the GPU that slows an all-reduce in a node."""
    return GpuLocalizer(cluster, pair_matrix, PAIRS)


all_reduce_in_node = collective_by("all_reduce", "busbw[all_reduce]", per="node")
"""A collective over the GPUs of each node, all nodes at once; the others as this one."""
all_gather_in_node = collective_by("all_gather", "busbw[all_gather]", per="node")
reduce_scatter_in_node = collective_by("reduce_scatter", "busbw[reduce_scatter]", per="node")
all_to_all_in_node = collective_by("all_to_all", "busbw[all_to_all]", per="node")
broadcast_in_node = collective_by("broadcast", "busbw[broadcast]", per="node")
send_recv_in_node = collective_by("send_recv", "busbw[send_recv]", per="node")
smallest_all_reduce = collective_by("all_reduce", "latency[all_reduce]", per="node")
"""All-reduce of so few bytes that only its latency counts; beside it the sizes above those of busbw."""


@pytest.mark.parametrize("collective", OPERATIONS)
def test_busbw(collective, node, request, gpu_localizer, criterion):
    """Bus bandwidth as nccl-tests counts it, what arrived verified; of a slow all_reduce the culprit is searched."""
    measured, sizes = request.getfixturevalue(f"{collective}_in_node")
    is_searched = collective == "all_reduce"
    culprit = gpu_localizer.search(criterion, measured[node].busbw_gb_s, node) if is_searched else Finding()
    judge_collective(criterion, measured, node, lambda: sizes[node], culprit)


@pytest.mark.parametrize("collective", ["all_reduce"])
def test_latency(collective, smallest_all_reduce, node, criterion):  # noqa: ARG001 -- its place in the key
    """Time of the smallest all-reduce, the slowest rank's."""
    measured, sizes = smallest_all_reduce
    evidence = evidence_of(measured[node], lambda: sizes[node])
    criterion.require(measured[node].time_us, evidence=evidence, remark=remark_on(evidence))
