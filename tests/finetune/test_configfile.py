"""Settings from a file: precedence, strictness, and that a run's own file repeats it."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from finetune_smoke.__main__ import main, parse
from finetune_smoke.ranks import PATHS, require_same_settings
from finetune_smoke.settings import configfile, options
from finetune_smoke.settings.config import PRESETS, InputError, OwnInputError, preset
from tests.support.finetune.fixed_ranks import ALONE
from tests.support.finetune.runs import QUICK, result
from tests.support.finetune.runs import options as options_of

if TYPE_CHECKING:
    from pathlib import Path


def written(folder: Path, content: str) -> Path:
    """A file with this content."""
    path = folder / "run.yaml"
    path.write_text(content)
    return path


def test_preset_then_file_then_command_line(tmp_path: Path) -> None:
    """Each wins over what stands before it, a preset on the command line over the file's preset only."""
    path = written(
        tmp_path, "preset: small\nsteps: 7\nlearning_rate: 2e-5\nrows_shared: true\nloss_limit: null\nclip_norm: 2\n"
    )
    expected = preset("small", steps=7, learning_rate=2e-5, rows_shared=True, loss_limit=None, clip_norm=2.0)
    assert parse([f"--config={path}"]) == expected
    assert parse(["--steps=9", "--config", str(path), "--no-rows-shared"]) == dataclasses.replace(
        expected, steps=9, rows_shared=False
    )
    other = parse([f"--config={path}", "--preset=tiny"])
    assert (other.preset, other.steps, other.hidden_size) == ("tiny", 7, preset("tiny").hidden_size)


def test_file_without_a_preset(tmp_path: Path) -> None:
    """The default is what it is on the command line; a model that is null is none."""
    assert parse([f"--config={written(tmp_path, 'steps: 3')}"]) == preset("tiny", steps=3)
    assert parse([f"--config={written(tmp_path, 'model: m')}"]) == preset("model", model="m")
    assert parse([f"--config={written(tmp_path, 'model: null')}"]) == preset("tiny")


def test_words_of_yaml_1_1_are_text(tmp_path: Path) -> None:
    """`off` and `no` are what the settings are called, not booleans."""
    assert parse([f"--config={written(tmp_path, 'compile: off' + chr(10) + 'resume: no')}"]) == preset("tiny")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("steps: 3\nstep: 4\n", "run.yaml:2: no such setting: step; did you mean steps?"),
        ("zzz: 4\n", "run.yaml:1: no such setting: zzz; known are accumulation, "),
        ("1: 4\n", "run.yaml:1: no such setting: 1; known are"),
        ("\nsteps: many\n", "run.yaml:2: steps is 'many': a whole number is needed"),
        ("steps: 2.5\n", "steps is 2.5: a whole number is needed"),
        ("steps: true\n", "steps is True: a whole number is needed"),
        ("steps:\n", "steps is nothing: a whole number is needed"),
        ("loss_limit: low\n", "loss_limit is 'low': a number or null is needed"),
        ("learning_rate: [1, 2]\n", "learning_rate is [1, 2]: a number is needed"),
        ("packed: 1\n", "packed is 1: true or false is needed"),
        ("packed: yes\n", "packed is 'yes': true or false is needed"),
        ("model: 7\n", "model is 7: text (in quotes if it looks like a number) or null is needed"),
        ("lora_rank: 0\n", "run.yaml:1: lora_rank is 0: at least 1 is needed"),
        ("strategy: zero3\n", "run.yaml:1: strategy is 'zero3': one of auto, ddp, fsdp"),
        ("preset: huge\n", "run.yaml:1: unknown preset 'huge'"),
        ("fault: gremlin\n", "run.yaml:1: unknown fault 'gremlin'"),
        ("steps: -1\nrows: 0\n", "run.yaml:1: steps is -1: at least 1 is needed (and 1 more)"),
        ("steps: 3\nrows: 2\nsteps: 4\n", "run.yaml:3: 'steps' is there twice; first in line 1"),
        ("learning_rate: .nan\n", "run.yaml:1: .nan is not a number"),
        ("steps: 99999999999999999999\n", "run.yaml:1: 99999999999999999999 is too large"),
        ("steps: &a 3\nrows: *a\n", "run.yaml:1: the anchor '&a' is not allowed"),
        (
            "model: !!python/object/apply:os.system [ls]\n",
            "run.yaml:1: the tag '!!python/object/apply:os.system' is not allowed",
        ),
        ("- steps\n", "run.yaml:1: a mapping ('key: value') was expected"),
        ("steps: 3\n---\nsteps: 4\n", "a second document"),
        ("steps: [\n", "not YAML"),
        ("", "run.yaml:1: empty: a mapping was expected"),
        ("trainng: {max_steps: 3}\n", "lora, training, data, distributed, each with its keys; did you mean training?"),
        ('learning_rate: "1e-4"\n', "run.yaml:1: learning_rate is '1e-4': a number is needed: write it without quotes"),
        ("scratch: ''\n", "run.yaml:1: scratch is empty: a name or path is needed"),
        ("# " + "x" * (1 << 20), "run.yaml: larger than 1048576 bytes"),
    ],
)
def test_what_does_not_belong_there_is_refused(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message is one line with file and line, the exit code 2."""
    assert main(["--config", str(written(tmp_path, content))]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A directory is refused, and a device, which would never end."""
    for path in (str(tmp_path), "/dev/zero"):
        with pytest.raises(InputError, match="not a regular file"):
            parse(["--config", path])


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    """Every preset, and text that looks like something else."""
    config = preset(name, model="1e5", output="no: \N{GRINNING FACE}\x7f '\"\udc80", learning_rate=3e-17, seed=-4)
    assert parse([f"--config={written(tmp_path, configfile.text(config))}"]) == config


def test_file_beside_the_adapter_repeats_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the bit; RESULT and summary state the settings too. With the same output it is refused and nothing is written."""
    given = options_of({**QUICK, "steps": 3, "greedy_rows": 0})
    assert main([*given, "--seed=7", "--packed", "--row-tokens=128", f"--output={tmp_path / 'a'}"]) == 0
    out = capsys.readouterr().out
    first = result(out)
    assert "settings: preset tiny, seed 7, " in out
    assert preset("tiny", **{name: value for name, value in first["config"].items() if name != "preset"}) == parse(
        ["--config", str(tmp_path / "a" / "config.yaml")]
    )
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert main(["--config", str(tmp_path / "a" / "config.yaml")]) == 2
    assert "is not empty: name another" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert main(["--config", str(tmp_path / "a" / "config.yaml"), f"--output={tmp_path / 'b'}"]) == 0
    again = result(capsys.readouterr().out)
    assert (again["adapter_digest"], again["losses"]) == (first["adapter_digest"], first["losses"])


def test_commands_read_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`preprocess` makes the rows of the same file."""
    path = written(tmp_path, f"steps: 2\nscratch: {json.dumps(str(tmp_path / 'rows'))}\n")
    assert main(["preprocess", "--config", str(path)]) == 0
    assert result(capsys.readouterr().out)["train"] == 64


def test_file_that_is_wrong_on_one_node_is_said_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank waits first: rank 0 would have ended the run meanwhile if it had found the same."""
    monkeypatch.setenv("RANK", "5")
    waited_s: list[float] = []
    monkeypatch.setattr(options.time, "sleep", waited_s.append)
    with pytest.raises(OwnInputError, match=r"rank 5: .*cannot be read"):
        parse(["--config", str(tmp_path / "none.yaml")], quiet=True)
    assert waited_s == [options.RANK_0_LEAD_S]


def test_ranks_with_other_settings_are_refused() -> None:
    """Rank 2 has another number of steps; the same settings pass."""
    compared = [field.name for field in dataclasses.fields(preset("tiny")) if field.name not in PATHS]

    def gather(values: list[int]) -> list[list[int]]:
        changed = list(values)
        changed[compared.index("steps")] += 1
        return [values, values, changed]

    with pytest.raises(InputError, match="rank 2 was given another steps than rank 0: all ranks need the same options"):
        require_same_settings(preset("tiny"), cast("Any", SimpleNamespace(gather=gather)))
    require_same_settings(preset("tiny"), ALONE)
