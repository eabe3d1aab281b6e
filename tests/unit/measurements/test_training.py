"""Training as a measurement, on the CPU: its results, its refusals, and a single rank beside a group."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from finetune_smoke.settings.config import require_limit_below_floor
from finetune_smoke.training import loop as finetune_smoke
from pytest_gpucluster.measurements import training
from tests.support.thresholds_files import packaged

SMALL = {
    "preset": "tiny", "steps": 4, "window_steps": 2, "rows": 2, "rows_shared": False, "heldout_rows": 2, "greedy_rows": 0,
    "audit_every": 0, "loss_limit": None,
}  # fmt: skip


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker that was in a group of two before and is rank 0 of two by torchrun's variables."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")


def outcome(**changes: Any) -> Any:
    """An outcome of finetune_smoke."""
    fields = {
        "tokens_per_s_per_gpu": 19_000.0, "mfu": 0.56, "step_ms": 430.0, "memory_peak_gib": [53.9, 54.2],
        "wire_gb_per_step": 0.65, "strategy": "ddp", "world_size": 2, "step_rows": 8, "compile_s": 10.0,
        "setup_s": 4.0, "train_s": 12.0, "eval_s": 1.0,
        "checks": {"finite": {"passed": True, "detail": "1 of 1 looks", "ranks": []}},
        "positions_per_s_per_gpu": 19_060.0, "window_rates": [18_900.0, 19_100.0], "timed_steps": 4, "timed_s": 1.7,
        "rows_s": 0.1,
        "notes": ["steps run compiled"], "left_out": {"lock_step": "--audit-every is 0"},
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


@pytest.fixture
def planted_outcome(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let finetune_smoke return this outcome; the function returns the Configs that finetune_smoke got."""

    def telling(**changes: Any) -> list[Any]:
        seen: list[Any] = []
        monkeypatch.setattr(finetune_smoke, "finetune", lambda config, **_: seen.append(config) or outcome(**changes))
        return seen

    return telling


def test_train_really_trains(crowd: None) -> None:
    """A single rank, though its worker is in a group; the whole result is JSON."""
    found = training.train(single_rank=True, **SMALL)
    outcome = found.outcome
    assert (outcome.world_size, outcome.strategy, outcome.step_rows) == (1, "none", 2)
    assert found.tokens_per_s_per_gpu > 0
    assert outcome.step_ms is not None
    assert outcome.step_ms > 0
    assert outcome.wire_gb_per_step == 0
    assert (outcome.mfu, outcome.memory_peak_gib, outcome.compile_s, found.telemetry) == (None, None, None, None)
    json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_a_rate_ends_early_where_steps_take_long(crowd: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its audits and checks at the end are made all the same, and the report tells it."""
    monkeypatch.setattr(training, "ENOUGH_S", 0.0)
    found = training.train(single_rank=True, **{**SMALL, "steps": 20})
    assert found.outcome.stopped
    assert str(found.shortened).startswith("ended after 16 of 20 steps: ")
    assert found.shortened in found.evidence["notes"]
    assert found.outcome.checks["finite"]["passed"]


def test_what_explains_a_rate(planted_outcome: Any) -> None:
    """MFU in per cent, the highest peak, the volume on the wire, what was not checked; nothing that is not known."""
    planted_outcome()
    seen = training.train(**SMALL).evidence
    assert (seen["notes"], seen["checks left out"]) == (["steps run compiled"], {"lock_step": "--audit-every is 0"})
    assert {"MFU %": 56.0, "peak GiB": 54.2, "GB sent a step": 0.65, "strategy": "ddp", "ranks": 2}.items() <= {
        **seen,
        "MFU %": round(seen["MFU %"], 6),
    }.items()
    assert seen["lowest to highest window"] == "18900 to 19100 tokens/s/GPU"
    assert seen["timed"] == "4 steps, 1.7 s, 2 windows"
    assert (seen["tokens/s/GPU with padding"], seen["s waiting for rows"]) == (19_060.0, 0.1)
    planted_outcome(mfu=None, memory_peak_gib=None, compile_s=None)
    assert {"MFU %", "peak GiB", "s compiling"}.isdisjoint(training.train(**SMALL).evidence)


def test_where_the_time_of_a_fine_tune_went(planted_outcome: Any) -> None:
    """Also of one that is judged by its loss: its minutes are counted as those of the others."""
    planted_outcome(compile_s=None)
    assert training.finetune(**SMALL).evidence == {"s setting up": 4.0, "s training": 12.0, "s evaluating": 1.0}


def test_a_single_window_is_no_rate() -> None:
    """The first is left out, and there would be no other."""
    with pytest.raises(ValueError, match="steps = 3 is less than two windows of 2"):
        training.train(**{**SMALL, "steps": 3})


def test_a_wrong_training_has_no_rate(planted_outcome: Any) -> None:
    """However fast: values that are not finite, ranks that differ."""
    planted_outcome(checks={"finite": {"passed": False, "detail": "2 on rank 1", "ranks": [1]}})
    with pytest.raises(ArithmeticError, match="the training went wrong: finite: 2 on rank 1"):
        training.train(**SMALL)


def test_a_slow_rank_is_no_wrong_training(planted_outcome: Any) -> None:
    """The rate itself shows a slow rank."""
    planted_outcome(checks={"step_time_spread": {"passed": False, "detail": "forward of rank 1", "ranks": [1]}})
    assert training.train(**SMALL).tokens_per_s_per_gpu == 19_000


def test_memory_is_that_of_the_fullest_gpu(planted_outcome: Any) -> None:
    """Without a GPU there is no memory to count (:func:`test_train_really_trains`): an error and not a number."""
    planted_outcome()
    assert training.train(**SMALL).peak_gib == 54.2
    planted_outcome(memory_peak_gib=None)
    with pytest.raises(RuntimeError, match="there is none"):
        _ = training.train(**SMALL).peak_gib


def test_a_rank_alone_makes_the_checks_that_need_no_other() -> None:
    """The others are skipped by rule: exactly those that are not recorded where there is one rank."""
    found = training.finetune(**{**SMALL, "audit_every": 50})
    file = packaged()
    entries = file.criteria(file.profiles["rehearsal"]).items()
    checks = {
        key[len("finetune_check[") : -1]: entry.needs.places for key, entry in entries if key.startswith("finetune_check[")
    }
    left_out = {"generation", "graph_lock_step"}  # no loss is promised here, and a CPU has no CUDA graphs
    assert "no curve was recorded" in found.outcome.left_out.pop("loss_band")
    assert {name for name, needs in checks.items() if needs == 1} == set(found.outcome.checks) | left_out
    assert set(found.outcome.left_out) == left_out
    assert {name for name, needs in checks.items() if needs == 2} == {
        "all_reduce",
        "adapter_digest",
        "step_time_spread",
    }


@pytest.mark.parametrize(("steps", "points"), [(1, 1), (4, 4), (100, 100), (101, 100), (1000, 100)])
def test_a_curve_is_bounded_and_whole(steps: int, points: int) -> None:
    """From the first step to the last, in order, each with its own loss."""
    found = training.curve([100.0 - step for step in range(steps)])
    assert len(found) == points
    assert (found[0], found[-1]) == ([0, 100.0], [steps - 1, 101.0 - steps])
    assert all(loss == 100.0 - step for step, loss in found)
    assert [step for step, _ in found] == sorted({step for step, _ in found})


def test_a_limit_that_a_blind_model_could_come_near_is_refused() -> None:
    """At half of the blind floor and above; the packaged limit lies below it, and an unknown floor refuses nothing."""
    file = packaged()
    for name, profile in file.profiles.items():
        entry = file.criteria(profile)["finetune_loss"]
        for limit in entry.numbers.values():
            require_limit_below_floor(limit, 1.33)
            assert limit < 0.5 * 1.33, name
    require_limit_below_floor(5.0, None)
    for limit in (0.665, 0.7, float("nan")):
        with pytest.raises(ValueError, match=r"not below half of the blind floor of 1\.330"):
            require_limit_below_floor(limit, 1.33)
