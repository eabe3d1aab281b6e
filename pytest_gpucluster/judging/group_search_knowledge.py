"""What the group tests so far say: which suspects are confirmed, open, or let go. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.group_search_between import FOUND, Weight, hunt, missed_share, spoilt_by
from pytest_gpucluster.judging.group_search_naming import is_confirmed
from pytest_gpucluster.judging.group_search_roster import WEIGHTS, Roster
from pytest_gpucluster.judging.group_tests import Finding, GroupTest, Report
from pytest_gpucluster.judging.suspicion import Observed, weigh_suspects

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pytest_gpucluster.judging.group_search_between import Hypotheses
    from pytest_gpucluster.judging.group_tests import Group, Part, Result
    from pytest_gpucluster.judging.suspicion import Beliefs, ErrorRates

NAMED = 0.999
"""A culprit is at least so probable."""
CLEAN = 0.05
"""All else is less probable than this where a failed test counts as a confirmation;"""
UNTOLD = 1.5
"""or less than this, relative to a part of which no test tells anything: among few parts that is more than the above."""
MISSED_SHARE = 0.006
"""Culprits expected among those that are let go, as a share of all expected culprits (at least 1)."""
UNSPOILT = 0.01
"""The rest is let go where a connection in it is bad with less than this probability, """
MISSED_CONNECTIONS = 0.01
"""and where its tests would have missed so few of the bad connections."""
HUNTED = 0.9
"""A connection is searched where one is bad with this probability."""
LATEST_RESTS = 8
"""Tests of the rest that are remembered."""


class Knowledge:
    """The tests so far, and how probable each suspect is.

    Attributes:
        covered: for each test the numbers of the suspects in it.
        company: how often two parts were tested as a pair.
        chance: the probability of each suspect that it is a culprit.
        share: that of a part of which no test tells anything.
        named: the numbers of the confirmed suspects.
        connection: which two units may fail together, where a test of the rest failed.
        spoilt: for tests, how probable it is that a bad connection spoils them that is no suspect.
    """

    def __init__(self, parts: Sequence[Part], rates: ErrorRates) -> None:
        self.roster = Roster(parts)
        self.rates = rates
        self.tests: list[GroupTest] = []
        self.covered: list[tuple[int, ...]] = []
        self.rounds = 0
        self.company: dict[str, Counter[str]] = defaultdict(Counter)
        self.named: tuple[int, ...] = ()
        self.connection: Hypotheses | None = None
        self.spoilt: dict[int, float] = {}
        beliefs = self._weigh_suspects((), {}, ())
        self.chance, self.share = beliefs.chance, beliefs.share

    def note(self, groups: Sequence[Group], results: Sequence[Result]) -> None:
        """Take in the results of a round."""
        if len(groups) != len(results):
            raise ValueError(f"{len(results)} results for {len(groups)} groups: expected one for each")
        self.rounds += 1
        for group, result in zip(groups, results, strict=True):
            self.tests.append(GroupTest(round=self.rounds, group=group, result=result))
            self.covered.append(self.roster.covered(group))
            if len(group.parts) == 2:
                one, other = group.parts
                self.company[one][other] += 1
                self.company[other][one] += 1
        measured = [at for at, test in enumerate(self.tests) if test.result.passed is not None]
        self._weigh_connections(measured)
        beliefs = self._weigh_suspects(measured, self.spoilt, ())
        self.chance, self.share = beliefs.chance, beliefs.share
        probable = [number for number, chance in enumerate(self.chance) if chance >= NAMED]
        self.named = tuple(number for number in probable if is_confirmed(self, number))

    # --- What the tests say ---

    def _weigh_connections(self, measured: Sequence[int]) -> None:
        """Weigh which two units fail together; a pair that is found is a suspect from now on.

        What else may explain a failed test is asked without the tests of the rest, and without those for a connection. Else
        some part takes the blame of them all, and is let go only when it was tested by itself.
        """
        large = {at: 1.0 for at in measured if self.tests[at].group.purpose in ("rest", "halves")}
        self.connection, self.spoilt, roster = None, {}, self.roster
        if len(self.rest()) < 2 or all(self.tests[at].result.passed for at in large):
            return
        explained = self._weigh_suspects(measured, large, roster.links.difference(self.named)).explained
        named = set(self.named)
        tests = [
            self._weight(at, chance if named.isdisjoint(self.covered[at]) else 1.0)
            for at, chance in zip(measured, explained, strict=True)
        ]
        self.connection = found = hunt(roster.units(set(self.rest())), tests, is_boundary_open=not roster.has_pairs)
        is_new = False
        if found.chance >= HUNTED and found.ends is not None and max(map(len, found.ends)) == 1:
            is_new = roster.add_connection(found.ends[0][0], found.ends[1][0])
        elif found.chance >= HUNTED and found.boundary >= FOUND:
            is_new = roster.add_connection(*{str(roster.first_container(unit[0])) for unit in found.units})
            found = replace(found, boundary=0.0)
        if is_new:
            self.covered = [roster.covered(test.group) for test in self.tests]
        known = {roster.suspects[number].names for number in roster.links}
        self.spoilt = dict(zip(measured, spoilt_by(found, tests, known), strict=True))

    def _weigh_suspects(self, measured: Sequence[int], spoilt: Mapping[int, float], left_out: Collection[int]) -> Beliefs:
        seen = [
            Observed(
                tuple(number for number in self.covered[at] if number not in left_out) if left_out else self.covered[at],
                not self.tests[at].result.passed,
                spoilt.get(at, 0.0),
            )
            for at in measured
        ]
        weights = [WEIGHTS[suspect.kind] for suspect in self.roster.suspects]
        return weigh_suspects(seen, weights, parts=len(self.roster.parts), rates=self.rates)

    def _weight(self, at: int, explained: float) -> Weight:
        """What a test says about connections: little where something else explains that it failed."""
        failed = not self.tests[at].result.passed
        factor = self.rates.outcome(failed=failed, spoilt=1.0) / self.rates.outcome(failed=failed, spoilt=explained)
        return Weight(members=frozenset(self.tests[at].group.parts), factor=factor)

    # --- Who is what ---

    def of(self, name: str) -> float:
        """The probability that a part is a culprit."""
        return self.chance[self.roster.number("part", name)]

    def rest(self) -> tuple[str, ...]:
        """All parts but those that a culprit leaves out."""
        out = {name for number in self.named for name in self.roster.left_out_by(number)}
        return tuple(name for name in self.roster.parts if name not in out)

    def hunted(self) -> Hypotheses | None:
        """Which two units may fail together, where the rest fails for the sake of a connection."""
        return self.connection if self.connection is not None and self.connection.chance >= HUNTED else None

    def is_rest_good(self) -> bool:
        """Whether the tests of the rest would have shown a bad connection, and did not."""
        rests = [test for test in self.tests if test.group.purpose == "rest" and test.result.passed]
        passed = [frozenset(test.group.parts) for test in rests[-LATEST_RESTS:]]
        is_covered = missed_share(self.rest(), passed, self.rates.missed) <= MISSED_CONNECTIONS
        return is_covered and (self.connection is None or self.connection.chance < UNSPOILT)

    def is_clean(self, at: int, number: int) -> bool:
        """Whether nothing but this suspect explains that a test failed."""
        most = max(CLEAN, UNTOLD * self.share)
        return self.spoilt.get(at, 0.0) < CLEAN and all(self.chance[one] < most for one in self.covered[at] if one != number)

    def finding(self, number: int) -> Finding:
        """A suspect with the tests that speak for and against it."""
        tests = [(at, test) for at, test in enumerate(self.tests) if number in self.covered[at]]
        evidence = [test for at, test in tests if test.result.passed is False and self.is_clean(at, number)]
        passed = sum(test.result.passed is True for _, test in tests)
        suspect = self.roster.suspects[number]
        return Finding(suspect=suspect, confidence=self.chance[number], evidence=tuple(evidence), passed=passed)

    def findings(self) -> list[Finding]:
        """Who is named, the most certain first; a container where all its parts would be: one cause, not several."""
        found = {number: self.finding(number) for number in self.named}
        for name in self.roster.sizes:
            whole = self.roster.number("whole", name)
            parts = [self.roster.number("part", part) for part in self.roster.left_out_by(whole)]
            if whole not in found and found.keys() >= set(parts):
                own = [found.pop(part) for part in parts]
                evidence = tuple(dict.fromkeys(test for one in own for test in one.evidence))
                confidence = min(one.confidence for one in own)
                found[whole] = replace(self.finding(whole), confidence=confidence, evidence=evidence)
        return sorted(found.values(), key=lambda one: -one.confidence)

    def open_suspects(self) -> list[int]:
        """The numbers of those neither confirmed nor let go, most probable first. Parts of a bad container are let go."""
        roster, let_go = self.roster, set(self.named)
        for number in self.named:
            if roster.suspects[number].kind == "whole":
                let_go.update(roster.number("part", name) for name in roster.left_out_by(number))
                let_go.update(roster.number(kind, *roster.suspects[number].names) for kind in roster.in_container)
        ranked = sorted((number for number in range(len(self.chance)) if number not in let_go), key=self.chance.__getitem__)
        budget = MISSED_SHARE * max(1.0, math.fsum(self.chance[number] for number in self.named))
        for at, number in enumerate(ranked):
            budget -= self.chance[number]
            if budget < 0:
                return ranked[at:][::-1]
        return []

    def report(self) -> Report:
        """What was found."""
        doubtful = [number for number in self.open_suspects() if self.chance[number] >= 0.5]
        known = {*self.named, *doubtful}
        left = [chance for number, chance in enumerate(self.chance) if number not in known]
        return Report(
            culprits=tuple(self.findings()),
            unconfirmed=tuple(map(self.finding, doubtful)),
            expected_missed=math.fsum(left),
            rest=next((test for test in reversed(self.tests) if test.group.purpose == "rest"), None),
            tests=tuple(self.tests),
            rounds=self.rounds,
        )
