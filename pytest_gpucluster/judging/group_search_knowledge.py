"""What the group tests so far say: which suspects are confirmed, open, or let go. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import combinations
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.group_tests import ANYWHERE, Finding, GroupTest, Report, Suspect
from pytest_gpucluster.judging.suspicion import Observed, probabilities

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpucluster.judging.group_tests import Group, Kind, Part, Purpose, Result
    from pytest_gpucluster.judging.suspicion import ErrorRates

WEIGHTS: dict[Kind, float] = {"part": 1.0, "whole": 0.1, "edge": 0.1, "between": 0.05}
"""How frequent culprits of a kind are, relative to parts."""
NAMED = 0.998
"""A culprit is at least so probable."""
FEWEST_FAILURES = 2
"""Failed tests, each in other company, without which nobody is named."""
CLEAN = 0.05
"""The others of a test are all less probable culprits than this where its failure counts as a confirmation."""
TESTED_ALONE = 0.01
"""Above this probability a suspect is tested with one partner and in no pool."""
MISSED_SHARE = 0.006
"""Culprits expected among those that are let go, as a share of all expected culprits (at least 1)."""
WHOLE_REST = 0.9
"""The rest is judged by a group of at least this share of it; by all of it after a failure."""
MOST_CONTAINERS_PAIRED = 32
"""Up to so many containers, the connection of any two is a suspect from the start."""
MOST_UNITS = 256
"""Units of which two that fail together are searched; parts without containers stand in so many blocks."""


class Knowledge:
    """The tests so far, and how probable each suspect is."""

    def __init__(self, parts: Sequence[Part], rates: ErrorRates) -> None:
        self.parts = {part.name: part for part in parts}
        if len(self.parts) < 2 or len(self.parts) < len(parts):
            raise ValueError(f"{len(parts)} parts, {len(self.parts)} names: expected at least 2 parts, each with its own name")
        if shared := sorted(self.parts.keys() & {name for part in parts for name in part.within}):
            raise ValueError(f"{shared[0]} names a part and what parts are in: expected different names")
        sizes = Counter(name for part in parts for name in dict.fromkeys(part.within))
        self.sizes = {name: size for name, size in sizes.items() if size > 1}
        containers = [Suspect(kind, (name,)) for name in self.sizes for kind in ("whole", "edge")]
        self.suspects = [*(Suspect("part", (name,)) for name in self.parts), *containers, ANYWHERE]
        firsts = sorted({at for name in self.parts if (at := self.first_container(name)) is not None})
        if len(firsts) <= MOST_CONTAINERS_PAIRED:
            self.suspects += [Suspect("between", pair) for pair in combinations(firsts, 2)]
        self.index = {suspect: number for number, suspect in enumerate(self.suspects)}
        self.rates = rates
        self.tests: list[GroupTest] = []
        self.covered: list[tuple[int, ...]] = []
        self.rounds = 0
        self.chance = [0.0] * len(self.suspects)
        self.company: dict[str, Counter[str]] = defaultdict(Counter)
        self._update()

    # --- What is known ---

    def note(self, groups: Sequence[Group], results: Sequence[Result]) -> None:
        """Take in the results of a round."""
        if len(groups) != len(results):
            raise ValueError(f"{len(results)} results for {len(groups)} groups: expected one for each")
        self.rounds += 1
        for group, result in zip(groups, results, strict=True):
            self.tests.append(GroupTest(round=self.rounds, group=group, result=result))
            self.covered.append(self._suspects_in(group))
            if len(group.parts) == 2:
                one, other = group.parts
                self.company[one][other] += 1
                self.company[other][one] += 1
        self._update()
        for test in tuple(self.tests):
            if test.result.passed is False and len(test.group.parts) == 2:
                self._suspect_connection(*test.group.parts)

    def of(self, name: str) -> float:
        """The probability that a part is a culprit."""
        return self.chance[self.index[Suspect("part", (name,))]]

    def _suspects_in(self, group: Group) -> tuple[int, ...]:
        """The numbers of all suspects that a test covers."""
        names = group.parts
        inside = Counter(name for part in names for name in self.parts[part].within if name in self.sizes)
        found = [Suspect("part", (name,)) for name in names]
        found += [Suspect("whole", (name,)) for name in inside]
        found += [Suspect("edge", (name,)) for name, number in inside.items() if number < len(names)]
        found += [ANYWHERE] if group.purpose == "rest" else []
        between = self.suspects[len(self.parts) + 2 * len(self.sizes) + 1 :]
        members = {*names, *inside} if between else set()
        found += [suspect for suspect in between if members.issuperset(suspect.names)]
        return tuple(self.index[suspect] for suspect in found)

    def suspect_between(self, one: str, other: str) -> bool:
        """Two parts or containers failed together, and each of them passes with others. Returns whether that is confirmed."""
        suspect = Suspect("between", (min(one, other), max(one, other)))
        if suspect not in self.index:
            self.index[suspect] = len(self.suspects)
            self.suspects.append(suspect)
            self.covered = [self._suspects_in(test.group) for test in self.tests]
            self._update()
        return self.is_confirmed(self.index[suspect])

    def _suspect_connection(self, one: str, other: str) -> None:
        """Suspect what is between two parts that failed together, where each of them passes with others."""
        if max(self.of(one), self.of(other)) < TESTED_ALONE:
            self.suspect_between(one, other)
            ends = [self.first_container(name) for name in (one, other)]
            if None not in ends and ends[0] != ends[1]:
                self.suspect_between(*map(str, ends))

    def first_container(self, name: str) -> str | None:
        """What a part is in, where other parts are in it too."""
        return next((at for at in self.parts[name].within if at in self.sizes), None)

    def units(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """Parts by their first container; without containers, parts or blocks of them."""
        by_container: dict[str, list[str]] = defaultdict(list)
        for name in names:
            by_container[self.first_container(name) or name].append(name)
        if len(by_container) < len(names) and 2 < len(by_container) <= MOST_UNITS:
            return [tuple(members) for members in by_container.values()]
        number = min(len(names), MOST_UNITS)
        return [tuple(names[len(names) * at // number : len(names) * (at + 1) // number]) for at in range(number)]

    def rest(self) -> tuple[str, ...]:
        """All parts but those that a culprit leaves out."""
        out = {name for number in self.culprits() for name in self.names_of(number)}
        return tuple(name for name in self.parts if name not in out)

    def failing_rest(self) -> tuple[str, ...]:
        """The rest, where it fails although nothing is suspected in it; else nothing."""
        return self.rest() if self.chance[self.index[ANYWHERE]] >= NAMED else ()

    def is_rest_good(self) -> bool:
        """Whether nearly all parts but the culprits passed together, and nothing speaks against it."""
        rests = [test for test in self.tests if test.group.purpose == "rest"]
        has_failed = any(test.result.passed is False for test in rests)
        fewest = (1 if has_failed else WHOLE_REST) * len(self.rest())
        good = any(test.result.passed and len(test.group.parts) >= fewest for test in rests)
        return good and self.chance[self.index[ANYWHERE]] < TESTED_ALONE

    def _update(self) -> None:
        tests = zip(self.covered, self.tests, strict=True)
        seen = [Observed(covered, not test.result.passed) for covered, test in tests if test.result.passed is not None]
        weights = [WEIGHTS[suspect.kind] for suspect in self.suspects]
        self.chance = probabilities(seen, weights, parts=len(self.parts), rates=self.rates)

    def finding(self, number: int) -> Finding:
        """A suspect with the tests that speak for and against it."""
        evidence, passed = [], 0
        for covered, test in zip(self.covered, self.tests, strict=True):
            if number not in covered or test.result.passed is None:
                continue
            passed += test.result.passed
            if not test.result.passed and all(self.chance[other] < CLEAN for other in covered if other != number):
                evidence.append(test)
        return Finding(suspect=self.suspects[number], confidence=self.chance[number], evidence=tuple(evidence), passed=passed)

    def is_confirmed(self, number: int) -> bool:
        """Whether a suspect is probable enough, and enough tests that nothing else explains confirm it."""
        if self.chance[number] < NAMED or self.suspects[number] == ANYWHERE:
            return False
        suspect, evidence = self.suspects[number], self.finding(number).evidence
        purposes: tuple[Purpose, ...] = ()
        if suspect.kind != "part":
            purposes = ("boundary",) if suspect.kind == "between" else ("pool",)
        close = [test.group.parts for test in evidence if len(test.group.parts) == 2 or test.group.purpose in purposes]
        is_one_pair = suspect.kind == "between" and suspect.names[0] in self.parts
        return len(close if is_one_pair else set(map(frozenset, close))) >= FEWEST_FAILURES

    def culprits(self) -> list[int]:
        """The numbers of the confirmed suspects."""
        return [number for number, chance in enumerate(self.chance) if chance >= NAMED and self.is_confirmed(number)]

    def open_suspects(self, culprits: Iterable[int]) -> list[int]:
        """The numbers of those neither confirmed nor let go, most probable first. Parts of a bad container are let go."""
        bad = {self.suspects[number] for number in culprits}
        whole = {suspect.names[0] for suspect in bad if suspect.kind == "whole"}
        known = set(culprits)
        ranked = []
        for number, suspect in enumerate(self.suspects):
            covered = suspect.kind == "part" and not whole.isdisjoint(self.parts[suspect.names[0]].within)
            covered = covered or (suspect.kind == "edge" and suspect.names[0] in whole)
            if number not in known and not covered and suspect != ANYWHERE:
                ranked.append(number)
        ranked.sort(key=lambda number: self.chance[number])
        budget = MISSED_SHARE * max(1.0, math.fsum(self.chance[number] for number in culprits))
        for at, number in enumerate(ranked):
            budget -= self.chance[number]
            if budget < 0:
                return ranked[at:][::-1]
        return []

    def names_of(self, number: int) -> tuple[str, ...]:
        """The parts that a confirmed culprit leaves out of later tests."""
        suspect = self.suspects[number]
        if suspect.names[0] in self.parts:
            return suspect.names[:1]
        return tuple(name for name, part in self.parts.items() if suspect.names[0] in part.within)

    def last_rest(self) -> GroupTest | None:
        """The last large group without suspects."""
        return next((test for test in reversed(self.tests) if test.group.purpose == "rest"), None)

    def report(self) -> Report:
        """What was found."""
        named = self.culprits()
        doubtful = [number for number in self.open_suspects(named) if self.chance[number] >= 0.5]
        known = {*named, *doubtful}
        left = [chance for number, chance in enumerate(self.chance) if number not in known]
        return Report(
            culprits=tuple(sorted(map(self.finding, named), key=lambda one: -one.confidence)),
            unconfirmed=tuple(map(self.finding, doubtful)),
            expected_missed=math.fsum(left),
            rest=self.last_rest(),
            tests=tuple(self.tests),
            rounds=self.rounds,
        )
