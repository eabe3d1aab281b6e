"""The band around a recorded curve: what is planted lies outside it, and healthy runs inside, however they are split."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from finetune_smoke.checks import band, faults
from finetune_smoke.checks.band import CurveMachine, RecordedCurve
from finetune_smoke.checks.exact import Checks
from finetune_smoke.model import lora
from finetune_smoke.settings.config import PRESETS, preset
from finetune_smoke.training import setup, steps
from finetune_smoke.training.loop import Outcome, finetune
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune_smoke.parallel.ranks import Ranks

SHORT: dict[str, Any] = {
    "steps": 11, "heldout_rows": 2, "greedy_rows": 0, "restore_check": False, "loss_limit": None, "audit_every": 0,
}  # fmt: skip


def run(**settings: Any) -> Outcome:
    """The beginning of preset tiny, whose curve is recorded."""
    return finetune(preset("tiny", **{**SHORT, **settings}))


@pytest.mark.parametrize("settings", [{}, {"rows": 8, "accumulation": 4, "own_lora": False, "loader_workers": 2}])
def test_healthy_runs_lie_inside(settings: dict[str, Any]) -> None:
    """Whatever makes no other training: passes, peft's forward, threads."""
    found = run(**settings)
    assert found.checks["loss_band"] == {"passed": True, "detail": "1 of 1 looks", "ranks": []}
    assert found.problems() == []


def _half_rate(patch: pytest.MonkeyPatch) -> None:
    usual = steps.learning_rate
    patch.setattr(steps, "learning_rate", lambda *arguments: usual(*arguments) / 2)


def _swapped_betas(patch: pytest.MonkeyPatch) -> None:
    def swapped(_config: Any, adapters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(adapters.values(), lr=4e-3, betas=(0.98, 0.9), weight_decay=0.0, fused=True)

    patch.setattr(setup, "_optimizer", swapped)


def _lost_gradient(patch: pytest.MonkeyPatch) -> None:
    """The adapters of the last layer never get theirs."""

    def lose(_fault: Any, adapters: dict[str, torch.nn.Parameter], _step: int) -> None:
        for name, parameter in adapters.items():
            if ".layers.1." in name and parameter.grad is not None:
                parameter.grad.zero_()

    patch.setattr(faults.Fault, "spoil_averages", lose)


def _wrong_product(patch: pytest.MonkeyPatch) -> None:
    """One column of every product of the base is 0, each time alike."""
    usual = lora.fused_product

    def wrong(*operands: Any) -> torch.Tensor:
        out = usual(*operands).clone()
        out[:, 0] = 0
        return out

    patch.setattr(lora, "fused_product", wrong)


@pytest.mark.parametrize("plant", [_half_rate, _swapped_betas, _lost_gradient, _wrong_product])
def test_what_is_planted_lies_outside(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a single rank, where nothing differs from anything; only adapters without any gradient are seen besides."""
    plant(monkeypatch)
    found = run()
    assert {name for name, check in found.checks.items() if not check["passed"]} - {"adapters_moved"} == {"loss_band"}
    assert "was recorded" in found.checks["loss_band"]["detail"]


HERE = CurveMachine(device="cpu", release="2.13")
CURVE = RecordedCurve(preset="tiny", device="cpu", release="2.13", step_rows=32, losses=(6.0, 5.0), source="made up")


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([6.0059, 5.14], None),
        ([6.007, 5.0], 0),
        ([5.993, 5.0], 0),
        ([6.0, 5.16], 1),
        ([6.0, 4.84], 1),
        ([float("nan"), 5.0], 0),
        ([6.0, float("inf")], 1),
        ([6.0], None),
        ([6.0, 5.0, 99.0], None),
    ],
)
def test_width_of_the_band(losses: list[float], step: int | None) -> None:
    """0.1 % at the first loss, 3 % later, to both sides; numbers that are none lie outside."""
    said = band.outside(losses, CURVE)
    assert said is None if step is None else said is not None and said.startswith(f"loss of step {step}: ")
    spaced = [losses[0], 99.0, *losses[1:]]  # a step that the record leaves out
    said = band.outside(spaced, dataclasses.replace(CURVE, losses=(6.0, None, 5.0)))
    assert said is None if step is None else said is not None and said.startswith(f"loss of step {2 * step}: ")


OTHER: dict[str, Any] = {
    "seed": 1, "row_tokens": 57, "learning_rate": 1e-3, "warmup_steps": 9, "beta2": 0.9, "lora_rank": 8, "layers": 3,
    "clip_norm": 2.0, "packed": True,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_another_training_has_no_curve(name: str) -> None:
    """It is left out, with the reason: neither passed nor failed."""
    assert CURVE.fits(preset("tiny"), HERE, 32)
    assert not CURVE.fits(preset("tiny", **{name: OTHER[name]}), HERE, 32)
    assert not CURVE.fits(preset("tiny"), CurveMachine(device="cuda", release="2.13"), 32)
    assert not CURVE.fits(preset("tiny"), HERE, 64)


@pytest.mark.parametrize("curve", band.RECORDED, ids=lambda one: f"{one.preset} {one.device}")
@pytest.mark.parametrize("changed", [{"device": "NVIDIA A100-SXM4-80GB"}, {"device": "NVIDIA B200"}, {"release": "2.12"}])
def test_another_machine_has_no_curve(curve: RecordedCurve, changed: dict[str, str]) -> None:
    """Its random weights may be others: a healthy GPU of a kind that nobody recorded is left out, never called wrong."""
    machine = CurveMachine(device=curve.device, release=curve.release)
    settings = preset(curve.preset)
    assert curve.fits(settings, machine, curve.step_rows)
    checks = Checks(cast("Ranks", None))
    other = machine._replace(**changed)
    band.record(checks, settings, machine=other, step_rows=curve.step_rows, losses=[99.0] * 20)
    assert "loss_band" not in checks.results()
    assert f"on {other.device}, torch {other.release}" in checks.left_out()["loss_band"]


def test_a_gpu_is_known_by_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by "cuda", which all GPUs are."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA B200")
    assert CurveMachine.of(torch.device("cuda", 3)).device == "NVIDIA B200"
    assert CurveMachine.of(torch.device("cpu")).device == "cpu"
    assert CurveMachine.of(torch.device("cpu")).release == "2.13"


def test_every_curve_is_whole() -> None:
    """Finite losses of the warm-up alone: later ones depend on the number of steps; and each says where it is from."""
    for curve in band.RECORDED:
        assert curve.preset in PRESETS
        assert 1 < len(curve.losses) <= min(band.MOST, preset(curve.preset).warmup_steps + 1)
        assert curve.losses[0] is not None
        assert curve.losses[-1] is not None
        assert all(loss is None or 0 < loss < 20 for loss in curve.losses)
        assert curve.source
    keys = [(curve.preset, curve.device, curve.release, curve.step_rows) for curve in band.RECORDED]
    assert len(set(keys)) == len(keys)


def test_two_h100_have_a_curve_in_an_acceptance() -> None:
    """The losses in a kept report of two H100 lie inside the band; with half the learning, they would not."""
    report = json.loads((REPOSITORY / "docs/results/2026-11-27-h100x2-3f6dcd6/results.json").read_text())
    judged = next(one for one in report["values"] if one["criterion"] == "finetune_loss")
    points = dict(next(one["all"] for one in judged["evidence"] if one["key"] == "curve [step, loss]"))
    losses = [points.get(step, 99.0) for step in range(band.MOST)]
    machine = CurveMachine(device="NVIDIA H100 80GB HBM3", release="2.11")
    (curve,) = (one for one in band.RECORDED if one.fits(preset("small"), machine, 128))
    assert [step for step, loss in enumerate(curve.losses) if loss is not None] == [step for step in points if step < band.MOST]
    assert band.outside(losses, curve) is None
    slower = [losses[0], *(loss + 0.5 * (losses[0] - loss) for loss in losses[1:])]
    assert band.outside(slower, curve) is not None


def test_every_setting_that_changes_a_loss_is_compared() -> None:
    """A new setting is either compared or known to leave the first losses alone."""
    free = {
        "preset", "gradient_checkpointing", "strategy", "cpu_offload", "own_lora", "compile", "cuda_graph", "rows",
        "rows_shared", "accumulation", "loader_workers", "prefetch", "steps", "loss_limit", "spread_limit", "heldout_rows",
        "greedy_rows", "restore_check", "window_steps", "audit_every", "digest_every", "peak_bf16_tflops", "checkpoint_dir",
        "checkpoint_every", "keep_checkpoints", "resume", "output", "tensorboard", "scratch", "fault",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(preset("tiny"))} == free | set(band.SAME)
