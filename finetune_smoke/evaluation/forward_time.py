"""How long this rank's forward takes, which shows a slow GPU first.

A small model is launch bound on a GPU: the time between two events around its forward is that of a host core issuing
kernels. Healthy H200s of one host differed by a factor of 1.38 in it (2026-11-21). So on a GPU the forward is captured into
a CUDA graph once, after training, and replayed: with one launch only the GPU's own time is left. On a CPU the time is the
thread's CPU time, the median over the steps: another program on the same core does not count. A forward on a GPU that no
graph can hold is not measured.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import torch

from finetune_smoke.data import batches
from finetune_smoke.ranks import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from finetune_smoke.checks.exact import Checks
    from finetune_smoke.run import TrainingRun

WARM_RUNS = 3
REPLAYS = 11
SETTLING_STEPS = 5


def obstacle(run: TrainingRun) -> str | None:
    """Why the forward is not measured, None if it is; the same on every rank.

    FSDP has collectives in the forward. Checkpointing, and the dropout of peft's forward, ask for random numbers. A user's
    model may ask its device. A capture that fails on torch 2.11 leaves random numbers unusable, so none is begun that may.
    """
    if run.config.spread_limit is None:
        return "--spread-limit is none"
    odd = run.strategy == "fsdp" or run.config.gradient_checkpointing or run.autocasts or run.config.model is not None
    if odd and run.ranks.device.type == "cuda":
        return "under FSDP, with checkpointing, dropout or --model, no CUDA graph can surely hold a GPU's forward"
    return None


def measure_ms(run: TrainingRun, seen_ms: Sequence[float]) -> float:
    """Measure one forward of this rank in ms; ``seen_ms`` are the times of the steps so far, at least one."""
    if run.ranks.device.type != "cuda":
        return statistics.median(seen_ms[min(SETTLING_STEPS, len(seen_ms) // 2) :])
    rows = [run.source.row(number) for number in range(run.rows)]  # the same on every rank
    batch = batches.batch(rows, run.source.pad_id).to(run.ranks.device)

    def once() -> None:
        run.fault.slow_down(seen_ms, run.ranks.device)
        with torch.no_grad():
            run.model(batch.ids, batch.positions, batch.targets)

    return _replayed_ms(once)


def _replayed_ms(call: Callable[[], None]) -> float:
    """Median GPU time of ``call`` in ms, by replaying it from a CUDA graph."""
    side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # a separate stream: PyTorch's notes on CUDA graphs
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_RUNS):
            call()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # "global" forbids NCCL's watchdog to query events
        call()
    return statistics.median(_one_replay_ms(graph) for _ in range(REPLAYS))


def _one_replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


def record_spread(checks: Checks, *, forward_ms: float, limit: float) -> None:
    """Record ``step_time_spread``: each rank's ``forward_ms`` over the median of all ranks.

    A whole step would take the slowest rank's time on every rank. Of two ranks the faster one is the reference, and a single
    rank has no spread.
    """
    everyone = [ms for (ms,) in checks.ranks.gather_floats([forward_ms])]
    if len(everyone) < 2:
        return
    usual = sorted(everyone, key=lambda ms: (math.isnan(ms), ms))[(len(everyone) - 1) // 2]
    slow = [rank for rank, ms in enumerate(everyone) if not ms <= limit * usual]
    worst = max(everyone[rank] for rank in slow or range(len(everyone)))
    times = f"{worst:.1f} ms against {usual:.1f} ms, {worst / usual:.2f} times; limit {limit:.2f}"
    problem = f"forward of {rank_list(slow)}: {times}" if slow else None
    checks.record("step_time_spread", problem=problem, at_fault=slow, remark=times)
