"""Which two of many units fail together, where each smaller group passes. Pure.

Every two units are a hypothesis, and all tests so far weigh it: nothing is kept from round to round. Once two units are found
that have several parts, the pairs of these are weighed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations_with_replacement

Unit = tuple[str, ...]
Pair = tuple[int, int]

EXPECTED = 0.02
"""How probable a bad connection is before any test."""
FOUND = 0.9
"""A pair of units with this share of the weight is looked into, or suspected where both are parts."""
COVERED = 0.75
"""A test has a unit where it has this share of its parts."""
SAYS_NOTHING = 0.01
"""A factor so near to 1 is left out."""
HELD = 0.9
"""The heaviest pairs with this share of the weight decide about the groups of a round."""
EQUAL = 0.99
"""Pairs that weigh this share of the last of these decide too."""
MOST_INSIDE = 3
"""Pairs of units that are looked into before others are."""


@dataclass(frozen=True, slots=True)
class ConnectionEvidence:
    """What a test says about each connection inside it.

    Attributes:
        members: the parts of the test.
        factor: how much more probable its outcome is where such a connection is bad.
    """

    members: frozenset[str]
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBeliefs:
    """Which two units may fail together; a unit of several parts also by itself.

    Attributes:
        units: parts, containers or blocks; or the parts of two units.
        pairs: for pairs of numbers of units how probable it is that just this one fails, the most probable first; without
            those that are much less probable.
        boundary: how probable it is that all pairs fail.
        chance: how probable it is that any connection fails.
        sides: so many units are on one side, and the others on the other; 0: there are no sides.
    """

    units: Sequence[Unit]
    pairs: Mapping[Pair, float]
    boundary: float
    chance: float
    sides: int

    @property
    def ends(self) -> tuple[Unit, Unit] | None:
        """The most probable pair, where it is probable enough."""
        (one, other), chance = next(iter(self.pairs.items()), ((0, 0), 0.0))
        return (self.units[one], self.units[other]) if chance >= FOUND else None


def find_bad_connection(
    units: Sequence[Unit], tests: Sequence[ConnectionEvidence], *, is_boundary_open: bool
) -> ConnectionBeliefs:
    """Weigh all pairs of units; or the pairs of parts inside two units, once these are found.

    Args:
        units: all of them, in the same order in each round; one whose parts are known culprits is empty.
        tests: so far.
        is_boundary_open: whether all pairs of two units may fail, and not just one.
    """
    rows, _ = _weigh(units, tests, 0)
    none = _number(rows) * (1 / EXPECTED - 1)
    total = none + math.fsum(map(math.fsum, rows))
    found = ConnectionBeliefs(units=units, pairs=_heaviest(rows, total), boundary=0.0, chance=1 - none / total, sides=0)
    for _ in range(MOST_INSIDE):
        if found.ends is None or len({*found.ends[0], *found.ends[1]}) == 2:
            break
        at, row = next(iter(found.pairs))
        rows[row][at] = 0.0
        others = none + math.fsum(map(math.fsum, rows))
        inside = _look_inside(units[at], units[row], tests, others, is_boundary_open=is_boundary_open)
        if inside.chance >= 0.5:
            return replace(inside, chance=found.chance)
        found = replace(found, pairs=_heaviest(rows, others))
    return found


def _look_inside(
    one: Unit, other: Unit, tests: Sequence[ConnectionEvidence], others: float, *, is_boundary_open: bool
) -> ConnectionBeliefs:
    """Weigh the pairs of parts of two units, against the weight of everything else."""
    units = [(name,) for name in dict.fromkeys((*one, *other))]
    sides = 0 if one == other else len(one)
    rows, weight = _weigh(units, tests, sides)
    number = _number(rows)
    boundary = weight * number if sides and is_boundary_open else 0.0
    others *= 2 * number if sides and is_boundary_open else number
    total = math.fsum(map(math.fsum, rows)) + boundary + others
    pairs, chance = _heaviest(rows, total), 1 - others / total
    return ConnectionBeliefs(units=units, pairs=pairs, boundary=boundary / total, chance=chance, sides=sides)


def probability_explained_by(
    found: ConnectionBeliefs, tests: Sequence[ConnectionEvidence], known: Collection[tuple[str, ...]]
) -> list[float]:
    """How probable it is for each test, by all others, that one of the pairs spoils it.

    Args:
        found: the pairs.
        tests: all that they were weighed by.
        known: pairs of parts that are left out.
    """
    units, place = found.units, _place(found.units)
    names = {(one, other): tuple(sorted(units[one] + units[other])) for one, other in found.pairs}
    pairs = {pair: chance for pair, chance in found.pairs.items() if names[pair] not in known}
    explained = [0.0] * len(tests)
    for at, test in enumerate(tests):
        inside = _inside(units, place, test) if test.factor > 1 + SAYS_NOTHING else []
        both: Iterable[Pair] = combinations_with_replacement(inside, 2)
        if len(inside) ** 2 > 2 * len(pairs):
            members = set(inside)
            both = (pair for pair in pairs if members.issuperset(pair))
        chance = math.fsum(pairs.get(pair, 0.0) for pair in both)
        chance += found.boundary * (0 < bisect_left(inside, found.sides) < len(inside))
        explained[at] = chance / (chance + max(1 - chance, 0.0) * test.factor) if chance else 0.0
    return explained


def missed_share(names: Sequence[str], passed: Sequence[frozenset[str]], missed: float) -> float:
    """The share of the bad connections among ``names`` that these passed tests would not have shown."""
    alike = Counter(tuple(name in members for members in passed) for name in names)
    share = pairs = 0.0
    for (one, first), (other, second) in combinations_with_replacement(alike.items(), 2):
        number = first * (first - 1) / 2 if one == other else first * second
        pairs += number
        share += number * missed ** sum(a and b for a, b in zip(one, other, strict=True))
    return share / pairs if pairs else 0.0


def _weigh(units: Sequence[Unit], tests: Sequence[ConnectionEvidence], sides: int) -> tuple[list[list[float]], float]:
    """The weight of each unit's pairs with those before it, and of the hypothesis that all of them fail.

    Args:
        units: in their order.
        tests: so far. A test has a unit where it has most of its parts.
        sides: the first so many units pair with the others only.
    """
    rows = [
        [float(len(units[one]) > (one == other) and len(units[other]) > 0) for one in range(sides or other + 1)]
        for other in range(len(units))
    ]
    rows[:sides] = [[] for _ in range(sides)]
    boundary, place = 1.0, _place(units)
    for test in tests:
        if abs(test.factor - 1) < SAYS_NOTHING:
            continue
        inside = _inside(units, place, test)
        first = bisect_left(inside, sides)
        boundary *= test.factor if 0 < first < len(inside) else 1.0
        for at in range(first, len(inside)):
            row = rows[inside[at]]
            for one in inside[: first if sides else at + 1]:
                row[one] *= test.factor
    return rows, boundary


def _place(units: Sequence[Unit]) -> dict[str, int]:
    """The number of each part's unit."""
    return {name: number for number, unit in enumerate(units) for name in unit}


def _inside(units: Sequence[Unit], place: Mapping[str, int], test: ConnectionEvidence) -> list[int]:
    """The numbers of the units of a test, in their order."""
    counts = Counter(place[name] for name in test.members if name in place)
    return sorted(number for number, count in counts.items() if count >= COVERED * len(units[number]))


def _number(rows: Sequence[Sequence[float]]) -> int:
    """How many pairs there are."""
    return sum(weight > 0 for row in rows for weight in row)


def _heaviest(rows: Sequence[Sequence[float]], total: float) -> dict[Pair, float]:
    """The heaviest pairs that hold most of the weight, and what share of it each has."""
    ordered = sorted((weight for row in rows for weight in row), reverse=True)
    at = bisect_left(list(accumulate(ordered)), HELD * math.fsum(ordered))
    least = EQUAL * ordered[min(at, len(ordered) - 1)] if ordered else 0.0
    pairs = {(one, other): weight / total for other, row in enumerate(rows) for one, weight in enumerate(row) if weight > least}
    return dict(sorted(pairs.items(), key=lambda pair: -pair[1]))
