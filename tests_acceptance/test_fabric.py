"""What lies between nodes."""

from __future__ import annotations

import pytest

from pytest_gpucluster.measurements import collectives
from pytest_gpucluster.measurements.transport import off_fabric_channels, transport
from tests_acceptance.conftest import sized

pytestmark = pytest.mark.fabric


@pytest.fixture(scope="session")
def reached(cluster):
    """Every rank's node, gathered over one group of all ranks."""
    return cluster.run(collectives.nodes_reached, per="cluster", deadline_s=60)


@pytest.fixture(scope="session")
def all_reduce_in_cluster(cluster, recipe):
    """All-reduce over every GPU of every node, at the size that is judged."""
    return cluster.run(collectives.all_reduce, per="cluster", **sized(recipe("inter_node_busbw[all_reduce]"), cluster))


@pytest.fixture(scope="session")
def small_all_reduce(all_reduce_in_cluster, cluster, recipe):
    """The same at the smaller size, which is shown where a larger one is judged; None where it is the judged one."""
    small = sized(recipe("inter_node_busbw[all_reduce]"), None)
    if all_reduce_in_cluster.value.size_bytes <= small["size_bytes"]:
        return None
    return cluster.run(collectives.all_reduce, per="cluster", **small)


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
def test_inter_node_busbw(collective, all_reduce_in_cluster, small_all_reduce, guilty_nodes, criterion):
    """Bus bandwidth over all nodes, as nccl-tests counts it. Where it is too low, the nodes that spoil it are searched."""
    measured = {"all_reduce": all_reduce_in_cluster}[collective]
    timing = measured.value
    small = {f"at {one.value.size_bytes} bytes": one.value.busbw_gb_s for one in (small_all_reduce,) if one is not None}
    guilty = guilty_nodes.of(criterion, timing.busbw_gb_s)
    criterion.require(
        measured.repeated(None, "busbw_gb_s", "spans_busbw_gb_s"),
        parts=guilty.parts,
        evidence={
            **guilty.evidence,
            "NVLS": timing.nvls,
            "NCCL": timing.nccl_version,
            "us": timing.time_us,
            "ranks": timing.world_size,
            "bytes": timing.size_bytes,
            **small,
            **timing.evidence,
        },
    )
