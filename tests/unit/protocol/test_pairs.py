"""Which pairs of a group work at the same time."""

from __future__ import annotations

import pytest

from pytest_gpucluster.protocol.pairs import rounds_of_pairs


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
