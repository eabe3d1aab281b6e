"""Presets, settings and faults, and that a wrong one is refused before torch is loaded."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from finetune_smoke.settings.config import FAULTS, PRESETS, Config, InputError, parse_fault, preset


def test_class_defaults_are_preset_tiny() -> None:
    """Except for the spread, which two processes on two busy cores exceed."""
    assert dataclasses.replace(preset("tiny"), spread_limit=1.25) == Config()


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_a_valid_config(name: str) -> None:
    """Every preset can be made, keeps its name and takes an override."""
    assert preset(name, steps=7).preset == name
    assert preset(name, steps=7).steps == 7


def test_presets_promise_a_loss_unless_they_are_for_throughput() -> None:
    """The 7B shape with random weights promises none."""
    assert {name: preset(name).loss_limit for name in PRESETS} == {
        "tiny": 0.5, "small": 0.5, "7b-shape": None, "reference": None, "reference-throughput": None, "optimized": None,
        "model": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "huge"}, "unknown preset 'huge': one of tiny"),
        ({"stepz": 3}, "no such setting: stepz; known are"),
        ({"steps": 0}, "steps is 0: at least 1"),
        ({"fault": "gremlin"}, "unknown fault 'gremlin': one of none, lr0"),
        ({"fault": "bitflip:x"}, "the rank after ':' must be a number"),
        ({"resume": "yes"}, "resume is 'yes'"),
        ({"resume": "auto"}, "--resume auto needs --checkpoint-dir"),
        ({"checkpoint_every": 5}, "--checkpoint-every needs --checkpoint-dir"),
        ({"dataset": "d"}, "--dataset needs --model"),
        ({"heads": 3}, "hidden_size 128 must be a multiple of heads 3"),
        ({"kv_heads": 3}, "and that of kv_heads 3"),
        ({"accumulation": 0}, "accumulation is 0: at least 1"),
        ({"strategy": "zero3"}, "strategy is 'zero3': one of auto, ddp, fsdp"),
        ({"compile": "all"}, "compile is 'all': one of off, layers"),
        ({"cpu_offload": True}, "cpu_offload needs strategy fsdp, and it is auto: with ddp every GPU holds the whole base"),
        ({"cpu_offload": True, "strategy": "ddp"}, "cpu_offload needs strategy fsdp, and it is ddp"),
        ({"prefetch": -1}, "prefetch is -1: at least 0 is needed"),
        ({"steps": -5}, "steps is -5: at least 1"),
        ({"lora_rank": 0}, "lora_rank is 0: at least 1"),
        ({"lora_alpha": 0}, "lora_alpha is 0: at least 1"),
        ({"layers": 0}, "layers is 0: at least 1"),
        ({"keep_checkpoints": -1}, "keep_checkpoints is -1: at least 0"),
        ({"checkpoint_every": -1}, "checkpoint_every is -1: at least 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1: at least 0"),
        ({"seed": 2**63}, "seed is 9223372036854775808: numbers end at"),
        ({"seed": -(10**400)}, "numbers end at"),
        ({"learning_rate": float("nan")}, "learning_rate is nan: a finite number is needed"),
        ({"learning_rate": float("inf")}, "learning_rate is inf: a finite number is needed"),
        ({"learning_rate": -1e-3}, r"learning_rate is -0\.001: 0 or more is needed"),
        ({"loss_limit": 0.0}, r"loss_limit is 0\.0: more than 0 is needed"),
        ({"clip_norm": 0.0}, r"clip_norm is 0\.0: more than 0"),
        ({"beta2": 1.0}, r"beta2 is 1\.0: 0 or more, and less than 1"),
        ({"clustering": 1.5}, r"clustering is 1\.5: 0 to 1 is needed"),
        ({"model": ""}, "model is empty: a name or path is needed"),
        ({"target_modules": "q_proj,"}, "target_modules is 'q_proj,': all-linear, or names of linears with commas between"),
    ],
)
def test_wrong_setting_is_refused(settings: dict[str, object], message: str) -> None:
    """The message says what is known or needed."""
    with pytest.raises(InputError, match=message):
        preset(**{"name": "tiny", **settings})  # type: ignore[arg-type]  # wrong on purpose


def test_reference_presets_are_the_published_recipe() -> None:
    """2 rows of 4096 tokens in 4 passes, so 128 rows a step on 16 GPUs; its variants differ where they say so."""
    reference, short, optimized = (preset(name) for name in ("reference", "reference-throughput", "optimized"))
    assert (reference.rows, reference.accumulation, reference.row_tokens, reference.learning_rate) == (2, 4, 4096, 2e-5)
    assert reference.rows * reference.accumulation * 16 == 128
    assert (short.row_tokens, short.rows) == (512, 8)
    assert (optimized.rows, optimized.loader_workers, optimized.prefetch, optimized.gradient_checkpointing) == (4, 8, 4, True)
    assert {(each.lora_rank, each.lora_alpha) for each in (reference, short, optimized)} == {(64, 128)}


def test_every_fault_can_be_asked_for() -> None:
    """A fault is parsed with and without a rank."""
    for name in FAULTS:
        assert parse_fault(name) == (name, None)
        assert parse_fault(f"{name}:3") == (name, 3)


def test_config_loads_no_torch() -> None:
    """A wrong option is refused at once, not after seconds of imports."""
    program = "import sys, finetune_smoke.settings.config, finetune_smoke.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
