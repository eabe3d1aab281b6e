"""Hosts: their limits, settings and clocks, and what differs between parts that should be alike."""

from __future__ import annotations

import time
from dataclasses import asdict

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.errors import Blame
from pytest_gpucluster.health import drift
from pytest_gpucluster.health.drift import facts_of_gpus, facts_of_hosts, facts_of_nics
from pytest_gpucluster.health.hosts import Least, Look, hints, judge_limits, judge_settings, skews
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.measurements.host import host_clock, host_state

pytestmark = pytest.mark.platform


@pytest.fixture(scope="session")
def host_states(cluster):
    """Every host's facts. All take part: they are compared."""
    return cluster.run(host_state, per="host", places=cluster.places, deadline_s=60)


def test_host_limits(host_states, node, cluster, recipe, criterion):
    """A job gets the files, the shared memory and the locked memory that it needs."""
    facts = host_states[node].facts
    found = judge_limits(facts, Least(**recipe("host_limits")), fabric=cluster.promised.fabric_between_nodes)
    evidence = {"open files": facts.nofile, "shared memory GiB": str(facts.shm_gib), "memlock bytes": facts.memlock}
    if found.wrong or not found.unknown:
        criterion.require(len(found.wrong), evidence={"found": found.wrong, **evidence})
    if found.unknown:
        raise MeasurementError(f"{node.label}: {'; '.join(found.unknown)}", culprits=(node,), blame=Blame(part="host"))


def test_host_settings(host_states, node, criterion):
    """No setting of the kernel costs speed."""
    facts = host_states[node].facts
    found = judge_settings(facts)
    shown = {"CPU governor": facts.governors, "CPU idle states": facts.idle_states, "IOMMU": facts.iommu}
    evidence = {"found": found.wrong, **{name: str(value) for name, value in shown.items()}}
    criterion.require(len(found.wrong), evidence=evidence, remark="; ".join(found.unknown) or None)


def test_environment_hints(host_states, node, cluster, criterion):
    """No variable of CUDA or NCCL costs speed."""
    variables = host_states[node].variables
    found = hints(variables, fabric=cluster.promised.fabric)
    criterion.require(len(found), evidence={"found": found, "variables": variables}, parts=Parts(kind="settings"))


@pytest.fixture(scope="session")
def clock_skews(cluster, recipe):
    """The skew of every host's clock. A host is asked alone where the question to all at once did not show it to be right."""
    arguments = recipe("clock_skew")
    looks, errors = look(cluster, cluster.nodes)
    for node in [node for node in cluster.nodes if node.id in looks] * arguments["looks"]:
        skew = skews(looks).get(node.id)
        if skew is not None and not skew.is_within(arguments["within_s"]):
            again, _ = look(cluster, [node])
            looks |= {one: seen for one, seen in again.items() if seen.doubt_s < looks[one].doubt_s}
    return skews(looks), errors


def look(cluster, nodes):
    """What the clocks of these hosts show, by node id, and the errors of those that did not answer."""
    asked_s = time.time()
    results = cluster.run(host_clock, per="host", places=nodes, deadline_s=60)
    answered_s = time.time()
    shown = {node.id: results[node].shown_s for node in results if node not in results.errors}
    looks = {node: Look(shown_s=shown_s, asked_s=asked_s, answered_s=answered_s) for node, shown_s in shown.items()}
    return looks, {node.id: error for node, error in results.errors.items()}


def test_clock_skew(clock_skews, node, criterion):
    """The host's clock shows what the others show."""
    by_node, errors = clock_skews
    if node.id in errors:
        raise errors[node.id]
    skew = by_node.get(node.id)
    if skew is None or not skew.is_known(criterion.limit.value):
        why = "no other host answered" if skew is None else f"{skew.skew_s:.3g} s, up to {skew.doubt_s:.3g} s more or less"
        raise MeasurementError(f"{node.label}: its clock cannot be compared: {why}")
    criterion.require(skew.skew_s, evidence={"s more or less": skew.doubt_s})


@pytest.fixture(scope="session")
def drift_rows(host_states, gpu_states, nics_at_start, cluster, recipe):
    """Every fact of every host, GPU and NIC over all of them."""
    read = {node: host_states[node] for node in host_states if node not in host_states.errors}
    facts = list(facts_of_hosts({node.id: state for node, state in read.items()}))
    for node in cluster.nodes:
        facts += facts_of_gpus(node.id, gpus_of(gpu_states, node))
        if node in nics_at_start.results and node not in nics_at_start.results.errors:
            facts += facts_of_nics(node.id, nics_at_start.results[node].nics)
    try:
        return drift.compare(facts, drift.Asked(**recipe("drift")))
    except ValueError as error:  # a fact is demanded that nobody knows
        raise MeasurementError(str(error), blame=Blame(part="settings")) from None


def gpus_of(gpu_states, node):
    """What NVML says of the GPUs of a node, of those that it can read, by place id."""
    seen = {place: gpu_states[place] for place in gpu_states if place.node == node.node and place not in gpu_states.errors}
    return {place.id: one.gpu for place, one in seen.items() if not isinstance(one.gpu, NotAvailable)}


def test_drift(drift_rows, host_states, node, criterion):
    """The host, its GPUs and its NICs are like the others, and as demanded."""
    assert host_states[node]
    odd, unread = drift.of_node(drift_rows, node.id)
    if odd or not unread:
        criterion.require(len(odd), evidence={"found": odd}, parts=Parts(kind="host"))
    if unread:
        raise MeasurementError(f"{node.label}: {'; '.join(unread)}", culprits=(node,), blame=Blame(part="host"))


def test_drift_coverage(drift_rows, cluster, criterion):
    """Enough facts were there to compare."""
    compared = [row for row in drift_rows if row.is_compared]
    summary = drift.summary(drift_rows, num_nodes=len(cluster.nodes))
    criterion.require(
        len({row.name for row in compared}), evidence={"facts": [asdict(row) for row in drift_rows]}, remark=summary
    )
