"""Clusters of which groups are tested: who is in them, what spoils which group, and which tests are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.localization.parts import Result, SearchPart
from pytest_gpucluster.localization.search import search

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpucluster.localization.parts import MemberGroup, SearchReport, Suspect


def nodes(number: int, leaf: int | None = None) -> list[SearchPart]:
    """Nodes, at leaf switches of ``leaf`` nodes."""
    return [SearchPart(name=f"node{at}", within=(f"leaf{at // leaf}",) if leaf else ()) for at in range(number)]


def found(
    parts: Sequence[SearchPart], passes: Callable[[MemberGroup], bool | None], most_rounds: int | None = None
) -> SearchReport:
    """The report of a search; each round's groups share no part, and each has two."""

    def measure(groups: Sequence[MemberGroup]) -> list[Result]:
        names = [name for group in groups for name in group.parts]
        assert len(names) == len(set(names))
        assert all(len(group.parts) >= 2 for group in groups)
        return [Result(passed=passes(group), value=1.0) for group in groups]

    return search(parts, measure, most_rounds=most_rounds)


def named(report: SearchReport) -> set[Suspect]:
    """Who is named, each once."""
    suspects = [finding.suspect for finding in report.culprits]
    assert len(suspects) == len(set(suspects))
    return set(suspects)


def without(*bad: str) -> Callable[[MemberGroup], bool]:
    """Groups without these parts pass."""
    return lambda group: not set(bad) & set(group.parts)


def wrong(
    passes: Callable[[MemberGroup], bool], *, times: int, where: Callable[[MemberGroup], bool]
) -> Callable[[MemberGroup], bool]:
    """The first tests of such groups have the wrong outcome."""
    left = iter(range(times))
    return lambda group: passes(group) != (where(group) and next(left, None) is not None)
