"""Curves for TensorBoard."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from finetune_smoke.settings.config import InputError, preset
from finetune_smoke.training.loop import finetune
from tests.support.finetune.runs import CHEAP

if TYPE_CHECKING:
    from pathlib import Path


def test_curves_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is written once, also by a resumed run."""
    made = Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=made))
    settings = {**CHEAP, "checkpoint_dir": str(tmp_path), "checkpoint_every": 3, "tensorboard": str(tmp_path / "board")}

    def written() -> dict[str, dict[int, float]]:
        curves: dict[str, dict[int, float]] = {}
        for name, value, step in (call.args for call in made().add_scalar.call_args_list):
            assert step not in curves.setdefault(name, {})
            curves[name][step] = value
        made.reset_mock()
        return curves

    outcome = finetune(preset("tiny", **settings))
    made.assert_called_once_with(settings["tensorboard"])
    made().close.assert_called_once_with()
    curves = written()
    assert list(curves["loss"].values()) == outcome.losses
    assert sorted(curves["gradient_norm"]) == sorted(curves["learning_rate"]) == list(range(6))
    assert sorted(curves["step_ms"]) == sorted(curves["tokens_per_s_per_gpu"]) == [0, 2, 5]
    for name in ("_SUCCESS", "rank-0.safetensors"):
        (tmp_path / "step-6" / name).unlink()
    finetune(preset("tiny", **settings, resume="auto"))
    assert written()["loss"] == {step: outcome.losses[step] for step in (3, 4, 5)}


def test_missing_tensorboard_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is refused before anything is trained, and the message names the package."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"--tensorboard needs the package tensorboard \(pip install tensorboard\)"):
        finetune(preset("tiny", **CHEAP, tensorboard=str(tmp_path)))
