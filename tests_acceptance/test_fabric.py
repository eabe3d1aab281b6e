"""What lies between nodes."""

from __future__ import annotations

import pytest

from pytest_gpucluster.measurements import collectives
from pytest_gpucluster.measurements.transport import off_fabric_channels, transport
from tests_acceptance.conftest import evidence_of, measure_collective, sized
from tests_acceptance.guilty_nodes import Guilty

pytestmark = pytest.mark.fabric


@pytest.fixture(scope="session")
def reached(cluster):
    """Every rank's node, gathered over one group of all ranks."""
    return cluster.run(collectives.nodes_reached, per="cluster", deadline_s=60)


def in_cluster(operation, cluster, recipe):
    """A collective over every GPU of every node, at the size that is judged."""
    return measure_collective(cluster, operation, sized(recipe(f"inter_node_busbw[{operation}]"), cluster), per="cluster")


@pytest.fixture(scope="session")
def all_reduce_in_cluster(cluster, recipe):
    """Every GPU gets the sum."""
    return in_cluster("all_reduce", cluster, recipe)


@pytest.fixture(scope="session")
def all_gather_in_cluster(cluster, recipe):
    """Every GPU gets the part of every other."""
    return in_cluster("all_gather", cluster, recipe)


@pytest.fixture(scope="session")
def reduce_scatter_in_cluster(cluster, recipe):
    """Every GPU gets its part of the sum."""
    return in_cluster("reduce_scatter", cluster, recipe)


@pytest.fixture(scope="session")
def all_to_all_in_cluster(cluster, recipe):
    """Every GPU sends a part of its own to every other."""
    return in_cluster("all_to_all", cluster, recipe)


@pytest.fixture(scope="session")
def chosen_transport(cluster, recipe):
    """The channels that NCCL really opened."""
    return cluster.run(transport, per="cluster", **recipe("transport"))


def test_nodes_reachable(reached, criterion):
    """Every expected node answers in one process group."""
    criterion.require(reached.value.num_nodes, evidence={"round trip us": reached.value.round_trip_us})


def test_transport(chosen_transport, cluster, criterion):
    """NCCL talks between nodes over the promised fabric, and over nothing else."""
    fabric = cluster.promised.fabric
    astray = chosen_transport.each(lambda found: off_fabric_channels(found, fabric=fabric))
    found = {kind: count for each in chosen_transport.each(lambda one: one.inter_node).values() for kind, count in each.items()}
    criterion.require(
        sum(astray.values()), evidence={"promised": fabric, "found": [*found], "network": chosen_transport.value.network}
    )


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_inter_node_busbw(collective, guilty_nodes, criterion, request):
    """Bus bandwidth over all nodes, as nccl-tests counts it. Where all_reduce is too slow, the guilty nodes are searched."""
    measured, sizes = request.getfixturevalue(f"{collective}_in_cluster")
    guilty = guilty_nodes.of(criterion, measured.value.busbw_gb_s) if collective == "all_reduce" else Guilty()
    criterion.require(
        measured.repeated(None, "busbw_gb_s", "spans_busbw_gb_s"),
        parts=guilty.parts,
        evidence={**guilty.evidence, **evidence_of(measured.value, lambda: sizes.value)},
    )
