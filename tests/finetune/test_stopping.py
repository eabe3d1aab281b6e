"""Signals: a flag until the ranks exchange it, a checkpoint, exit code 3, and the old handlers afterwards."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed.run

from finetune_smoke.__main__ import main
from finetune_smoke.training import loop
from tests.finetune.test_kills import last_result, started
from tests.finetune.test_recipe_file import MEANT, RECIPE
from tests.support.finetune.fixed_ranks import ALONE
from tests.support.finetune.runs import QUICK, options, result

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = options(QUICK)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_is_remembered_and_handlers_come_back(number: signal.Signals) -> None:
    """The process continues; the earlier handlers are back afterwards."""
    before = signal.getsignal(number)
    with loop.handle_signals(wanted=True) as stop:
        assert not stop.on_any_rank(ALONE)
        os.kill(os.getpid(), number)
        assert stop.on_any_rank(ALONE)
    assert signal.getsignal(number) == before


def test_nothing_is_touched_without_a_place_to_save() -> None:
    """Without a checkpoint directory a signal ends the run at once."""
    before = signal.getsignal(signal.SIGTERM)
    with loop.handle_signals(wanted=False) as stop:
        assert signal.getsignal(signal.SIGTERM) == before
        assert not stop.on_any_rank(ALONE)


def test_other_threads_may_run_it_too() -> None:
    """Without handlers, which Python gives to the main thread only."""
    heard: list[bool] = []

    def listen() -> None:
        with loop.handle_signals(wanted=True) as stop:
            heard.append(stop.on_any_rank(ALONE))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert heard == [False]


def test_stopped_run_leaves_3_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RESULT says so, the loss limit is not judged, and the next start resumes."""
    progress_text = loop._progress_text

    def progress(config: Any, step: int, log: Any) -> str:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return progress_text(config, step, log)

    given = [*OPTIONS, "--steps=9", "--window-steps=3", f"--checkpoint-dir={tmp_path}"]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_progress_text", progress)
        assert main([*given, "--loss-limit=0.5", "--heldout-rows=128"]) == 3
    out = capsys.readouterr().out
    stopped = result(out)
    assert (stopped["stopped"], stopped["passed"], stopped["steps"]) == (True, False, 6)
    assert stopped["heldout_loss"] is None
    assert "STOPPED after step 6 of 9, resumable: --resume auto goes on from there" in out
    assert "NOT GOOD" not in out
    assert "stopped by a signal" in out
    assert (tmp_path / "step-6" / "_SUCCESS").exists()
    assert not (tmp_path / "final").exists()
    assert main([*given, "--resume=auto"]) == 0
    went_on = result(capsys.readouterr().out)
    assert (went_on["resumed_at"], went_on["stopped"], went_on["steps"]) == (6, False, 9)


def test_failed_check_of_a_stopped_run_leaves_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scheduler that starts 3 again must not start broken hardware again."""
    monkeypatch.setattr(loop.StopRequest, "on_any_rank", lambda _stop, _ranks: True)
    # A repeat of the audit's pass differs: as a GPU that does not repeat itself.
    monkeypatch.setattr(loop.steps, "lock_step_pass", lambda _run, _step: (torch.rand(1), [torch.rand(1)]))
    assert main([*OPTIONS, f"--checkpoint-dir={tmp_path}"]) == 1
    out = capsys.readouterr().out
    assert "FAIL lock_step" in out
    assert result(out)["stopped"]


@pytest.mark.e2e
@pytest.mark.long  # torchrun, twice
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_signal_to_torchrun_leaves_a_checkpoint(
    number: signal.Signals, tmp_path: Path, real_model: Path, real_dataset: Path
) -> None:
    """Two ranks and a recipe in sections: torchrun passes the signal on, and kills after 30 s whoever has not saved."""
    if "--signals-to-handle" not in torch.distributed.run.get_args_parser().format_help():
        pytest.skip("this torchrun has no such option: SIGUSR1 would end it")
    file, folder, printed = tmp_path / "training_config.yaml", tmp_path / "run", tmp_path / "printed"
    text = RECIPE.replace(MEANT["model"], str(real_model)).replace(MEANT["dataset"], str(real_dataset))
    file.write_text(text.replace("max_steps: 100", "max_steps: 100000").replace("4096", "64"))
    start = ["--standalone", "--nproc-per-node=2", "-m", "finetune_smoke", f"--config={file}", f"--checkpoint-dir={folder}"]
    command = [sys.executable, "-m", "torch.distributed.run", *start]
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    with printed.open("w") as output, started(command, output, PET_SIGNALS_TO_HANDLE=signals) as child:
        deadline = time.monotonic() + 300
        while "of 100000: loss" not in printed.read_text():
            assert child.poll() is None, printed.read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        child.send_signal(number)
        child.wait(120)
    ended = last_result(printed.read_text())
    assert ended["stopped"]
    assert (folder / f"step-{ended['steps']}" / "_SUCCESS").exists()
