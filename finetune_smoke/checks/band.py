"""A band around a recorded loss curve: the same seed and the same rows give the same first losses, on every healthy part.

It sees what a loss below a limit does not: what is wrong in the same way each time, also on a single GPU. Random weights come
from the device: another model of GPU, or another torch, may draw others. So a curve holds for these and for no other. Compared
are the losses of the warm-up, which do not depend on the number of steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from finetune_smoke.checks.exact import Checks
from finetune_smoke.settings.config import Config, preset

FIRST = 0.001
"""How far the first loss may lie from the recorded one, relative: nothing was learnt yet, only products are rounded."""
LATER = 0.03
"""The same for the others: five times the 0.6 % by which strategies and hosts differ (docs/finetune/checks.md)."""
MOST = 20
"""The most losses that are compared."""

SAME = (
    "model", "dataset", "seed", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "vocab_size",
    "tie_embeddings", "clustering", "mimetic", "damping", "lora_rank", "lora_alpha", "lora_dropout", "target_modules",
    "row_tokens", "packed", "learning_rate", "warmup_steps", "beta2", "clip_norm",
)  # fmt: skip
"""Settings on which the first losses depend, beside the rows of a step of all ranks and passes."""


class CurveMachine(NamedTuple):
    """What draws the random weights: the GPU's model as torch names it, or ``cpu``, and the release of torch, ``2.11``."""

    device: str
    release: str

    @classmethod
    def of(cls, device: torch.device) -> CurveMachine:
        """That of a rank."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return cls(name, ".".join(torch.__version__.split(".")[:2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCurve:
    """The first losses of ``preset`` with ``step_rows`` rows a step, and where they are from; None for a step left out."""

    preset: str
    device: str
    release: str
    step_rows: int
    losses: tuple[float | None, ...]
    source: str

    def fits(self, config: Config, machine: CurveMachine, step_rows: int) -> bool:
        """Whether a run of these settings has this curve."""
        recorded = preset(self.preset)
        same = all(getattr(config, name) == getattr(recorded, name) for name in SAME)
        return same and (self.device, self.release, self.step_rows) == (*machine, step_rows)


RECORDED = tuple(
    RecordedCurve(**{**curve, "losses": tuple(curve["losses"])})
    for curve in json.loads(Path(__file__).with_name("curves.json").read_text(encoding="utf-8"))
)
"""The curves that were recorded; ``curves.json`` has one more for each kind of machine that somebody measures."""


def record(checks: Checks, config: Config, *, machine: CurveMachine, step_rows: int, losses: Sequence[float]) -> None:
    """Record ``loss_band``, or why it is left out: nobody recorded a curve of these settings and rows on such a machine."""
    curve = next((one for one in RECORDED if one.fits(config, machine, step_rows)), None)
    if curve is None:
        here = f"{step_rows} rows a step on {machine.device}, torch {machine.release}"
        checks.leave_out("loss_band", why=f"no curve was recorded for these settings with {here}")
        return
    checks.record("loss_band", problem=outside(losses, curve), at_fault=())


def outside(losses: Sequence[float], curve: RecordedCurve) -> str | None:
    """The first loss that lies outside the band, as a message; None if there is none."""
    for step, (mine, recorded) in enumerate(zip(losses[:MOST], curve.losses, strict=False)):
        if recorded is None:
            continue
        allowed = LATER if step else FIRST
        apart = abs(mine - recorded) / recorded
        if not apart <= allowed or not math.isfinite(mine):
            return (
                f"loss of step {step}: {mine:.5f}, where {recorded:.5f} was recorded ({curve.source}, torch {curve.release}): "
                f"{100 * apart:.2f} % apart, and {100 * allowed:g} % is allowed"
            )
    return None
