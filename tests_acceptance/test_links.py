"""Collectives inside a node."""

from __future__ import annotations

import pytest

from tests_acceptance.conftest import evidence_of, measure_collective
from tests_acceptance.guilty_gpus import GuiltyGpus
from tests_acceptance.guilty_nodes import Guilty

pytestmark = pytest.mark.links


def in_node(operation, cluster, recipe):
    """A collective over the GPUs of each node, all nodes at once."""
    return measure_collective(cluster, operation, recipe(f"busbw[{operation}]"), per="node")


@pytest.fixture(scope="session")
def guilty_gpus(cluster):
    """Looks for the GPU that spoils an all-reduce in a node."""
    return GuiltyGpus(cluster)


@pytest.fixture(scope="session")
def all_reduce_in_node(cluster, recipe):
    """Every GPU gets the sum."""
    return in_node("all_reduce", cluster, recipe)


@pytest.fixture(scope="session")
def all_gather_in_node(cluster, recipe):
    """Every GPU gets the part of every other."""
    return in_node("all_gather", cluster, recipe)


@pytest.fixture(scope="session")
def reduce_scatter_in_node(cluster, recipe):
    """Every GPU gets its part of the sum."""
    return in_node("reduce_scatter", cluster, recipe)


@pytest.fixture(scope="session")
def all_to_all_in_node(cluster, recipe):
    """Every GPU sends a part of its own to every other."""
    return in_node("all_to_all", cluster, recipe)


@pytest.fixture(scope="session")
def broadcast_in_node(cluster, recipe):
    """Every GPU gets what the first one has."""
    return in_node("broadcast", cluster, recipe)


@pytest.fixture(scope="session")
def send_recv_in_node(cluster, recipe):
    """Every GPU sends to the next one, all at once."""
    return in_node("send_recv", cluster, recipe)


@pytest.fixture(scope="session")
def smallest_all_reduce(cluster, recipe):
    """All-reduce of so few bytes that only its latency counts; beside it the sizes above those of busbw."""
    return measure_collective(cluster, "all_reduce", recipe("latency[all_reduce]"), per="node")


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"])
def test_busbw(collective, node, guilty_gpus, criterion, request):
    """Bus bandwidth as nccl-tests counts it, what arrived verified; of a slow all_reduce the guilty GPU is searched."""
    measured, sizes = request.getfixturevalue(f"{collective}_in_node")
    guilty = guilty_gpus.of(criterion, measured[node].busbw_gb_s, node) if collective == "all_reduce" else Guilty()
    criterion.require(
        measured.repeated(node, "busbw_gb_s", "spans_busbw_gb_s"),
        parts=guilty.parts,
        evidence={**guilty.evidence, **evidence_of(measured[node], lambda: sizes[node])},
    )


@pytest.mark.parametrize("collective", ["all_reduce"])
def test_latency(collective, smallest_all_reduce, node, criterion):
    """Time of the smallest all-reduce, the slowest rank's."""
    measured, sizes = {"all_reduce": smallest_all_reduce}[collective]
    criterion.require(measured[node].time_us, evidence=evidence_of(measured[node], lambda: sizes[node]))
