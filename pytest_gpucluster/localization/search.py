"""Which parts make a collective miss its limit: group tests in rounds, and confirmation against known-good partners. Pure.

A group of parts runs together and passes or misses its limit. The groups of one round share no part, so that all of them run
at once. :func:`search` has the groups of a round measured, learns from the results, and ends with a report.

Two rounds sweep all parts, in blocks and across the blocks. Later rounds test each suspect with a partner that passed
elsewhere, and the low suspicions in pools. What is left runs as one group beside them, without the suspects. A culprit is
named only where two tests in different pair_tests failed and nothing else explains them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.localization.connections import ConnectionBeliefs, Pair
from pytest_gpucluster.localization.knowledge import Knowledge, broken_ends, is_inside, reached_from
from pytest_gpucluster.localization.parts import ErrorRates, MemberGroup, Purpose, Result, SearchPart, SearchReport, Suspect

BLOCK = 0.6
"""Parts in a group of the first round, relative to the square root of all."""


def search(
    parts: Sequence[SearchPart],
    measure: Callable[[Sequence[MemberGroup]], Sequence[Result]],
    *,
    rates: ErrorRates | None = None,
    most_rounds: int | None = None,
) -> SearchReport:
    """Find the culprits among parts of which a group failed.

    Args:
        parts: at least 2, each with a name of its own. Parts of one container should stand together.
        measure: the results of the groups of a round, in their order. The groups have no common part, and at least 2 each.
        rates: how often a test is wrong.
        most_rounds: the search ends after so many rounds, whatever is still open; :func:`bound` by default.

    Raises:
        ValueError: fewer than 2 parts, a name twice or of a part and a container, or not one result for each group.
    """
    known = Knowledge(parts, rates or ErrorRates())
    size = max(2, math.ceil(BLOCK * math.sqrt(len(parts))))
    last = bound(len(parts)) if most_rounds is None else most_rounds
    groups = blocks(known, size)
    while known.rounds < last and groups:
        known.note(groups, measure(groups))
        groups = across(known) if known.rounds == 1 else plan(known, 3 * size)
    return known.report()


def bound(parts: int) -> int:
    """The most rounds that a search among so many parts asks for."""
    return 12 + 4 * max(1, (parts - 1).bit_length())


MIXER = 0x9E3779B97F4A7C15
LEAST_PROBABILITY = 1e-4
"""A group is worth a test where a bad connection is inside with this probability."""


def split(beliefs_of_pairs: ConnectionBeliefs, free: Collection[str], rates: ErrorRates) -> list[tuple[str, ...]]:
    """The groups of a round among the parts that are ``free``."""
    members = [tuple(name for name in unit if name in free) for unit in beliefs_of_pairs.units]
    pairs = {
        (one, other): chance
        for (one, other), chance in beliefs_of_pairs.pairs.items()
        if members[one] and members[other] and len({*members[one], *members[other]}) > 1
    }
    units = sorted({unit for pair in pairs for unit in pair})
    bits = range((len(members) - 1).bit_length())
    ways: list[dict[int, Hashable]] = [{unit: unit >> bit & 1 for unit in units} for bit in bits]
    ways.append(_matched(pairs))
    structured = len(ways)
    ways += [{unit: (unit + 1) * MIXER >> shift & 1 for unit in units} for shift in range(20, 60, 4)]
    explained = [_bad_pair_probabilities(way, pairs) for way in ways]
    at = max(range(len(ways)), key=lambda at: _expected_bits(explained[at].values(), rates) * (1 if at < structured else 0.75))
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for unit, group in ways[at].items():
        if explained[at].get(group, 0.0) >= LEAST_PROBABILITY:
            groups[group] += members[unit]
    return [tuple(group) for group in groups.values()]


def _matched(pairs: Mapping[Pair, float]) -> dict[int, Hashable]:
    """The most probable pairs that share no unit."""
    way: dict[int, Hashable] = {}
    for pair in pairs:
        if way.keys().isdisjoint(pair):
            way.update(dict.fromkeys(pair, pair))
    return way


def _bad_pair_probabilities(way: Mapping[int, Hashable], pairs: Mapping[Pair, float]) -> dict[Hashable, float]:
    """How probable it is for each group of a way that a bad pair is inside."""
    explained: dict[Hashable, float] = defaultdict(float)
    for (one, other), chance in pairs.items():
        if one in way and other in way and way[one] == way[other]:
            explained[way[one]] += chance
    return explained


def _expected_bits(explained: Iterable[float], rates: ErrorRates) -> float:
    """What the outcomes of groups are expected to say: the less, the rarer a group fails for any other reason than by error."""
    wrong = [_bits(rates.false_failure), _bits(rates.missed)]
    failures = [(chance, rates.outcome(failed=True, explained=chance)) for chance in explained]
    return math.fsum(_bits(failure) - (1 - chance) * wrong[0] - chance * wrong[1] for chance, failure in failures)


def _bits(chance: float) -> float:
    return -chance * math.log2(chance) - (1 - chance) * math.log2(1 - chance)


SPREAD = 1.5
"""Groups of the second round for those whose first failed, relative to what leaves the fewest tests."""
# A part of low probability is tested with the rest, if few culprits are expected among such parts. Otherwise parts of still
# lower probability are tested with each other, in pools.
REST_BELOW_PROBABILITY = 0.03
"""A part below this probability may be tested with the rest."""
REST_AT_MOST_EXPECTED = 0.2
"""Culprits that may be expected among the parts that are tested with the rest."""
POOL_BELOW_PROBABILITY = 0.01
"""A part below this probability may be tested in a pool."""
POOL_AT_MOST_EXPECTED = 0.3
"""Culprits that may be expected in one pool."""
MOST_REPEATS = 2
"""Tests of a part with the same partner, at most, while no other partner can be had."""
MOST_OF_ONE = 6
"""Tests of the same connection, and of the same rest, at most."""
PAIRS = 3
"""Pairs of a container that are tested at once, where it is a culprit with at least the probability that follows."""
LIKELY = 0.3
MOST_TRIED = 8
"""Parts of a container from which the two for a test are taken."""


def blocks(knowledge: Knowledge, size: int) -> tuple[MemberGroup, ...]:
    """Groups of neighbours, of about so many parts."""
    names = sorted(knowledge.roster.parts, key=lambda name: knowledge.roster.parts[name].within)
    number = max(1, min(math.ceil(len(names) / size), len(names) // 2))
    ends = [len(names) * at // number for at in range(number + 1)]
    return tuple(MemberGroup(tuple(names[a:b]), "block") for a, b in pairwise(ends))


def across(knowledge: Knowledge) -> tuple[MemberGroup, ...]:
    """Small groups across all blocks that failed, and the others together."""
    failed = {name for test in knowledge.tests if test.result.passed is False for name in test.group.parts}
    ordered = [name for test in knowledge.tests for name in test.group.parts]
    doubtful, others = [name for name in ordered if name in failed], [name for name in ordered if name not in failed]
    small = math.ceil(SPREAD * math.sqrt(len(doubtful) * math.fsum(map(knowledge.probability_of, doubtful))))
    large = math.ceil(math.fsum(map(knowledge.probability_of, others)) / POOL_AT_MOST_EXPECTED)
    pools = tuple(MemberGroup(tuple(names), "pool") for names in _strided(doubtful, small))
    return (*pools, *(MemberGroup(tuple(names), "rest") for names in _strided(others, large)))


def _strided(names: Sequence[str], number: int) -> list[Sequence[str]]:
    """So many groups, fewer where one would have a single name."""
    number = max(1, min(number, len(names) // 2))
    return [names[at::number] for at in range(number)] if len(names) > 1 else []


def plan(knowledge: Knowledge, pool_size: int) -> tuple[MemberGroup, ...]:
    """The groups of the next round; none where all is decided or nothing more can be learnt."""
    beliefs_of_pairs = knowledge.suspected_connection()
    undecided = knowledge.open_suspects()
    is_part = {number for number in undecided if knowledge.roster.suspects[number].kind == "part"}
    left_out = set(knowledge.roster.parts).difference(knowledge.parts_without_culprits())
    draft = _Draft(knowledge, used=left_out, avoid={knowledge.roster.suspects[number].names[0] for number in is_part})
    for least in (REST_BELOW_PROBABILITY, POOL_BELOW_PROBABILITY):
        low = [number for number in undecided if number in is_part and knowledge.chance[number] < least]
        if are_few := math.fsum(knowledge.chance[number] for number in low) < REST_AT_MOST_EXPECTED:
            break
    for number in undecided:
        if knowledge.chance[number] >= (least if number in is_part else REST_BELOW_PROBABILITY):
            draft.test_alone(number)
    names = [name for number in low if (name := knowledge.roster.suspects[number].names[0]) not in draft.used]
    is_wanted = beliefs_of_pairs is None and not knowledge.is_rest_good()
    is_together = beliefs_of_pairs is None and are_few and (is_wanted or bool(names))
    if not (is_together and draft.add_rest(names)):
        draft.pool(names, pool_size)
        if beliefs_of_pairs is not None:
            draft.add_halves(beliefs_of_pairs)
        elif is_wanted:
            draft.add_rest(())
    for behind in knowledge.behind_bad_ways():
        draft.add_inside(behind, [name for name in behind if knowledge.roster.number("part", name) in undecided])
    return tuple(draft.groups)


class _Draft:
    """A round in the making. No part is used twice."""

    def __init__(self, known: Knowledge, *, used: set[str], avoid: set[str]) -> None:
        self.known = known
        self.roster = known.roster
        self.groups: list[MemberGroup] = []
        self.used = set(used)
        self.avoid = avoid
        self.by_trust = sorted(self.roster.parts, key=self._distrust)
        self.neighbours = grouped((at, name) for name in self.by_trust for at in self.roster.parts[name].within)

    def _distrust(self, name: str) -> float:
        """The probability that a test with this part fails for its sake, roughly."""
        roster, chance = self.roster, self.known.chance
        around = [at for at in roster.parts[name].within if at in roster.sizes]
        of_containers = sum(chance[roster.number(kind, at)] for at in around for kind in roster.in_container)
        return self.known.probability_of(name) + of_containers

    def add(self, parts: Sequence[str], purpose: Purpose) -> None:
        """One more group."""
        self.groups.append(MemberGroup(tuple(parts), purpose))
        self.used.update(parts)

    def test_alone(self, number: int) -> None:
        """Test a suspect with a partner that is most probably good; a container by several of its parts."""
        suspect = self.roster.suspects[number]
        if suspect.kind == "part":
            self._with_partner(suspect.names[0], near=self.roster.parts[suspect.names[0]].within[:1])
            return
        is_likely = self.known.chance[number] >= LIKELY
        for end in broken_ends(self.known, number) if is_likely and suspect.kind == "between" else ():
            if end in self.roster.parts:
                self._with_partner(end)
            else:
                self._test_container(Suspect("edge", (end,)))
        if suspect.names[0] not in self.roster.parts:
            for _ in range(PAIRS if is_likely else 1):
                self._test_container(suspect)
        elif self.used.isdisjoint(suspect.names) and self._repeats(*suspect.names) < MOST_OF_ONE:
            self.add(suspect.names, "suspect")

    def _test_container(self, suspect: Suspect) -> None:
        """Test two parts inside a container; two across where only what leaves it is suspected, or what is between two."""
        known, container = self.known, suspect.names[0]
        free = [
            sorted((name for name in self.neighbours[end] if name not in self.used), key=self.avoid.__contains__)[:MOST_TRIED]
            for end in suspect.names
        ]
        pairs: Iterator[tuple[str, ...]] = iter(())
        if suspect.kind == "between":
            pairs = product(*free)
        elif suspect.kind == "whole" or not is_inside(known, container, passing=True):
            pairs = combinations(free[0], 2)
        fresh = next((pair for pair in pairs if not self._repeats(*pair)), None)
        if fresh is not None:
            self.add(fresh, "suspect")
        left = [name for name in free[0] if name not in self.used]
        if left and (suspect.kind == "edge" or (suspect.kind == "whole" and fresh is None)):
            self._with_partner(left[0], outside=container)

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
        """Parts to test another one with, the best first: out of a container, to another one than before if it can."""
        for container in near:
            yield from (other for other in self.neighbours[container] if self._is_free(other, name) and other not in self.avoid)
        others = self.by_trust
        if outside is not None:
            groups = [*(test.group for test in self.known.tests), *self.groups]
            reached = reached_from(self.known, outside, (group.parts for group in groups if len(group.parts) == 2))
            others = [other for other in others if not self.roster.is_at(other, outside)]
            others.sort(key=lambda other: not reached.isdisjoint(self.roster.parts[other].within))
        for trusted in (True, False):
            yield from (other for other in others if self._is_free(other, name) and (other not in self.avoid) == trusted)

    def add_inside(self, behind: Sequence[str], undecided: Sequence[str]) -> None:
        """Test the undecided parts behind a bad way out with each other, where all works: the likely ones each by itself."""
        likely = [name for name in undecided if self.known.probability_of(name) >= REST_BELOW_PROBABILITY]
        free = sorted(behind, key=self.known.probability_of)
        for name in sorted(likely, key=self.known.probability_of, reverse=True):
            others = [other for other in free if other != name and self._repeats(name, other) < MOST_REPEATS]
            if name in free and others:
                partner = min(others, key=lambda other: self._repeats(name, other))
                self.add((name, partner), "suspect")
                free = [other for other in free if other not in (name, partner)]
        low = MemberGroup(tuple(name for name in free if name not in likely), "pool")
        is_new = sum(test.group == low for test in self.known.tests) < MOST_REPEATS
        if len(low.parts) > 1 and is_new and not {*undecided}.isdisjoint(low.parts):
            self.add(low.parts, low.purpose)

    def _is_free(self, other: str, name: str) -> bool:
        return other != name and other not in self.used

    def _repeats(self, one: str, other: str) -> int:
        return self.known.pair_tests[one][other]

    def pool(self, names: Sequence[str], size: int) -> None:
        """Groups of low suspicion, so large that most of them pass; of neighbours where too many containers are connected."""
        waiting = list(names)
        expected = math.fsum(map(self.known.probability_of, waiting))
        number = min(max(math.ceil(len(waiting) / size), math.ceil(expected / POOL_AT_MOST_EXPECTED)), len(waiting))
        if not self.roster.has_pairs:
            waiting.sort(key=lambda name: self.roster.parts[name].within)
        for at in range(number):
            a, b = len(waiting) * at // number, len(waiting) * (at + 1) // number
            members = waiting[at::number] if self.roster.has_pairs else waiting[a:b]
            if len(members) > 1:
                self.add(members, "pool")
            else:
                self._with_partner(members[0])

    def add_halves(self, beliefs_of_pairs: ConnectionBeliefs) -> None:
        """Groups of parts that pass each by itself, to find the two that fail together."""
        free = {name for name in self.roster.parts if name not in self.used and name not in self.avoid}
        for group in split(beliefs_of_pairs, free, self.known.rates):
            self.add(group, "halves")

    def add_rest(self, low: Sequence[str]) -> bool:
        """Everything else, and low suspicions, as one group: whether all is well without the culprits. False: too often."""
        left_out = self.used | self.avoid.difference(low)
        group = MemberGroup(tuple(name for name in self.roster.parts if name not in left_out), "rest")
        repeats = sum(test.group == group for test in self.known.tests)
        is_new = len(group.parts) >= max(2, len(self.roster.parts) // 2) and repeats < MOST_OF_ONE
        if is_new:
            self.add(group.parts, "rest")
        return is_new
