"""The cases of finetune.py: settings, cases to compare with, and the settings of a rehearsal on a CPU."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

QUIET: dict[str, Any] = {"audit_every": 0, "digest_every": 0, "restore_check": False, "greedy_rows": 0}
SHAPE_7B: dict[str, Any] = {**QUIET, "steps": 16, "window_steps": 4, "heldout_rows": 4, "loader_workers": 1}
COMPILED = {**SHAPE_7B, "compile": "layers"}
RECIPE: dict[str, Any] = {**QUIET, "steps": 12, "window_steps": 4, "heldout_rows": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A preset with ``settings``; ``beside`` are the cases it is compared with, the first of them that was run."""

    preset: str
    settings: dict[str, Any]
    beside: tuple[str, ...] = ()
    on_request: bool = False


def _recipe(preset: str, **settings: Any) -> Case:
    beside = () if preset == "reference" and not settings else ("recipe-reference",)
    return Case(preset=preset, settings={**RECIPE, **settings}, beside=beside, on_request=True)


RECIPES = {
    "recipe-reference": _recipe("reference"),
    "recipe-no-checkpointing": _recipe("reference", gradient_checkpointing=False),
    "recipe-batch-4": _recipe("reference", rows=4),
    "recipe-loaders-8": _recipe("reference", loader_workers=8),
    "recipe-prefetch-4": _recipe("reference", prefetch=4),
    "recipe-throughput": _recipe("reference-throughput"),
    "recipe-optimized": _recipe("optimized"),
    "recipe-optimized-eager": _recipe("optimized", compile="off"),
    "recipe-optimized-no-checkpointing": _recipe("optimized", gradient_checkpointing=False),
}
"""The published recipe as it stands, each thing that its optimised variant changes by itself, and all of them."""

ALONE = {
    "7b-peft-eager": Case(preset="7b-shape", settings={**SHAPE_7B, "own_lora": False, "compile": "off"}),
    "7b-eager": Case(preset="7b-shape", settings={**SHAPE_7B, "compile": "off"}, beside=("7b-peft-eager",), on_request=True),
    "7b-compiled": Case(preset="7b-shape", settings=COMPILED, beside=("7b-eager", "7b-peft-eager")),
    "small-eager": Case(preset="small", settings={"cuda_graph": False}),
    "small-graph": Case(preset="small", settings={"cuda_graph": True}, beside=("small-eager",)),
    **RECIPES,
}
"""Cases for one process."""

TOGETHER = {
    "7b-ddp": Case(preset="7b-shape", settings={**COMPILED, "strategy": "ddp"}),
    "7b-fsdp": Case(preset="7b-shape", settings={**COMPILED, "strategy": "fsdp"}, beside=("7b-ddp",)),
    "7b-fsdp-offload": Case(
        preset="7b-shape",
        settings={**COMPILED, "strategy": "fsdp", "cpu_offload": True},
        beside=("7b-fsdp", "7b-ddp"),
        on_request=True,
    ),
    "7b-ddp-8-rows": Case(preset="7b-shape", settings={**COMPILED, "strategy": "ddp", "rows": 8}, on_request=True),
    "7b-fsdp-8-rows": Case(
        preset="7b-shape",
        settings={**COMPILED, "strategy": "fsdp", "rows": 8},
        beside=("7b-ddp-8-rows",),
        on_request=True,
    ),
    **RECIPES,
}
"""Cases for several ranks."""

REHEARSED: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2, "kv_heads": 1, "lora_rank": 8, "vocab_size": 0,
    "rows": 2, "row_tokens": 256, "steps": 8, "window_steps": 4, "heldout_rows": 4, "greedy_rows": 0, "loss_limit": None,
    "compile": "off",
}  # fmt: skip
"""Settings with which each case takes about a second on a CPU."""


def named(patterns: str | None, cases: dict[str, Case]) -> list[str]:
    """The names that comma-separated ``patterns`` (``recipe-*``) mean, in their order; without any, what runs unasked.

    Raises ValueError for a pattern that means none.
    """
    if patterns is None:
        return [name for name, case in cases.items() if not case.on_request]
    found: list[str] = []
    for pattern in patterns.split(","):
        meant = fnmatch.filter(cases, pattern)
        if not meant:
            raise ValueError(f"no case {pattern!r} here: there are {', '.join(cases)}")
        found += [name for name in meant if name not in found]
    return found
