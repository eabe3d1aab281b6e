"""What a checkpoint and the run that resumes it must have in common, and where in the data that run continues.

Rows are one endless sequence (data/batches.py), and a step takes ``step_rows`` of it. So the place of a checkpoint in the
data is a number of rows, ``next_row``, whichever ranks read the rows before. A run with another number of ranks keeps the
rows of a step, and so the sequence, the losses and the learning rate of every step. Its rows a pass and its number of
passes change instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from finetune_smoke.checkpoints.marker import FORMAT, Marker
from finetune_smoke.digests import as_hex
from finetune_smoke.run import TrainingRun
from finetune_smoke.settings.config import InputError

SETTINGS = (
    "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "seed", "row_tokens", "packed",
    "steps", "learning_rate", "warmup_steps", "beta2", "clip_norm",
)  # fmt: skip
"""Settings that determine the losses, besides base, data and the rows of a step."""

BEFORE = {"lora_dropout": 0.0, "target_modules": "all-linear"}
"""What checkpoints were trained with that were written before these settings were there."""


def fits(run: TrainingRun) -> dict[str, object]:
    """What a run has to have in common with a checkpoint that it resumes or an adapter that it replaces."""
    return {
        "format": FORMAT,
        "base": as_hex(run.initial.base),
        "data": as_hex(run.initial.data),
        # They decide which rows of a data set are trained on. Synthetic calls are drawn for each split separately.
        "heldout_rows": None if run.config.dataset is None else len(run.source.heldout),
        **{name: getattr(run.config, name) for name in SETTINGS},
    }


def differences(found: Mapping[str, object], run: TrainingRun) -> str:
    """How ``found``, an earlier result of ``fits``, differs from that of ``run``; empty if it does not."""
    wanted, found = fits(run), {**BEFORE, **found}
    names = ("format",) if found.get("format") != FORMAT else tuple(wanted)  # another format has other fields
    return "; ".join(
        f"{name} {found.get(name)} there, {wanted[name]} here" for name in names if found.get(name) != wanted[name]
    )


def continued(run: TrainingRun, marker: Marker, path: Path) -> tuple[TrainingRun, list[str]]:
    """(``run`` with the checkpoint's rows a step, a line if that changed it).

    No rank takes more rows a pass than ``run`` has. Raises InputError if the ranks cannot share the rows of a step.
    """
    rows, ranks = marker.step_rows, run.ranks.world_size
    if rows == run.step_rows:
        return run, []
    if rows % ranks:
        raise InputError(
            f"checkpoint {path} was trained on {rows} rows a step, which {ranks} ranks cannot share: resume it with a number "
            f"of ranks that divides {rows}"
        )
    share = rows // ranks
    passes = next(count for count in range(-(-share // run.rows), share + 1) if share % count == 0)
    note = (
        f"checkpoint {path.name} was trained on {rows} rows a step, these settings make {run.step_rows}: kept at {rows}, by "
        f"{share // passes} rows a rank in {passes} passes"
    )
    whole = share // passes * (ranks if run.config.rows_shared else 1)
    config = dataclasses.replace(run.config, rows=whole, accumulation=passes)
    return dataclasses.replace(run, config=config, rows=share // passes), [note]
