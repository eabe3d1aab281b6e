"""The adapters' gradients of a rank, one after another in one float32 buffer: one all-reduce, one norm, one zeroing.

DDP would put them into buckets, overlap them with the backward, and keep a hook for each. 0.65 GB of a 7B shape's
gradients take about 3 ms over NVLink in a step of 450 ms, so one buffer costs less than 1 %. It also works under FSDP2,
whose shards are the frozen base. Forward and backward hold no collective, so that a CUDA graph can capture them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Gradients:
    """``flat`` holds the gradients of ``parameters`` in order, ``views`` are its parts in the parameters' shapes."""

    parameters: tuple[torch.nn.Parameter, ...]
    flat: torch.Tensor
    views: tuple[torch.Tensor, ...]

    def bind(self) -> None:
        """Let ``parameter.grad`` be the view, for the optimiser and for faults planted after the all-reduce."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def zero(self) -> None:
        """Set all gradients to 0."""
        self.flat.zero_()

    def add(self, gradients: Sequence[torch.Tensor]) -> None:
        """Add the ``gradients`` of one backward, in the order of ``parameters``."""
        torch._foreach_add_(self.views, tuple(gradients))  # a few kernels for hundreds of tensors

    def clip(self, limit: float) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``limit``; returns the norm before, without waiting for it."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.flat)
        self.flat.mul_(torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm


def flat_gradients(parameters: Iterable[torch.nn.Parameter]) -> Gradients:
    """Zero gradients for the trained ones of ``parameters``: at least one, all of one type and on one device."""
    trained = tuple(parameter for parameter in parameters if parameter.requires_grad)
    flat = torch.zeros(sum(each.numel() for each in trained), dtype=trained[0].dtype, device=trained[0].device)
    parts = torch.split(flat, [each.numel() for each in trained])
    return Gradients(trained, flat, tuple(part.view_as(each) for part, each in zip(parts, trained, strict=True)))
