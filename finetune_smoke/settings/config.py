"""The settings of a run as a frozen dataclass, and the presets.

This module imports nothing heavy, so that a wrong option is refused before torch is loaded.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import ClassVar

FAULTS: dict[str, str] = {
    "none": "nothing is planted",
    "lr0": "all ranks: the learning rate is 0",
    "frozen": "all ranks: every adapter tensor but one is frozen",
    "noallreduce": "all ranks: gradients are never all-reduced",
    "base": "one rank: a bit of its base weights is wrong from the start",
    "base-late": "one rank: a bit of its frozen weights changes in the last step",
    "bitflip": "one rank, before the all-reduce: one mantissa bit of one gradient, each step",
    "bitflip-exp": "one rank, before the all-reduce: one high exponent bit of one gradient, each step",
    "bitflip-late": "one rank, before the all-reduce: one mantissa bit of one gradient, in the last step",
    "graph-bitflip": "one rank: one mantissa bit of the gradients of each replayed CUDA graph",
    "scale": "one rank, before the all-reduce: gradients times 8",
    "zero": "one rank, before the all-reduce: gradients are 0",
    "noise": "one rank, before the all-reduce: noise of the gradient's size is added",
    "signflip": "one rank, before the all-reduce: gradients change sign",
    "post-bitflip": "one rank, after the all-reduce: one mantissa bit of one gradient, each step",
    "post-bitflip-once": "one rank, after the all-reduce: one bit, once, at step 10",
    "post-scale": "one rank, after the all-reduce: gradients times 8",
    "post-signflip": "one rank, after the all-reduce: gradients change sign",
    "wrongdata": "one rank: the answers of other prompts",
    "dupdata": "one rank: reads the rows of rank 0 again (rank 0 those of rank 1)",
    "straggler": "one rank: 0.1 s, or three forwards, slower in every forward",
    "truncate-ckpt": "one rank: a tensor is missing from the adapter it saved",
}
"""Faults that ``--fault NAME[:RANK]`` plants to show that the checks find them; default rank: the last one."""


CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": ("auto", "ddp", "fsdp"),
    "compile": ("off", "layers"),
    "resume": ("no", "auto"),
}
"""The choices of settings that name one. Config describes each."""

LIMITS: dict[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(
        (
            "steps", "rows", "row_tokens", "window_steps", "heldout_rows", "accumulation", "hidden_size", "intermediate_size",
            "layers", "heads", "kv_heads", "lora_rank", "lora_alpha",
        ),
        (lambda value: value >= 1, "at least 1"),
    ),
    **dict.fromkeys(
        (
            "vocab_size", "loader_workers", "prefetch", "warmup_steps", "greedy_rows", "audit_every", "digest_every",
            "checkpoint_every", "keep_checkpoints",
        ),
        (lambda value: value >= 0, "at least 0"),
    ),
    **dict.fromkeys(("clip_norm", "loss_limit", "spread_limit", "peak_bf16_tflops"), (lambda value: value > 0, "more than 0")),
    **dict.fromkeys(("beta2", "lora_dropout"), (lambda value: 0 <= value < 1, "0 or more, and less than 1,")),
    "clustering": (lambda value: 0 <= value <= 1, "0 to 1"),
    "learning_rate": (lambda value: value >= 0, "0 or more"),
}  # fmt: skip
"""Which numbers a setting may be, and how a message says so. Where a count may be 0, that has a meaning, see ``--help``."""

MAX_NUMBER = 2**53
"""The maximum of each count: the largest number that float64 holds exactly."""


class InputError(ValueError):
    """Unusable input: options, model, data set or checkpoint. Exit code 2 on the command line."""

    blames: ClassVar[str] = "settings"
    """What an acceptance suite that runs this training blames for it."""


class OwnInputError(InputError):
    """Unusable input on this rank only, which prints the message. Rank 0 prints an InputError that is the same on all ranks."""


@contextmanager
def as_input_error(what: str, kinds: type[Exception] | tuple[type[Exception], ...] = OSError) -> Iterator[None]:
    """Raise InputError, ``what`` and the reason, for an error of these ``kinds`` within the block."""
    try:
        yield
    except kinds as error:
        raise InputError(f"{what}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One fine-tune run. Every field can be overridden on the command line (``row_tokens`` as ``--row-tokens``).

    ``options.HELP`` says what each is for. ``own_lora`` off uses peft's forward under autocast. ``loss_limit`` None: the
    preset promises no loss; ``spread_limit`` None measures no forward. ``vocab_size`` 0 means the tokenizer's. The fields from
    ``hidden_size`` to ``damping`` describe the random base and are unused with ``model``.
    """

    preset: str = "tiny"
    model: str | None = None
    dataset: str | None = None
    seed: int = 1234

    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    vocab_size: int = 0
    tie_embeddings: bool = True
    clustering: float = 0.5
    mimetic: float = 0.5
    damping: float = 0.05

    lora_rank: int = 64
    lora_alpha: int = 128
    lora_dropout: float = 0.0
    target_modules: str = "all-linear"
    gradient_checkpointing: bool = False
    strategy: str = "auto"
    cpu_offload: bool = False
    own_lora: bool = True
    compile: str = "off"
    cuda_graph: bool = False

    rows: int = 32
    rows_shared: bool = True
    row_tokens: int = 56
    packed: bool = False
    accumulation: int = 1
    loader_workers: int = 0
    prefetch: int = 4

    steps: int = 120
    learning_rate: float = 4e-3
    warmup_steps: int = 10
    beta2: float = 0.98
    clip_norm: float = 1.0

    loss_limit: float | None = 0.5
    spread_limit: float | None = 1.25
    heldout_rows: int = 256
    greedy_rows: int = 32
    restore_check: bool = True
    window_steps: int = 10
    audit_every: int = 50
    digest_every: int = 25
    peak_bf16_tflops: float | None = None

    checkpoint_dir: str | None = None
    checkpoint_every: int = 0
    keep_checkpoints: int = 0
    resume: str = "no"
    output: str | None = None
    tensorboard: str | None = None
    scratch: str | None = None
    fault: str = "none"

    def __post_init__(self) -> None:
        """Raise InputError for unusable settings."""
        for field in fields(self):
            wrong = flaw(field.name, getattr(self, field.name))
            if wrong is not None:
                raise InputError(wrong)
        if self.cpu_offload and self.strategy != "fsdp":
            raise InputError(
                f"cpu_offload needs strategy fsdp, and it is {self.strategy}: with ddp every GPU holds the whole base"
            )
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise InputError(
                f"hidden_size {self.hidden_size} must be a multiple of heads {self.heads}, and that of kv_heads {self.kv_heads}"
            )
        if self.resume == "auto" and self.checkpoint_dir is None:
            raise InputError("--resume auto needs --checkpoint-dir")
        if self.checkpoint_every and self.checkpoint_dir is None:
            raise InputError("--checkpoint-every needs --checkpoint-dir")
        if self.dataset is not None and self.model is None:
            raise InputError("--dataset needs --model: the random base knows only the tokens of its own data")


TYPES = typing.get_type_hints(Config)
"""The type of each setting."""

QWEN2_7B: dict[str, object] = {
    "hidden_size": 3584, "intermediate_size": 18944, "layers": 28, "heads": 28, "kv_heads": 4,
    "vocab_size": 152064, "tie_embeddings": False, "mimetic": 0.25, "rows_shared": False, "packed": True,
    "loss_limit": None, "heldout_rows": 8, "greedy_rows": 0, "restore_check": False,
}  # fmt: skip
"""The shape of Qwen2-7B with random weights and 161.5 M trained ones: throughput and memory. It promises no loss."""


def flaw(name: str, value: object) -> str | None:
    """Why ``value``, of the right type, is invalid in field ``name``; None if it is valid by itself."""
    if name == "preset":
        return None if value in PRESETS else f"unknown preset {value!r}: one of {', '.join(PRESETS)}"
    if name == "fault":
        try:
            parse_fault(str(value))
        except InputError as error:
            return str(error)
    if name in CHOICES and value not in CHOICES[name]:
        return f"{name} is {value!r}: one of {', '.join(CHOICES[name])}"
    if name == "target_modules" and not all(part.strip() for part in str(value).split(",")):
        return f"{name} is {value!r}: all-linear, or names of linears with commas between, is needed"
    if isinstance(value, str) and not value.strip():
        return f"{name} is empty: a name or path is needed"
    return _number_flaw(name, value)


def _number_flaw(name: str, value: object) -> str | None:
    """What is wrong with a number in field ``name``; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    is_possible, wanted = LIMITS.get(name, (lambda _value: True, ""))
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return f"{name} is {value}: numbers end at {MAX_NUMBER}"
    if not math.isfinite(value):
        return f"{name} is {value}: a finite number is needed"
    return None if is_possible(value) else f"{name} is {value}: {wanted} is needed"


PRESETS: dict[str, dict[str, object]] = {
    # CPU, fp32: two gloo ranks of one thread. The figures are those of the class.
    "tiny": {"spread_limit": 1.75},
    # One GPU and up, bf16 base of 56 M weights, 64 rows on every GPU. On one H200: exact 1.00 after 150 steps, 0.91 to
    # 0.99 after 100; 75 ms a step where launches bind it, hence the graph.
    "small": {
        "hidden_size": 768, "intermediate_size": 2304, "layers": 8, "heads": 12, "kv_heads": 4,
        "rows": 64, "rows_shared": False, "steps": 150, "learning_rate": 1e-3, "warmup_steps": 20,
        "cuda_graph": True, "loader_workers": 1,
    },
    "7b-shape": {
        **QWEN2_7B, "rows": 4, "row_tokens": 2048, "steps": 80, "learning_rate": 5e-4, "compile": "layers", "loader_workers": 1,
    },
    # The published recipe of a Qwen2-7B fine-tune on function calls: 2 rows of 4096 tokens a GPU, 4 passes a step.
    "reference": {
        **QWEN2_7B, "rows": 2, "accumulation": 4, "row_tokens": 4096, "steps": 100, "learning_rate": 2e-5,
        "gradient_checkpointing": True, "loader_workers": 4, "prefetch": 2,
    },
    # The same in short rows, in which its throughput is quoted.
    "reference-throughput": {
        **QWEN2_7B, "rows": 8, "row_tokens": 512, "steps": 100, "learning_rate": 2e-5, "loader_workers": 4, "prefetch": 2,
    },
    # The recipe's own optimised variant: twice the rows, twice the loaders, further ahead; and layers compiled.
    "optimized": {
        **QWEN2_7B, "rows": 4, "accumulation": 4, "row_tokens": 4096, "steps": 100, "learning_rate": 2e-5,
        "gradient_checkpointing": True, "loader_workers": 8, "prefetch": 4, "compile": "layers",
    },
    # A real model given with --model, all tokens of --dataset (or the synthetic calls) as text.
    "model": {
        "rows": 4, "rows_shared": False, "row_tokens": 1024, "steps": 100, "learning_rate": 2e-4,
        "heldout_rows": 32,
    },
}  # fmt: skip


def preset(name: str, **overrides: object) -> Config:
    """The preset ``name`` with fields of Config overridden; raises InputError for what does not exist."""
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}: one of {', '.join(PRESETS)}")
    known = {field.name for field in fields(Config)} - {"preset"}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise InputError(f"no such setting: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return Config(**{"preset": name, **PRESETS[name], **overrides})  # type: ignore[arg-type]  # names checked above


def require_limit_below_floor(limit: float | None, blind_floor_nats: float | None) -> None:
    """Refuse to judge a loss by a ``limit`` that a model blind to its prompt could come near.

    Both are in nats per predicted token. Raises InputError if the limit is half of the floor or more; nothing is refused where
    no loss is promised or the floor is unknown (None).
    """
    if limit is not None and blind_floor_nats is not None and not limit < 0.5 * blind_floor_nats:
        raise InputError(
            f"the limit of {limit:g} nats is not below half of the blind floor of {blind_floor_nats:.3f}: a model that reads "
            f"no prompt could come near it, so a loss below it proves nothing; set it below {0.5 * blind_floor_nats:.3f}"
        )


def parse_fault(text: str) -> tuple[str, int | None]:
    """``NAME[:RANK]`` as (name, rank or None for the last rank); raises InputError."""
    name, colon, rank = text.partition(":")
    if name not in FAULTS:
        raise InputError(f"unknown fault {name!r}: one of {', '.join(FAULTS)}")
    if colon and not rank.isdecimal():
        raise InputError(f"fault {text!r}: the rank after ':' must be a number")
    return name, int(rank) if colon else None
