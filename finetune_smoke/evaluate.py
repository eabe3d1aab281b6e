"""What the adapters learnt, on prompts whose answers never occurred in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from finetune_smoke import data, generation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune_smoke.state import Run

ROWS = 64
"""Held-out calls in one forward; of running text, as many rows as a training step has."""


@torch.no_grad()
def heldout(run: Run) -> tuple[float, float | None]:
    """(loss per predicted token in nats, share of calls exact to the last token) over the held-out rows of all ranks.

    Greedy decoding gives exactly the target if and only if every teacher-forced argmax does, so one forward tells.
    The share is None where rows are running text.
    """
    run.model.eval()
    mine = run.source.heldout[run.ranks.rank :: run.ranks.world_size]
    loss, tokens, wrong = 0.0, 0, 0
    size = ROWS if run.source.answers else run.rows
    for first in range(0, len(mine), size):
        batch = data.batch(mine[first : first + size], run.source.pad_id).to(run.ranks.device)
        with run.autocast():
            logits = run.model.logits(batch.ids, batch.positions).float()
        loss += float(torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum"))
        tokens += batch.targets.numel()
        wrong += len(set(batch.owners[logits.argmax(-1) != batch.targets].tolist()))
    run.model.train()
    everyone = run.ranks.gather_floats([loss, tokens, wrong])
    loss_all, tokens_all, wrong_all = (sum(column) for column in zip(*everyone, strict=True))
    exact = 1 - wrong_all / len(run.source.heldout) if run.source.answers else None
    return loss_all / tokens_all, exact


@torch.no_grad()
def greedy(run: Run) -> float | None:
    """Share of exact calls among ``greedy_rows`` prompts really decoded, through the cache; the ranks share them."""
    prompts = run.source.heldout[: run.config.greedy_rows]
    if not prompts or not run.source.answers:
        return None
    run.model.eval()
    mine = prompts[run.ranks.rank :: run.ranks.world_size]
    answers = _generated(run, mine) if mine else []
    right = sum(answer == row.ids[row.predicted[0] :] for answer, row in zip(answers, mine, strict=True))
    run.model.train()
    return sum(count for (count,) in run.ranks.gather([right])) / len(prompts)


def _generated(run: Run, rows: Sequence[data.Row]) -> list[list[int]]:
    """What the model writes after the prompt of each row, up to the end token."""
    prompts = [row.ids[: row.predicted[0]] for row in rows]
    limit = max(len(row.predicted) for row in rows) + 1
    ends = {"end_id": run.source.end_id, "pad_id": run.source.pad_id}
    with run.autocast():
        return generation.generate(run.model.model, prompts, limit=limit, device=run.ranks.device, **ends)
