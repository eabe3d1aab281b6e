"""Checks over ranks whose gathers return fixed values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from finetune_smoke.checks.exact import Checks
from finetune_smoke.ranks import Ranks
from finetune_smoke.settings.config import preset
from finetune_smoke.training.setup import prepare

if TYPE_CHECKING:
    from finetune_smoke.checks import exact
    from finetune_smoke.run import TrainingRun


class FixedRanks:
    """Ranks whose every gather returns the same values."""

    def __init__(self, *by_rank: Any) -> None:
        """``by_rank``: for each rank its value, or a tuple of its values."""
        self.by_rank = [list(values) if isinstance(values, tuple) else [values] for values in by_rank]
        self.world_size = len(by_rank)

    def gather(self, _values: object) -> list[list[Any]]:
        """The fixed values by rank."""
        return self.by_rank

    gather_floats = gather


ALONE = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
"""A rank without others."""


def prepared(**settings: Any) -> TrainingRun:
    """A run of preset tiny on that rank, before its first step."""
    return prepare(preset("tiny", **settings), ranks=ALONE, progress=lambda _step, _part: None)


def checks_over(*by_rank: Any) -> Checks:
    """Empty checks over ranks with these values."""
    return Checks(cast("Ranks", FixedRanks(*by_rank)))


def only_result(record: Checks, name: str) -> exact.CheckResult:
    """The result of the only check that was recorded, which must be ``name``."""
    (found,) = record.results().items()
    assert found[0] == name
    return found[1]
