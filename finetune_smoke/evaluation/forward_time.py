"""How long this rank's forward takes, which shows a slow GPU first.

A small model is launch bound on a GPU: the time between two events around its forward is that of a host core issuing
kernels. Healthy H200s of one host differed by a factor of 1.38 in it (2026-11-21). So on a GPU the forward is captured into
a CUDA graph once, after training, and replayed: with one launch only the GPU's own time is left. On a CPU the time is the
thread's CPU time, the median over the steps: another program on the same core does not count. FSDP's forward cannot be
captured. If a host core determines its time, the check is left out with that reason.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from finetune_smoke.checks.exact import Checks
from finetune_smoke.parallel import cuda_graphs
from finetune_smoke.ranks import rank_list
from finetune_smoke.run import TrainingRun

WARM_RUNS = 3
REPLAYS = 11
SETTLING_STEPS = 5
MOST_ISSUING = 0.75
"""If a host core issues kernels for a larger share of a call's time, the time is the core's, not the GPU's.

A launch-bound GPU is done microseconds after its last launch. A busy GPU may have 1024 launches queued, a quarter of a
model of 4,000 kernels.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTime:
    """The time of one forward of this rank, and the part of it in which a host core issued kernels, in ms."""

    ms: float
    issuing_ms: float = 0.0


def measure(run: TrainingRun, seen_ms: Sequence[float]) -> ForwardTime:
    """Measure one forward of this rank; ``seen_ms`` are the times of the steps so far in ms, at least one. A collective."""
    if run.ranks.device.type != "cuda" and run.strategy != "fsdp":
        return ForwardTime(ms=statistics.median(seen_ms[min(SETTLING_STEPS, len(seen_ms) // 2) :]))
    batch = run.batch_of(range(run.rows))  # the same on every rank

    def once() -> None:
        run.fault.slow_down(seen_ms, run.ranks.device)
        with torch.no_grad(), run.autocast():
            run.model(batch.ids, batch.positions, batch.targets)

    replayed_ms = None if run.strategy == "fsdp" else _replayed_ms(once)
    if run.ranks.where(replayed_ms is None):
        return _timed(run, once)
    assert replayed_ms is not None
    return ForwardTime(ms=replayed_ms)


def _timed(run: TrainingRun, call: Callable[[], None]) -> ForwardTime:
    """Median time of ``call`` by the host's clock (on a CPU, this thread's CPU time), without the first run.

    Under FSDP all layers are gathered by then. Preset ``small`` is launch bound here too: healthy H200s differed by a factor
    of 1.45 (2026-11-22). So the time of issuing the kernels is returned as well.
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
    cuda_graphs.warm_up(call, WARM_RUNS)
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
    """Record ``step_time_spread``: each rank's ``forward`` time over the median of all ranks.

    The forward holds no collective; a whole step would take the slowest rank's time on every rank. Of two ranks the faster
    one is the reference, and a single rank has no spread. If a host core issued kernels for most of a forward, the extra
    time of issuing is no fault of the GPU and is subtracted. If some rank is bound like this and no rank is slow after the
    subtraction, the times say nothing about GPUs, and the check is left out.
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
