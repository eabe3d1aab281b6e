"""Curves for TensorBoard."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, ClassVar

import pytest

from finetune_smoke.settings.config import InputError, preset
from finetune_smoke.training.loop import finetune
from tests.support.finetune.runs import CHEAP

if TYPE_CHECKING:
    from pathlib import Path


class Writer:
    """Stands in for TensorBoard's writer and remembers."""

    written: ClassVar[dict[str, dict[int, float]]] = {}
    folder: str
    closed = False

    def __init__(self, folder: str) -> None:
        Writer.written = {}
        Writer.folder = folder

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """One point of a curve."""
        self.written.setdefault(name, {})[step] = value

    def flush(self) -> None:
        """To disk."""

    def close(self) -> None:
        """The end."""
        Writer.closed = True


def test_curves_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is written once, also by a resumed run."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    settings = {**CHEAP, "checkpoint_dir": str(tmp_path), "checkpoint_every": 3, "tensorboard": str(tmp_path / "board")}
    outcome = finetune(preset("tiny", **settings))
    assert list(Writer.written["loss"].values()) == outcome.losses
    assert sorted(Writer.written["gradient_norm"]) == sorted(Writer.written["learning_rate"]) == list(range(6))
    assert sorted(Writer.written["step_ms"]) == sorted(Writer.written["tokens_per_s_per_gpu"]) == [0, 2, 5]
    assert Writer.closed
    assert Writer.folder == settings["tensorboard"]
    for name in ("_SUCCESS", "rank-0.safetensors"):
        (tmp_path / "step-6" / name).unlink()
    finetune(preset("tiny", **settings, resume="auto"))
    assert Writer.written["loss"] == {step: outcome.losses[step] for step in (3, 4, 5)}


def test_missing_tensorboard_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is refused before anything is trained, and the message names the package."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"--tensorboard needs the package tensorboard \(pip install tensorboard\)"):
        finetune(preset("tiny", **CHEAP, tensorboard=str(tmp_path)))
