"""The network's adapters: ports that are up, and what went wrong on them during the run."""

import pytest

from pytest_gpucluster import NotAvailable, health
from pytest_gpucluster.measurements.host import nic_state
from tests_acceptance.conftest import values_of

pytestmark = pytest.mark.reads


@pytest.fixture(scope="session")
def ports(nics_at_start, cluster, recipe):
    """The ports of each host beside the profile's promise and the other hosts, by node id."""
    hosts = {node.id: found.nics for node, found in values_of(nics_at_start).items()}
    promised = cluster.promised
    total = {"total_gb_s": promised.node_gb_s} if promised.fabric in ("infiniband", "roce") else {}
    return health.judge_ports(hosts, health.PortPromise(fabric=promised.fabric, **total, **recipe("nic_ports")))


@pytest.mark.health
def test_nic_ports(nics_at_start, ports, node, criterion):
    """Every port that should be up is up, and as fast as it should be."""
    nics_at_start.first_of(node)  # raises why the host was not read
    criterion.judge(ports[node.id])


@pytest.mark.health
def test_nic_pcie(nic_ways, node, cluster, criterion):
    """Every PCIe link on the way to an adapter of the promised fabric is as wide and as fast as both of its ends can be."""
    found = nic_ways[node]
    ways = own_ways(found, cluster)
    near = {"GPUs near": gpus_near(found, ways), "nvidia_peermem": str(found.peer_memory)}
    criterion.judge(health.judge_pcie_links(ways).with_evidence(**near))


@pytest.mark.health
def test_nic_redirection(nic_ways, node, cluster, criterion):
    """What a GPU and an adapter below one switch send each other does not go up to the root of the PCIe tree."""
    found = nic_ways[node]
    redirected = health.judge_redirection(own_ways(found, cluster), found.gpu_paths)
    if redirected is None:
        criterion.does_not_apply(f"on {node.label}")
    criterion.judge(redirected)


def beside_others(judge):
    """A fixture: what the judge finds at each host that shows its adapters, beside the others, by node id."""

    @pytest.fixture(scope="session")
    def found(nic_ways, cluster):  # noqa: ANN202 - a fixture, known by the name that it is given below
        return judge({node.id: one for node, one in values_of(nic_ways).items()}, cluster.promised.fabric)

    return found


nic_settings = beside_others(health.judge_nic_settings)
"""What each host's ports are set to."""
cables = beside_others(health.judge_cabling)
"""Where each host's cables end."""


@pytest.mark.health
def test_nic_settings(nic_ways, nic_settings, node, criterion):
    """NCCL can open every port that is up, and uses it as it does on the other hosts."""
    nic_ways.first_of(node)  # raises why the host was not read
    criterion.judge(nic_settings[node.id])


@pytest.mark.health
def test_gpudirect(nic_ways, node, criterion):
    """Adapters have a way to the memory of GPUs."""
    criterion.judge(health.judge_gpudirect(nic_ways[node]))


@pytest.mark.health
def test_cabling(nic_ways, cables, node, criterion):
    """Every cable ends at the switch where those of hosts like it end."""
    nic_ways.first_of(node)  # raises why the host was not read
    if cables[node.id] is None:
        criterion.does_not_apply(f"on {node.label}")
    criterion.judge(cables[node.id])


def own_ways(found, cluster):
    """The ways of the adapters of the promised fabric, by name."""
    listed = [] if isinstance(found.nics, NotAvailable) else found.nics
    return {nic.device: found.paths[nic.device] for nic, _ in health.own_ports(listed, cluster.promised.fabric)}


def gpus_near(found, ways):
    """The GPUs that are nearest to each adapter, where the tree shows them."""
    gpus = {} if isinstance(found.gpu_paths, NotAvailable) else found.gpu_paths
    known = {name: way for name, way in ways.items() if not isinstance(way, NotAvailable)}
    return [f"{name}: {' '.join(health.nearest_gpus(way, gpus)) or 'not shown'}" for name, way in known.items()]


@pytest.mark.fabric
@pytest.mark.over_run(nic_state, per="host", every=True)
def test_nic_errors(over_run, node, cluster, recipe, criterion):
    """No port lost its link during the run, and no error counter grew beyond its limit."""
    first, last = over_run[node]
    both = health.NicReadings(first=first.nics, last=last.nics, seconds=over_run.seconds)
    limits = health.read_limits(recipe("nic_errors")["limits"])
    growth = health.judge_nic_counters(both, fabric=cluster.promised.fabric, limits=limits)
    criterion.judge(growth.with_evidence(**{"seconds watched": round(over_run.seconds, 1)}))
