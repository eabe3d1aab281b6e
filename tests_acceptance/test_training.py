"""Real training: a LoRA fine-tune that only works when everything under it does."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.training


def test_finetune_loss(finetuned, criterion):
    """The loss falls below the limit, which lies well under what a model blind to its prompt could reach."""
    outcome = finetuned.value
    criterion.require(
        outcome.loss,
        evidence={
            "first": outcome.first_loss,
            "blind floor": outcome.blind_floor_nats,
            "below at step": outcome.step_below_limit,
        },
    )


def test_finetune_exact_match(finetuned, criterion):
    """Held-out function calls come out exactly right."""
    criterion.require(finetuned.value.exact_match, evidence={"held-out loss": finetuned.value.heldout_loss})


def test_finetune_checks(finetuned, criterion):
    """No exact check failed: lock-step, equal adapters, right data, restore."""
    failed = {name: check["detail"] for name, check in finetuned.value.checks.items() if not check["passed"]}
    criterion.require(len(failed), evidence=failed)
