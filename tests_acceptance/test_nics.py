"""The network's adapters: ports that are up, and what went wrong on them during the run."""

from __future__ import annotations

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.errors import Blame
from pytest_gpucluster.health.nic_growth import Readings, compare, read_limits
from pytest_gpucluster.health.nics import Promise, judge_links, judge_ports, nearest_gpus, own_ports
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.measurements.host import nic_state
from tests_acceptance.conftest import snapshot, watched_s


@pytest.fixture(scope="session")
def nics_at_end(cluster):
    """Every adapter again, after everything else."""
    return snapshot(cluster, nic_state, per="host", deadline_s=60)


@pytest.fixture(scope="session")
def ports_seen(nics_at_start, cluster, recipe):
    """The ports of each host beside the profile's promise and the other hosts, by node id."""
    results = nics_at_start.results
    hosts = {node.id: results[node].nics for node in results if node not in results.errors}
    return judge_ports(hosts, Promise(fabric=cluster.promised.fabric, **recipe("nic_ports")))


def require(criterion, value, seen, evidence):
    """Judge what is known, then raise what is not. A value outside its limit stands, whatever else is not known."""
    if value or not seen.unknown:
        criterion.require(value, evidence=evidence, parts=Parts(kind="nic", names=seen.names))
    if seen.unknown:
        text = f"{criterion.place.label}: {'; '.join(seen.unknown)}"
        raise MeasurementError(text, culprits=(criterion.place,), blame=Blame(part="nic"))


@pytest.mark.health
def test_nic_ports(nics_at_start, ports_seen, node, criterion):
    """Every port that should be up is up, and as fast as it should be."""
    assert nics_at_start.results[node]
    seen = ports_seen[node.id]
    evidence = {"ports": seen.facts, "up": seen.up, "expected": seen.expected}
    require(criterion, seen.amiss, seen, evidence)


@pytest.mark.health
def test_nic_pcie(nic_ways, node, cluster, criterion):
    """Every PCIe link on the way to an adapter of the promised fabric is as wide and as fast as both of its ends can be."""
    found = nic_ways[node]
    listed = [] if isinstance(found.nics, NotAvailable) else found.nics
    names = dict.fromkeys(nic.device for nic, _ in own_ports(listed, cluster.promised.fabric))
    seen = judge_links({name: found.paths[name] for name in names})
    evidence = {"links": seen.facts, "GPUs near": gpus_near(found, names), "nvidia_peermem": str(found.peer_memory)}
    require(criterion, len(seen.names), seen, evidence)


def gpus_near(found, names):
    """The GPUs that are nearest to each adapter, where the tree shows them."""
    gpus = {} if isinstance(found.gpu_paths, NotAvailable) else found.gpu_paths
    ways = {name: found.paths[name] for name in names if not isinstance(found.paths[name], NotAvailable)}
    return [f"{name}: {' '.join(nearest_gpus(way, gpus)) or 'not shown'}" for name, way in ways.items()]


@pytest.fixture
def nic_growth(nics_at_start, nics_at_end, node, cluster, recipe):
    """What happened on the ports of a host from the begin of the run to its end."""
    first, last = nics_at_start.results[node].nics, nics_at_end.results[node].nics
    readings = Readings(first=first, last=last, seconds=watched_s(nics_at_start, nics_at_end))
    return compare(readings, fabric=cluster.promised.fabric, limits=read_limits(recipe("nic_errors")["limits"]))


@pytest.mark.fabric
@pytest.mark.at_end
def test_nic_errors(nic_growth, nics_at_start, nics_at_end, criterion):
    """No port lost its link during the run, and no error counter grew beyond its limit."""
    growth, seconds = nic_growth, watched_s(nics_at_start, nics_at_end)
    evidence = {"ports": growth.facts, "within": growth.within, "seconds watched": round(seconds, 1)}
    require(criterion, growth.over, growth, evidence)
