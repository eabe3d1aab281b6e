"""Which places this run would call stragglers: by its own entries of the thresholds and its own comparison of siblings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.outliers import FEWEST_SIBLINGS, shortfalls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.places import Place
    from pytest_gpucluster.thresholds.limit import Limit
    from pytest_gpucluster.thresholds.resolve import Threshold

CRITERIA = {
    "bf16": "straggler[bf16_tflops]",
    "fp32": "straggler[fp32_tflops]",
    "copy": "straggler[hbm_bandwidth]",
}
"""The entries that compare the GPUs' rates, by the operation that the self-test slows down."""
FEWEST = FEWEST_SIBLINGS + 1
SIGMAS = 2.0
"""A healthy GPU may be so much faster than its siblings; slowed down, it keeps that lead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """One entry of the thresholds: how far below its siblings a place may lie, and the spread that they have in any case."""

    criterion: str
    limit: Limit
    floor_spread: float

    @property
    def promised_percent(self) -> float:
        """A GPU that loses as much of its own rate has to be found, whichever it is; one that loses less may be."""
        return self.limit.value + 100 * SIGMAS * self.floor_spread

    def names(self, rates: Mapping[Place, float], models: Mapping[Place, str]) -> list[Place]:
        """The stragglers among ``rates``; ``models`` tells whose should be alike."""
        found = shortfalls(rates, floor_spread=self.floor_spread, group_of=models)
        return [place for place, one in found.items() if one.is_judged and not self.limit.holds(one.unexplained_percent)]


def judge_of(operation: str, criteria: Mapping[str, Threshold]) -> Judge | None:
    """By what this run judges the rates of an operation; None where it compares none."""
    threshold = criteria.get(CRITERIA[operation])
    if threshold is None:
        return None
    limit = threshold.limit(gpus=1, cluster={})
    return Judge(criterion=threshold.key, limit=limit, floor_spread=float(threshold.recipe["floor_spread"]))
