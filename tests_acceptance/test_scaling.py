"""The same work for each GPU, on one, on a node, on all: what is kept of a rate, and how a model's memory is divided."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from pytest_gpucluster import Blame, Finding, MeasurementError, scaling
from pytest_gpucluster.measurements.collectives import all_reduce
from pytest_gpucluster.measurements.training import sharded_memory
from tests_acceptance.conftest import measured, require_possible, sized


@pytest.fixture
def trainings(trained_alone, trained_in_node, cluster, node, possible):
    """What a node's GPUs reach alone, and the training of all of them, if GPUs can be so fast at all."""
    alone = {place: trained_alone[place] for place in cluster.places if place.node == node.node}
    trained = trained_in_node[node]
    require_possible({**alone, node: trained}, possible)
    return {place: one.tokens_per_s_per_gpu for place, one in alone.items()}, trained


@pytest.mark.training
def test_training_scaling_node(trainings, criterion):
    """Tokens a second and GPU of a whole node, in per cent of its GPUs alone."""
    alone, trained = trainings
    rate = trained.tokens_per_s_per_gpu
    shown = {"tokens/s/GPU": rate, "single GPU": {gpu.id: one for gpu, one in alone.items()}, **trained.evidence}
    value = scaling.efficiency_percent(rate, of=[*alone.values()])
    culprit = Finding() if criterion.limit.holds(value) else waited_for(rate, alone, criterion)
    criterion.judge(replace(culprit, value=value, evidence=shown))


def waited_for(rate, alone, criterion):
    """The slowest GPU, if its own rate explains the rate of all: they wait for it, and nothing else of the node is slow."""
    slowest = min(alone, key=alone.__getitem__)
    explains = criterion.limit.holds(scaling.efficiency_percent(rate, of=[alone[slowest]]))
    return Finding(bad={slowest: ("the others wait for it",)}, kind="gpu") if explains else Finding()


@pytest.mark.training
def test_training_scaling_cluster(trained_in_node, trained_in_cluster, cluster, possible, criterion):
    """Tokens a second and GPU of all nodes, in per cent of each alone."""
    of_nodes = {node: trained_in_node[node] for node in cluster.nodes}
    together = trained_in_cluster.value
    require_possible({**of_nodes, "all nodes": together}, possible)
    alone = {node.id: one.tokens_per_s_per_gpu for node, one in of_nodes.items()}
    criterion.require(
        scaling.efficiency_percent(together.tokens_per_s_per_gpu, of=[*alone.values()]),
        evidence={"tokens/s/GPU": together.tokens_per_s_per_gpu, "single node": alone, **together.evidence},
    )


@pytest.fixture(scope="session")
def all_reduced(cluster, recipe, budget):
    """All-reduce over the GPUs of each node, and right after it over all, at one size."""
    named = {**sized(recipe("busbw_scaling"), cluster), "budget_s": budget("busbw_scaling", share=0.5)}
    return tuple(cluster.run(all_reduce, per=per, **named) for per in ("node", "cluster"))


@pytest.mark.fabric
def test_busbw_scaling(all_reduced, node_localizer, cluster, possible, criterion):
    """Bus bandwidth of all GPUs, in per cent of what of a node's own could cross to the others."""
    in_node, in_cluster = all_reduced
    by_node = {node.id: in_node[node].busbw_gb_s for node in cluster.nodes}
    whole, ring = in_cluster.value, cluster.promised.ring_gb_s
    for node, rate in by_node.items():
        possible("busbw[all_reduce]", gpus=cluster.promised.gpus_per_node).require(rate, where=node)
    possible("inter_node_busbw[all_reduce]").require(whole.busbw_gb_s, where="all nodes")
    culprit = node_localizer.found
    evidence: dict[str, Any] = {"slowed by": [str(part) for part in culprit.bad]} if culprit.bad else {}
    evidence |= {"GB/s": whole.busbw_gb_s, "bytes": whole.size_bytes, "single node": by_node}
    value = scaling.efficiency_percent(whole.busbw_gb_s, of=[*by_node.values()])
    if criterion.threshold.by_shape and criterion.limit.basis is None:  # the limit of a stated shape is one of the plain ratio
        if ring is None:
            raise MeasurementError("the profile does not say 'nic_gb_s_per_gpu'", kind="refused", blame=Blame(part="settings"))
        evidence |= {"plain ratio %": value, "rings GB/s": ring}
        value = scaling.kept_percent(whole.busbw_gb_s, of=[*by_node.values()], most=ring)
    found = Finding() if criterion.limit.holds(value) else culprit
    remark = found.remark or whole.shortened
    criterion.judge(replace(found, value=value, evidence={**evidence, **whole.evidence}, remark=remark))


@pytest.fixture(scope="session")
def memory_alone(cluster, recipe):
    """Peak memory of one GPU of each node that trains the whole model."""
    first = [place for place in cluster.places if place.gpu == 0]
    return cluster.run(sharded_memory, per="gpu", places=first, single_rank=True, **recipe("memory_scaling_node"))


@pytest.fixture(scope="session")
def memory_in_node(cluster, recipe):
    """The same when 2, 4, 8 .. GPUs of each node share the model, by their number."""
    found = {}
    for size in scaling.group_sizes(cluster.promised.gpus_per_node):
        some = [place for place in cluster.places if place.gpu < size]
        found[size] = cluster.run(sharded_memory, per="node", places=some, **recipe("memory_scaling_node"))
    return found


memory_in_cluster = measured(sharded_memory, "memory_scaling_cluster", per="cluster")
"""The same when all GPUs share the model."""


def require_shares(alone, shared, criterion):
    """Judge the group whose peak lies furthest from what it should be; show all of them."""
    layers = {"sharded_gib": alone.sharded_gib, "layer_gib": alone.layer_gib}
    peak = functools.partial(scaling.sharded_peak_gib, single_rank_gib=alone.peak_gib, **layers)
    due = {one.world_size: peak(ranks=one.world_size) for one in shared}
    peaks = {f"GiB at {one.world_size}": f"{one.peak_gib:.2f} of {due[one.world_size]:.2f}" for one in shared}
    criterion.require(
        max(scaling.deviation_percent(one.peak_gib, due[one.world_size]) for one in shared),
        evidence={"GiB alone": alone.peak_gib, **peaks, "GiB sharded": alone.sharded_gib},
    )


@pytest.mark.training
def test_memory_scaling_node(memory_alone, memory_in_node, node, criterion):
    """The peak is what one GPU needs alone, less what the others hold of it."""
    require_shares(memory_alone[node], [found[node] for found in memory_in_node.values()], criterion)


@pytest.mark.training
def test_memory_scaling_cluster(memory_alone, memory_in_cluster, cluster, criterion):
    """The same over all nodes."""
    require_shares(memory_alone[cluster.nodes[0]], [memory_in_cluster.value], criterion)
