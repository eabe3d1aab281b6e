"""How two ranks share the work: all-reduces in buckets, or FSDP2 over the frozen base; the numbers do not depend on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import device_mesh, fsdp

from finetune_smoke.model import build
from finetune_smoke.parallel import strategy
from finetune_smoke.ranks import Ranks
from finetune_smoke.settings.config import InputError, preset
from finetune_smoke.training.loop import finetune
from tests.support.finetune.runs import QUICK, SCRIPTS, failed, torchrun

pytestmark = pytest.mark.long

Outcomes = dict[str, list[dict[str, Any]]]


def test_buckets_give_the_gradients_of_ddp() -> None:
    """The reference is torch's DistributedDataParallel, on two ranks with different rows."""
    done = torchrun(SCRIPTS / "ddp_reference.py")
    assert done.returncode == 0, done.stderr[-4000:]


def test_fsdp_has_the_losses_of_ddp(outcomes: Outcomes) -> None:
    """Over 8 steps to 1e-5, with every check passed; and it sends the base's layers as well."""
    whole, sharded = outcomes["eight-steps"][0], outcomes["fsdp"][0]
    assert (whole["strategy"], sharded["strategy"]) == ("ddp", "fsdp")
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert sharded["heldout_loss"] == pytest.approx(whole["heldout_loss"], rel=1e-5)
    assert failed(sharded) == set()
    assert set(sharded["checks"]) == set(whole["checks"])
    assert sharded["wire_gb_per_step"] > whole["wire_gb_per_step"] > 0
    assert (whole["sharded_gib"], whole["layer_gib"]) == (0, 0)
    assert sharded["sharded_gib"] == 2 * sharded["layer_gib"] > 0  # two layers, all ranks' parts of them


@pytest.mark.parametrize(
    ("name", "check"),
    [("fsdp-bitflip", "lock_step"), ("fsdp-noallreduce", "adapter_digest"), ("fsdp-straggler", "step_time_spread")],
)
def test_faults_are_caught_under_fsdp_too(outcomes: Outcomes, name: str, check: str) -> None:
    """One fault of each kind: before the all-reduce, of the all-reduce itself, and of time."""
    assert check in failed(outcomes[name][0])


def test_shard_that_changed_is_seen_and_its_rank_named(outcomes: Outcomes) -> None:
    """All ranks compute with the same wrong weight, so no other check finds it."""
    outcome = outcomes["fsdp-base-late"][0]
    assert failed(outcome) == {"base_digest"}
    assert outcome["checks"]["base_digest"]["ranks"] == [1]
    assert outcome["checks"]["base_digest"]["detail"].startswith(
        "frozen weights of rank 1 have other bits than before training"
    )


def test_passes_are_summed_under_fsdp(outcomes: Outcomes) -> None:
    """With gradient checkpointing as well, which gathers a layer and runs it again."""
    assert outcomes["fsdp-passes"][0]["losses"] == pytest.approx(outcomes["eight-steps"][0]["losses"], rel=1e-5)


def test_base_in_host_memory_changes_no_bit(outcomes: Outcomes) -> None:
    """Two gloo ranks: the shards go another way to the same products."""
    kept, offloaded = outcomes["fsdp"][0], outcomes["fsdp-offload"][0]
    assert offloaded["losses"] == kept["losses"]
    assert offloaded["adapter_digest"] == kept["adapter_digest"]
    assert offloaded["strategy"] == "fsdp"
    assert failed(offloaded) == set()
    assert set(offloaded["checks"]) == set(kept["checks"])


@pytest.mark.parametrize("wanted", [False, True])
def test_every_layer_is_offloaded_if_asked_for(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 -- parametrised
    """The arguments of FSDP2 for each layer; host memory is pinned if there is a GPU."""
    policies: list[Any] = []
    monkeypatch.setattr(device_mesh.DeviceMesh, "from_group", lambda *_: None)
    monkeypatch.setattr(strategy.dist.distributed_c10d, "_get_default_group", lambda: None)
    monkeypatch.setattr(fsdp, "fully_shard", lambda _module, offload_policy=None, **_: policies.append(offload_policy))
    config = preset("tiny", **{**QUICK, "layers": 2}, strategy="fsdp", cpu_offload=wanted)
    base = build.random_base(config, torch.device("cpu"))
    for device, pinned in (("cpu", False), ("cuda", True)):
        policies.clear()
        ranks = Ranks(rank=0, world_size=2, device=torch.device(device))
        strategy.shard(build.SummedLoss(base), {}, ranks, cpu_offload=config.cpu_offload)
        policy = fsdp.CPUOffloadPolicy(pin_memory=pinned) if wanted else fsdp.OffloadPolicy()
        assert policies == [policy, policy, None]  # two layers, and the root, which holds nothing that is sharded


def test_fsdp_of_one_rank_is_refused() -> None:
    """A single rank has nothing to shard over."""
    with pytest.raises(InputError, match="strategy fsdp shards the base over ranks, and there is only one"):
        finetune(preset("tiny", **QUICK, strategy="fsdp"))


@pytest.mark.parametrize(("wanted", "world_size", "found"), [("auto", 1, "none"), ("ddp", 1, "none"), ("auto", 4, "ddp")])
def test_strategy_by_the_number_of_ranks(wanted: str, world_size: int, found: str) -> None:
    """A single rank shares nothing; several use ddp by default."""
    ranks = Ranks(rank=0, world_size=world_size, device=torch.device("cpu"))
    assert strategy.choose(preset("tiny", strategy=wanted), ranks) == found
