"""Find the members that spoil a group's measurement, by measuring smaller groups. Pure; docs/localization.md has the method."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pytest_gpucluster.localization.parts import ErrorRates, MemberGroup, Result, SearchPart
from pytest_gpucluster.localization.search import search

Member = TypeVar("Member", bound=Hashable)
LEAST_NOISE, MOST_NOISE = 0.001, 0.45
"""Every measurement can be wrong, and one that is wrong half of the time says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings(Generic[Member]):
    """What a search found.

    Attributes:
        culprits: members that spoil every group, most certain first.
        connections: two members each that work with all others, and fail together.
        unconfirmed: suspects that are more probably culprits than not. Nothing confirmed them, so nobody should replace them.
        rounds: how many times groups were measured.
        probes: how many groups were measured.
    """

    culprits: tuple[Member, ...]
    connections: tuple[tuple[Member, Member], ...]
    unconfirmed: tuple[Member, ...]
    rounds: int
    probes: int


def localize(
    members: Sequence[Member],
    probe: Callable[[list[list[Member]]], Sequence[float | None]],
    *,
    limit: float,
    noise: float = 0.02,
    max_rounds: int | None = None,
) -> Findings[Member]:
    """Name the members without which a group reaches ``limit``.

    Args:
        members: at least 2, none twice: nodes, GPUs, adapters. Neighbours should stand together.
        probe: measures the groups of a round and returns one value for each, higher is better. They share no member, so they
            can run at once. None, or a value that is not finite: not measured.
        limit: a group below it fails.
        noise: the share of groups that come out on the wrong side of the limit, at least 0 and below 0.5.
        max_rounds: end after so many rounds; by default 12 + 4 log2(members).

    Raises:
        ValueError: fewer than 2 members, one twice, or a number out of its range.
    """
    if not 0 <= noise < 0.5:
        raise ValueError(f"noise is {noise}: expected a share of at least 0 and below 0.5")
    if max_rounds is not None and max_rounds < 1:
        raise ValueError(f"max_rounds is {max_rounds}: expected at least 1")
    if len(set(members)) != len(members):
        raise ValueError("a member stands there twice")
    by_name = {str(number): member for number, member in enumerate(members)}
    probes = 0

    def measure(groups: Sequence[MemberGroup]) -> list[Result]:
        nonlocal probes
        probes += len(groups)
        values = probe([[by_name[name] for name in group.parts] for group in groups])
        return [_result(value, limit) for value in values]

    rate = min(max(noise, LEAST_NOISE), MOST_NOISE)
    parts, rates = [SearchPart(name=name) for name in by_name], ErrorRates(false_failure=rate, missed=rate)
    report = search(parts, measure, rates=rates, most_rounds=max_rounds)
    named = [tuple(by_name[name] for name in found.suspect.names) for found in report.culprits]
    return Findings(
        culprits=tuple(names[0] for names in named if len(names) == 1),
        connections=tuple((names[0], names[1]) for names in named if len(names) > 1),
        unconfirmed=tuple(dict.fromkeys(by_name[name] for found in report.unconfirmed for name in found.suspect.names)),
        rounds=report.rounds,
        probes=probes,
    )


def _result(value: float | None, limit: float) -> Result:
    if value is None or not math.isfinite(value):
        return Result(passed=None)
    return Result(passed=value >= limit, value=value)
