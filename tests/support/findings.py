"""What tests compare of a finding: its bad facts and its doubts, each in a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpucluster.judging.finding import Finding

NOTHING: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


def said(finding: Finding) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The bad facts, and what is unknown."""
    return finding.facts, finding.doubts
