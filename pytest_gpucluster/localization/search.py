"""Which parts make a collective miss its limit: group tests in rounds, and confirmation against known-good partners. Pure.

A group of parts runs together and passes or misses its limit. The groups of one round share no part, so that all of them run
at once. :func:`search` has the groups of a round measured, learns from the results, and ends with a report.

Two rounds sweep all parts, in blocks and across the blocks. Later rounds test each suspect with a partner that passed
elsewhere, and the low suspicions in pools. What is left runs as one group beside them, without the suspects. A culprit is
named only where two tests in different pair_tests failed and nothing else explains them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_gpucluster.localization.beliefs import ErrorRates
from pytest_gpucluster.localization.knowledge import Knowledge
from pytest_gpucluster.localization.rounds import across, blocks, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from pytest_gpucluster.localization.parts import MemberGroup, Result, SearchPart, SearchReport


BLOCK = 0.6
"""Parts in a group of the first round, relative to the square root of all."""


def search(
    parts: Sequence[SearchPart],
    measure: Callable[[Sequence[MemberGroup]], Sequence[Result]],
    *,
    rates: ErrorRates | None = None,
    group_size: int | None = None,
    most_rounds: int | None = None,
) -> SearchReport:
    """Find the culprits among parts of which a group failed.

    Args:
        parts: at least 2, each with a name of its own. Parts of one container should stand together.
        measure: the results of the groups of a round, in their order. The groups have no common part, and at least 2 each.
        rates: how often a test is wrong.
        group_size: of the groups of the first two rounds, about; chosen by the number of parts where absent.
        most_rounds: the search ends after so many rounds, whatever is still open; :func:`bound` by default.

    Raises:
        ValueError: fewer than 2 parts, a name twice or of a part and a container, or not one result for each group.
    """
    rounds = _rounds(parts, rates or ErrorRates(), group_size, bound(len(parts)) if most_rounds is None else most_rounds)
    try:
        groups = next(rounds)
        while True:
            groups = rounds.send(measure(groups))
    except StopIteration as ended:
        report: SearchReport = ended.value
        return report


def _rounds(
    parts: Sequence[SearchPart], rates: ErrorRates, group_size: int | None, last: int
) -> Generator[tuple[MemberGroup, ...], Sequence[Result], SearchReport]:
    """Ask for the groups of each round, and return what was found."""
    known = Knowledge(parts, rates)
    size = max(2, group_size or math.ceil(BLOCK * math.sqrt(len(parts))))
    groups = blocks(known, size)
    while known.rounds < last and groups:
        known.note(groups, (yield groups))
        groups = across(known) if known.rounds == 1 else plan(known, 3 * size)
    return known.report()


def bound(parts: int) -> int:
    """The most rounds that a search among so many parts asks for."""
    return 12 + 4 * max(1, (parts - 1).bit_length())
