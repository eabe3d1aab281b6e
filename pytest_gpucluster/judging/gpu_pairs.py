"""The pairs of GPUs of a node: which take the way over the host, and which are slower than the others of their kind. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from pytest_gpucluster.inventory.nearness import nearness

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.inventory.nearness import Position
    from pytest_gpucluster.measurements.pair_matrix import PairMatrix

Quantity: TypeAlias = Literal["bandwidth", "latency"]
OVER_HOST = ("SHM", "NET")
"""How NCCL's channels begin that go through the host's memory, or over its network, inside a node."""
FEWEST_SIBLINGS = 2
"""Of two pairs that differ, either may be the slow one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One ordered pair. ``way`` is the topology's word (``NV18``, ``PIX``, ``SYS``); the rest is as in ``PairMatrix``."""

    source: str
    target: str
    way: str | None
    gb_s: float
    latency_us: float
    path: str | None
    peer_access: bool | None

    @property
    def name(self) -> str:
        """Both ends."""
        return f"{self.source} -> {self.target}"

    @property
    def takes_host(self) -> bool | None:
        """Whether it goes through the host; None where neither CUDA nor NCCL's log tells."""
        if self.path is not None and any(kind.startswith(OVER_HOST) for kind in self.path.split()):
            return True
        if self.peer_access is not None:
            return not self.peer_access
        return None if self.path is None else False

    @property
    def why(self) -> str:
        """What shows that it takes the host, in words."""
        refused = "; CUDA refuses peer access" if self.peer_access is False else ""
        return f"{self.name} ({self.way or 'way not known'}): {self.path or 'no channel logged'}{refused}"

    @property
    def kind(self) -> str:
        """The word without its count: a pair whose GPU has lost an NVLink is still a sibling of the others."""
        return (self.way or "").rstrip("0123456789")


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """How far a pair is worse than the median of the others of its kind, in per cent of it; negative: it is better."""

    percent: float
    median: float
    siblings: int


def pairs_of(matrix: PairMatrix, positions: Mapping[str, Position]) -> list[Pair]:
    """Every ordered pair of a node's GPUs; ``positions``: where each GPU is, in the order of the ranks."""
    names = list(positions)
    return [
        Pair(
            source=source,
            target=target,
            way=nearness(positions[source], positions[target]),
            gb_s=gb_s,
            latency_us=latency_us,
            path=matrix.paths[row][column],
            peer_access=matrix.peer_access[row][column],
        )
        for row, source in enumerate(names)
        for column, target in enumerate(names)
        if (gb_s := matrix.gb_s[row][column]) is not None and (latency_us := matrix.latency_us[row][column]) is not None
    ]


def behind_siblings(pairs: Sequence[Pair], quantity: Quantity) -> dict[tuple[str, str], Behind]:
    """Each pair beside the other pairs of its kind; a pair with fewer than two of these is left out."""
    found: dict[tuple[str, str], Behind] = {}
    for pair in pairs:
        others = [_value(one, quantity) for one in pairs if one.kind == pair.kind and one is not pair]
        if len(others) < FEWEST_SIBLINGS:
            continue
        median = statistics.median(others)
        percent = 100 * (_value(pair, quantity) / median - 1)
        worse = -percent if quantity == "bandwidth" else percent
        found[pair.source, pair.target] = Behind(percent=worse, median=median, siblings=len(others))
    return found


def _value(pair: Pair, quantity: Quantity) -> float:
    return pair.gb_s if quantity == "bandwidth" else pair.latency_us
