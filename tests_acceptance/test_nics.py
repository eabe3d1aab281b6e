"""The network's adapters: ports that are up, and what went wrong on them during the run."""

from __future__ import annotations

import pytest

from pytest_gpucluster import NotAvailable, health
from pytest_gpucluster.measurements.host import nic_state


@pytest.fixture(scope="session")
def ports(nics_at_start, cluster, recipe):
    """The ports of each host beside the profile's promise and the other hosts, by node id."""
    hosts = {node.id: nics_at_start[node].nics for node in nics_at_start if node not in nics_at_start.errors}
    return health.judge_ports(hosts, health.PortPromise(fabric=cluster.promised.fabric, **recipe("nic_ports")))


@pytest.mark.health
def test_nic_ports(nics_at_start, ports, node, criterion):
    """Every port that should be up is up, and as fast as it should be."""
    assert nics_at_start[node]
    criterion.judge(ports[node.id])


@pytest.mark.health
def test_nic_pcie(nic_ways, node, cluster, criterion):
    """Every PCIe link on the way to an adapter of the promised fabric is as wide and as fast as both of its ends can be."""
    found = nic_ways[node]
    listed = [] if isinstance(found.nics, NotAvailable) else found.nics
    names = dict.fromkeys(nic.device for nic, _ in health.own_ports(listed, cluster.promised.fabric))
    links = health.judge_pcie_links({name: found.paths[name] for name in names})
    criterion.judge(links.with_evidence(**{"GPUs near": gpus_near(found, names), "nvidia_peermem": str(found.peer_memory)}))


def gpus_near(found, names):
    """The GPUs that are nearest to each adapter, where the tree shows them."""
    gpus = {} if isinstance(found.gpu_paths, NotAvailable) else found.gpu_paths
    ways = {name: found.paths[name] for name in names if not isinstance(found.paths[name], NotAvailable)}
    return [f"{name}: {' '.join(health.nearest_gpus(way, gpus)) or 'not shown'}" for name, way in ways.items()]


@pytest.mark.fabric
@pytest.mark.over_run(nic_state, per="host", every=True)
def test_nic_errors(over_run, node, cluster, recipe, criterion):
    """No port lost its link during the run, and no error counter grew beyond its limit."""
    first, last = over_run[node]
    both = health.NicReadings(first=first.nics, last=last.nics, seconds=over_run.seconds)
    limits = health.read_limits(recipe("nic_errors")["limits"])
    growth = health.judge_nic_counters(both, fabric=cluster.promised.fabric, limits=limits)
    criterion.judge(growth.with_evidence(**{"seconds watched": round(over_run.seconds, 1)}))
