"""How long this rank's forward takes: what a straggling GPU shows first.

A small model is launch bound on a GPU: the time between two events around its forward is that of a host core issuing
kernels, and healthy H200s of one host were 1.38 apart by it (2026-11-21). So on a GPU the forward is captured into a CUDA
graph once, after training, and replayed: one launch, and only the GPU's own time is left. On a CPU it is the median
over the steps of the time that its thread had of a core: that another program had the core meanwhile is no slowness.
FSDP's forward cannot be captured; where a host core set its time nothing is told of the GPU, and that is said.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from finetune_smoke import data

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from finetune_smoke.state import Run

WARM_RUNS = 3
REPLAYS = 11
SETTLING_STEPS = 5
LEAST_WAIT = 0.05
"""The share of a call's time that a GPU needs beyond its last launch, if launches do not bind it.

A launch-bound GPU is done microseconds later. Of one that is not, 1024 launches may be queued and not begun, a tenth of a
model of 10,000 kernels.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Milliseconds of one forward of this rank, and whether a host core that issues kernels set them, not the GPU."""

    ms: float
    launch_bound: bool = False


def forward(run: Run, seen_ms: Sequence[float]) -> Forward:
    """How long one forward of this rank takes; ``seen_ms`` are those of the steps so far in ms, at least one."""
    if run.ranks.device.type != "cuda" and run.strategy != "fsdp":
        return Forward(ms=statistics.median(seen_ms[min(SETTLING_STEPS, len(seen_ms) // 2) :]))
    rows = [run.source.row(number) for number in range(run.rows)]  # the same on every rank
    batch = data.batch(rows, run.source.pad_id).to(run.ranks.device)

    def once() -> None:
        run.fault.slow_down(seen_ms, run.ranks.device)
        with torch.no_grad(), run.autocast():
            run.model(batch.ids, batch.positions, batch.targets)

    return _timed(run, once) if run.strategy == "fsdp" else Forward(ms=_replayed_ms(once))


def _timed(run: Run, call: Callable[[], None]) -> Forward:
    """Median time of ``call`` by the host's clock (on a CPU, this thread's time of a core), the first run left out.

    FSDP's forward in training waits for its gathers, so it is run again here, with all layers there; its streams cannot be
    captured. What is worth sharding is not launch bound; preset ``small`` is, and healthy H200s were 1.45 apart by it
    (2026-11-22).
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
    issuing, whole = statistics.median(issued_s[1:]), statistics.median(times_s[1:])
    return Forward(ms=1e3 * whole, launch_bound=on_gpu and issuing > (1 - LEAST_WAIT) * whole)


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
