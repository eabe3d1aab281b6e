"""Groups that find the two of many units that fail together. Pure.

A round splits the units by one bit of their numbers, or tests the likeliest pairs, whichever is expected to say more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping

    from pytest_gpucluster.judging.group_search_between import Hypotheses, Pair
    from pytest_gpucluster.judging.suspicion import ErrorRates

MIXER = 0x9E3779B97F4A7C15
LEAST_SPOILT = 1e-4
"""A group is worth a test where a bad connection is inside with this probability."""


def split(hypotheses: Hypotheses, free: Collection[str], rates: ErrorRates) -> list[tuple[str, ...]]:
    """The groups of a round among the parts that are ``free``."""
    members = [tuple(name for name in unit if name in free) for unit in hypotheses.units]
    pairs = {
        (one, other): chance
        for (one, other), chance in hypotheses.pairs.items()
        if members[one] and members[other] and len({*members[one], *members[other]}) > 1
    }
    units = sorted({unit for pair in pairs for unit in pair})
    bits = range((len(members) - 1).bit_length())
    ways: list[dict[int, Hashable]] = [{unit: unit >> bit & 1 for unit in units} for bit in bits]
    ways.append(_matched(pairs))
    structured = len(ways)
    ways += [{unit: (unit + 1) * MIXER >> shift & 1 for unit in units} for shift in range(20, 60, 4)]
    spoilt = [_spoilt(way, pairs) for way in ways]
    at = max(range(len(ways)), key=lambda at: _bits_told(spoilt[at].values(), rates) * (1 if at < structured else 0.75))
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for unit, group in ways[at].items():
        if spoilt[at].get(group, 0.0) >= LEAST_SPOILT:
            groups[group] += members[unit]
    return [tuple(group) for group in groups.values()]


def _matched(pairs: Mapping[Pair, float]) -> dict[int, Hashable]:
    """The most probable pairs that share no unit."""
    way: dict[int, Hashable] = {}
    for pair in pairs:
        if way.keys().isdisjoint(pair):
            way.update(dict.fromkeys(pair, pair))
    return way


def _spoilt(way: Mapping[int, Hashable], pairs: Mapping[Pair, float]) -> dict[Hashable, float]:
    """How probable it is for each group of a way that a bad pair is inside."""
    spoilt: dict[Hashable, float] = defaultdict(float)
    for (one, other), chance in pairs.items():
        if one in way and other in way and way[one] == way[other]:
            spoilt[way[one]] += chance
    return spoilt


def _bits_told(spoilt: Iterable[float], rates: ErrorRates) -> float:
    """What the outcomes of groups are expected to say: the less, the rarer a group fails for any other reason than by error."""
    wrong = [_bits(rates.false_failure), _bits(rates.missed)]
    return math.fsum(
        _bits(rates.outcome(failed=True, spoilt=chance)) - (1 - chance) * wrong[0] - chance * wrong[1] for chance in spoilt
    )


def _bits(chance: float) -> float:
    return -chance * math.log2(chance) - (1 - chance) * math.log2(1 - chance)
