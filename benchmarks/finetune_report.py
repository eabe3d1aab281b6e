"""Reports of finetune.py: the comparison of two cases, a JSON file that is complete after every case, and a table."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.config.strict_json import strict_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

NOT_RUN = "not run"
NOT_ENDED = "started, and did not end"
COMPARED_STEPS = 100
"""Longer curves are compared over their beginning: what is learnt late differs by much, and says little."""


@dataclass(slots=True)
class Rows:
    """Rows by case. Every case has a row from the beginning, so ``file`` has all rows however the run ends."""

    about: Mapping[str, Any]
    file: Path | None
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def put(self, name: str, row: Mapping[str, Any]) -> None:
        """Set the row of case ``name`` and write the file anew, by one rename."""
        self.rows[name] = strict_json(dict(row))
        if self.file is not None:
            draft = self.file.with_name(self.file.name + ".tmp")
            draft.write_text(json.dumps({**self.about, "cases": self.rows}, indent=1, allow_nan=False) + "\n")
            draft.replace(self.file)


def compared(losses: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """The largest relative distance of the first 100 losses, at which step, and the distances of means of 10.

    Each is |mine - other| / other; None where a loss is no number.
    """
    pairs = list(zip(losses[:COMPARED_STEPS], reference[:COMPARED_STEPS], strict=True))
    apart = [abs(mine - other) / other for mine, other in pairs]
    if not all(map(math.isfinite, apart)):
        return {"apart_max": None, "apart_max_step": None, "apart_means_of_10": None}
    tens = [pairs[first : first + 10] for first in range(0, len(pairs), 10)]
    means = [tuple(map(statistics.fmean, zip(*ten, strict=True))) for ten in tens]
    return {
        "apart_max": max(apart),
        "apart_max_step": apart.index(max(apart)),
        "apart_means_of_10": [round(abs(mine - other) / other, 4) for mine, other in means],
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown, a line a case; a case that failed says why in its line."""
    head = ["case", "tokens/s/GPU", "MFU", "ms a step", "peak memory", "rows a step", "compared", "losses apart"]
    lines = [head, ["---"] * len(head)]
    for name, row in rows.items():
        lines.append([name, f"ERROR: {row['error']}", *[""] * 6] if "error" in row else [name, *_cells(row)])
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    ratio = "" if row.get("rate_ratio") is None else f"{row['rate_ratio']:.3f} of {row['beside']}"
    apart = "" if row.get("apart_max") is None else f"{row['apart_max']:.2%} at step {row['apart_max_step']}"
    bad = [f"NOT GOOD: {problem}" for problem in row.get("problems") or []]
    return [
        _cell(row.get("tokens_per_s_per_gpu"), "{:,.0f}"),
        _cell(row.get("mfu"), "{:.1%}"),
        _cell(row.get("step_ms"), "{:.1f}"),
        _cell(row.get("memory_peak_gib"), "{:.1f} GiB"),
        _cell(row.get("step_rows"), "{}"),
        ratio,
        "; ".join([*([apart] if apart else []), *bad]),
    ]


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
