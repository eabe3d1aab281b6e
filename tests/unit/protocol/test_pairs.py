"""Which pairs of a group work at the same time."""

from __future__ import annotations

import pytest

from pytest_gpucluster.protocol.rank import ordered_rounds, rounds_of_pairs


@pytest.mark.parametrize("size", range(2, 18))
def test_every_pair_once_in_disjoint_rounds(size: int) -> None:
    """For even n they are n - 1, for odd n: no fewer are possible."""
    rounds = rounds_of_pairs(list(range(size)))
    assert len(rounds) == (size if size % 2 else size - 1)
    for pairs in rounds:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members))
        assert pairs
    everything = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(everything) == len(set(everything)) == size * (size - 1) // 2


@pytest.mark.parametrize("size", range(2, 10))
def test_every_ordered_pair_once_in_disjoint_rounds(size: int) -> None:
    """Both directions of a pair, never at once."""
    rounds = ordered_rounds(size)
    for pairs in rounds:
        members = [member for pair in pairs for member in pair]
        assert len(members) == len(set(members))
    everything = [pair for pairs in rounds for pair in pairs]
    assert len(everything) == len(set(everything)) == size * (size - 1)


@pytest.mark.parametrize(("size", "fewest"), [(2, 1), (3, 2), (4, 3), (5, 2), (8, 3), (9, 2), (128, 3)])
def test_few_partners_of_each(size: int, fewest: int) -> None:
    """As many rounds as asked, in which each member has different partners, both ways."""
    found = [pair for pairs in ordered_rounds(size, most=3) for pair in pairs]
    assert len(found) == len(set(found))
    partners = [{target for source, target in found if source == member} for member in range(size)]
    assert partners == [{source for source, target in found if target == member} for member in range(size)]
    assert min(map(len, partners)) == fewest
    assert max(map(len, partners)) <= 3
