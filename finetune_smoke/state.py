"""A run in progress: what set-up made and every later part works on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from finetune_smoke.checks import Checks
    from finetune_smoke.config import Config
    from finetune_smoke.data import Source
    from finetune_smoke.faults import Fault
    from finetune_smoke.flops import Shape
    from finetune_smoke.model import SummedLoss
    from finetune_smoke.ranks import Ranks

Progress = Callable[[str, "float | None"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything a step needs. ``network`` is ``model``, in DDP if there is a group; ``rows`` are each rank's a step.

    ``adapters`` are the trained tensors by name, in the model's order; ``shape`` is None for an unusual architecture;
    ``base_digest`` stands for the frozen weights and ``start`` for each adapter tensor as it began.
    """

    config: Config
    ranks: Ranks
    source: Source
    rows: int
    fault: Fault
    model: SummedLoss
    network: torch.nn.Module
    adapters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    shape: Shape | None
    base_digest: int
    start: torch.Tensor
    checks: Checks
    progress: Progress

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 matmuls on a GPU, float32 on a CPU."""
        if self.ranks.device.type == "cuda":
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()
