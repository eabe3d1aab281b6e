"""What a search by group tests is about: parts, groups, results, suspects, and which suspects a test covers. Pure.

How probable each suspect of a group test is. Pure: outcomes of tests in, probabilities out.

The model: a test fails with probability ``1 - missed`` where at least one of its suspects is a culprit, and with probability
``false_failure`` where none is. The tests are independent, given the culprits. Belief propagation over suspects and tests
gives each suspect's probability. How frequent culprits are is estimated from the same tests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Literal

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.siblings import FEWEST_SIBLINGS, middle_without

Kind = Literal["part", "whole", "edge", "between"]
Quantity = Literal["bandwidth", "latency"]
Purpose = Literal["block", "suspect", "pool", "rest", "halves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPart:
    """What can be tested together with others: a node, a GPU, an adapter.

    Attributes:
        name: unique among the parts.
        within: what it shares with other parts and may be at fault as well: a leaf switch, a rail, a node.
    """

    name: str
    within: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberGroup:
    """The names of the parts of one test, and what the test is for."""

    parts: tuple[str, ...]
    purpose: Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a group.

    Attributes:
        passed: whether it met its limit; None where it could not be measured.
        value: what was measured, as evidence.
    """

    passed: bool | None
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTest:
    """A group and its result. ``round``: counts from 1."""

    round: int
    group: MemberGroup
    result: Result


@dataclass(frozen=True, slots=True, order=True)
class Suspect:
    """What may be a culprit.

    Attributes:
        kind: ``part``; ``whole``: all that crosses a container, such as a leaf switch; ``edge``: only what leaves the
            container, while its inside works; ``between``: the connection of two parts that work with all others.
        names: the part, the container, or the two parts.
    """

    kind: Kind
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPart:
    """A suspect, and how sure it is.

    Attributes:
        confidence: the probability that it is a culprit.
        evidence: the failed tests that nothing else explains.
        passed: the number of tests with it that passed all the same.
    """

    suspect: Suspect
    confidence: float
    evidence: tuple[GroupTest, ...]
    passed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """How a search ended.

    Attributes:
        culprits: what is named, most probable first.
        unconfirmed: suspects that are more probably culprits than not, and that were not confirmed.
        rest: what became of the last large group without culprits and suspects; None where there was none.
        tests: all tests, in their order.
        rounds: how many rounds were measured.
    """

    culprits: tuple[NamedPart, ...]
    unconfirmed: tuple[NamedPart, ...]
    rest: GroupTest | None
    tests: tuple[GroupTest, ...]
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How much worse a part is than the median of the others like it, in per cent of it; negative: it is better."""

    percent: float
    median: float
    siblings: int


def lags_of(values: Sequence[float], quantity: Quantity) -> list[Lag]:
    """Each value beside all others, in order; none where it has fewer than two of these."""
    ordered, siblings = sorted(values), len(values) - 1
    if siblings < FEWEST_SIBLINGS:
        return []
    worse = -100 if quantity == "bandwidth" else 100
    medians = [middle_without(ordered, value) for value in values]
    pairs = zip(values, medians, strict=True)
    return [Lag(percent=worse * (value / median - 1), median=median, siblings=siblings) for value, median in pairs]


WEIGHTS: dict[Kind, float] = {"part": 1.0, "whole": 0.1, "edge": 0.1, "between": 0.05}
"""How frequent culprits of a kind are, relative to parts."""
MOST_CONTAINERS_PAIRED = 32
"""Up to so many containers, the connection of any two is a suspect from the start."""
MOST_UNITS = 512
"""Units of which two that fail together are searched; parts without containers stand in so many blocks."""


class Roster:
    """All suspects by their numbers: first the parts in their order, then what they are in.

    Attributes:
        sizes: of the containers, without those that have one part or all.
        in_container: the kinds of suspects that each container is; of two that have all parts, what leaves one is what is
            between both, so there only that is one.
        links: the numbers of the connections that were not suspects from the start.
        has_pairs: the connections of all containers were.
    """

    def __init__(self, parts: Sequence[SearchPart]) -> None:
        self.parts = {part.name: part for part in parts}
        if len(self.parts) < 2 or len(self.parts) < len(parts):
            names = f"{len(self.parts)} names of {len(parts)} parts"
            raise ValueError(f"{names}: expected at least 2 parts, each with its own name")
        if shared := sorted(self.parts.keys() & {name for part in parts for name in part.within}):
            raise ValueError(f"{shared[0]} names a part and what parts are in: expected different names")
        sizes = Counter(name for part in parts for name in dict.fromkeys(part.within))
        self.sizes = {name: size for name, size in sizes.items() if 1 < size < len(parts)}
        self.suspects = [Suspect("part", (name,)) for name in self.parts]
        has_two = len(self.sizes) == 2 and all(len(self.sizes.keys() & set(part.within)) == 1 for part in parts)
        self.in_container: tuple[Kind, ...] = ("whole",) if has_two else ("whole", "edge")
        self.suspects += [Suspect(kind, (name,)) for name in self.sizes for kind in self.in_container]
        firsts = sorted({at for name in self.parts if (at := self.first_container(name)) is not None})
        self.has_pairs = len(firsts) <= MOST_CONTAINERS_PAIRED
        if self.has_pairs:
            self.suspects += [Suspect("between", pair) for pair in combinations(firsts, 2)]
        self.links: set[int] = set()
        self._numbers = {(suspect.kind, suspect.names): number for number, suspect in enumerate(self.suspects)}

    def number(self, kind: Kind, *names: str) -> int:
        """The number of a suspect."""
        return self._numbers[kind, names]

    def add_connection(self, one: str, other: str) -> bool:
        """Suspect what is between two parts or containers. Returns whether it is a new suspect."""
        suspect = Suspect("between", (min(one, other), max(one, other)))
        if (suspect.kind, suspect.names) in self._numbers:
            return False
        self._numbers[suspect.kind, suspect.names] = len(self.suspects)
        self.links.add(len(self.suspects))
        self.suspects.append(suspect)
        return True

    def covered(self, group: MemberGroup) -> tuple[int, ...]:
        """The numbers of all suspects that a test covers."""
        names = group.parts
        inside = Counter(name for part in names for name in self.parts[part].within if name in self.sizes)
        found = [self.number("part", name) for name in names]
        for name, size in inside.items():
            found.append(self.number("whole", name))
            if size < len(names) and "edge" in self.in_container:
                found.append(self.number("edge", name))
        first = len(self.parts) + len(self.in_container) * len(self.sizes)
        members = {*names, *inside} if first < len(self.suspects) else set()
        return (*found, *(at for at in range(first, len(self.suspects)) if members.issuperset(self.suspects[at].names)))

    def first_container(self, name: str) -> str | None:
        """What a part is in, where other parts are in it too."""
        return next((at for at in self.parts[name].within if at in self.sizes), None)

    def is_at(self, part: str, name: str) -> bool:
        """Whether a part is the one that is named, or in the container that is named."""
        return part == name or name in self.parts[part].within

    def left_out_by(self, number: int) -> tuple[str, ...]:
        """The parts that a culprit leaves out of later tests; of a connection of two parts the first one."""
        name = self.suspects[number].names[0]
        return (name,) if name in self.parts else tuple(part for part in self.parts if self.is_at(part, name))

    def units(self, good: Collection[str]) -> list[tuple[str, ...]]:
        """Good parts by their first container where the connections of these are no suspects; else parts or blocks of them."""
        names, number = tuple(self.parts), min(len(self.parts), MOST_UNITS)
        ends = [len(names) * at // number for at in range(number + 1)]
        units: list[Sequence[str]] = [names[a:b] for a, b in pairwise(ends)]
        by_container = grouped((self.first_container(name) or name, name) for name in names)
        if not self.has_pairs and len(by_container) <= MOST_UNITS:
            units = list(by_container.values())
        return [tuple(name for name in unit if name in good) for unit in units]


MOST_SWEEPS = 30
SETTLED = 1e-2
"""The largest relative change of a message or of the share of culprits, after which nothing more is computed."""
DAMPING = 0.3
FEWEST_EXPECTED = 0.5
"""Culprits that are expected before any test: the failure that asked for the search may have been noise."""
HIGHEST_SHARE = 0.3
MOST_ODDS = 1e26
"""Beyond these odds a suspect is a culprit for certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRates:
    """How often one test is wrong.

    Attributes:
        false_failure: share of the tests without a culprit that fail, above 0 and below 0.5.
        missed: share of the tests with a culprit that pass, above 0 and below 0.5.

    Raises:
        ValueError: a share is outside its range.
    """

    false_failure: float = 0.02
    missed: float = 0.02

    def __post_init__(self) -> None:
        """Check both shares."""
        for name in ("false_failure", "missed"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(f"{name} is {getattr(self, name)}: expected a share above 0 and below 0.5")

    def outcome(self, *, failed: bool, explained: float) -> float:
        """How probable an outcome is where a culprit is in the test with probability ``explained``."""
        failure = self.false_failure + (1 - self.missed - self.false_failure) * explained
        return failure if failed else 1 - failure


@dataclass(frozen=True, slots=True)
class Observed:
    """One test: the numbers of its suspects, and whether it failed.

    Attributes:
        explained: how probable it is that something spoils the test that is none of the suspects.
    """

    suspects: tuple[int, ...]
    failed: bool
    explained: float = 0.0


@dataclass(frozen=True, slots=True)
class Beliefs:
    """What the tests say.

    Attributes:
        chance: the probability of each suspect that it is a culprit.
        explained: the probability for each test, by all others, that a culprit is in it.
        share: of the culprits among the parts: what a part of which no test tells anything is taken for.
    """

    chance: list[float]
    explained: list[float]
    share: float


def weigh_suspects(tests: Sequence[Observed], weights: Sequence[float], *, parts: int, rates: ErrorRates) -> Beliefs:
    """Weigh all suspects by all tests.

    Args:
        tests: all tests so far.
        weights: of each suspect, how frequent culprits of its kind are, relative to parts (1.0).
        parts: the first so many suspects are parts; the share of culprits is estimated among them.
        rates: how often a test is wrong.
    """
    share = FEWEST_EXPECTED / max(parts, 1)
    messages = [[1.0] * len(test.suspects) for test in tests]
    odds = [_odds(weight, share) for weight in weights]
    active: Sequence[int] = range(len(tests))
    for _ in range(MOST_SWEEPS):
        is_full = len(active) == len(tests)
        active = [at for at in active if _pass_on(tests[at], messages[at], odds, rates) >= SETTLED]
        expected = FEWEST_EXPECTED + math.fsum(map(_probability, odds[:parts]))
        before, share = share, min(expected / (parts + 1), HIGHEST_SHARE)
        renewed = {weight: _odds(weight, share) / _odds(weight, before) for weight in set(weights)}
        odds = [one * renewed[weight] for one, weight in zip(odds, weights, strict=True)]
        if not active and is_full and abs(share - before) < SETTLED * before:
            break
        active = active or range(len(tests))
    explained = [1 - math.prod(_innocent(test, sent, odds)) for test, sent in zip(tests, messages, strict=True)]
    return Beliefs(chance=list(map(_probability, odds)), explained=explained, share=share)


def _pass_on(test: Observed, sent: list[float], odds: list[float], rates: ErrorRates) -> float:
    """Renew the factor that a test has in the odds of each of its suspects. Returns the largest relative change."""
    with_culprit = rates.outcome(failed=test.failed, explained=1.0)
    without = rates.outcome(failed=test.failed, explained=test.explained)
    if test.explained == 1.0:
        return 0.0
    innocent = _innocent(test, sent, odds)
    all_innocent = math.prod(innocent)
    share = 1 - DAMPING if test.failed else 1.0
    least = most = 1.0
    for at, (index, free) in enumerate(zip(test.suspects, innocent, strict=True)):
        fresh = with_culprit / (with_culprit + (without - with_culprit) * (all_innocent / free))
        step = (fresh / sent[at]) ** share
        sent[at] *= step
        odds[index] *= step
        if step < least:
            least = step
        elif step > most:
            most = step
    return max(most - 1, 1 - least)


def _innocent(test: Observed, sent: Sequence[float], odds: Sequence[float]) -> list[float]:
    """How probable it is, by all other tests, that each suspect of a test is no culprit."""
    innocent = []
    for index, factor in zip(test.suspects, sent, strict=True):
        others_say = odds[index] / factor
        innocent.append(1 / (1 + others_say) if others_say < MOST_ODDS else 1 / MOST_ODDS)
    return innocent


def _probability(odds: float) -> float:
    return odds / (1 + odds) if odds < MOST_ODDS else 1.0


def _odds(weight: float, share: float) -> float:
    return weight * share / (1 - min(weight, 1.0) * share)
