"""Cross-entropy over a frozen head, in chunks of rows: the logits of a step are never all in memory.

8192 predictions over 152064 tokens are 5 GB of float32 logits, and their gradient is as large. Here each chunk's logits
become its loss and the gradient of its hidden states at once. A frozen head needs no more.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK = 1024
"""Rows of a chunk. Compiled chunks are all padded to this size, so that one shape is compiled."""

IGNORED = -100
"""The target of a row that predicts nothing and pads a chunk or a batch of fixed size."""


def chunk_terms(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed loss, its gradient by ``hidden``) of one chunk; the softmax in float32, as in cross_entropy."""
    kept = targets != IGNORED
    logits = (hidden @ weight.t()).float()
    logarithms = logits - logits.logsumexp(dim=1, keepdim=True)
    columns = torch.arange(logits.shape[1], device=logits.device)
    right = columns == targets.clamp(min=0)[:, None]
    loss = -(torch.where(right, logarithms, 0.0).sum(dim=1) * kept).sum()
    slopes = (logarithms.exp() - right.float()) * kept[:, None]
    return loss, slopes.to(hidden.dtype) @ weight


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, terms: Any) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        slopes = []
        for rows, wanted in zip(torch.split(hidden, CHUNK), torch.split(targets, CHUNK), strict=True):
            if terms is not chunk_terms:
                loss, slope = terms(*_filled(rows, weight, wanted))
            else:
                loss, slope = terms(rows, weight, wanted)
            total = total + loss
            slopes.append(slope[: len(rows)])
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(torch.cat(slopes))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * gradients[0], None, None, None  # a scalar factor stays in float32 within the product


def _filled(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The chunk, padded to CHUNK rows with rows that predict nothing."""
    short = CHUNK - len(hidden)
    if short:
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, short))
        targets = torch.nn.functional.pad(targets, (0, short), value=IGNORED)
    return hidden, weight, targets


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, terms: Any = chunk_terms
) -> torch.Tensor:
    """Summed cross-entropy of ``hidden`` [rows, H] times the transpose of the frozen ``weight`` [V, H], float32.

    ``terms`` is ``chunk_terms``, compiled or not.
    """
    result: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, terms)  # type: ignore[no-untyped-call]  # torch's
    return result
