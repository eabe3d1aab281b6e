"""A step as two CUDA graphs: forward and backward, then clip and optimiser. Between them lies the all-reduce.

A small model is launch bound: a host core is busy for 70 ms issuing the kernels of a step that take a GPU 10 ms. A graph
issues them at once. Shapes must not change. So rows are padded to ``row_tokens``, and predictions to the most of the first
batches. A step with more predictions runs eagerly, and so do the steps before the capture, which warm everything up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from finetune_smoke.data import batches
from finetune_smoke.model import build
from finetune_smoke.ranks import Ranks, rank_list

if TYPE_CHECKING:
    from finetune_smoke.run import TrainingRun
    from finetune_smoke.settings.config import Config

WARM_RUNS = 2
ROUND_TO = 64


def obstacle(config: Config, ranks: Ranks) -> str | None:
    """Why this run cannot be captured, or None."""
    reasons = {
        "there is no GPU": ranks.device.type != "cuda",
        "a planted fault needs every step run afresh": config.fault.partition(":")[0] not in {"none", "graph-bitflip"},
        "strategy fsdp has collectives in forward and backward": config.strategy == "fsdp",
        "dropout draws random numbers": config.lora_dropout > 0,
        "gradient checkpointing asks the host for random state": config.gradient_checkpointing,
    }
    return next((why for why, holds in reasons.items() if holds), None)


def capacity(batches: Sequence[batches.Batch], rows: int) -> int:
    """The number of predictions that a graph holds: the most of any row in ``batches``, times ``rows``, rounded up."""
    most = max(int(batch.owners.bincount().max()) for batch in batches)
    return -(-most * rows // ROUND_TO) * ROUND_TO


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The graphs, and the tensors that they read and write."""

    batch: batches.Batch
    scale: torch.Tensor
    rate: torch.Tensor
    loss: torch.Tensor
    norm: torch.Tensor
    backward: torch.cuda.CUDAGraph
    update: torch.cuda.CUDAGraph

    def fits(self, batch: batches.Batch) -> bool:
        """Whether ``batch`` has the shape of the graph and no more predictions than it has room for."""
        return batch.ids.shape == self.batch.ids.shape and len(batch.targets) <= len(self.batch.targets)

    def run_backward(self, batch: batches.Batch, scale: torch.Tensor) -> torch.Tensor:
        """Add the gradients of ``batch``, which is on the device and ``padded``; returns its summed loss."""
        self.batch.ids.copy_(batch.ids)
        self.batch.positions.copy_(batch.positions)
        self.batch.targets.copy_(batch.targets)
        self.scale.copy_(scale)
        self.backward.replay()
        return self.loss.clone()

    def run_update(self, learning_rate: float) -> torch.Tensor:
        """Clip the gradients and step the optimiser; returns the norm before clipping."""
        self.rate.fill_(learning_rate)
        self.update.replay()
        return self.norm.clone()


def padded(batch: batches.Batch, room: int) -> batches.Batch:
    """``batch`` with exactly ``room`` predictions: added ones do not count, surplus ones are left out."""
    short = room - len(batch.targets)
    positions = torch.nn.functional.pad(batch.positions, (0, short))
    targets = torch.nn.functional.pad(batch.targets, (0, short), value=build.IGNORED)
    return batches.Batch(batch.ids, positions, targets, batch.owners)


class CaptureError(RuntimeError):
    """A call did what a CUDA graph cannot hold, for example read a number from the device. The message says what."""


def try_capture(run: TrainingRun, batch: batches.Batch) -> tuple[Captured | None, str | None]:
    """(what ``capture`` returns, None) on all ranks, or (None, why not) on all of them. A failed rank prints its reason."""
    captured = problem = None
    try:
        captured = capture(run, batch)
    except CaptureError as error:
        problem = str(error)
    failed = run.ranks.where(problem is not None)
    if not failed:
        return captured, None
    if problem is not None:
        sys.stderr.write(f"rank {run.ranks.rank}: no CUDA graph: {problem}\n")
    return None, f"{rank_list(failed)} could not capture a step" + (f": {problem}" if run.ranks.world_size == 1 else "")


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Capture the calls within the block as ``graph``; raises CaptureError with stream, random numbers and memory restored.

    The error mode is not torch's default "global", which forbids other threads to query events: NCCL's watchdog does so.
    """
    pool = torch.cuda.graph_pool_handle()
    try:
        with _restore_after_failure(pool), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except RuntimeError as error:
        cause = error.__context__ or error  # the end of a capture that failed within fails too
        if isinstance(cause, torch.cuda.OutOfMemoryError):
            raise cause from None
        raise CaptureError(str(cause).partition("\n")[0]) from error


@contextmanager
def _restore_after_failure(pool: tuple[int, int]) -> Iterator[None]:
    """Restore what a failed capture over ``pool`` changed: torch does so only if the capture's end succeeds.

    On torch 2.11, after a failed capture, drawing random numbers failed. The memory of the graph was never freed, nor any
    that two streams had used (an H200, 2026-11-22). Newer releases restore more by themselves (PyTorch pull requests 176752
    and 180395) and may keep the memory of the graph; they were not tried on a GPU.
    """
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    before = generator.clone_state()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()):
            yield
    except BaseException:
        generator.graphsafe_set_state(before)
        with suppress(RuntimeError):  # it was ended
            torch._C._cuda_endAllocateToPool(device, pool)  # noqa: SLF001 -- as torch.cuda.use_mem_pool does
            torch._C._cuda_releasePool(device, pool)  # noqa: SLF001
        raise


def warm_up(call: Callable[[], object], runs: int) -> torch.cuda.Stream:
    """Run ``call`` on a separate stream before its capture, as PyTorch's notes on CUDA graphs ask for; returns the stream."""
    side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(runs):
            call()
    torch.cuda.current_stream().wait_stream(side_stream)
    return side_stream


def capture(run: TrainingRun, batch: batches.Batch) -> Captured:
    """Capture the two graphs for batches like ``batch``, which is padded and on the device; changes no weight.

    The optimiser must have stepped before, so that its state exists.
    """
    batch = batches.Batch(batch.ids.clone(), batch.positions.clone(), batch.targets.clone(), batch.owners)
    scale = torch.ones((), device=run.ranks.device)
    side_stream = warm_up(lambda: _pass(run, batch, scale), WARM_RUNS)
    torch.cuda.synchronize()
    backward, update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with capturing(backward, side_stream):
        summed = _pass(run, batch, scale)
    rate = torch.zeros((), device=run.ranks.device)
    groups = run.optimizer.param_groups
    before = [(group["lr"], group["capturable"]) for group in groups]
    for group in groups:
        group["lr"], group["capturable"] = rate, True
    try:
        with capturing(update, side_stream):
            norm = run.gradients.clip(run.config.clip_norm)
            run.optimizer.step()
    finally:
        for group, (learning_rate, capturable) in zip(groups, before, strict=True):
            group["lr"], group["capturable"] = learning_rate, capturable  # a checkpoint saves these values
    run.gradients.zero()
    return Captured(batch=batch, scale=scale, rate=rate, loss=summed, norm=norm, backward=backward, update=update)


def _pass(run: TrainingRun, batch: batches.Batch, scale: torch.Tensor) -> torch.Tensor:
    with run.autocast():
        summed = run.model(batch.ids, batch.positions, batch.targets)
    run.gradients.add(torch.autograd.grad(summed * scale, run.gradients.parameters))
    result: torch.Tensor = summed.detach()
    return result
