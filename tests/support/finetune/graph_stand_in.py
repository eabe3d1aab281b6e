"""CUDA graphs where there are none: a captured step that is computed afresh at each replay, on any device."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from finetune_smoke.parallel import cuda_graphs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_smoke.data.batches import Batch
    from finetune_smoke.run import TrainingRun


@dataclass
class StandIn:
    """Used as ``graphs.Captured``: what it replays is the run's own eager step."""

    run: TrainingRun
    batch: Batch

    def fits(self, batch: Batch) -> bool:
        """As a graph: one shape, and no more predictions than there is room for."""
        return batch.ids.shape == self.batch.ids.shape and len(batch.targets) <= len(self.batch.targets)

    def run_backward(self, batch: Batch, scale: torch.Tensor) -> torch.Tensor:
        """Add the gradients of ``batch``, which must fill the room; its summed loss."""
        assert len(batch.targets) == len(self.batch.targets)
        return cuda_graphs._pass(self.run, batch, scale)

    def run_update(self, learning_rate: float) -> torch.Tensor:
        """Clip and step; the norm before."""
        norm = self.run.gradients.clip(self.run.config.clip_norm)
        for group in self.run.optimizer.param_groups:
            group["lr"] = learning_rate
        self.run.optimizer.step()
        return norm


def install(patch: Any = setattr) -> None:
    """From now on nothing hinders a capture, and StandIn is what it makes; ``patch`` may be a MonkeyPatch's."""
    patch(cuda_graphs, "obstacle", lambda _config, _ranks: None)
    patch(cuda_graphs, "capture", StandIn)


def refuse_to_end(patch: Any) -> list[str]:
    """From now on a capture fails as it does on a GPU: its end in turn, and nothing is put back by it. What then was."""
    left: list[str] = []
    random = SimpleNamespace(clone_state=lambda: "numbers", graphsafe_set_state=left.append)

    @contextmanager
    def capture(_graph: object, *, pool: str, **_options: object) -> Iterator[None]:
        assert pool == "pool"
        try:
            yield
        finally:
            left.append("capture")
            raise RuntimeError("operation failed due to a previous error during capture")

    @contextmanager
    def stream(_stream: object) -> Iterator[None]:
        try:
            yield
        finally:
            left.append("stream")

    patch.setattr(torch.cuda, "graph", capture)
    patch.setattr(torch.cuda, "stream", stream)
    patch.setattr(torch.cuda, "current_stream", lambda: None)
    patch.setattr(torch.cuda, "current_device", lambda: 1)
    patch.setattr(torch.cuda, "default_generators", [None, random])
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *pool: left.append(f"end {pool}"), raising=False)
    patch.setattr(torch._C, "_cuda_releasePool", lambda *pool: left.append(f"release {pool}"), raising=False)
    return left
