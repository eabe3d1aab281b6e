"""The network's adapters: ports that are up, and what went wrong on them during the run."""

from __future__ import annotations

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.errors import Blame
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.judging.nic_ports import Promise, judge_ports
from pytest_gpucluster.measurements.nics import nic_state

pytestmark = pytest.mark.health


@pytest.fixture(scope="session")
def nics_at_start(cluster):
    """Every adapter of every host, before the long work. All hosts take part: their ports are compared."""
    return cluster.run(nic_state, per="host", places=cluster.places, deadline_s=60)


@pytest.fixture(scope="session")
def ports_seen(nics_at_start, cluster, recipe):
    """The ports of each host beside the profile's promise and the other hosts, by node id."""
    hosts = {node.id: nics_at_start[node].nics for node in nics_at_start if node not in nics_at_start.errors}
    return judge_ports(hosts, Promise(fabric=cluster.promised.fabric, **recipe("nic_ports")))


def require(criterion, value, unknown, evidence, names):
    """Judge what is known, then raise what is not. A value outside its limit stands, whatever else is not known."""
    if value or not unknown:
        criterion.require(value, evidence=evidence, parts=Parts(kind="nic", names=names))
    if unknown:
        text = f"{criterion.place.label}: {'; '.join(unknown)}"
        raise MeasurementError(text, culprits=(criterion.place,), blame=Blame(part="nic"))


def test_nic_ports(nics_at_start, ports_seen, node, criterion):
    """Every port that should be up is up, and as fast as it should be."""
    assert nics_at_start[node]
    seen = ports_seen[node.id]
    evidence = {"ports": seen.facts, "up": seen.up, "expected": seen.expected}
    require(criterion, seen.amiss, seen.unknown, evidence, seen.names)
