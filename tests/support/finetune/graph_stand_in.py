"""CUDA graphs on a CPU: a captured step that is computed again at each replay."""

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
    """Replaces ``cuda_graphs.Captured``: a replay is the run's own eager step."""

    run: TrainingRun
    batch: Batch

    def fits(self, batch: Batch) -> bool:
        """Whether ``batch`` has the shape of the graph and no more predictions than it holds."""
        return batch.ids.shape == self.batch.ids.shape and len(batch.targets) <= len(self.batch.targets)

    def run_backward(self, batch: Batch, scale: torch.Tensor) -> torch.Tensor:
        """Add the gradients of ``batch``, which must be padded to the graph's size; returns its summed loss."""
        assert len(batch.targets) == len(self.batch.targets)
        return cuda_graphs._pass(self.run, batch, scale)

    def run_update(self, learning_rate: float) -> torch.Tensor:
        """Clip and step; returns the norm before clipping."""
        norm = self.run.gradients.clip(self.run.config.clip_norm)
        for group in self.run.optimizer.param_groups:
            group["lr"] = learning_rate
        self.run.optimizer.step()
        return norm


def install(patch: Any = setattr) -> None:
    """Remove every obstacle to a capture, which makes a StandIn. ``patch`` may be a MonkeyPatch's ``setattr``."""
    patch(cuda_graphs, "obstacle", lambda _config, _ranks: None)
    patch(cuda_graphs, "capture", StandIn)


def refuse_to_end(patch: Any) -> list[str]:
    """Let a capture fail as on a GPU: its end fails too and restores nothing. Returns the log of what happens then."""
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
