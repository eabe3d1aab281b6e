"""Whether a forward's time is the GPU's or that of the host core that issues its kernels."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from finetune_smoke.evaluation import forward_time
from finetune_smoke.settings.config import preset
from finetune_smoke.training import loop
from tests.support.finetune.fixed_ranks import checks_over, only_result

if TYPE_CHECKING:
    from finetune_smoke.checks.exact import Checks
    from finetune_smoke.run import TrainingRun

ISSUED_S = 0.02


class Rank:
    """A rank whose device goes on for ``after_s`` after the last launch; a clock that only this moves."""

    def __init__(self, device: str, *, after_s: float) -> None:
        self.device, self.after_s = SimpleNamespace(type=device), after_s
        self.now_s = 0.0
        self.busy = False

    def clock(self) -> float:
        """Seconds of either clock."""
        return self.now_s

    def forward(self) -> None:
        """Issue the kernels."""
        self.now_s += ISSUED_S
        self.busy = True

    def wait(self) -> None:
        """Wait until the device is done, if it is busy."""
        self.now_s += self.after_s * self.busy
        self.busy = False


def timed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> forward_time.ForwardTime:
    """The time of its forward."""
    monkeypatch.setattr(forward_time, "time", SimpleNamespace(perf_counter=rank.clock, thread_time=rank.clock))
    return forward_time._timed(cast("TrainingRun", SimpleNamespace(ranks=rank)), rank.forward)


@pytest.mark.parametrize(("after_s", "launch_bound"), [(0.0, True), (0.002, True), (0.01, False), (0.2, False)])
def test_issuing_is_told_apart(after_s: float, *, launch_bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that is done soon after the last launch, and of one that works on."""
    found = timed(Rank("cuda", after_s=after_s), monkeypatch)
    assert found.ms == pytest.approx(1e3 * (ISSUED_S + after_s))
    assert found.issuing_ms == pytest.approx(1e3 * ISSUED_S)
    assert (found.issuing_ms > forward_time.MOST_ISSUING * found.ms) == launch_bound


def test_a_cpu_has_no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes while the call runs."""
    assert timed(Rank("cpu", after_s=0.0), monkeypatch) == forward_time.ForwardTime(ms=pytest.approx(1e3 * ISSUED_S))


def spread(*times: tuple[float, float]) -> Checks:
    """The checks after ``step_time_spread`` of ranks with such times of a forward and of its launches, in ms."""
    record = checks_over(*times)
    forward_time.record_spread(record, forward=forward_time.ForwardTime(ms=0.0), limit=1.25)
    return record


@pytest.mark.parametrize(
    ("times", "at_fault"),
    [
        (((10.0, 0.0), (10.4, 0.0)), []),
        (((10.0, 0.0), (14.0, 0.0)), [1]),
        (((10.0, 0.0), (10.1, 0.0), (15.0, 0.0), (9.9, 0.0)), [2]),
        (((10.0, 0.0), (math.nan, 0.0)), [1]),  # no number is no pass
        # Of 2000 kernels a thousand can be queued: a slower GPU holds up its launches as well, and they excuse nothing.
        (((220.0, 107.0), (221.0, 108.0), (308.0, 165.0)), [2]),
        # The GPU of the others takes no longer than their launches, and those of this one took no longer than theirs.
        (((26.3, 26.2), (60.0, 5.0), (26.9, 26.8)), [1]),
        (((26.3, 26.2), (60.0, 26.2), (26.9, 26.8)), [1]),
    ],
)
def test_slow_rank_is_named(times: tuple[tuple[float, float], ...], at_fault: list[int]) -> None:
    """Against the median rank, less what its launches excuse."""
    found = only_result(spread(*times), "step_time_spread")
    assert (found["passed"], found["ranks"]) == (not at_fault, at_fault)


def test_one_rank_has_no_spread() -> None:
    """The check is not recorded for a single rank."""
    assert spread((10.0, 0.0)).results() == {}


@pytest.mark.parametrize(
    ("times", "named"),
    [
        (((26.3, 26.2), (38.1, 38.0)), "ranks 0, 1"),  # two healthy H200s of 2026-11-22
        (((26.3, 26.2), (26.9, 26.8)), "ranks 0, 1"),  # alike, which says nothing of their GPUs
        (((26.3, 18.0), (38.4, 30.1)), "rank 1"),  # a GPU that works on after the launches, and a slower host core
    ],
)
def test_who_is_slow_by_its_launches_is_not_blamed(times: tuple[tuple[float, float], ...], named: str) -> None:
    """The check is left out, and the reason names the ranks."""
    record = spread(*times)
    assert record.results() == {}
    assert record.left_out()["step_time_spread"] == f"{named} issued kernels for most of the forward: a host core's time"


def test_the_time_told_is_that_of_who_is_blamed() -> None:
    """The time in the detail is that of the slow rank, not that of an excused one."""
    record = spread((26.3, 26.2), (80.0, 79.9), (60.0, 26.0), (26.9, 26.8))
    assert only_result(record, "step_time_spread")["detail"].startswith("forward of rank 2: 60.0 ms against 26.9 ms")


@pytest.mark.parametrize(
    ("limit", "strategy", "device", "why"),
    [
        (None, "ddp", "cuda", "--spread-limit is none"),
        (1.25, "fsdp", "cuda", "it would gather all of FSDP's layers on each GPU"),
        (1.25, "fsdp", "cpu", None),
        (1.25, "ddp", "cuda", None),
    ],
)
def test_where_no_forward_is_measured(
    limit: float | None, strategy: str, device: str, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody reads the result, which took 3 s of the 7B shape, and where the base may not fit before the last save."""
    measured = []
    monkeypatch.setattr(loop.strategy, "unsharded_eager", lambda _run: nullcontext())
    monkeypatch.setattr(forward_time, "measure", lambda *_: measured.append(1) or forward_time.ForwardTime(ms=1.0))
    record = checks_over((1.0, 0.0), (1.0, 0.0))
    config = preset("tiny", steps=1, restore_check=False, spread_limit=limit)
    ranks = SimpleNamespace(device=torch.device(device))
    run: Any = SimpleNamespace(config=config, ranks=ranks, checks=record, strategy=strategy)
    loop._record_spread(run, cast("Any", SimpleNamespace(forward_ms=[1.0])))
    assert bool(measured) == (why is None)
    assert record.left_out() == ({} if why is None else {"step_time_spread": why})


def test_the_graphs_of_the_step_are_freed_before_the_forward_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold a step's activations, beside which a forward's own graph may not fit. Audits before it replay them."""
    held: list[tuple[str, object]] = []
    at: Any = SimpleNamespace(captured="graphs", log=SimpleNamespace(losses=[], norms=[]))
    monkeypatch.setattr(loop.steps, "audit", lambda at, _step: held.append(("audit", at.captured)))
    monkeypatch.setattr(loop, "_record_spread", lambda _run, _log: held.append(("spread", at.captured)))
    others = [(loop, "_compare_base"), (loop, "_compare_adapters"), (loop.band, "record"), (loop.exact, "record_finite")]
    for where, name in others:
        monkeypatch.setattr(where, name, lambda *_, **__: None)
    ranks = SimpleNamespace(device=torch.device("cpu"), world_size=2)
    at.run = SimpleNamespace(config=preset("tiny", steps=1), ranks=ranks, checks=None, step_rows=32, adapters={})
    loop._audit_at_end(at, 1)
    assert held == [("audit", "graphs"), ("spread", None)]
