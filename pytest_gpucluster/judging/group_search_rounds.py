"""Which groups the next round tests. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import combinations, islice, pairwise
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.group_search_knowledge import TESTED_ALONE
from pytest_gpucluster.judging.group_tests import Group, Suspect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_gpucluster.judging.group_search_knowledge import Knowledge
    from pytest_gpucluster.judging.group_tests import Kind, Purpose

FEW = 0.1
"""Where fewer culprits than this are expected among the low suspicions, these are tested with the rest and not in pools."""
POOLED = 0.3
"""Culprits expected in one pool, at most."""
MOST_REPEATS = 2
"""Tests of a part with the same partner, at most, while no other partner can be had."""
MOST_OF_ONE = 6
"""Tests of the same connection, and of the same rest, at most."""
MOST_TRIED = 8
"""Parts of a container from which the two for a test are taken."""


def sweep(knowledge: Knowledge, size: int) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Blocks of neighbours of about ``size``; then as many groups across all blocks."""
    parts = knowledge.parts
    names = sorted(parts, key=lambda name: parts[name].within)
    number = max(1, min(math.ceil(len(names) / size), len(names) // 2))
    ends = [len(names) * at // number for at in range(number + 1)]
    blocks = tuple(Group(tuple(names[a:b]), "block") for a, b in pairwise(ends))
    across = tuple(Group(tuple(names[at::number]), "across") for at in range(number))
    return blocks, across


def plan(knowledge: Knowledge, pool_size: int) -> tuple[Group, ...]:
    """The groups of the next round; none where all is decided or nothing more can be learnt."""
    undecided = knowledge.open_suspects(knowledge.culprits())
    is_part = {number for number in undecided if knowledge.suspects[number].kind == "part"}
    left_out = set(knowledge.parts).difference(knowledge.rest())
    draft = _Draft(knowledge, used=left_out, avoid={knowledge.suspects[number].names[0] for number in is_part})
    low = [knowledge.suspects[number].names[0] for number in undecided if number in is_part]
    low = [name for name in low if knowledge.of(name) < TESTED_ALONE]
    for number in undecided:
        if knowledge.chance[number] >= TESTED_ALONE:
            draft.test_alone(number)
    is_wanted = not knowledge.is_rest_good() and not knowledge.failing_rest()
    if not is_wanted or math.fsum(map(knowledge.of, low)) >= FEW:
        draft.pool(low, pool_size)
    if is_wanted:
        draft.add_rest(low)
    return tuple(draft.groups)


class _Draft:
    """A round in the making. No part is used twice."""

    def __init__(self, search: Knowledge, *, used: set[str], avoid: set[str]) -> None:
        self.search = search
        self.groups: list[Group] = []
        self.used = set(used)
        self.avoid = avoid
        self.by_trust = sorted(search.parts, key=self._distrust)
        self.neighbours: dict[str, list[str]] = defaultdict(list)
        for name in self.by_trust:
            for container in search.parts[name].within:
                self.neighbours[container].append(name)

    def _distrust(self, name: str) -> float:
        """The probability that a test with this part fails for its sake, roughly."""
        search = self.search
        kinds: tuple[Kind, ...] = ("whole", "edge")
        around = [Suspect(kind, (at,)) for at in search.parts[name].within if at in search.sizes for kind in kinds]
        return search.of(name) + math.fsum(search.chance[search.index[suspect]] for suspect in around)

    def add(self, parts: Sequence[str], purpose: Purpose) -> None:
        """One more group."""
        self.groups.append(Group(tuple(parts), purpose))
        self.used.update(parts)

    def test_alone(self, number: int) -> None:
        """Test a suspect with a partner that is most probably good."""
        suspect = self.search.suspects[number]
        if suspect.kind == "between" and suspect.names[0] in self.search.parts:
            if self.used.isdisjoint(suspect.names) and self._repeats(*suspect.names) < MOST_OF_ONE:
                self.add(suspect.names, "suspect")
        elif suspect.kind == "between":
            ends = [[name for name in self.neighbours[end] if name not in self.used][:MOST_TRIED] for end in suspect.names]
            fresh = ((one, other) for one in ends[0] for other in ends[1] if not self._repeats(one, other))
            for pair in islice(fresh, 1):
                self.add(pair, "suspect")
        elif suspect.kind == "part":
            self._with_partner(suspect.names[0], near=self.search.parts[suspect.names[0]].within[:1])
        else:
            self._test_container(suspect)

    def _test_container(self, suspect: Suspect) -> None:
        """Test the inside of a container; where only what leaves it is suspected, a part of it with one outside."""
        container = suspect.names[0]
        free = sorted((name for name in self.neighbours[container] if name not in self.used), key=self.avoid.__contains__)
        inside = combinations(free[:MOST_TRIED], 2) if suspect.kind == "whole" else iter(())
        fresh = next((pair for pair in inside if not self._repeats(*pair)), None)
        if fresh is not None:
            self.add(fresh, "suspect")
        elif free:
            self._with_partner(free[0], outside=container)

    def _with_partner(self, name: str, *, near: tuple[str, ...] = (), outside: str | None = None) -> None:
        """Pair a part with another one, of the containers ``near`` if it can, and not of the container ``outside``."""
        if name in self.used:
            return
        for most in (0, MOST_REPEATS - 1):
            others = (other for other in self._partners(name, near, outside) if self._repeats(name, other) <= most)
            partner = next(others, None)
            if partner is not None:
                self.add((name, partner), "suspect")
                return

    def _partners(self, name: str, near: tuple[str, ...], outside: str | None) -> Iterator[str]:
        """Parts to test another one with, the best first."""
        parts = self.search.parts
        for container in near:
            yield from (other for other in self.neighbours[container] if self._is_free(other, name) and other not in self.avoid)
        for trusted in (True, False):
            for other in self.by_trust:
                is_outside = outside is None or outside not in parts[other].within
                if is_outside and self._is_free(other, name) and (other not in self.avoid) == trusted:
                    yield other

    def _is_free(self, other: str, name: str) -> bool:
        return other != name and other not in self.used

    def _repeats(self, one: str, other: str) -> int:
        return self.search.company[one][other]

    def pool(self, names: Sequence[str], size: int) -> None:
        """Groups of low suspicion, so large that most of them pass."""
        waiting = [name for name in names if name not in self.used]
        number = max(math.ceil(len(waiting) / size), math.ceil(math.fsum(map(self.search.of, waiting)) / POOLED))
        for at in range(min(number, len(waiting))):
            self._pool(waiting[at::number])

    def _pool(self, members: Sequence[str]) -> None:
        if len(members) > 1:
            self.add(members, "pool")
        else:
            self._with_partner(members[0])

    def add_rest(self, low: Sequence[str]) -> None:
        """Everything else, and low suspicions, as one group: it shows whether all is well without the culprits."""
        rest = [name for name in self.search.parts if name not in self.used and name not in self.avoid.difference(low)]
        group = Group(tuple(rest), "rest")
        repeats = sum(test.group == group for test in self.search.tests)
        if len(rest) >= max(2, len(self.search.parts) // 2) and repeats < MOST_OF_ONE:
            self.add(rest, "rest")
