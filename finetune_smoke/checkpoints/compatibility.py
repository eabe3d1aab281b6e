"""What a checkpoint and the run that resumes it must have in common, and where in the data that run goes on.

Rows are one endless sequence (data.py) and a step takes ``step_rows`` of it, so a checkpoint's place in the data is a
number of rows, ``next_row``, whatever ranks had read those before it. A run of other ranks keeps the rows of a step, and
with them the sequence, the losses and the learning rate of every step: its rows a pass and its passes change instead.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from finetune_smoke.ranks import rank_list
from finetune_smoke.settings.config import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from finetune_smoke.checks.exact import Failures
    from finetune_smoke.run import TrainingRun

FORMAT = 3
SETTINGS = (
    "lora_rank", "lora_alpha", "base_dtype", "seed", "row_tokens", "packed",
    "steps", "learning_rate", "warmup_steps", "beta2", "clip_norm",
)  # fmt: skip
"""Settings that decide the losses, beside base, data and the rows of a step."""


def fits(run: TrainingRun) -> dict[str, object]:
    """What a checkpoint or an adapter has to have in common with a run that goes on from it or replaces it."""
    return {
        "format": FORMAT,
        "base": f"{run.initial.base % 2**64:016x}",
        "data": f"{run.initial.data % 2**64:016x}",
        # They decide which rows of a data set are trained on; calls are drawn for each part by itself.
        "heldout_rows": None if run.config.dataset is None else len(run.source.heldout),
        **{name: getattr(run.config, name) for name in SETTINGS},
    }


def differences(found: Mapping[str, object], run: TrainingRun) -> str:
    """In what the ``fits`` that was ``found`` is not that of ``run``, empty if in nothing."""
    wanted = fits(run)
    names = ("format",) if found.get("format") != FORMAT else tuple(wanted)  # another format tells other things
    return "; ".join(
        f"{name} {found.get(name)} there, {wanted[name]} here" for name in names if found.get(name) != wanted[name]
    )


def read_marker(path: Path) -> dict[str, Any]:
    """The marker in file ``path``; raises OSError, and ValueError, KeyError, TypeError or AttributeError if damaged.

    Of a marker of another format nothing but the format is looked at.
    """
    marker: dict[str, Any] = json.loads(path.read_text())
    if marker["fits"].get("format") != FORMAT:
        return marker
    step, rows, next_row = (int(marker[name]) for name in ("step", "step_rows", "next_row"))
    if step < 1 or rows < 1 or next_row != step * rows:
        raise ValueError(f"next row {next_row} after {step} steps of {rows} rows")
    _ = [int(entry["bytes"]) for entry in marker["files"].values()], str(marker["state_digest"]), marker["config"]
    _ = [str(problem) + rank_list(at_fault) for found in marker["failures"].values() for problem, at_fault in found]
    return marker


def continued(run: TrainingRun, marker: Mapping[str, Any], path: Path) -> tuple[TrainingRun, list[str]]:
    """``run`` with the checkpoint's rows a step, and a line if that changed it.

    No rank takes more rows a pass than it was to take. Raises InputError if the ranks cannot share the rows of a step.
    """
    rows, ranks = int(marker["step_rows"]), run.ranks.world_size
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


def carried(marker: Mapping[str, Any], path: Path) -> list[str]:
    """A line for each check that had failed before the checkpoint was saved."""
    failures: Failures = marker["failures"]
    ranks = marker["world_size"]
    return [f"checkpoint {path.name}, of {ranks} ranks, carries a failure of {name}" for name in sorted(failures)]
