"""Slurm: its view of the hosts, and what its job may use there."""

import pytest

from pytest_gpucluster import health
from pytest_gpucluster.measurements.host import rank_binding, slurm_state
from tests_acceptance.conftest import values_of

pytestmark = [pytest.mark.platform, pytest.mark.reads]


def job_of(cluster):
    """The job of Slurm in which this run is."""
    return cluster.promised.slurm_job


@pytest.fixture(scope="session")
def rank_bindings(cluster):
    """Where every rank may run."""
    return cluster.run(rank_binding, per="gpu", deadline_s=60, job=job_of(cluster))


@pytest.mark.over_run(slurm_state, per="host", job=job_of)
def test_slurm_node(over_run, readings, node, cluster, criterion):
    """Slurm gives the host jobs, and counts its GPUs, at the start and at the end: a health check may drain it meanwhile."""
    found = health.at_start_and_end(*over_run[node])
    states = readings.first(slurm_state, per="host", job=job_of)
    blocks = {other.id: state.block for other, state in values_of(states).items()}
    criterion.judge(health.with_remark(found, health.remark_on_blocks(node.id, blocks, domains_of(cluster))))


def domains_of(cluster):
    """The NVLink domain of each node, where the profile promises domains of several nodes."""
    if cluster.promised.nodes_per_domain == 1:
        return {}
    fabrics = {place.node: place.fabric for place in cluster.places if place.fabric is not None}
    return {node.id: fabrics[node.node] for node in cluster.nodes if node.node in fabrics}


def test_slurm_config(readings, node, criterion):
    """Slurm looks after its hosts by itself."""
    criterion.judge(health.judge_config(readings.first(slurm_state, per="host", job=job_of)[node]))


def test_slurm_job(readings, rank_bindings, node, criterion):
    """The ranks may use what the job has of the host."""
    state = readings.first(slurm_state, per="host", job=job_of)[node]
    ranks = {place.id: rank_bindings[place] for place in rank_bindings if place.node == node.node}
    criterion.judge(health.judge_job(state, ranks))
