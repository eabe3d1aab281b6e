"""What a localisation by group tests speaks of: parts, groups, results, suspects and findings. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["part", "whole", "edge", "between"]
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
        expected_missed: culprits that are expected among all others, by the error rates of the tests.
        rest: what became of the last large group without culprits and suspects; None where there was none.
        tests: all tests, in their order.
        rounds: how many rounds were asked for.
    """

    culprits: tuple[NamedPart, ...]
    unconfirmed: tuple[NamedPart, ...]
    expected_missed: float
    rest: GroupTest | None
    tests: tuple[GroupTest, ...]
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """How much worse a part is than the median of the others like it, in per cent of it; negative: it is better."""

    percent: float
    median: float
    siblings: int
