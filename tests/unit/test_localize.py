"""The search for culprits as other programs call it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.localize import localize

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = 350.0


class Cluster:
    """Groups with a bad member, or with both members of a pair, reach 203, others about 390; a share comes out wrong."""

    def __init__(self, bad: set[Any], *, pair: tuple[Any, Any] | None = None, noise: float = 0.0, seed: int = 0) -> None:
        self.bad, self.pair, self.noise = bad, pair, noise
        self.chance = random.Random(seed)
        self.asked: list[list[list[Any]]] = []

    def probe(self, groups: list[list[Any]]) -> list[float | None]:
        """One value for each group; the groups share no member."""
        members = [member for group in groups for member in group]
        assert len(members) == len(set(members))
        self.asked.append(groups)
        return [self._value(group) for group in groups]

    def _value(self, group: Sequence[Any]) -> float:
        is_bad = bool(self.bad & set(group)) or (self.pair is not None and set(self.pair) <= set(group))
        if self.chance.random() < self.noise:
            is_bad = not is_bad
        return (203.0 if is_bad else 390.0) * self.chance.uniform(0.98, 1.02)


@pytest.mark.parametrize("bad", [set(), {"n7"}, {"n0", "n63"}, {"n3", "n4", "n5", "n40", "n41"}])
def test_the_bad_members(bad: set[str]) -> None:
    """All of them and nobody else; rounds and groups are counted."""
    cluster = Cluster(bad)
    found = localize([f"n{number}" for number in range(64)], cluster.probe, limit=LIMIT, noise=0.02)
    assert set(found.culprits) == bad
    assert (found.connections, found.unconfirmed) == ((), ())
    assert found.rounds == len(cluster.asked)
    assert found.probes == sum(map(len, cluster.asked))


def test_wrong_values() -> None:
    """2 % of the groups come out on the wrong side; members may be anything that can be a key."""
    for seed in range(5):
        bad = {(seed, 1), (seed + 20, 1)}
        cluster = Cluster(bad, noise=0.02, seed=seed)
        assert set(localize([(number, 1) for number in range(100)], cluster.probe, limit=LIMIT).culprits) == bad


def test_a_connection() -> None:
    """Two members that are slow only with each other: both are good."""
    cluster = Cluster(set(), pair=(3, 11))
    found = localize(range(16), cluster.probe, limit=LIMIT, noise=0)
    assert found.culprits == ()
    assert [set(pair) for pair in found.connections] == [{3, 11}]


def test_an_end() -> None:
    """After so many rounds, and where nothing can be measured."""
    assert localize(range(50), Cluster({9}).probe, limit=LIMIT, max_rounds=1).rounds == 1
    for nothing in (None, float("nan")):
        found = localize(range(50), lambda groups: [nothing] * len(groups), limit=LIMIT)  # noqa: B023
        assert found.culprits == ()


@pytest.mark.parametrize(
    ("members", "changes", "said"),
    [
        ([], {}, "at least 2"),
        ([1], {}, "at least 2"),
        ([1, 1, 2], {}, "twice"),
        ([1, 2, 3], {"noise": 0.5}, "noise is 0.5"),
        ([1, 2, 3], {"noise": -0.1}, "noise is -0.1"),
        ([1, 2, 3], {"max_rounds": 0}, "max_rounds is 0"),
    ],
)
def test_bad_input(members: list[int], changes: dict[str, Any], said: str) -> None:
    """Refused before anything is measured."""
    cluster = Cluster(set())
    with pytest.raises(ValueError, match=said):
        localize(members, cluster.probe, limit=LIMIT, **changes)
    assert cluster.asked == []
