"""Whether a forward's time is the GPU's or that of the host core that issues its kernels."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from finetune_smoke.evaluation import forward_time
from finetune_smoke.settings.config import preset
from finetune_smoke.training import loop
from tests.support.finetune.fixed_ranks import checks_over, only_result


@pytest.mark.parametrize(
    ("forward_ms", "at_fault"),
    [([10.0, 10.4], []), ([10.0, 14.0], [1]), ([10.0, 10.1, 15.0, 9.9], [2]), ([10.0, math.nan], [1])],
)
def test_slow_rank_is_named(forward_ms: list[float], at_fault: list[int]) -> None:
    """Against the median rank; a time that is no number is no pass."""
    record = checks_over(*((ms,) for ms in forward_ms))
    forward_time.record_spread(record, forward_ms=0.0, limit=1.25)
    found = only_result(record, "step_time_spread")
    assert found["passed"] == (not at_fault)
    assert found["ranks"] == at_fault


def test_one_rank_has_no_spread() -> None:
    """The check is not recorded for a single rank."""
    record = checks_over((10.0,))
    forward_time.record_spread(record, forward_ms=10.0, limit=1.25)
    assert record.results() == {}


GPU = SimpleNamespace(device=SimpleNamespace(type="cuda"))


@pytest.mark.parametrize(
    ("settings", "strategy", "measured"),
    [
        ({}, "ddp", True),
        ({}, "fsdp", False),
        ({"gradient_checkpointing": True}, "ddp", False),
        ({"model": "m"}, "ddp", False),
    ],
)
def test_a_forward_that_no_graph_can_hold_is_left_out(settings: dict[str, Any], strategy: str, *, measured: bool) -> None:
    """On a GPU, with the reason; a CPU has no launches, so its time is measured in every run."""
    config = preset("tiny", **settings)
    run: Any = SimpleNamespace(config=config, strategy=strategy, autocasts=False, ranks=GPU)
    assert (forward_time.obstacle(run) is None) == measured
    run.ranks = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    assert forward_time.obstacle(run) is None
    run.ranks, run.autocasts = GPU, True
    assert "no CUDA graph can surely hold" in str(forward_time.obstacle(run))


@pytest.mark.parametrize("limit", [None, 1.25])
def test_a_training_for_its_rate_measures_no_forward(limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """15 forwards of the 7B shape took 3 s, and nobody read the result: with --spread-limit none they are left out."""
    measured = []
    monkeypatch.setattr(forward_time, "measure_ms", lambda *_: measured.append(1) or 1.0)
    record = checks_over((1.0,), (1.0,))
    config = preset("tiny", steps=1, restore_check=False, spread_limit=limit)
    run: Any = SimpleNamespace(config=config, ranks=record.ranks, checks=record, strategy="ddp", autocasts=False)
    loop._record_spread(run, cast("Any", SimpleNamespace(forward_ms=[1.0])))
    assert bool(measured) == (limit is not None)
    assert record.left_out() == ({} if measured else {"step_time_spread": "--spread-limit is none"})
