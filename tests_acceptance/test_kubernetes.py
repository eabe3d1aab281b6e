"""Kubernetes: its view of the hosts and of what drives their GPUs, where kubectl knows a cluster."""

from __future__ import annotations

import pytest

from pytest_gpucluster import health
from pytest_gpucluster.measurements.host import kubernetes_cluster, kubernetes_node

pytestmark = [pytest.mark.platform, pytest.mark.reads]


@pytest.fixture(scope="session")
def records(cluster):
    """Every host's record in Kubernetes."""
    return cluster.run(kubernetes_node, per="host", deadline_s=60)


def test_kubernetes_node(records, node, criterion):
    """Kubernetes gives Pods the host and all of its GPUs."""
    state = records[node]
    if state.why_none is not None:
        criterion.does_not_apply(f"on {node.label}: {state.why_none}")
    criterion.judge(health.judge_kubernetes(state.node, state.gpus_on_bus))


@pytest.fixture(scope="session")
def cluster_record(cluster):
    """What Kubernetes says of the cluster, asked by one node."""
    first = cluster.nodes[0]
    return cluster.run(kubernetes_cluster, per="host", places=[first], deadline_s=60)[first]


def test_kubernetes_operators(cluster_record, criterion):
    """What drives GPUs and adapters is ready wherever it is due."""
    if cluster_record.why_none is not None:
        criterion.does_not_apply(f"where it was asked: {cluster_record.why_none}")
    criterion.judge(health.judge_operators(cluster_record.cluster))
