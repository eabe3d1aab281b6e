"""Which parts spoil a collective: group tests in rounds, and confirmation against known-good partners. Pure.

A group of parts runs together and passes or misses its limit. The groups of one round share no part, so that all of them run
at once. :func:`search` has the groups of a round measured, learns from the results, and ends with a report.

Two rounds sweep all parts, in blocks and across the blocks. Later rounds test each suspect with a partner that passed
elsewhere, and the low suspicions in pools. What is left runs as one group beside them, without the suspects. A culprit is
named only where two tests in different company failed and nothing else explains them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.group_search_between import find_pair
from pytest_gpucluster.judging.group_search_knowledge import Knowledge
from pytest_gpucluster.judging.group_search_rounds import plan, sweep
from pytest_gpucluster.judging.group_tests import Group
from pytest_gpucluster.judging.suspicion import ErrorRates

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from pytest_gpucluster.judging.group_tests import Part, Report, Result


def search(
    parts: Sequence[Part],
    measure: Callable[[Sequence[Group]], Sequence[Result]],
    *,
    rates: ErrorRates | None = None,
    group_size: int | None = None,
    most_rounds: int | None = None,
) -> Report:
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
        report: Report = ended.value
        return report


def _rounds(
    parts: Sequence[Part], rates: ErrorRates, group_size: int | None, last: int
) -> Generator[tuple[Group, ...], Sequence[Result], Report]:
    """Ask for the groups of each round, and return what was found."""
    known = Knowledge(parts, rates)
    size = max(2, group_size or math.ceil(1.1 * math.sqrt(len(parts))))
    for groups in sweep(known, size)[:last]:
        known.note(groups, (yield groups))
    while known.rounds < last:
        if groups := plan(known, 2 * size):
            known.note(groups, (yield groups))
        elif not (rest := known.failing_rest()) or not (yield from _connection(known, rest, last)):
            break
    return known.report()


def bound(parts: int) -> int:
    """The most rounds that a search among so many parts asks for."""
    return 12 + 4 * max(1, (parts - 1).bit_length())


def _connection(known: Knowledge, rest: Sequence[str], last: int) -> Generator[tuple[Group, ...], Sequence[Result], bool]:
    """Find two containers or parts that fail only together. Returns whether a culprit was found."""
    units = known.units(rest)
    weights = {
        (one, other): 1.0 for other in range(len(units)) for one in range(other + 1) if len({*units[one], *units[other]}) > 1
    }
    pair = yield from _asked(known, units, weights, last)
    if pair is None:
        return False
    one, other = (units[number] for number in pair)
    if len({*one, *other}) > 2:
        if pair[0] != pair[1] and (yield from _is_boundary(known, one, other, last)):
            return True
        units = [(name,) for name in dict.fromkeys((*one, *other))]
        sides = (range(len(one)), range(len(units)) if one is other else range(len(one), len(units)))
        weights = {(a, b): 1.0 for a in sides[0] for b in sides[1] if a < b}
        pair = yield from _asked(known, units, weights, last)
    return pair is not None and known.suspect_between(*(units[number][0] for number in pair))


def _asked(
    known: Knowledge, units: Sequence[tuple[str, ...]], weights: dict[tuple[int, int], float], last: int
) -> Generator[tuple[Group, ...], Sequence[Result], tuple[int, int] | None]:
    """Search a pair of units, and note the tests. None where it is not found before round ``last`` has ended."""
    pairs = find_pair(weights, known.rates)
    try:
        asked = next(pairs)
        while known.rounds < last:
            groups = tuple(Group(tuple(name for unit in group for name in units[unit]), "halves") for group in asked)
            results = yield groups
            known.note(groups, results)
            asked = pairs.send([result.passed for result in results])
    except StopIteration as ended:
        found: tuple[int, int] | None = ended.value
        return found
    return None


def _is_boundary(
    known: Knowledge, one: Sequence[str], other: Sequence[str], last: int
) -> Generator[tuple[Group, ...], Sequence[Result], bool]:
    """Whether all halves of two containers fail with each other: then no single connection is to blame."""
    containers = [known.first_container(names[0]) for names in (one, other)]
    if None in containers or min(len(one), len(other)) < 2:
        return False
    halves = [(names[: len(names) // 2], names[len(names) // 2 :]) for names in (one, other)]
    for turned in (False, True):
        if known.rounds >= last:
            return False
        mates = halves[1][::-1] if turned else halves[1]
        groups = tuple(Group((*a, *b), "boundary") for a, b in zip(halves[0], mates, strict=True))
        results = yield groups
        known.note(groups, results)
        if sum(result.passed is False for result in results) < 2 - turned:
            return False
    return known.suspect_between(*map(str, containers))
