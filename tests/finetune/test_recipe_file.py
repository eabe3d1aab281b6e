"""A recipe in sections, as fine-tunes are described: taken as it is, each wrong key in one line, dropout and targets told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from finetune_smoke.__main__ import parse
from finetune_smoke.data import batches, hub
from finetune_smoke.settings import configfile
from finetune_smoke.settings.config import InputError, preset
from finetune_smoke.training.loop import finetune
from tests.support.finetune.runs import QUICK

if TYPE_CHECKING:
    from pathlib import Path

RECIPE = """\
model:
  name: "Qwen/Qwen2-7B-Instruct"
  torch_dtype: "bfloat16"
lora:
  r: 64
  alpha: 128
  dropout: 0.05
  target_modules:
    - q_proj
    - k_proj
    - v_proj
    - o_proj
training:
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 4
  learning_rate: 2.0e-5
  max_steps: 100
  warmup_steps: 10
  bf16: true
  gradient_checkpointing: true
data:
  dataset_name: "glaiveai/glaive-function-calling-v2"
  max_seq_length: 4096
distributed:
  deepspeed: null
"""
MEANT: dict[str, Any] = {
    "model": "Qwen/Qwen2-7B-Instruct", "dataset": "glaiveai/glaive-function-calling-v2", "lora_rank": 64, "lora_alpha": 128,
    "lora_dropout": 0.05, "target_modules": "q_proj,k_proj,v_proj,o_proj", "rows": 2, "rows_shared": False, "accumulation": 4,
    "learning_rate": 2e-5, "steps": 100, "warmup_steps": 10, "gradient_checkpointing": True, "row_tokens": 4096,
}  # fmt: skip


def test_recipe_is_taken_as_it_is(tmp_path: Path) -> None:
    """Each key is a setting of ours; the preset is that of a real model; options still win."""
    file = tmp_path / "training_config.yaml"
    file.write_text(RECIPE)
    assert parse([f"--config={file}"], quiet=True) == preset("model", **MEANT)
    assert parse([f"--config={file}", "--steps=3"], quiet=True).steps == 3


def test_loader_of_the_optimised_recipe_is_taken(tmp_path: Path) -> None:
    """The documents give its two keys apart from the file."""
    file = tmp_path / "training_config_optimized.yaml"
    file.write_text(RECIPE.replace("  bf16: true", "  dataloader_num_workers: 8\n  prefetch_factor: 4\n  bf16: true"))
    assert configfile.read(file) == {**MEANT, "loader_workers": 8, "prefetch": 4}


def test_keys_that_mean_something_else_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line each, with the file; nothing for the others."""
    file = tmp_path / "training_config.yaml"
    file.write_text(RECIPE)
    parse([f"--config={file}"])
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: model.torch_dtype means the base alone: adapters are float32, and on a CPU all is",
        f"{file}: training.bf16 means products on a GPU: on a CPU all is float32",
    ]


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("deepspeed: null", "deepspeed: zero3.json", 25, "distributed.deepspeed is 'zero3.json': there is no DeepSpeed here"),
        ('torch_dtype: "bfloat16"', "torch_dtype: float32", 3, "model.torch_dtype is 'float32': the base is bfloat16"),
        ("bf16: true", "bf16: false", 19, "training.bf16 is False: products are bfloat16"),
        ("max_steps: 100", "max_steps: many", 17, "training.max_steps is 'many': a whole number is needed"),
        ("max_steps: 100", "max_step: 100", 17, "no such key: training.max_step; did you mean max_steps?"),
        ("dropout: 0.05", "dropout: 1.5", 7, "lora_dropout is 1.5: 0 or more, and less than 1, is needed"),
        ("data:", "date:", 21, "no such section: date; a recipe has model, lora, training, data, distributed"),
        ("r: 64", "r: 0", 5, "lora_rank is 0: at least 1 is needed"),
        ("r: 64", 'r: "64"', 5, "lora.r is '64': a whole number is needed: write it without quotes"),
        ("2.0e-5", '"1e-4"', 16, "training.learning_rate is '1e-4': a number is needed: write it without quotes"),
        ("2.0e-5", "null", 16, "training.learning_rate is nothing: a number is needed"),
        ("dropout: 0.05", "dropout: true", 7, "lora.dropout is True: a number is needed"),
        ('"Qwen/Qwen2-7B-Instruct"', '" "', 2, "model is empty: a name or path is needed"),
        ("    - q_proj\n", "    - 1\n", 8, "lora.target_modules is [1, 'k_proj', 'v_proj', 'o_proj']: a list of names"),
        ("    - q_proj\n", "    -\n", 8, "lora.target_modules is [None, 'k_proj', 'v_proj', 'o_proj']: a list of names"),
        ("deepspeed: null", "deepspeed: {stage: 3}", 25, "distributed.deepspeed is {'stage': 3}: there is no DeepSpeed here"),
        ("  deepspeed: null", "  - fsdp", 24, "distributed is ['fsdp']: keys with values are needed"),
        ("data:", "steps: 3\ndata:", 21, "no such section: steps; a recipe has model"),
        ("max_steps: 100", "MAX_STEPS: 100", 17, "no such key: training.MAX_STEPS; did you mean max_steps?"),
    ],
)  # fmt: skip
def test_wrong_key_is_one_line(old: str, new: str, line: int, said: str, tmp_path: Path) -> None:
    """With file and line."""
    file = tmp_path / "c.yaml"
    file.write_text(RECIPE.replace(old, new, 1))
    with pytest.raises(InputError) as found:
        configfile.read(file)
    assert str(found.value).startswith(f"{file}:{line}: {said}")
    assert "\n" not in str(found.value)


OTHER_WAYS = [("\n", "\r\n"), ("model:", "\ufeffmodel:"), ("  deepspeed: null\n", ""), ("2.0e-5", "2e-5")]


@pytest.mark.parametrize("change", OTHER_WAYS)
def test_same_recipe_written_in_other_ways(change: tuple[str, str], tmp_path: Path) -> None:
    """Windows line ends, a byte order mark, a section whose keys were taken out, a number as YAML 1.1 does not read it."""
    file = tmp_path / "training_config.yaml"
    file.write_bytes(RECIPE.replace(*change).encode())
    assert configfile.read(file) == MEANT


def test_every_key_stands_for_a_setting_or_is_fixed() -> None:
    """None is taken and forgotten; no name stands in two sections, or a table of names would mean both."""
    keys = [(name, setting) for keys in configfile.RECIPE.values() for name, setting in keys.items()]
    assert {setting for name, setting in keys if name not in configfile.FIXED} < set(configfile.TYPES)
    assert {name for name, setting in keys if not setting} == set(configfile.FIXED)
    assert len({name for name, _ in keys}) == len(keys)
    assert set(configfile.ELSEWHERE) < {name for name, _ in keys}


def test_dropout_trains_the_named_targets_by_pefts_forward_and_audits_nothing() -> None:
    """It is told; the losses are others; held-out rows and the restore see no dropout. Four of seven linears: fewer weights."""
    settings = {**QUICK, "target_modules": "q_proj, k_proj,v_proj,o_proj", "greedy_rows": 0}
    found = finetune(preset("tiny", **settings, lora_dropout=0.5))
    assert found.trained_parameters == 8 * (64 + 64 + 2 * (64 + 32) + 64 + 64)
    (note,) = [note for note in found.notes if "dropout" in note]
    assert note.startswith("lora_dropout 0.5: by peft's forward; lock-step audits are off")
    assert found.left_out["lock_step"] == "--lora-dropout draws other numbers on every rank"
    assert "lock_step" not in found.checks
    assert found.problems() == []
    plain = finetune(preset("tiny", **{**settings, "restore_check": False}))
    assert found.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)  # B is 0: dropout changes nothing yet
    assert found.losses[-1] != pytest.approx(plain.losses[-1], rel=1e-6)


def test_target_that_the_model_does_not_have_is_named() -> None:
    """Beside those that it has."""
    with pytest.raises(InputError, match="target_modules: this model has no linear w_proj; it has down_proj, gate_proj"):
        finetune(preset("tiny", **{**QUICK, "target_modules": "q_proj,w_proj"}))


def test_rows_of_instructions(tmp_path: Path) -> None:
    """instruction, input and output are one text; the first two may be missing."""
    rows = [{"instruction": "You have f(city)", "input": "Tokyo?", "output": "<call>"}, {"output": "o"}, {"instruction": "i"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
    assert hub.load_texts(str(tmp_path)) == ["You have f(city)\nTokyo?\n<call>", "o"]
    nothing = {"instruction": "i", "input": None, "output": "o"}
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(nothing).encode() + b"\r\n")
    assert hub.load_texts(str(tmp_path)) == ["i\no"]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[2]))
    with pytest.raises(InputError, match="'output' with or without 'instruction' and 'input'"):
        hub.load_texts(str(tmp_path))


def test_rows_are_shuffled_by_the_seed() -> None:
    """Every row once an epoch, in another order each time and with each seed, and the same order on every rank."""
    rows = [batches.Row([number], []) for number in range(50)]
    source = batches.Source(row=rows.__getitem__, size=50, heldout=(), pad_id=0, digest=0)
    first, second = ([source.shuffled(7).row(epoch * 50 + at).ids[0] for at in range(50)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert len({tuple(first), tuple(second), tuple(range(50))}) == 3
    again, other = ([source.shuffled(seed).row(at).ids[0] for at in range(50)] for seed in (7, 8))
    assert again == first != other
