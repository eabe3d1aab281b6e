"""How two ranks share the work: one flat all-reduce, or FSDP2 over the frozen base; the numbers do not depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_runs import QUICK, torchrun

from finetune_smoke import strategy
from finetune_smoke.config import InputError, preset
from finetune_smoke.ranks import Ranks
from finetune_smoke.train import finetune

Outcomes = dict[str, list[dict[str, Any]]]


def failed(outcome: dict[str, Any]) -> set[str]:
    """Names of the checks that did not pass."""
    return {name for name, check in outcome["checks"].items() if not check["passed"]}


def test_flat_all_reduce_gives_the_gradients_of_ddp() -> None:
    """Torch's own DistributedDataParallel beside it, on two ranks with rows of their own."""
    done = torchrun(Path(__file__).parent / "ddp_beside.py")
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


@pytest.mark.parametrize(
    ("name", "check"),
    [("fsdp-bitflip", "lock_step"), ("fsdp-noallreduce", "adapter_digest"), ("fsdp-straggler", "step_time_spread")],
)
def test_faults_are_caught_under_fsdp_too(outcomes: Outcomes, name: str, check: str) -> None:
    """One of each kind: before the all-reduce, the all-reduce itself, and time."""
    assert check in failed(outcomes[name][0])


def test_passes_are_summed_under_fsdp(outcomes: Outcomes) -> None:
    """With gradient checkpointing as well, which gathers a layer and runs it again."""
    assert outcomes["fsdp-passes"][0]["losses"] == pytest.approx(outcomes["eight-steps"][0]["losses"], rel=1e-5)


def test_fsdp_of_one_rank_is_refused() -> None:
    """There is nothing to shard over."""
    with pytest.raises(InputError, match="strategy fsdp shards the base over ranks, and there is only one"):
        finetune(preset("tiny", **QUICK, strategy="fsdp"))


@pytest.mark.parametrize(("wanted", "world_size", "found"), [("auto", 1, "none"), ("ddp", 1, "none"), ("auto", 4, "ddp")])
def test_strategy_by_the_number_of_ranks(wanted: str, world_size: int, found: str) -> None:
    """A rank alone shares nothing; many do the plain thing unless told otherwise."""
    ranks = Ranks(rank=0, world_size=world_size, device=torch.device("cpu"))
    assert strategy.chosen(preset("tiny", strategy=wanted), ranks) == found
