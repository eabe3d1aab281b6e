"""What the reports of one run say, at one moment: the same for results.json and every JUnit file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.judging import waivers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.judging.verdict import Record, Verdict
    from pytest_gpucluster.places import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One outcome and the node id of its test; the criterion itself where no test was selected."""

    nodeid: str
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that results.json and a JUnit file are made from.

    Attributes:
        cases: all expected outcomes, in the order of the plan.
        places: the expected GPUs and nodes by id.
        facts: the other top-level members of results.json.
        is_rebuilt: made from a journal after the run, not by the run itself.
    """

    cases: tuple[Case, ...]
    verdict: Verdict
    places: Mapping[str, Place]
    facts: Mapping[str, Any]
    is_rehearsal: bool
    is_rebuilt: bool = False

    @property
    def waivers(self) -> list[str]:
        """A line about each waiver."""
        return waivers.lines_of(self.facts.get("waivers", []))
