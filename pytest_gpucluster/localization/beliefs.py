"""How probable each suspect of a group test is. Pure: outcomes of tests in, probabilities out.

The model: a test fails with probability ``1 - missed`` where at least one of its suspects is a culprit, and with probability
``false_failure`` where none is. The tests are independent, given the culprits. Belief propagation over suspects and tests
gives each suspect's probability. How frequent culprits are is estimated from the same tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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
