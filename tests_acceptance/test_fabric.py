"""What lies between nodes."""

from __future__ import annotations

from collections import Counter

import pytest

from pytest_gpucluster import Finding, health
from pytest_gpucluster.measurements import collectives
from pytest_gpucluster.measurements.transport import off_fabric_channels, transport, unknown_networks
from tests_acceptance.conftest import collective_by, judge_collective, measured

pytestmark = pytest.mark.fabric

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


reached = measured(collectives.nodes_reached, per="cluster", deadline_s=60)
"""Every rank's node, gathered over one group of all ranks."""
all_reduce_in_cluster = collective_by("all_reduce", "inter_node_busbw[all_reduce]", per="cluster")
"""A collective over every GPU of every node, at the size that is judged; the others as this one."""
all_gather_in_cluster = collective_by("all_gather", "inter_node_busbw[all_gather]", per="cluster")
reduce_scatter_in_cluster = collective_by("reduce_scatter", "inter_node_busbw[reduce_scatter]", per="cluster")
all_to_all_in_cluster = collective_by("all_to_all", "inter_node_busbw[all_to_all]", per="cluster")


all_reduce_in_domains = measured(collectives.all_reduce, "domain_busbw[all_reduce]", per="domain", in_budget=True)
"""Every GPU of an NVLink domain gets the sum, all domains at once."""


@pytest.fixture(scope="session")
def chosen_transport(cluster, recipe):
    """The channels that NCCL really opened. Each rank gets to know which others NVLink should reach."""
    return cluster.run(transport, per="cluster", **promised_domains(cluster), **recipe("transport"))


def promised_domains(cluster):
    """The NVLink domain of each rank, where the profile promises domains of several nodes: HGX may tell a cluster UUID too."""
    of_rank = {place.rank: place.fabric for place in cluster.places if place.rank is not None}
    is_promised = cluster.promised.nodes_per_domain > 1 and any(of_rank.values())
    return {"domains": [of_rank[rank] for rank in sorted(of_rank)]} if is_promised else {}


def test_nodes_reachable(reached, criterion):
    """Every expected node answers in one process group."""
    criterion.require(reached.value.num_nodes, evidence={"round trip us": reached.value.round_trip_us})


def test_transport(chosen_transport, cluster, criterion):
    """NCCL talks between nodes over the promised fabric, and over nothing else."""
    fabric = cluster.promised.fabric
    off_fabric = chosen_transport.each(lambda found: off_fabric_channels(found, fabric=fabric))
    traffic = traffic_by_node(cluster, off_fabric, chosen_transport.each(lambda one: sum(one.inter_node.values())))
    found = {kind for each in chosen_transport.each(lambda one: one.inter_node).values() for kind in each}
    in_domain = {kind for each in chosen_transport.each(lambda one: one.in_domain).values() for kind in each}
    shown = {"promised": fabric, "found": sorted(found), "network": chosen_transport.value.network}
    domains = {"in NVLink domains": sorted(in_domain)} if in_domain else {}
    unknown = sorted({name for names in chosen_transport.each(unknown_networks).values() for name in names})
    criterion.judge(health.judge_transport(traffic, unknown).with_evidence(**shown, **domains), among=cluster.nodes)


def traffic_by_node(cluster, off_fabric, connections):
    """What the ranks of each node opened to other nodes, from the numbers of each rank."""
    total: Counter[int] = Counter()
    off: Counter[int] = Counter()
    for place, count in connections.items():
        total[place.node] += count
        off[place.node] += off_fabric[place]
    return {node: health.NodeTraffic(total[node.node], off[node.node]) for node in cluster.nodes}


@pytest.mark.parametrize("collective", OPERATIONS)
def test_inter_node_busbw(collective, node_localizer, criterion, request):
    """Bus bandwidth over all nodes, as nccl-tests counts it. Where all_reduce is too slow, the culprits are searched."""
    judged, sizes = request.getfixturevalue(f"{collective}_in_cluster")
    culprit = node_localizer.search(criterion, judged.value) if collective == "all_reduce" else Finding()
    judge_collective(criterion, judged, None, lambda: sizes.value, culprit)


@pytest.mark.parametrize("collective", ["all_reduce"])
def test_domain_busbw(collective, request, cluster, criterion):
    """Bus bandwidth in each NVLink domain that spans nodes; the slowest domain counts."""
    found = request.getfixturevalue(f"{collective}_in_domains")
    timings = {place.fabric: found[place] for place in cluster.places}
    fabrics = {(place.node, place.fabric) for place in cluster.places}
    nodes = {domain: [node.id for node in cluster.nodes if (node.node, domain) in fabrics] for domain in timings}
    judged = [domain for domain in timings if len(nodes[domain]) > 1] or [*timings]  # busbw judges a single node
    slowest = min(judged, key=lambda domain: timings[domain].busbw_gb_s)
    by_domain = {f"{len(nodes[one])} nodes from {nodes[one][0]}": timing.busbw_gb_s for one, timing in timings.items()}
    timing = timings[slowest]
    evidence = {"domains": by_domain, "bytes": timing.size_bytes, **timing.evidence}
    criterion.require(timing.busbw_gb_s, evidence=evidence, remark=timing.shortened)
