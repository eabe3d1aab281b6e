"""Slurm: its view of the hosts, and what its job may use there."""

from __future__ import annotations

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.errors import Blame
from pytest_gpucluster.health.slurm import judge_job, judge_node
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.slurm import SlurmNode
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.measurements.slurm import rank_binding
from tests_acceptance.conftest import ask_slurm

pytestmark = pytest.mark.platform


@pytest.fixture(scope="session")
def slurm_at_end(cluster):
    """What Slurm says after everything else: a site's health check may have drained a host meanwhile."""
    return ask_slurm(cluster)


@pytest.fixture(scope="session")
def rank_bindings(cluster):
    """Where every rank may run."""
    return cluster.run(rank_binding, per="gpu", deadline_s=60, job=cluster.promised.slurm_job)


def told(state):
    """What Slurm says of a host and the job there, in words."""
    node, share = state.node, state.share
    if not isinstance(node, NotAvailable):
        node = f"{node.name}: {'+'.join(node.states)}, GPUs {node.gpus}, Slurm {node.version}"
    if not isinstance(share, NotAvailable):
        share = f"{share.cpus} CPUs, {share.memory_mib} MiB, GPUs {share.gpus}"
    partitions = state.partitions
    if not isinstance(partitions, NotAvailable):
        partitions = ", ".join(f"{name} {found}" for name, found in partitions.items()) or "none"
    seen = f"{state.gpus_seen}{f', {state.mig_gpus} of them in MIG mode' if state.mig_gpus else ''}"
    return {
        "node": str(node),
        "job": str(share),
        "partitions": str(partitions),
        "controller": str(state.controller),
        "GPUs seen": seen,
    }


def raise_unknown(node, unknown):
    """An ERROR at the host, of what could not be judged."""
    text = f"{node.label}: {'; '.join(unknown)}"
    raise MeasurementError(text, culprits=(node,), blame=Blame(part="host"))


def remark_on(state):
    """What a site may have on purpose: Slurm counts no GPU of a host that has some; a partition takes no jobs."""
    remarks = []
    has_none = isinstance(state.node, SlurmNode) and state.node.gpus == 0
    if has_none and isinstance(state.gpus_seen, int) and state.gpus_seen > 0:
        remarks.append(f"Slurm counts no GPU of this host (Gres), and NVML shows {state.gpus_seen}")
    if not isinstance(state.partitions, NotAvailable):
        remarks += [f"partition {name} is {found}, not UP" for name, found in state.partitions.items() if found != "UP"]
    return "; ".join(remarks) or None


@pytest.mark.at_end
def test_slurm_node(slurm_at_start, slurm_at_end, node, criterion):
    """Slurm gives the host jobs, and counts its GPUs, at the start and at the end."""
    first, last = slurm_at_start[node], slurm_at_end[node]
    at_start, found = judge_node(first), judge_node(last)
    wrong = [*found.wrong, *(f"{text}, at the start" for text in at_start.wrong if text not in found.wrong)]
    unknown = [*found.unknown, *(f"{text}, at the start" for text in at_start.unknown if text not in found.unknown)]
    if wrong or not unknown:
        evidence = {"found": wrong, **told(last), "node at the start": told(first)["node"]}
        criterion.require(len(wrong), evidence=evidence, remark=remark_on(last), parts=Parts(kind="host"))
    if unknown:
        raise_unknown(node, unknown)


def test_slurm_job(slurm_at_start, rank_bindings, node, criterion):
    """The ranks may use what the job has of the host."""
    state = slurm_at_start[node]
    ranks = {place: rank_bindings[place] for place in rank_bindings if place.node == node.node}
    found = judge_job(state, [*ranks.values()])
    if isinstance(state.node, NotAvailable) or isinstance(state.share, NotAvailable) or not ranks:
        raise_unknown(node, found.unknown)
    bound = [f"{place.id}: CPUs {one.cpus} on NUMA nodes {one.numa_nodes}" for place, one in ranks.items()]
    evidence = {"found": found.wrong, **told(state), "ranks": bound}
    criterion.require(
        len(found.wrong), evidence=evidence, remark="; ".join(found.unknown) or None, parts=Parts(kind="settings")
    )
