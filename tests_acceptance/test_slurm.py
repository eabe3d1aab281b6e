"""Slurm: its view of the hosts, and what its job may use there."""

from __future__ import annotations

import pytest

from pytest_gpucluster import health
from pytest_gpucluster.measurements.host import rank_binding, slurm_state

pytestmark = pytest.mark.platform


def job_of(cluster):
    """The job of Slurm in which this run is."""
    return cluster.promised.slurm_job


@pytest.fixture(scope="session")
def rank_bindings(cluster):
    """Where every rank may run."""
    return cluster.run(rank_binding, per="gpu", deadline_s=60, job=job_of(cluster))


@pytest.mark.over_run(slurm_state, per="host", job=job_of)
def test_slurm_node(over_run, node, criterion):
    """Slurm gives the host jobs, and counts its GPUs, at the start and at the end: a health check may drain it meanwhile."""
    criterion.judge(health.at_start_and_end(*over_run[node]))


def test_slurm_job(readings, rank_bindings, node, criterion):
    """The ranks may use what the job has of the host."""
    state = readings.first(slurm_state, per="host", job=job_of)[node]
    ranks = {place.id: rank_bindings[place] for place in rank_bindings if place.node == node.node}
    criterion.judge(health.judge_job(state, ranks))
