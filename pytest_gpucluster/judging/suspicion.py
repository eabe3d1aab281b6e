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
"""The largest change of a log-odds message, after which nothing more is computed."""
DAMPING = 0.3
FEWEST_EXPECTED = 0.5
"""Culprits that are expected before any test: the failure that asked for the search may have been noise."""
HIGHEST_SHARE = 0.3
LARGEST_LOG_ODDS = 60.0


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


@dataclass(frozen=True, slots=True)
class Observed:
    """One test: the numbers of its suspects, and whether it failed."""

    suspects: tuple[int, ...]
    failed: bool


def probabilities(tests: Sequence[Observed], weights: Sequence[float], *, parts: int, rates: ErrorRates) -> list[float]:
    """The probability of each suspect that it is a culprit.

    Args:
        tests: all tests so far.
        weights: of each suspect, how frequent culprits of its kind are, relative to parts (1.0).
        parts: the first so many suspects are parts; the share of culprits is estimated among them.
        rates: how often a test is wrong.
    """
    messages = [[0.0] * len(test.suspects) for test in tests]
    share = FEWEST_EXPECTED / max(parts, 1)
    sums = [0.0] * len(weights)
    priors = _log_odds(weights, share)
    for _ in range(MOST_SWEEPS):
        change = 0.0
        for test, sent in zip(tests, messages, strict=True):
            change = max(change, _pass_on(test, sent, priors, sums, rates))
        found = math.fsum(_probability(priors[index] + sums[index]) for index in range(parts))
        before, share = share, min((FEWEST_EXPECTED + found) / (parts + 1), HIGHEST_SHARE)
        priors = _log_odds(weights, share)
        if change < SETTLED and abs(share - before) < SETTLED * before:
            break
    return [_probability(prior + total) for prior, total in zip(priors, sums, strict=True)]


def _pass_on(test: Observed, sent: list[float], priors: Sequence[float], sums: list[float], rates: ErrorRates) -> float:
    """Renew what a test says to each of its suspects, in log-odds. Returns the largest change."""
    with_culprit, without = (1 - rates.missed, rates.false_failure) if test.failed else (rates.missed, 1 - rates.false_failure)
    innocent = [_log_innocent(priors[index] + sums[index] - said) for index, said in zip(test.suspects, sent, strict=True)]
    all_innocent = math.fsum(innocent)
    largest = 0.0
    for at, index in enumerate(test.suspects):
        others = math.exp(min(all_innocent - innocent[at], 0.0))
        fresh = math.log(with_culprit / (without * others + with_culprit * (1 - others)))
        step = (1 - DAMPING) * (fresh - sent[at])
        sent[at] += step
        sums[index] += step
        largest = max(largest, abs(step))
    return largest


def _log_odds(weights: Sequence[float], share: float) -> list[float]:
    return [math.log(weight * share / (1 - min(weight, 1.0) * share)) for weight in weights]


def _probability(log_odds: float) -> float:
    bounded = max(-LARGEST_LOG_ODDS, min(LARGEST_LOG_ODDS, log_odds))
    return 1 / (1 + math.exp(-bounded))


def _log_innocent(log_odds: float) -> float:
    """The logarithm of the probability that a suspect is none."""
    if log_odds > LARGEST_LOG_ODDS:
        return -log_odds
    return -math.log1p(math.exp(log_odds))
