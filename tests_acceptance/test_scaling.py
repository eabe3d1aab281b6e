"""The same work for each GPU, on one, on a node, on all: what is kept of a rate, and how a model's memory is divided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpucluster import Blame, Finding, MeasurementError, scaling
from pytest_gpucluster.measurements.collectives import all_reduce
from tests_acceptance.conftest import require_possible, sized


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


def require_same_work(single, sharded):
    """Raise MeasurementError for two recipes of trainings whose memory differs by more than how the model is divided."""
    differing = [name for name in {**single, **sharded} if name != "strategy" and single.get(name) != sharded.get(name)]
    if differing or sharded.get("strategy") != "fsdp":
        why = f"their recipes differ in {', '.join(differing)}" if differing else "no recipe has strategy fsdp"
        raise MeasurementError(f"the memory of two trainings cannot be compared: {why}", blame=Blame(part="settings"))


@pytest.fixture
def require_shares(recipe, criterion):
    """Judge the peak of a training whose GPUs share the model, by that of GPUs that trained the whole of it."""

    def judge(alone, shared, key):  # noqa: ANN202 - a fixture's function
        require_same_work(recipe("training_throughput_gpu"), recipe(key))
        outcome = shared.outcome
        alone_gib = max(one.peak_gib for one in alone)
        layers = {"sharded_gib": outcome.sharded_gib, "layer_gib": outcome.layer_gib}
        due_gib = scaling.sharded_peak_gib(single_rank_gib=alone_gib, ranks=outcome.world_size, **layers)
        criterion.require(
            scaling.deviation_percent(shared.peak_gib, due_gib, of=outcome.sharded_gib),
            evidence={
                "peak GiB": shared.peak_gib,
                "due GiB": due_gib,
                "GiB alone": alone_gib,
                "GiB sharded": outcome.sharded_gib,
                "ranks": outcome.world_size,
            },
        )

    return judge


@pytest.mark.training
def test_memory_scaling_node(trained_alone, sharded_in_node, cluster, node, require_shares):
    """The peak is what one GPU needs alone, less what the others hold of it."""
    alone = [trained_alone[place] for place in cluster.places if place.node == node.node]
    require_shares(alone, sharded_in_node[node], "training_throughput_fsdp_node")


@pytest.mark.training
def test_memory_scaling_cluster(trained_alone, sharded_in_cluster, cluster, require_shares):
    """The same over all nodes."""
    alone = [trained_alone[place] for place in cluster.places]
    require_shares(alone, sharded_in_cluster.value, "training_throughput_fsdp_cluster")
