"""Evaluate the adapters on prompts whose answers never occurred in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.nn.attention import sdpa_kernel

from finetune_smoke.checks import exact
from finetune_smoke.data import batches, hub
from finetune_smoke.evaluation import generation
from finetune_smoke.evaluation.generation import Shares
from finetune_smoke.run import TrainingRun

ROWS = 64
"""Held-out calls in one forward. Running text takes as many rows as a training pass."""

EXACT = 0.9
"""The least share of exact generated calls; the base must stay below. Preset tiny reaches 1.0 at three seeds, its base 0."""


def evaluate(run: TrainingRun) -> tuple[float, float | None]:
    """(loss per predicted token in nats, share of calls exact to the last token) over the held-out rows of all ranks.

    Greedy decoding gives exactly the target if and only if every teacher-forced argmax does, so one forward suffices. The
    share is None for running text. A collective.
    """
    loss, tokens, wrong = _forward_over(run, run.source.heldout)
    return loss / tokens, 1 - wrong / len(run.source.heldout) if run.source.answers else None


@sdpa_kernel(exact.NO_CUDNN)
@torch.no_grad()
def _forward_over(run: TrainingRun, rows: Sequence[batches.Row]) -> tuple[float, float, float]:
    """(summed loss, predicted tokens, rows of which some token is wrong); the ranks share the ``rows``. A collective."""
    run.model.eval()
    mine = rows[run.ranks.rank :: run.ranks.world_size]
    loss, tokens, wrong = 0.0, 0, 0
    size = ROWS if run.source.answers else run.rows
    for first in range(0, len(mine), size):
        batch = batches.batch(mine[first : first + size], run.source.pad_id).to(run.ranks.device)
        with run.autocast():
            logits = run.model.logits(batch.ids, batch.positions).float()
        loss += float(torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum"))
        tokens += batch.targets.numel()
        wrong += len(set(batch.owners[logits.argmax(-1) != batch.targets].tolist()))
    run.model.train()
    everyone = run.ranks.gather_floats([loss, tokens, wrong])
    loss_all, tokens_all, wrong_all = (sum(column) for column in zip(*everyone, strict=True))
    return loss_all, tokens_all, wrong_all


@torch.no_grad()
def generate(run: TrainingRun) -> float | None:
    """Generate the answers to ``greedy_rows`` prompts, through the cache; returns the share of exact calls. A collective.

    The ranks share the prompts. If the preset promises that calls are learnt, ``generation`` is recorded. What the base by
    itself would generate follows from one forward (see ``evaluate``), which takes a fiftieth of generating it.
    """
    unjudged = _why_not_judged(run)
    if unjudged is not None:
        run.checks.leave_out("generation", why=unjudged)
    if not run.config.greedy_rows or not run.source.answers:
        return None
    codec = hub.codec_of(run.config)
    rows = min(run.config.greedy_rows, run.config.heldout_rows)
    asked = generation.held_out(dataclasses.replace(run.config, heldout_rows=rows), codec).questions
    run.model.eval()
    with run.autocast():
        adapter = generation.score(run.model.model, asked, codec, run.ranks)
    if unjudged is None:
        with run.weights_kept():
            for name, adapter_weights in run.adapters.items():
                if ".lora_B." in name:
                    adapter_weights.zero_()  # so that the base computes by itself
            _, _, wrong = _forward_over(run, run.source.heldout[:rows])
        judge(run.checks, 1 - wrong / rows, adapter)
    run.model.train()
    return adapter.exact


def judge(record: exact.Checks, base: float, adapter: Shares) -> None:
    """Record ``generation``: the adapter generates the calls exactly, and a share ``base`` of them is all the base would."""
    problem = None
    if adapter.exact < EXACT:
        problem = (
            f"{adapter.exact:.0%} of {adapter.prompts} generated calls are exact, below {EXACT:.0%} "
            f"({adapter.json_valid:.0%} are calls in JSON, {adapter.name:.0%} have the right name, "
            f"{adapter.arguments:.0%} the right arguments)"
        )
    elif base >= EXACT:
        problem = f"the base alone generates {base:.0%} of the calls: these prompts show no learning"
    shares = f"{adapter.exact:.0%} of {adapter.prompts} generated calls exact; {base:.0%} of those of the base alone"
    record.record("generation", problem=problem, remark=shares)


def _why_not_judged(run: TrainingRun) -> str | None:
    """Why the generated calls are not judged, None if they are."""
    reasons = {
        "rows are running text: there is no call to generate": not run.source.answers,
        "greedy_rows is 0: no call is generated": not run.config.greedy_rows,
        "nobody knows how many calls a real model has to get right; see `evaluate`": run.config.model is not None,
        "no loss is promised, so no call either": run.config.loss_limit is None,
    }
    return next((why for why, holds in reasons.items() if holds), None)
