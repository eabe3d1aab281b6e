"""What the group tests so far say: which suspects are confirmed, open, or let go. Pure.

A part is named where tests with two different partners failed, and nothing else explains either. Containers and connections
are tested by several pairs, or by one again and again: more of these have to fail than pass. What is only partly broken has to
be shown to work elsewhere: a container whose edge is named inside, the ends of a connection with others. An edge fails to two
other containers, or the boundary to one of them may be to blame.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from pytest_gpucluster.localization import connections
from pytest_gpucluster.localization.parts import (
    WEIGHTS,
    Beliefs,
    ErrorRates,
    GroupTest,
    MemberGroup,
    NamedPart,
    Observed,
    Result,
    Roster,
    SearchPart,
    SearchReport,
    weigh_suspects,
)
from pytest_gpucluster.text import counted

FEWEST = 2
"""Failed tests of two parts without which nobody is named. Tests that show that something works are as many."""
FEWEST_BETWEEN = 3
"""The same for a connection: there are so many that one of them fails twice by error."""


def is_confirmed(known: Knowledge, number: int) -> bool:
    """Whether enough tests confirm a suspect."""
    suspect = known.roster.suspects[number]
    failed = [test.group.parts for test in known.finding(number).evidence if len(test.group.parts) == 2]
    if suspect.kind == "part":
        return len(set(map(frozenset, failed))) >= FEWEST
    tests = zip(known.covered, known.tests, strict=True)
    passed = sum(number in covered and test.result.passed is True for covered, test in tests if len(test.group.parts) == 2)
    if len(failed) - passed < (FEWEST_BETWEEN if suspect.kind == "between" else FEWEST):
        return False
    if suspect.kind == "between":
        return not broken_ends(known, number)
    if suspect.kind == "whole":
        return is_inside(known, suspect.names[0], passing=False) and not is_one_part_enough(known, suspect.names[0])
    return is_inside(known, suspect.names[0], passing=True) and len(reached_from(known, suspect.names[0], failed)) >= FEWEST


def is_inside(known: Knowledge, container: str, *, passing: bool) -> bool:
    """Whether enough more tests inside a container passed than failed for no other reason, pairs among them; or the reverse."""
    roster, tests = known.roster, known.tests
    inside = [at for at, test in enumerate(tests) if all(roster.is_at(name, container) for name in test.group.parts)]
    pairs = [at for at in inside if len(tests[at].group.parts) == 2]
    sign, whole = 1 if passing else -1, roster.number("whole", container)
    fewest = min(FEWEST, roster.sizes[container] - 1)
    return sign * _passes(known, inside, whole) >= fewest and sign * _passes(known, pairs, whole) >= 1


def is_one_part_enough(known: Knowledge, container: str) -> bool:
    """Whether all that failed inside has one part in common: that part beside a bad way out is an explanation as well."""
    inside = [test for test in known.tests if all(known.roster.is_at(name, container) for name in test.group.parts)]
    failed = [set(test.group.parts) for test in inside if test.result.passed is False]
    return known.roster.sizes[container] > FEWEST and bool(set.intersection(*failed))


def broken_ends(known: Knowledge, number: int) -> list[str]:
    """The ends of a connection that tests without its other end have not shown to work.

    One of these tests has two parts. Of a connection that was searched it is younger than the first that failed: what passed
    before made the search suspect the connection, and not a part of which two tests were wrong.
    """
    roster, broken = known.roster, []
    one, other = names = roster.suspects[number].names
    own = [test.round for test in known.tests if set(test.group.parts) == set(names) and test.result.passed is False]
    if number in roster.links and one in roster.parts and not own:
        return []
    if one not in roster.parts and "edge" not in roster.in_container:  # there is nowhere else to show that they work
        return [end for end in names if not is_inside(known, end, passing=True)]
    since = min(own) if number in roster.links and own else 0
    for end, far in ((one, other), (other, one)):
        tests = []
        for at, test in enumerate(known.tests):
            is_at = [roster.is_at(name, end) for name in test.group.parts]
            if any(is_at) and not all(is_at) and not any(roster.is_at(name, far) for name in test.group.parts):
                tests.append(at)
        pairs = [at for at in tests if len(known.tests[at].group.parts) == 2 and known.tests[at].round > since]
        suspect = roster.number("part" if end in roster.parts else "edge", end)
        if _passes(known, tests, suspect) < FEWEST or _passes(known, pairs, suspect) < 1:
            broken.append(end)
    return broken


def _passes(known: Knowledge, tests: Iterable[int], number: int) -> int:
    """How many more tests passed than failed where only this suspect explains it."""
    results = [(at, known.tests[at].result.passed) for at in tests]
    return sum(1 if passed else -known.is_clean(at, number) for at, passed in results if passed is not None)


def reached_from(known: Knowledge, container: str, pairs: Iterable[Sequence[str]]) -> set[str]:
    """The other containers, of the same kind, to which pairs reach from a container."""
    found: set[str] = set()
    for pair in pairs:
        inner, outer = sorted(pair, key=lambda name: not known.roster.is_at(name, container))
        ways = [known.roster.parts[name].within for name in (inner, outer)]
        if container in ways[0] and container not in ways[1]:
            found.update(ways[1][ways[0].index(container) :][:1] or (outer,))
    return found


NAMED = 0.999
"""A culprit is at least so probable."""
# A failed test confirms a suspect if each other explanation has a low probability. Among few parts, the prior of a part of
# which no test says anything is high: then a probability near that prior is low enough.
CONFIRMING_PROBABILITY = 0.05
"""The highest probability of another explanation."""
CONFIRMING_TIMES_PRIOR = 1.5
"""The same, as a multiple of the prior."""
MISSED_SHARE = 0.006
"""Culprits expected among those that are let go, as a share of all expected culprits (at least 1)."""
CLEAN_REST_PROBABILITY = 0.01
"""The rest is let go if a connection in it is bad with less than this probability."""
MISSED_CONNECTIONS = 0.01
"""The rest is let go if its tests would have missed at most this share of the bad connections."""
SUSPECTED_PROBABILITY = 0.9
"""A connection is searched where one is bad with this probability."""
LATEST_RESTS = 8
"""Tests of the rest that are remembered."""


class Knowledge:
    """The tests so far, and how probable each suspect is.

    Attributes:
        covered: for each test the numbers of the suspects in it.
        pair_tests: how often two parts were tested as a pair.
        chance: the probability of each suspect that it is a culprit.
        share: that of a part of which no test says anything.
        named: the numbers of the confirmed suspects.
        connection: which two units may fail together, where a test of the rest failed.
        explained: for tests, how probable it is that a bad connection spoils them that is no suspect.
    """

    def __init__(self, parts: Sequence[SearchPart], rates: ErrorRates) -> None:
        self.roster = Roster(parts)
        self.rates = rates
        self.tests: list[GroupTest] = []
        self.covered: list[tuple[int, ...]] = []
        self.rounds = 0
        self.pair_tests: dict[str, Counter[str]] = defaultdict(Counter)
        self.named: tuple[int, ...] = ()
        self.connection: connections.ConnectionBeliefs | None = None
        self.explained: dict[int, float] = {}
        beliefs = self._weigh_suspects((), {}, ())
        self.chance, self.share = beliefs.chance, beliefs.share

    def note(self, groups: Sequence[MemberGroup], results: Sequence[Result]) -> None:
        """Take in the results of a round."""
        if len(groups) != len(results):
            raise ValueError(f"{counted(len(results), 'result')} for {counted(len(groups), 'group')}: expected one for each")
        self.rounds += 1
        for group, result in zip(groups, results, strict=True):
            self.tests.append(GroupTest(round=self.rounds, group=group, result=result))
            self.covered.append(self.roster.covered(group))
            if len(group.parts) == 2:
                one, other = group.parts
                self.pair_tests[one][other] += 1
                self.pair_tests[other][one] += 1
        measured = [at for at, test in enumerate(self.tests) if test.result.passed is not None]
        self._weigh_connections(measured)
        beliefs = self._weigh_suspects(measured, self.explained, ())
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
        self.connection, self.explained, roster = None, {}, self.roster
        if len(self.parts_without_culprits()) < 2 or all(self.tests[at].result.passed for at in large):
            return
        explained = self._weigh_suspects(measured, large, roster.links.difference(self.named)).explained
        named = set(self.named)
        tests = [
            self._weight(at, chance if named.isdisjoint(self.covered[at]) else 1.0)
            for at, chance in zip(measured, explained, strict=True)
        ]
        units = roster.units(set(self.parts_without_culprits()))
        self.connection = found = connections.find_bad_connection(units, tests, is_boundary_open=not roster.has_pairs)
        is_new = False
        if found.chance >= SUSPECTED_PROBABILITY and found.ends is not None and max(map(len, found.ends)) == 1:
            is_new = roster.add_connection(found.ends[0][0], found.ends[1][0])
        elif found.chance >= SUSPECTED_PROBABILITY and found.boundary >= connections.FOUND:
            is_new = roster.add_connection(*{str(roster.first_container(unit[0])) for unit in found.units})
            found = replace(found, boundary=0.0)
        if is_new:
            self.covered = [roster.covered(test.group) for test in self.tests]
        known = {roster.suspects[number].names for number in roster.links}
        self.explained = dict(zip(measured, connections.probability_explained_by(found, tests, known), strict=True))

    def _weigh_suspects(self, measured: Sequence[int], explained: Mapping[int, float], left_out: Collection[int]) -> Beliefs:
        covered = [self.covered[at] for at in measured]
        if left_out:
            covered = [tuple(number for number in numbers if number not in left_out) for numbers in covered]
        tests = [(not self.tests[at].result.passed, explained.get(at, 0.0)) for at in measured]
        seen = [Observed(numbers, *test) for numbers, test in zip(covered, tests, strict=True)]
        weights = [WEIGHTS[suspect.kind] for suspect in self.roster.suspects]
        return weigh_suspects(seen, weights, parts=len(self.roster.parts), rates=self.rates)

    def _weight(self, at: int, explained: float) -> connections.ConnectionEvidence:
        """What a test says about connections: little where something else explains that it failed."""
        failed = not self.tests[at].result.passed
        factor = self.rates.outcome(failed=failed, explained=1.0) / self.rates.outcome(failed=failed, explained=explained)
        return connections.ConnectionEvidence(members=frozenset(self.tests[at].group.parts), factor=factor)

    # --- Who is what ---

    def probability_of(self, name: str) -> float:
        """The probability that a part is a culprit."""
        return self.chance[self.roster.number("part", name)]

    def parts_without_culprits(self) -> tuple[str, ...]:
        """All parts but those that a culprit leaves out."""
        out = {name for number in self.named for name in self.roster.left_out_by(number)}
        return tuple(name for name in self.roster.parts if name not in out)

    def behind_bad_ways(self) -> list[tuple[str, ...]]:
        """The parts of each container that only a bad way leaves out: what is inside can be tested with each other."""
        out: dict[bool, list[tuple[str, ...]]] = {True: [], False: []}
        for number in self.named:
            out[self.roster.suspects[number].kind in ("edge", "between")].append(self.roster.left_out_by(number))
        gone = {name for names in out[False] for name in names}
        found = (tuple(name for name in names if name not in gone) for names in out[True])
        return list(dict.fromkeys(behind for behind in found if len(behind) > 1))

    def suspected_connection(self) -> connections.ConnectionBeliefs | None:
        """Which two units may fail together, where the rest fails for the sake of a connection."""
        return self.connection if self.connection is not None and self.connection.chance >= SUSPECTED_PROBABILITY else None

    def is_rest_good(self) -> bool:
        """Whether the tests of the rest would have shown a bad connection, and did not."""
        rests = [test for test in self.tests if test.group.purpose == "rest" and test.result.passed]
        passed = [frozenset(test.group.parts) for test in rests[-LATEST_RESTS:]]
        is_covered = connections.missed_share(self.parts_without_culprits(), passed, self.rates.missed) <= MISSED_CONNECTIONS
        return is_covered and (self.connection is None or self.connection.chance < CLEAN_REST_PROBABILITY)

    def is_clean(self, at: int, number: int) -> bool:
        """Whether nothing but this suspect explains that a test failed."""
        most = max(CONFIRMING_PROBABILITY, CONFIRMING_TIMES_PRIOR * self.share)
        others = (self.chance[one] for one in self.covered[at] if one != number)
        return self.explained.get(at, 0.0) < CONFIRMING_PROBABILITY and all(chance < most for chance in others)

    def finding(self, number: int) -> NamedPart:
        """A suspect with the tests that speak for and against it."""
        tests = [(at, test) for at, test in enumerate(self.tests) if number in self.covered[at]]
        evidence = [test for at, test in tests if test.result.passed is False and self.is_clean(at, number)]
        passed = sum(test.result.passed is True for _, test in tests)
        suspect = self.roster.suspects[number]
        return NamedPart(suspect=suspect, confidence=self.chance[number], evidence=tuple(evidence), passed=passed)

    def findings(self) -> list[NamedPart]:
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

    def report(self) -> SearchReport:
        """What was found."""
        doubtful = [number for number in self.open_suspects() if self.chance[number] >= 0.5]
        return SearchReport(
            culprits=tuple(self.findings()),
            unconfirmed=tuple(map(self.finding, doubtful)),
            rest=next((test for test in reversed(self.tests) if test.group.purpose == "rest"), None),
            tests=tuple(self.tests),
            rounds=self.rounds,
        )
