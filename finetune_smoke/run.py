"""A training run in progress: what set-up made, and what every later part works on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from finetune_smoke.checks.exact import Checks
from finetune_smoke.checks.faults import Fault
from finetune_smoke.data import batches
from finetune_smoke.model.build import SummedLoss
from finetune_smoke.model.flops import Shape
from finetune_smoke.model.gradients import Gradients
from finetune_smoke.ranks import Ranks
from finetune_smoke.settings.config import Config

ProgressCallback = Callable[[str, "float | None"], None]
"""Called with what happens, and with the share of the run that is done (0 to 1) or None."""


class InitialState(NamedTuple):
    """Digests (64 bits each) taken before training; later states are compared with them.

    ``local_base`` stands for the weights or shards of the frozen base that this rank holds, ``data`` for data set and
    tokenizer, whatever the number of ranks. ``adapters`` [tensors] has one number for each adapter tensor.
    """

    base: int
    local_base: int
    data: int
    adapters: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Everything that a step needs.

    ``rows`` is the number of rows of one pass on each rank. ``strategy`` is none, ddp or fsdp. ``adapters`` holds the
    trained tensors by name, in the model's order, unsharded under every strategy; ``gradients`` holds their gradients.
    ``autocasts``: some linear still runs peft's forward on a GPU. ``shape`` is None for an unusual architecture.
    ``notes`` say what set-up had to change.
    """

    config: Config
    ranks: Ranks
    source: batches.Source
    rows: int
    fault: Fault
    model: SummedLoss
    strategy: str
    autocasts: bool
    adapters: dict[str, torch.nn.Parameter]
    gradients: Gradients
    optimizer: torch.optim.Optimizer
    shape: Shape | None
    initial: InitialState
    checks: Checks
    progress: ProgressCallback
    notes: list[str]

    @property
    def step_rows(self) -> int:
        """Rows of a step: of all ranks and passes."""
        return self.rows * self.config.accumulation * self.ranks.world_size

    def batch_of(self, numbers: Iterable[int], width: int | None = None) -> batches.Batch:
        """The rows of these numbers as a batch on this rank's device, filled to ``width`` tokens or to the longest."""
        rows = [self.source.row(number) for number in numbers]
        return batches.batch(rows, self.source.pad_id, width).to(self.ranks.device)

    @contextmanager
    def weights_kept(self) -> Iterator[None]:
        """Put the adapters' weights back at the end of the block."""
        kept = [adapter.detach().clone() for adapter in self.adapters.values()]
        try:
            yield
        finally:
            with torch.no_grad():
                for adapter, values in zip(self.adapters.values(), kept, strict=True):
                    adapter.copy_(values)

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 products on a GPU for the modules that do not choose their type themselves."""
        return torch.autocast("cuda", dtype=torch.bfloat16) if self.autocasts else nullcontext()
