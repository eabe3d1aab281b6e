"""A state not worth saving is not saved and displaces nothing; failures are carried; another run is refused."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_smoke.__main__ import main
from finetune_smoke.checkpoints import writing
from finetune_smoke.settings.config import InputError, preset
from finetune_smoke.training import loop
from finetune_smoke.training.loop import Outcome, finetune
from tests.support.finetune.fixed_ranks import prepared
from tests.support.finetune.runs import CHEAP, flip_a_bit, options, result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from finetune_smoke.run import TrainingRun

pytestmark = pytest.mark.long

SHORT = {**CHEAP, "steps": 8, "window_steps": 2}
OFTEN = {**SHORT, "checkpoint_every": 2, "keep_checkpoints": 1}


def given(folder: Path, settings: dict[str, Any]) -> list[str]:
    """``settings`` and a checkpoint directory as options of the command line."""
    return options({**settings, "checkpoint_dir": folder})


def printed(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """The printed text, and RESULT."""
    out = capsys.readouterr().out
    return out, result(out)


def steps_in(folder: Path) -> list[str]:
    """The names of the checkpoints in ``folder``."""
    return sorted(path.name for path in folder.glob("step-*"))


def unsteady_at(step: int) -> Callable[[TrainingRun, int], tuple[torch.Tensor, list[torch.Tensor]]]:
    """A replacement of the audit's pass that does not repeat itself at ``step``, as a GPU that was wrong once."""
    steady = loop.steps.lock_step_pass

    def work(run: TrainingRun, at: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return (torch.rand(1), [torch.rand(1)]) if at == step else steady(run, at)

    return work


def test_failed_audit_is_remembered_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fails at step 2 of 8 and never again: step 4 is not saved, 6 and 8 carry it, and 2 is not displaced by them."""
    command = given(tmp_path, {**OFTEN, "audit_every": 2})
    with monkeypatch.context() as patch:
        patch.setattr(loop.steps, "lock_step_pass", unsteady_at(2))
        assert main(command) == 1
    out, failed = printed(capsys)
    assert "checkpoint of step 4 is not saved: lock_step: gradients of the same rows at step 2" in out
    assert "no checkpoint of step 4: lock_step" in failed["notes"][0]
    assert failed["saved_step"] == 8
    assert steps_in(tmp_path) == ["step-2", "step-8"]
    assert main([*command, "--resume=auto"]) == 1
    out, again = printed(capsys)
    assert again["resumed_at"] == 8
    assert again["checks"]["lock_step"]["detail"].startswith("gradients of the same rows at step 2")
    assert "checkpoint step-8, of 1 ranks, carries a failure of lock_step" in again["notes"]
    assert "NOT GOOD: lock_step" in out
    shutil.rmtree(tmp_path / "step-8")
    assert main([*command, "--resume=auto"]) == 0  # from before the failure, whose steps are made and judged anew
    assert printed(capsys)[1]["resumed_at"] == 2


def test_state_that_is_not_finite_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN from step 5 on: the checkpoint of step 4 stays, though one only is kept."""
    rate = loop.steps.learning_rate
    monkeypatch.setattr(loop.steps, "learning_rate", lambda run, step: float("nan") if step >= 5 else rate(run, step))
    assert main(given(tmp_path, OFTEN)) == 1
    out, found = printed(capsys)
    assert steps_in(tmp_path) == ["step-4"]
    assert (tmp_path / "step-4" / "_SUCCESS").exists()
    assert "checkpoint of step 6 is not saved: finite: step 6: values of adapters" in out
    assert "no checkpoint of steps 6, 8: finite: step 6" in "".join(found["notes"])
    assert found["saved_step"] == 4
    assert not found["checks"]["finite"]["passed"]


def test_stop_with_a_state_that_is_not_finite_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, not 3, which a scheduler would restart; the message promises no checkpoint."""
    monkeypatch.setattr(loop.StopRequest, "on_any_rank", lambda _stop, _ranks: True)
    monkeypatch.setattr(loop.steps, "learning_rate", lambda _run, _step: float("nan"))
    assert main(given(tmp_path, OFTEN)) == 1
    assert "STOPPED after step 1 of 8, without a checkpoint: --resume auto starts at step 0" in printed(capsys)[0]
    assert steps_in(tmp_path) == []


def run(folder: Path, **settings: Any) -> Outcome:
    """A quick run with checkpoints in ``folder``."""
    return finetune(preset("tiny", **{**SHORT, "checkpoint_dir": str(folder), **settings}))


def test_damaged_checkpoint_is_not_counted(tmp_path: Path) -> None:
    """Three resumable checkpoints are kept; otherwise the damaged one would displace one of them."""
    run(tmp_path, steps=6, checkpoint_every=2)
    shutil.rmtree(tmp_path / "step-6")
    flip_a_bit(next((tmp_path / "step-4").glob("*.safetensors")))
    went_on = run(tmp_path, steps=6, checkpoint_every=5, keep_checkpoints=3, resume="auto")
    assert went_on.resumed_at == 2
    assert steps_in(tmp_path) == ["step-2", "step-4", "step-5", "step-6"]


def test_another_data_set_is_refused(tmp_path: Path, real_model: Path, real_dataset: Path) -> None:
    """Other content under the same name, another share held out; nothing there is touched."""
    texts = tmp_path / "texts"
    shutil.copytree(real_dataset, texts)
    settings = {"model": str(real_model), "dataset": str(texts), "checkpoint_dir": str(tmp_path / "run")}
    real = {**settings, "steps": 2, "loss_limit": None, "heldout_rows": 4, "audit_every": 0, "restore_check": False}
    finetune(preset("model", **real))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"does not fit this run: heldout_rows 4 there, 3 here$"):
        finetune(preset("model", **{**real, "heldout_rows": 3}, resume="auto"))
    calls = (texts / "calls.jsonl").read_text()
    (texts / "calls.jsonl").write_text(calls.replace("city 7", "city 8"))
    with pytest.raises(InputError, match=r"does not fit this run: data \w+ there, \w+ here$"):
        finetune(preset("model", **real, resume="auto"))
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    (texts / "calls.jsonl").write_text(calls)
    assert finetune(preset("model", **real, resume="auto")).resumed_at == 2


def test_marker_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint without a marker does not count."""
    write = writing.write_synced

    def full(path: Path, content: bytes) -> None:
        if path.name == "_SUCCESS":
            raise OSError("No space left on device")
        write(path, content)

    monkeypatch.setattr(writing, "write_synced", full)
    with pytest.raises(InputError, match="step-1 cannot be written: No space left"):
        writing.Saver(run=prepared(**SHORT, checkpoint_dir=str(tmp_path))).save(step=1, losses=[0.5])
    assert not (tmp_path / "step-1" / "_SUCCESS").exists()
