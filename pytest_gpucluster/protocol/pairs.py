"""Which pairs of a group work at the same time."""

from __future__ import annotations

from typing import TypeVar

Member = TypeVar("Member")


def rounds_of_pairs(members: list[Member]) -> list[list[tuple[Member, Member]]]:
    """Every pair once, in rounds of disjoint pairs (the circle method): n members need n - 1 rounds, n if n is odd."""
    ring: list[Member | None] = [*members]
    if len(ring) % 2:
        ring.append(None)
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(first, second) for first, second in pairs if first is not None and second is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def ordered_rounds(size: int, *, most: int | None = None) -> list[list[tuple[int, int]]]:
    """Ordered pairs of ``size`` members, by number, in rounds of disjoint pairs; each pair forth, then back.

    ``most``: so many partners of each member at most; None: all.
    """
    rounds = rounds_of_pairs(list(range(size)))[:most]
    return [pairs for forth in rounds for pairs in (forth, [(target, source) for source, target in forth])]
