"""Which two of many units fail together, where each half of them passes by itself. Pure.

Halves by one bit of the units' numbers run at once: a pair fails in a half exactly where its numbers agree in that bit. After
all bits the pairs that are left share no unit, so that one round tests all of them. Each outcome is weighed by the error rates
of the tests, so that a wrong one delays the search and does not mislead it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from pytest_gpucluster.judging.suspicion import ErrorRates

    Pair = tuple[int, int]
    Units = tuple[int, ...]

FOUND = 0.99
TESTED = 0.5
"""A round of pairs follows where pairs that share no unit hold this share of the weight."""
FEWEST_FAILURES = 2
LEAST_WEIGHT = 1e-3
"""Of the heaviest pair's weight: what weighs less is in no round of pairs."""


def most_rounds_for(units: int) -> int:
    """Rounds after which the search for a pair ends."""
    return 2 * max(1, (units - 1).bit_length()) + 6


def find_pair(
    weights: dict[Pair, float], rates: ErrorRates
) -> Generator[tuple[Units, ...], Sequence[bool | None], Pair | None]:
    """Find the pair of units that fails together.

    Args:
        weights: the pairs that may do so, the smaller number first, with how probable each is. A unit may pair with itself.
            The search changes them.
        rates: how often a test is wrong.

    Yields:
        groups of units without a common one; sent is which of them passed, None where one was not measured.

    Returns:
        the pair, once it is probable enough and failed twice by itself; None where the rounds ran out.
    """
    units = sorted({unit for pair in weights for unit in pair})
    bits = max(1, (units[-1]).bit_length())
    failures: dict[Pair, int] = {}
    turn, was_bit = 0, False
    for _ in range(most_rounds_for(len(units))):
        best = max(weights, key=lambda pair: weights[pair])
        if weights[best] >= FOUND * sum(weights.values()) and failures.get(best, 0) >= FEWEST_FAILURES:
            return best
        matched = _matched(weights)
        held = sum(weights[pair] for pair in matched) / sum(weights.values())
        if held >= (TESTED if was_bit else FOUND):
            groups, was_bit = [tuple(dict.fromkeys(pair)) for pair in matched], False
        else:
            sides = [tuple(unit for unit in units if unit >> turn % bits & 1 == side) for side in (0, 1)]
            groups = [side for side in sides if side]
            turn, was_bit = turn + 1, True
        for group, passed in zip(groups, (yield tuple(groups)), strict=True):
            _weigh(weights, group, passed=passed, rates=rates)
            if passed is False:
                pair = (group[0], group[-1])
                failures[pair] = failures.get(pair, 0) + (len(group) <= 2)
    return None


def _matched(weights: Mapping[Pair, float]) -> list[Pair]:
    """The heaviest pairs that share no unit, without those that hardly weigh anything."""
    least = LEAST_WEIGHT * max(weights.values())
    taken: set[int] = set()
    found = []
    for pair in sorted((pair for pair, weight in weights.items() if weight > least), key=lambda pair: -weights[pair]):
        if taken.isdisjoint(pair):
            found.append(pair)
            taken.update(pair)
    return found


def _weigh(weights: dict[Pair, float], group: Units, *, passed: bool | None, rates: ErrorRates) -> None:
    """Weigh all pairs inside a group by its outcome."""
    if passed is None:
        return
    factor = rates.missed / (1 - rates.false_failure) if passed else (1 - rates.missed) / rates.false_failure
    members = set(group)
    for pair in weights:
        if pair[0] in members and pair[1] in members:
            weights[pair] *= factor
