"""Which GPU slows a collective, by the rates of pairs. Pure.

In a node: the GPU that is slow with every other one, and the pairs that take the way over the host. Of a slow node: the GPU
whose own way out is slow, beside the same between good nodes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.inventory.numa import sysfs_address
from pytest_gpucluster.inventory.pci_tree import PciPath, Position, nearness, position
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.judging.finding import Finding
from pytest_gpucluster.localization.parts import Lag, Quantity, lags_of
from pytest_gpucluster.text import counted, shortlist

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.nvml import GpuState
    from pytest_gpucluster.measurements.pair_matrix import PairMatrix

__all__ = ["judge_pair_paths", "pair_lags", "pairs_of", "position_of"]

SLOW_SHARE = 0.8
"""A pair below this part of the median of all pairs is slow: a guess, as far below as limits in a node lie."""
FEWEST_GPUS = 3
"""Of two GPUs that are slow together, either may be to blame."""
SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGpus:
    """What the pairs of a node show.

    Attributes:
        gpus: those that are slow with every other one, as source, as target, or as both.
        pairs: the other slow pairs, source and target.
        usual_gb_s: the median of all pairs of all nodes.
        slowest_gb_s: the slowest pair of this node.
    """

    gpus: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    usual_gb_s: float
    slowest_gb_s: float

    @property
    def text(self) -> str:
        """What it shows, in words."""
        usual = f"{format_number(self.usual_gb_s)} GB/s is the median of all pairs"
        slowest = f"the slowest pair {format_number(self.slowest_gb_s)}"
        if self.gpus:
            return f"slow with every other GPU: {', '.join(self.gpus)} ({slowest}; {usual})"
        if self.pairs:
            shown = shortlist([f"{source} -> {target}" for source, target in self.pairs], most=SHOWN)
            return f"{counted(len(self.pairs), 'slow pair')}: {shown} ({slowest}; {usual})"
        return f"each pair of its GPUs is as fast as others ({slowest}; {usual}): look at NVLink SHARP, if the node has it"


def slow_gpus(names: Sequence[str], matrix: PairMatrix, usual_gb_s: float) -> SlowGpus:
    """Look for the GPUs of a node that are slow with all others.

    Args:
        names: the GPUs of the node, at least :data:`FEWEST_GPUS`, in the order of the ranks.
        matrix: what each sends to each other one.
        usual_gb_s: what a pair usually reaches, by :func:`usual_pair_gb_s`.
    """
    rates = _rates(names, matrix)
    slow = {pair for pair, gb_s in rates.items() if gb_s < SLOW_SHARE * usual_gb_s}
    bad = [name for name in names if _is_slow_with_all(name, names, slow)]
    found = bad if len(bad) < len(names) else []  # all of them: the node is slow, and none of its GPUs stands out
    left = tuple(sorted(pair for pair in slow if not {*pair} & {*found}))
    return SlowGpus(gpus=tuple(found), pairs=left, usual_gb_s=usual_gb_s, slowest_gb_s=min(rates.values()))


def usual_pair_gb_s(matrices: Mapping[object, PairMatrix]) -> float:
    """The median of every ordered pair of all nodes."""
    return statistics.median(gb_s for matrix in matrices.values() for row in matrix.gb_s for gb_s in row if gb_s is not None)


def _rates(names: Sequence[str], matrix: PairMatrix) -> dict[tuple[str, str], float]:
    return {
        (source, target): gb_s
        for row, source in enumerate(names)
        for column, target in enumerate(names)
        if (gb_s := matrix.gb_s[row][column]) is not None
    }


def _is_slow_with_all(name: str, names: Sequence[str], slow: set[tuple[str, str]]) -> bool:
    """Whether every pair of a GPU is slow, in one direction or in both. Two bad GPUs are slow with each other anyway."""
    others = [other for other in names if other != name]
    return all((name, other) in slow for other in others) or all((other, name) in slow for other in others)


OVER_HOST = ("SHM", "NET")
"""How NCCL's channels begin that go through the host's memory, or over its network, inside a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPair:
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
        return f"{self.way or 'way not known'}, {self.path or 'no channel logged'}{refused}"

    @property
    def kind(self) -> str:
        """The word without its count: a pair whose GPU has lost an NVLink is still a sibling of the others."""
        return (self.way or "").rstrip("0123456789")


def pairs_of(matrix: PairMatrix, positions: Mapping[str, Position]) -> list[GpuPair]:
    """Every ordered pair of a node's GPUs; ``positions``: where each GPU is, in the order of the ranks."""
    names = list(positions)
    return [
        GpuPair(
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


def position_of(state: GpuState | NotAvailable | None, ways: Mapping[str, PciPath | NotAvailable]) -> Position:
    """The position of a GPU by what NVML (None: not measured) and the PCIe tree show."""
    if state is None or isinstance(state, NotAvailable):
        return position(None)
    links = [] if isinstance(state.nvlinks, NotAvailable) or state.nvlink_peer != "switch" else state.nvlinks
    return position(ways.get(sysfs_address(state.pci)), nvlinks=sum(link.is_up is True for link in links))


def judge_pair_paths(pairs: Sequence[GpuPair]) -> Finding:
    """The pairs of a node's GPUs that reach each other through the host only."""
    return Finding(
        bad={pair.name: (pair.why,) for pair in pairs if pair.takes_host},
        unknown={pair.name: ("neither CUDA nor NCCL's log shows its way",) for pair in pairs if pair.takes_host is None},
        kind="link",
        unknown_kind="software",
        evidence={"pairs": [asdict(pair) for pair in pairs]},
    )


def pair_lags(pairs: Sequence[GpuPair], quantity: Quantity) -> dict[tuple[str, str], Lag]:
    """Each pair beside the other pairs of its kind; a pair with fewer than two of these is left out."""
    found: dict[tuple[str, str], Lag] = {}
    for alike in grouped((pair.kind, pair) for pair in pairs).values():
        lags = lags_of([one.gb_s if quantity == "bandwidth" else one.latency_us for one in alike], quantity)
        found.update(zip([(one.source, one.target) for one in alike], lags, strict=False))
    return found


GOOD_SHARE = 0.8
"""A way below this part of the median between good nodes is slow: a guess, as far below as limits between nodes lie."""


def slow_ways(node: Mapping[str, float | None], good: Mapping[str, float | None]) -> tuple[str, ...]:
    """The GPUs of a node whose way is slow; none where nothing between good nodes was measured.

    Args:
        node: by GPU of the node, what it and the same GPU of a good node reach, higher is better; None: not measured.
        good: the same of two good nodes.
    """
    usual = _median(good)
    return tuple(name for name, value in _known(node).items() if usual is not None and value < GOOD_SHARE * usual)


def describe_ways(node: Mapping[str, float | None], good: Mapping[str, float | None], *, unit: str) -> str:
    """What the GPUs of a node reach by themselves, in words."""
    known, usual = _known(node), _median(good)
    if usual is None or not known:
        return "its GPUs by themselves: not measured"
    between = f"{format_number(usual)} {unit} between good nodes"
    slow = slow_ways(node, good)
    if not slow:
        return f"each of its GPUs by itself is as fast as elsewhere ({format_number(min(known.values()))}; {between})"
    if len(slow) == len(known):
        best = format_number(max(known.values()))
        return f"each of its {counted(len(known), 'GPU')} is slow by itself (best {best}; {between})"
    rates = ", ".join(f"{name} {format_number(known[name])}" for name in slow)
    return f"by itself only the way of {rates} is slow ({between})"


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _median(values: Mapping[str, float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known.values()) if known else None
