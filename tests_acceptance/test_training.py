"""Real training: a LoRA fine-tune that only works when everything under it does, and its speed. See docs/decisions/0015."""

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.measurements.training import curve, require_limit_below_floor
from tests_acceptance.conftest import require_possible

pytestmark = pytest.mark.training

CHECKS = (
    "base_digest", "data_digest", "lock_step", "all_reduce", "adapter_digest", "finite", "adapters_moved", "restore",
    "generation", "graph_lock_step", "step_time_spread",
)  # fmt: skip
"""Of finetune_smoke: all that a run without an output folder makes."""
AMONG_RANKS = ("base_digest", "data_digest", "lock_step", "graph_lock_step")
ONE_RANK = "one rank, compared with itself; no other rank to compare with"


def test_finetune_loss(finetuned, criterion):
    """The loss falls below the limit, which lies well under what a model blind to its prompt could reach."""
    outcome = finetuned.value.outcome
    try:
        require_limit_below_floor(criterion.limit.value, outcome.blind_floor_nats)
    except ValueError as error:
        raise MeasurementError(str(error)) from error
    criterion.require(
        outcome.loss,
        evidence={
            "first": outcome.first_loss,
            "blind floor": outcome.blind_floor_nats,
            "below at step": outcome.step_below_limit,
            "curve [step, loss]": curve(outcome.losses),
            "recorded curve": outcome.checks.get("loss_band", {}).get("detail", outcome.left_out.get("loss_band")),
            "notes": outcome.notes,
            **finetuned.value.evidence,
        },
    )


def test_finetune_exact_match(finetuned, criterion):
    """Held-out function calls come out exactly right."""
    outcome = finetuned.value.outcome
    criterion.require(outcome.exact_match, evidence={"held-out loss": outcome.heldout_loss})


def test_finetune_checks(finetuned, criterion):
    """No exact check failed: lock-step, equal adapters, right data, restore."""
    failed = {name: check["detail"] for name, check in finetuned.value.outcome.checks.items() if not check["passed"]}
    criterion.require(len(failed), evidence=failed)


@pytest.mark.parametrize("name", CHECKS)
def test_finetune_check(name, finetuned, criterion):
    """The check looked, and found nothing; else at a rank that it names, unless it names all of them."""
    check = finetuned.value.outcome.checks.get(name)
    if check is None:
        why = finetuned.value.outcome.left_out.get(name, "nothing was looked at")
        raise MeasurementError(f"the fine-tune made no check {name!r}: {why}")
    failed = int(not check["passed"])
    by_place = {place: failed * (rank in check["ranks"]) for rank, place in enumerate(finetuned)}
    is_some = 0 < sum(by_place.values()) < len(finetuned)
    remark = ONE_RANK if len(finetuned) == 1 and name in AMONG_RANKS else None
    criterion.require(by_place if is_some else failed, evidence={"found": check["detail"]}, remark=remark)


def test_finetune_loss_limit(finetuned, criterion):
    """The limit lies well under what a model blind to its prompt could reach."""
    outcome = finetuned.value.outcome
    if outcome.blind_floor_nats is None or outcome.loss_limit is None:
        raise MeasurementError("the fine-tune has no loss limit, or nobody knows what a model blind to its prompt would reach")
    criterion.require(
        outcome.loss_limit / outcome.blind_floor_nats,
        evidence={"limit": outcome.loss_limit, "blind floor": outcome.blind_floor_nats},
    )


@pytest.fixture(scope="session")
def trained_by_all(request, cluster):
    """A training over all GPUs there are, measured for another criterion wherever that is the same."""
    if len(cluster.nodes) > 1:
        return request.getfixturevalue("trained_in_cluster")
    return request.getfixturevalue("trained_in_node" if len(cluster.places) > 1 else "trained_alone")


def require_rate(trained, criterion, possible):
    """Judge the rate, if a GPU can have it; show what it is to be read with."""
    require_possible({criterion.place or "all nodes": trained}, possible)
    criterion.require(trained.tokens_per_s_per_gpu, evidence=trained.evidence, remark=trained.shortened)


def test_training_throughput_gpu(trained_alone, place, possible, criterion):
    """Every GPU by itself, all at once: nothing on the wire."""
    require_rate(trained_alone[place], criterion, possible)


def test_training_throughput_ddp_node(trained_in_node, node, possible, criterion):
    """The GPUs of a node, each with the whole model: gradients all-reduced."""
    require_rate(trained_in_node[node], criterion, possible)


def test_training_throughput_fsdp_node(sharded_in_node, node, possible, criterion):
    """The GPUs of a node, each with a part of the model: weights gathered layer by layer."""
    require_rate(sharded_in_node[node], criterion, possible)


def test_training_throughput_ddp_cluster(trained_in_cluster, possible, criterion):
    """All GPUs, each with the whole model."""
    require_rate(trained_in_cluster.value, criterion, possible)


def test_training_throughput_fsdp_cluster(sharded_in_cluster, possible, criterion):
    """All GPUs, each with a part of the model."""
    require_rate(sharded_in_cluster.value, criterion, possible)


def test_finetune_throughput(trained_by_all, possible, criterion):
    """Tokens a second and GPU over everything there is."""
    require_rate(trained_by_all.value, criterion, possible)


def test_finetune_throughput_healthy(trained_by_all, possible, criterion):
    """The same, against what a healthy cluster does."""
    require_rate(trained_by_all.value, criterion, possible)
