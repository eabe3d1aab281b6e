"""What lies between nodes."""

from __future__ import annotations

from collections import Counter

import pytest

from pytest_gpucluster.health.nics import NodeTraffic, describe_astray, guilty_of_astray
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.measurements import collectives
from pytest_gpucluster.measurements.transport import off_fabric_channels, transport
from pytest_gpucluster.protocol.rank import ranges
from tests_acceptance.conftest import evidence_of, measure_collective, sized
from tests_acceptance.guilty_nodes import Guilty

pytestmark = pytest.mark.fabric

OFF_FABRIC = "look there at the adapters, at nvidia_peermem or dma_buf, and at NCCL's variables: gpucluster info"


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
def all_reduce_in_domains(cluster, recipe):
    """Every GPU of an NVLink domain gets the sum, all domains at once."""
    return cluster.run(collectives.all_reduce, per="domain", **recipe("domain_busbw[all_reduce]"))


@pytest.fixture(scope="session")
def chosen_transport(cluster, recipe):
    """The channels that NCCL really opened. Each rank is told which others NVLink should reach."""
    of_rank = {place.rank: place.fabric for place in cluster.places if place.rank is not None}
    domains = {"domains": [of_rank[rank] for rank in sorted(of_rank)]} if any(of_rank.values()) else {}
    return cluster.run(transport, per="cluster", **domains, **recipe("transport"))


def test_nodes_reachable(reached, criterion):
    """Every expected node answers in one process group."""
    criterion.require(reached.value.num_nodes, evidence={"round trip us": reached.value.round_trip_us})


def test_transport(chosen_transport, cluster, criterion):
    """NCCL talks between nodes over the promised fabric, and over nothing else."""
    fabric = cluster.promised.fabric
    astray = chosen_transport.each(lambda found: off_fabric_channels(found, fabric=fabric))
    traffic = traffic_by_node(cluster, astray, chosen_transport.each(lambda one: sum(one.inter_node.values())))
    guilty = guilty_of_astray(traffic)
    found = {kind for each in chosen_transport.each(lambda one: one.inter_node).values() for kind in each}
    in_domain = {kind for each in chosen_transport.each(lambda one: one.in_domain).values() for kind in each}
    evidence = {"promised": fabric, "found": sorted(found), "network": chosen_transport.value.network}
    if in_domain:
        evidence["in NVLink domains"] = sorted(in_domain)
    if any(astray.values()):
        evidence["off the fabric"] = describe_astray(traffic)
    places = tuple(node for node in cluster.nodes if node.id in guilty)
    parts = Parts(kind="host", places=places, advice=OFF_FABRIC) if places else None
    criterion.require(sum(astray.values()), parts=parts, evidence=evidence)


def traffic_by_node(cluster, astray, connections):
    """What the ranks of each node opened to other nodes, from the numbers of each rank."""
    total: Counter[int] = Counter()
    off: Counter[int] = Counter()
    for place, count in connections.items():
        total[place.node] += count
        off[place.node] += astray[place]
    return {node.id: NodeTraffic(total[node.node], off[node.node]) for node in cluster.nodes}


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


@pytest.mark.parametrize("collective", ["all_reduce"])
def test_domain_busbw(collective, request, cluster, criterion):
    """Bus bandwidth in each NVLink domain that spans nodes; the slowest domain counts."""
    measured = request.getfixturevalue(f"{collective}_in_domains")
    timings = {place.fabric: measured[place] for place in cluster.places}
    nodes = {domain: sorted({place.node for place in cluster.places if place.fabric == domain}) for domain in timings}
    slowest = min(timings, key=lambda domain: timings[domain].busbw_gb_s)
    by_domain = {f"nodes {ranges(nodes[domain])}": timing.busbw_gb_s for domain, timing in timings.items()}
    found = timings[slowest]
    criterion.require(found.busbw_gb_s, evidence={"domains": by_domain, "bytes": found.size_bytes, **found.evidence})
