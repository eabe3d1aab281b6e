"""What a simulated fleet answers of its links: GPUs in pairs, and nodes by one adapter at a time. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.fleet.simulated_call import made
from pytest_gpucluster.inventory.nics import NetInterface
from pytest_gpucluster.inventory.reading import healthy
from pytest_gpucluster.protocol.plain_data import to_plain
from pytest_gpucluster.protocol.rank import ordered_rounds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.fleet.simulated_call import SimulatedCall
    from pytest_gpucluster.fleet.simulation import FaultKind

DIRECT = (0.88, 4.2, "P2P/CUMEM")
"""What a pair reaches of its NVLinks, its latency in microseconds, and NCCL's name of the way."""
OVER_HOST = (0.05, 11.5, "SHM/direct/direct")


KEPT: Mapping[FaultKind, float] = {"links": 0.5, "nvlink": 17 / 18}
"""What is left of a pair's rate where one of its GPUs has this fault."""


def pair_matrix(call: SimulatedCall) -> Any:
    """Every ordered pair of a node's GPUs: equal, unless one is planted that takes the host, or that has slow NVLinks."""
    ranks = range(len(call.group.ranks))
    bad = [{first, (first + 1) % len(ranks)} for first in call.group.with_fault("pair")]
    found = [[OVER_HOST if {source, target} in bad else DIRECT for target in ranks] for source in ranks]
    shares, latencies_us, paths = ([_of_row(row, number, column) for number, row in enumerate(found)] for column in range(3))
    kept = {number: share for kind, share in KEPT.items() for number in call.group.with_fault(kind)}
    left = [[min(kept.get(source, 1.0), kept.get(target, 1.0)) for target in ranks] for source in ranks]
    full_gb_s = call.spec.peer_gb_s
    return made(
        "measurements.pair_matrix:PairMatrix",
        gb_s=[
            [None if row[to] is None else row[to] * left[at][to] * full_gb_s for to in ranks] for at, row in enumerate(shares)
        ],
        latency_us=latencies_us,
        paths=paths,
        peer_access=[[None if one is None else one == DIRECT[2] for one in row] for row in paths],
        size_bytes=call.kwargs["size_bytes"],
        small_bytes=call.kwargs.get("small_bytes", 8),
        world_size=len(ranks),
        shortened=0,
        backend="nccl",
        device=call.device,
    )


def _of_row(row: list[tuple[float, float, str]], source: int, column: int) -> list[Any]:
    """One value of each target; None for the GPU itself."""
    return [None if target == source else one[column] for target, one in enumerate(row)]


# --- One adapter at a time ---

RDMA_GB_S, SOCKETS_GB_S = 46.5, 4.8
RDMA_US, SOCKETS_US = 9.0, 38.0
INTERFACE = "eth0"
SLOW = ("mlx5_5:1", INTERFACE)
"""The adapters that are slow where that is planted."""
LOSS, DELAY = 0.5, 2.5
PARTNERS = 3


def net_interfaces(_call: SimulatedCall) -> Any:
    """One interface for sockets."""
    return made("measurements.rails:NetInterfaces", interfaces=[to_plain(healthy(NetInterface, name=INTERFACE))])


def rail(call: SimulatedCall) -> Any:
    """A rank's ends of its pairs. A pair is as slow as a slow adapter at either end."""
    group, name, size = call.group, call.kwargs["name"], call.kwargs["size_bytes"]
    own = group.ranks.index(call.rank)
    slow = {*group.with_fault("rail")} if name in SLOW else set()
    sockets = name == INTERFACE
    rounds = ordered_rounds(len(group.ranks), most=call.kwargs.get("partners", PARTNERS))
    transfer_s = size / (SOCKETS_GB_S if sockets else RDMA_GB_S) / 1e9
    trip_s = 2e-6 * (SOCKETS_US if sockets else RDMA_US)
    ends = [
        made(
            "measurements.rails:RailEnd",
            source=source,
            target=target,
            transfer_s=transfer_s / LOSS if slow & {source, target} else transfer_s,
            round_trip_s=trip_s * DELAY if slow & {source, target} else trip_s,
        )
        for pairs in rounds
        for source, target in pairs
        if own in (source, target)
    ]
    return made(
        "measurements.rails:RailRates",
        name=name,
        ends=ends,
        used=[name],
        kinds=["NET/Socket" if sockets else "NET/IB/GDRDMA"],
        size_bytes=size,
        small_bytes=8,
        world_size=len(group.ranks),
        shortened=0,
        backend="nccl",
        device=call.device,
    )
