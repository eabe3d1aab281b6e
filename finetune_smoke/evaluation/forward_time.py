"""How long this rank's forward takes: what a straggling GPU shows first.

A small model is launch bound on a GPU: the time between two events around its forward is that of a host core issuing
kernels, and healthy H200s of one host were 1.38 apart by it (2026-11-21). So on a GPU the forward is captured into a CUDA
graph once, after training, and replayed: one launch, and only the GPU's own time is left. On a CPU it is the median
over the steps of the time that its thread had of a core: that another program had the core meanwhile is no slowness.
FSDP's forward cannot be captured; where a host core set its time nothing is told of the GPU, and that is said.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from finetune_smoke.data import batches
from finetune_smoke.parallel import cuda_graphs
from finetune_smoke.ranks import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from finetune_smoke.checks.exact import Checks
    from finetune_smoke.run import TrainingRun

WARM_RUNS = 3
REPLAYS = 11
SETTLING_STEPS = 5
MOST_ISSUING = 0.75
"""The share of a call's time that a host core may issue kernels for, if the time is to be the GPU's.

A launch-bound GPU is done microseconds after its last launch. One that is not may have 1024 launches queued, a quarter of a
model of 4,000 kernels.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTime:
    """How long one forward of this rank takes, and for how much of that a host core was issuing kernels, in ms."""

    ms: float
    issuing_ms: float = 0.0


def measure(run: TrainingRun, seen_ms: Sequence[float]) -> ForwardTime:
    """How long one forward of this rank takes; ``seen_ms`` are those of the steps so far in ms, at least one."""
    if run.ranks.device.type != "cuda" and run.strategy != "fsdp":
        return ForwardTime(ms=statistics.median(seen_ms[min(SETTLING_STEPS, len(seen_ms) // 2) :]))
    rows = [run.source.row(number) for number in range(run.rows)]  # the same on every rank
    batch = batches.batch(rows, run.source.pad_id).to(run.ranks.device)

    def once() -> None:
        run.fault.slow_down(seen_ms, run.ranks.device)
        with torch.no_grad(), run.autocast():
            run.model(batch.ids, batch.positions, batch.targets)

    replayed_ms = None if run.strategy == "fsdp" else _replayed_ms(once)
    if any(cannot for (cannot,) in run.ranks.gather([replayed_ms is None])):
        return _timed(run, once)
    assert replayed_ms is not None
    return ForwardTime(ms=replayed_ms)


def _timed(run: TrainingRun, call: Callable[[], None]) -> ForwardTime:
    """Median time of ``call`` by the host's clock (on a CPU, this thread's time of a core), the first run left out.

    FSDP's forward in training waits for its gathers, so it is run again here, with all layers there; its streams cannot be
    captured. What is worth sharding is not launch bound; preset ``small`` is, and healthy H200s were 1.45 apart by it
    (2026-11-22). So is told how long issuing the kernels took.
    """
    on_gpu = run.ranks.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    issued_s, times_s = [], []
    for _ in range(1 + REPLAYS):
        run.ranks.wait()
        begin = clock()
        call()
        issued_s.append(clock() - begin)
        run.ranks.wait()
        times_s.append(clock() - begin)
    issuing_s = statistics.median(issued_s[1:]) if on_gpu else 0.0
    return ForwardTime(ms=1e3 * statistics.median(times_s[1:]), issuing_ms=1e3 * issuing_s)


def _replayed_ms(call: Callable[[], None]) -> float | None:
    """Median GPU time of ``call`` in ms, by replaying it from a CUDA graph; None where it cannot be captured."""
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # warm-up elsewhere: PyTorch's notes on CUDA graphs
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM_RUNS):
            call()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    try:
        with cuda_graphs.capturing(graph):
            call()
    except cuda_graphs.CaptureError:
        return None
    return statistics.median(_one_replay_ms(graph) for _ in range(REPLAYS))


def _one_replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


def record_spread(checks: Checks, *, forward: ForwardTime, limit: float) -> None:
    """``step_time_spread``: each rank's ``forward`` time over the median of all ranks.

    The forward holds no collective; of a whole step every rank shows the slowest one's time. With two ranks the
    faster one is the measure, and one rank has no spread. Where a host core issued kernels for most of a forward, what it
    took longer for that is no fault of the GPU. If that explains a slow rank, or fills a forward, nothing is told of
    GPUs: the check is left out, unless another rank is slow beside.
    """
    everyone = checks.ranks.gather_floats([forward.ms, forward.issuing_ms])
    if len(everyone) < 2:
        return
    usual, usually_issuing = sorted(everyone, key=lambda row: (math.isnan(row[0]), row[0]))[(len(everyone) - 1) // 2]
    bound = [rank for rank, (ms, issuing_ms) in enumerate(everyone) if issuing_ms > MOST_ISSUING * ms]
    excused_ms = {rank: max(0.0, everyone[rank][1] - usually_issuing) for rank in bound}
    slow = [rank for rank, (ms, _) in enumerate(everyone) if not ms - excused_ms.get(rank, 0.0) <= limit * usual]
    if bound and not slow:
        checks.leave_out(
            "step_time_spread", why=f"{rank_list(bound)} issued kernels for most of the forward: a host core's time"
        )
        return
    worst = max(everyone[rank][0] for rank in slow or range(len(everyone)))
    times = f"{worst:.1f} ms against {usual:.1f} ms, {worst / usual:.2f} times; limit {limit:.2f}"
    problem = f"forward of {rank_list(slow)}: {times}" if slow else None
    checks.record("step_time_spread", problem=problem, at_fault=slow, remark=times)
