"""A run in progress: what set-up made and every later part works on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from finetune_smoke.checks.exact import Checks
    from finetune_smoke.checks.faults import Fault
    from finetune_smoke.data.batches import Source
    from finetune_smoke.model.build import SummedLoss
    from finetune_smoke.model.flops import Shape
    from finetune_smoke.model.gradients import Gradients
    from finetune_smoke.ranks import Ranks
    from finetune_smoke.settings.config import Config

Progress = Callable[[str, "float | None"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything a step needs. ``rows`` are those of one pass on each rank, ``strategy`` is none, ddp or fsdp.

    ``adapters`` are the trained tensors by name, in the model's order, plain and whole under every strategy, and
    ``gradients`` theirs; ``autocasts`` says that some linear still runs peft's forward on a GPU. ``shape`` is None for an
    unusual architecture; ``base_digest`` stands for the frozen weights, ``data_digest`` for data set and tokenizer,
    whatever the number of ranks, ``held_digest`` for what this rank holds of those weights, and ``start`` for each adapter
    tensor as it began; ``notes`` say what set-up had to change.
    """

    config: Config
    ranks: Ranks
    source: Source
    rows: int
    fault: Fault
    model: SummedLoss
    strategy: str
    autocasts: bool
    adapters: dict[str, torch.nn.Parameter]
    gradients: Gradients
    optimizer: torch.optim.Optimizer
    shape: Shape | None
    base_digest: int
    held_digest: int
    data_digest: int
    start: torch.Tensor
    checks: Checks
    progress: Progress
    notes: list[str]

    @property
    def step_rows(self) -> int:
        """Rows of a step: of all ranks and passes."""
        return self.rows * self.config.accumulation * self.ranks.world_size

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 matmuls on a GPU for what is not computed in the base's type by itself."""
        if self.autocasts:
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()
