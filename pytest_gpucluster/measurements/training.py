"""Real training as a measurement: the LoRA fine-tune of ``finetune_smoke`` on the ranks of the current group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.measurements import progress

if TYPE_CHECKING:
    from finetune_smoke.train import Outcome


def finetune(*, preset: str, **overrides: Any) -> Outcome:
    """Fine-tune with LoRA on all ranks of the default process group; every rank returns the same outcome.

    Args:
        preset: one of ``finetune_smoke.config.PRESETS``.
        overrides: further fields of ``finetune_smoke.config.Config``.

    Raises:
        finetune_smoke.config.InputError: no such preset or field.
    """
    from finetune_smoke.config import preset as config_of
    from finetune_smoke.train import finetune as train

    return train(config_of(preset, **overrides), progress=progress.report)
