"""What the GPUs of a simulated fleet answer in pairs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.fleet.asked import made

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.fleet.asked import Asked
    from pytest_gpucluster.fleet.faults import FaultKind

DIRECT = (0.88, 4.2, "P2P/CUMEM")
"""What a pair reaches of its NVLinks, its latency in microseconds, and NCCL's name of the way."""
OVER_HOST = (0.05, 11.5, "SHM/direct/direct")


KEPT: Mapping[FaultKind, float] = {"links": 0.5, "nvlink": 17 / 18}
"""What is left of a pair's rate where one of its GPUs has this fault."""


def pair_matrix(asked: Asked) -> Any:
    """Every ordered pair of a node's GPUs: equal, unless one is planted that takes the host, or that has slow NVLinks."""
    ranks = range(len(asked.group.ranks))
    bad = [{first, (first + 1) % len(ranks)} for first in asked.group.with_fault("pair")]
    found = [[OVER_HOST if {source, target} in bad else DIRECT for target in ranks] for source in ranks]
    shares, latencies_us, paths = ([_of_row(row, number, column) for number, row in enumerate(found)] for column in range(3))
    kept = {number: share for kind, share in KEPT.items() for number in asked.group.with_fault(kind)}
    left = [[min(kept.get(source, 1.0), kept.get(target, 1.0)) for target in ranks] for source in ranks]
    full_gb_s = asked.spec.nvlink_gb_s
    return made(
        "measurements.pair_matrix:PairMatrix",
        gb_s=[
            [None if row[to] is None else row[to] * left[at][to] * full_gb_s for to in ranks] for at, row in enumerate(shares)
        ],
        latency_us=latencies_us,
        paths=paths,
        peer_access=[[None if one is None else one == DIRECT[2] for one in row] for row in paths],
        size_bytes=asked.kwargs["size_bytes"],
        small_bytes=asked.kwargs.get("small_bytes", 8),
        world_size=len(ranks),
        backend="nccl",
        device=asked.device,
    )


def _of_row(row: list[tuple[float, float, str]], source: int, column: int) -> list[Any]:
    """One value of each target; None for the GPU itself."""
    return [None if target == source else one[column] for target, one in enumerate(row)]
