"""What lies between nodes."""

from __future__ import annotations

import pytest

from pytest_gpucluster.measurements import collectives
from pytest_gpucluster.measurements.transport import off_fabric_channels, transport

pytestmark = pytest.mark.fabric


@pytest.fixture(scope="session")
def reached(cluster):
    """Every rank's node, gathered over one group of all ranks."""
    return cluster.run(collectives.nodes_reached, per="cluster", deadline_s=60)


@pytest.fixture(scope="session")
def all_reduce_in_cluster(cluster, recipe):
    """All-reduce over every GPU of every node."""
    return cluster.run(collectives.all_reduce, per="cluster", **recipe("inter_node_busbw[all_reduce]"))


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


@pytest.mark.parametrize("collective", ["all_reduce"])
def test_inter_node_busbw(collective, all_reduce_in_cluster, criterion):
    """Bus bandwidth over all nodes, as nccl-tests counts it."""
    measured = {"all_reduce": all_reduce_in_cluster}[collective]
    timing = measured.value
    criterion.require(
        measured.repeated(None, "busbw_gb_s", "spans_busbw_gb_s"),
        evidence={
            "NVLS": timing.nvls,
            "NCCL": timing.nccl_version,
            "us": timing.time_us,
            "ranks": timing.world_size,
            **timing.evidence,
        },
    )
