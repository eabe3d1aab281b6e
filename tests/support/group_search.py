"""Clusters of which groups are tested: who is in them, what spoils which group, and which tests are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.localization.parts import Part, Result
from pytest_gpucluster.localization.search import search

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpucluster.localization.parts import Group, Report, Suspect


def nodes(number: int, leaf: int | None = None) -> list[Part]:
    """Nodes, at leaf switches of ``leaf`` nodes."""
    return [Part(name=f"node{at}", within=(f"leaf{at // leaf}",) if leaf else ()) for at in range(number)]


def found(parts: Sequence[Part], passes: Callable[[Group], bool | None], most_rounds: int | None = None) -> Report:
    """The report of a search; each round's groups share no part, and each has two."""

    def measure(groups: Sequence[Group]) -> list[Result]:
        names = [name for group in groups for name in group.parts]
        assert len(names) == len(set(names))
        assert all(len(group.parts) >= 2 for group in groups)
        return [Result(passed=passes(group), value=1.0) for group in groups]

    return search(parts, measure, most_rounds=most_rounds)


def named(report: Report) -> set[Suspect]:
    """Who is named, each once."""
    suspects = [finding.suspect for finding in report.culprits]
    assert len(suspects) == len(set(suspects))
    return set(suspects)


def without(*bad: str) -> Callable[[Group], bool]:
    """Groups without these parts pass."""
    return lambda group: not set(bad) & set(group.parts)


def wrong(passes: Callable[[Group], bool], *, times: int, where: Callable[[Group], bool]) -> Callable[[Group], bool]:
    """The first tests of such groups have the wrong outcome."""
    left = iter(range(times))
    return lambda group: passes(group) != (where(group) and next(left, None) is not None)
