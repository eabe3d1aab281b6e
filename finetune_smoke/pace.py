"""How long this rank's forward takes: what a straggling GPU shows first.

A small model is launch bound on a GPU: the time between two events around its forward is that of a host core issuing
kernels, and healthy H200s of one host were 1.38 apart by it (2026-11-21). So on a GPU the forward is captured into a CUDA
graph once, after training, and replayed: one launch, and only the GPU's own time is left. On a CPU it is the median
over the steps of the time that its thread had of a core: that another program had the core meanwhile is no slowness.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from finetune_smoke import data

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from finetune_smoke.state import Run

WARM_RUNS = 3
REPLAYS = 11
SETTLING_STEPS = 5


def forward_ms(run: Run, seen_ms: Sequence[float]) -> float:
    """Milliseconds of one forward of this rank; ``seen_ms`` are those of the steps so far, at least one."""
    if run.ranks.device.type != "cuda" and run.strategy != "fsdp":
        return statistics.median(seen_ms[min(SETTLING_STEPS, len(seen_ms) // 2) :])
    rows = [run.source.row(number) for number in range(run.rows)]  # the same on every rank
    batch = data.batch(rows, run.source.pad_id).to(run.ranks.device)

    def forward() -> None:
        run.fault.slow_down(seen_ms, run.ranks.device)
        with torch.no_grad(), run.autocast():
            run.model(batch.ids, batch.positions, batch.targets)

    return _timed_ms(run, forward) if run.strategy == "fsdp" else _replayed_ms(forward)


def _timed_ms(run: Run, call: Callable[[], None]) -> float:
    """Median time of ``call`` in ms by the host's clock (on a CPU, this thread's time of a core), the first run left out.

    FSDP's forward in training waits for its gathers, so it is run again here, with all layers there; its streams cannot be
    captured, but what is worth sharding is not launch bound.
    """
    clock = time.perf_counter if run.ranks.device.type == "cuda" else time.thread_time
    times_s = []
    for _ in range(1 + REPLAYS):
        run.ranks.wait()
        begin = clock()
        call()
        run.ranks.wait()
        times_s.append(clock() - begin)
    return 1e3 * statistics.median(times_s[1:])


def _replayed_ms(call: Callable[[], None]) -> float:
    """Median GPU time of ``call`` in ms, by replaying it from a CUDA graph."""
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # warm-up elsewhere: PyTorch's notes on CUDA graphs
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM_RUNS):
            call()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return statistics.median(_one_replay_ms(graph) for _ in range(REPLAYS))


def _one_replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))
