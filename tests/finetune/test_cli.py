"""The command line: options, exit codes, the RESULT line."""

from __future__ import annotations

import faulthandler
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
import torch

from finetune_smoke import __main__ as command_line
from finetune_smoke.__main__ import main, parse
from finetune_smoke.settings import options as settings_options
from finetune_smoke.settings.config import InputError, preset
from finetune_smoke.training import loop, steps
from tests.support import REPOSITORY
from tests.support.finetune.runs import QUICK, options, result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OPTIONS = options(QUICK)


def test_every_field_can_be_overridden() -> None:
    """Numbers, switches, and none for a field that may be None."""
    config = parse(["--preset", "small", "--row-tokens", "64", "--no-rows-shared", "--loss-limit", "none", "--seed=7"])
    assert config == preset("small", row_tokens=64, rows_shared=False, loss_limit=None, seed=7)


def test_contract_options() -> None:
    """The names of options that the acceptance uses."""
    text = "--preset tiny --model m --dataset d --checkpoint-dir c --checkpoint-every 5 --resume auto --fault bitflip:1"
    config = parse([*text.split(), "--steps", "9"])
    expected = preset(
        "tiny", model="m", dataset="d", checkpoint_dir="c", checkpoint_every=5, resume="auto", fault="bitflip:1", steps=9
    )
    assert config == expected


def test_preset_is_tiny_and_with_a_model_that_for_models() -> None:
    """A real model needs longer rows and a lower rate than the random base."""
    assert parse([]) == preset("tiny")
    assert parse(["--model", "m"]) == preset("model", model="m")


def test_run_prints_result_last_and_leaves_0(capsys: pytest.CaptureFixture[str]) -> None:
    """Progress in plain lines, a summary, and RESULT with what the contract names."""
    assert main(OPTIONS) == 0
    out = capsys.readouterr().out
    found = result(out)
    assert {"loss", "exact_match", "tokens_per_s_per_gpu", "mfu", "adapter_digest", "checks"} <= set(found)
    assert found["passed"]
    assert found["mfu"] is None
    assert found["greedy_exact_match"] == 0
    assert len(found["losses"]) == 6
    assert re.search(r"\nstep 6 of 6: loss \d\.\d+, \d+ tokens/s/GPU, 0 s left\n", out)
    assert "ok   lock_step" in out


def test_loss_above_the_limit_leaves_1(capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate of 0 keeps the loss where it was."""
    assert main([*OPTIONS, "--loss-limit", "0.5", "--heldout-rows", "128", "--fault", "lr0"]) == 1
    out = capsys.readouterr().out
    assert not result(out)["passed"]
    assert "NOT GOOD: loss" in out
    assert "is not below 0.5" in out


def test_loss_that_is_no_number_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    """RESULT stays strict JSON, and the run is not good."""
    assert main([*OPTIONS, "--learning-rate", "1e30", "--loss-limit", "0.5", "--heldout-rows", "128"]) == 1
    found = result(capsys.readouterr().out)
    assert found["loss"] is None
    assert not found["checks"]["finite"]["passed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "unknown preset 'huge'"),
        (["--fault", "bitflip:5", *OPTIONS], "there are ranks 0 to 0"),
        (["--loss-limit", "0.7"], "the limit of 0.7 nats is not below half of the blind floor"),
        (["--row-tokens", "20"], "more than row_tokens = 20"),
        (["--model", "/no/such/model"], "no such model directory: /no/such/model"),
        (["--model", "nobody/nothing"], "model nobody/nothing: not a directory here, and not to be had from the hub"),
        (["--steps", "-3"], "steps is -3: at least 1 is needed"),
        (["--model", __file__], f"model {__file__}: a file, and a directory is needed"),
        (["--output", "/dev/null/adapter", *OPTIONS], "directory for the adapter cannot be written: "),
        (["--output", "/proc/adapter", *OPTIONS], "directory for the adapter cannot be written: "),
        (["--checkpoint-dir", "/dev/null/run", *OPTIONS], "checkpoint directory cannot be written: "),
        (["--config", "/no/such/file.yaml"], "/no/such/file.yaml: cannot be read: No such file or directory"),
    ],
)
def test_bad_input_leaves_2_with_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, no RESULT."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert "RESULT" not in captured.out


def test_host_without_enough_memory_leaves_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Too little memory on a CPU is bad input; another RuntimeError stays a crash."""
    monkeypatch.setattr(steps, "window", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
    assert main(OPTIONS) == 2
    error = capsys.readouterr().err
    assert "rank 0: out of memory (can't allocate memory: you tried to allocate 1152921504606846976 bytes); try fewer" in error
    assert len(error.splitlines()) == 1
    monkeypatch.setattr(steps, "window", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        main(OPTIONS)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--stepz 3", "unrecognized arguments: --stepz 3. Did you mean --steps?"),
        ("--learning_rate=1", "unrecognized arguments: --learning_rate=1. Did you mean --learning-rate?"),
        ("evalute", "unrecognized arguments: evalute. Did you mean evaluate?"),
        ("--zzzzzz", "unrecognized arguments: --zzzzzz"),
        ("--lr 1", "unrecognized arguments: --lr 1"),
        ("--dtype fp16", "unrecognized arguments: --dtype fp16"),
        ("--STEPS 3", "unrecognized arguments: --STEPS 3. Did you mean --steps?"),
        ("--steps", "argument --steps: expected one argument"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
    ],
)
def test_wrong_usage_is_three_lines(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """How it is called, what is wrong, and where all options are: not 60 of them above the sentence."""
    with pytest.raises(SystemExit) as left:
        settings_options.settings(typed.split())
    assert left.value.code == 2
    lines = ["usage: finetune_smoke [OPTIONS]", f"finetune_smoke: error: {said}", "all options: finetune_smoke --help"]
    assert capsys.readouterr().err.splitlines() == lines


def test_wrong_usage_is_said_by_rank_0_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Other ranks exit silently and after rank 0: torchrun ends rank 0 when they have exited."""
    monkeypatch.setenv("RANK", "1")
    waited_s: list[float] = []
    monkeypatch.setattr(settings_options.time, "sleep", waited_s.append)
    with pytest.raises(SystemExit) as left:
        main(["--stepz", "3"])
    assert left.value.code == 2
    assert waited_s == [settings_options.RANK_0_LEAD_S]
    assert capsys.readouterr().err == ""


def test_environment_is_set_before_cuda_starts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read when cuBLAS starts; without it audits would compare unrepeatable sums."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    main([*OPTIONS, "--steps=1", "--greedy-rows=0"])
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_help_lists_faults(capsys: pytest.CaptureFixture[str]) -> None:
    """The faults are documented as a self-test."""
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "noallreduce: all ranks: gradients are never all-reduced" in text


def test_what_a_rank_raises_is_left_for_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback in torchrun's file; unusable input has a line of its own and leaves none."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(faulthandler, "enable", lambda **_: None)  # pytest's stderr is no file

    def refuse(*_: object, **__: object) -> None:
        raise InputError("no such thing")

    monkeypatch.setattr(loop, "finetune", refuse)
    assert main(OPTIONS) == 2
    assert not file.exists()

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(loop, "finetune", fail)
    with pytest.raises(ZeroDivisionError):
        main(OPTIONS)
    assert "ZeroDivisionError: planted" in file.read_text()


class LeftError(BaseException):
    """Stands for the end of the process."""


def crash() -> int:
    """Print half a line, and crash."""
    sys.stdout.write("half a line")
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("work", "code"),
    [
        (lambda: 0, 0),
        (lambda: 3, 3),
        (lambda: sys.exit(2), 2),
        (sys.exit, 0),
        (crash, 1),
        (Mock(side_effect=KeyboardInterrupt), 1),
    ],
)
def test_however_it_ends_the_process_leaves_at_once(
    work: Callable[[], int], code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python's own shutdown is never reached, where a thread of torch may abort the process; all output is flushed before."""

    def leave(found: int) -> None:
        raise LeftError(found)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(command_line, "main", work)
    with pytest.raises(LeftError) as left:
        command_line.run_and_leave()
    assert left.value.args == (code,)
    out, err = capfd.readouterr()
    assert (out, "RuntimeError: boom" in err) == (("half a line", True) if work is crash else ("", False))


def test_output_that_nobody_reads_does_not_change_the_end() -> None:
    """A pipe whose reader has gone: the code is that of the run, and Python's shutdown adds no line."""
    code = "import sys; from finetune_smoke import __main__ as it; it.main = lambda: 3 * sys.stdout.write('x')"
    read, write = os.pipe()
    os.close(read)
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", f"{code}; it.run_and_leave()"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=REPOSITORY, env=buffered, timeout=120, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (3, b"")
