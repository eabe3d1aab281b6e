"""Hosts: their limits, settings and clocks, and what differs between parts that should be alike."""

import time
from dataclasses import asdict

import pytest

from pytest_gpucluster import Blame, MeasurementError, NotAvailable, health
from pytest_gpucluster.measurements.host import host_clock, host_errors, host_state, kubernetes_cluster, kubernetes_node
from pytest_gpucluster.measurements.host_parts import host_parts
from tests_acceptance.conftest import measured, values_of

pytestmark = [pytest.mark.platform, pytest.mark.reads]


host_states = measured(host_state, per="host", at="all", deadline_s=60)
"""Every host's facts. All take part: they are compared."""


def test_host_limits(host_states, node, cluster, recipe, criterion):
    """A job gets the files, the shared memory and the locked memory that it needs."""
    least = health.HostMinimum(**recipe("host_limits"))
    criterion.judge(health.judge_limits(host_states[node].facts, least, fabric=cluster.promised.fabric_between_nodes))


def test_host_settings(host_states, node, criterion):
    """No setting of the kernel costs speed."""
    criterion.judge(health.judge_settings(host_states[node].facts))


def test_environment_hints(host_states, node, cluster, criterion):
    """No variable of CUDA or NCCL costs speed."""
    criterion.judge(health.judge_variables(host_states[node].variables, fabric=cluster.promised.fabric))


def test_known_versions(host_states, nics_at_start, node, cluster, criterion):
    """No version of what runs on the host has a fault that is known to be mended."""
    nics, promised = nics_at_start[node].nics, cluster.promised
    asked = {"num_nodes": len(cluster.nodes), "fabric": promised.fabric}
    criterion.judge(health.judge_versions(host_states[node], nics, promised.versions, **asked))


def test_container_versions(host_states, node, cluster, criterion):
    """No image reaches the host by a known fault of runc, of Docker or of NVIDIA's container toolkit."""
    found = health.judge_container_versions(host_states[node].software, cluster.promised.versions)
    if found is None:
        criterion.does_not_apply(f"on {node.label}, or a container hides it")
    criterion.judge(found)


def test_host_management(host_states, nics_at_start, node, criterion):
    """No job reaches the BMC of its host, or the boot of a DPU."""
    criterion.judge(health.judge_management(host_states[node].management, nics_at_start[node].nics))


@pytest.mark.over_run(host_errors, per="host")
def test_host_errors(over_run, node, recipe, criterion):
    """The host's memory and the PCIe ways of its GPUs and adapters count no uncorrected error during the run."""
    first, last = over_run[node]
    limits = health.read_limits(recipe("host_errors")["limits"])
    found = health.judge_host_errors(first, last, seconds=over_run.seconds, limits=limits)
    if found is None:
        criterion.does_not_apply(f"on {node.label}")
    criterion.judge(found)


parts = measured(host_parts, per="host", deadline_s=120)
"""The memory modules and disks of every host."""


def test_memory_modules(parts, node, criterion):
    """No module runs slower than its siblings."""
    why = health.why_no_modules(parts[node])
    if why is not None:
        criterion.does_not_apply(f"on {node.label}: {why}")
    criterion.judge(health.judge_modules(parts[node].modules))


def test_nvme_health(parts, node, criterion):
    """Every local disk works, and its log says so."""
    disks = parts[node].disks
    if isinstance(disks, NotAvailable):
        raise MeasurementError(f"{node.label}: the NVMe disks are {disks}", blame=Blame(part="host"))
    why = health.why_no_logs(disks)
    if not disks or why is not None:
        criterion.does_not_apply(f"on {node.label}" + (f": {why}" if disks else ""))
    criterion.judge(health.judge_disks(disks))


kubernetes_records = measured(kubernetes_node, per="host", deadline_s=60)
"""Every host's record in Kubernetes."""


def test_kubernetes_node(kubernetes_records, node, criterion):
    """Kubernetes gives Pods the host and all of its GPUs."""
    state = kubernetes_records[node]
    why = health.why_not_asked(state.why_none, state.node)
    if why is not None:
        criterion.does_not_apply(f"on {node.label}: {why}")
    criterion.judge(health.judge_kubernetes(state.node, state.gpus_on_bus))


@pytest.fixture(scope="session")
def kubernetes_found(cluster):
    """What Kubernetes says of the cluster, asked by one node."""
    first = cluster.nodes[0]
    return cluster.run(kubernetes_cluster, per="host", places=[first], deadline_s=60)[first]


def test_kubernetes_operators(kubernetes_found, criterion):
    """What drives GPUs and adapters is ready wherever it is due."""
    found = kubernetes_found.cluster
    why = health.why_not_asked(kubernetes_found.why_none, found and found.daemonsets)
    if why is not None:
        criterion.does_not_apply(f"where it was asked: {why}")
    criterion.judge(health.judge_operators(found))


@pytest.fixture(scope="session")
def clock_skews(cluster, recipe):
    """The skew of every host's clock, and the errors of those that did not answer; asked again while that is in doubt."""
    nodes, errors = {node.id: node for node in cluster.nodes}, {}
    ahead_s = time.time() - time.monotonic()  # the controller's clock may be set meanwhile

    def ask(hosts):  # noqa: ANN202 -- what read_skews takes
        sent_s = ahead_s + time.monotonic()
        results = cluster.run(host_clock, per="host", places=[nodes[host] for host in hosts], deadline_s=60)
        span = {"sent_s": sent_s, "received_s": ahead_s + time.monotonic()}
        errors.update({node.id: error for node, error in results.errors.items()})
        return {node.id: health.ClockReading(shown_s=one.shown_s, **span) for node, one in values_of(results).items()}

    return health.read_skews(ask, list(nodes), health.ClockTerms(**recipe("clock_skew"))), errors


def test_clock_skew(clock_skews, node, criterion):
    """The host's clock shows what the others show."""
    by_node, errors = clock_skews
    if node.id in errors and node.id not in by_node:
        raise errors[node.id]
    criterion.judge(health.judge_clock(by_node.get(node.id), limit_s=criterion.limit.value))


@pytest.fixture(scope="session")
def drift_rows(host_states, gpu_states, nics_at_start, cluster, recipe):
    """Every fact of every host, GPU and NIC over all of them."""
    facts = list(health.facts_of_hosts({node.id: state for node, state in values_of(host_states).items()}))
    gpus = {place: one.gpu for place, one in values_of(gpu_states).items() if not isinstance(one.gpu, NotAvailable)}
    nics = values_of(nics_at_start)
    for node in cluster.nodes:
        facts += health.facts_of_gpus(node.id, {place.id: gpu for place, gpu in gpus.items() if place.node == node.node})
        if node in nics:
            facts += health.facts_of_nics(node.id, nics[node].nics)
    try:
        return health.compare_facts(facts, health.DriftRules(**recipe("drift")))
    except ValueError as error:  # a fact is demanded that nobody knows
        raise MeasurementError(str(error), blame=Blame(part="settings")) from None


@pytest.mark.again
def test_drift(drift_rows, host_states, node, criterion):
    """The host, its GPUs and its NICs are like the others, and as demanded."""
    host_states.first_of(node)  # raises why the host was not read
    criterion.judge(health.judge_drift(drift_rows, node.id))


@pytest.mark.again
def test_drift_coverage(drift_rows, host_states, criterion):
    """Enough facts were there to compare."""
    compared = [row for row in drift_rows if row.is_compared]
    summary = health.summary(drift_rows, num_nodes=len(host_states) - len(host_states.errors))
    facts = {"facts": [asdict(row) for row in drift_rows]}
    criterion.require(len({row.name for row in compared}), evidence=facts, remark=summary)
