"""Does this cluster really train? A LoRA fine-tune on function calls, with exact checks beside the loss.

``python -m finetune_smoke --preset tiny`` or ``torchrun --nproc-per-node=8 -m finetune_smoke --preset small``; from
code ``finetune_smoke.finetune(finetune_smoke.preset("small"))``. Needs torch, transformers and peft, no network and no
files: tokenizer, data and base model are made from a seed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune_smoke.settings.config import preset
    from finetune_smoke.training.loop import finetune

__all__ = ["finetune", "preset"]

_HOMES = {"finetune": "finetune_smoke.training.loop", "preset": "finetune_smoke.settings.config"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: torch takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
