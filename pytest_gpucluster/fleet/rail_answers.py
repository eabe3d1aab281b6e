"""What the nodes of a simulated fleet answer of one adapter at a time. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.fleet.asked import made
from pytest_gpucluster.protocol.rank import ordered_rounds

if TYPE_CHECKING:
    from pytest_gpucluster.fleet.asked import Asked

RDMA_GB_S, SOCKETS_GB_S = 46.5, 4.8
RDMA_US, SOCKETS_US = 9.0, 38.0
INTERFACE, INTERFACE_GBIT_S = "eth0", 50.0
SLOW = ("mlx5_5:1", INTERFACE)
"""The adapters that are slow where that is planted."""
LOSS, DELAY = 0.5, 2.5
PARTNERS = 3


def net_interfaces(asked: Asked) -> Any:
    """One interface for sockets."""
    del asked
    interface = made("inventory.net_interfaces:NetInterface", name=INTERFACE, rate_gbit_s=INTERFACE_GBIT_S)
    return made("measurements.rails:NetInterfaces", interfaces=[interface])


def rail(asked: Asked) -> Any:
    """A rank's ends of its pairs. A pair is as slow as a slow adapter at either end."""
    group, name, size = asked.group, asked.kwargs["name"], asked.kwargs["size_bytes"]
    own = group.ranks.index(asked.rank)
    slow = {*group.with_fault("rail")} if name in SLOW else set()
    sockets = name == INTERFACE
    rounds = ordered_rounds(len(group.ranks), most=asked.kwargs.get("partners", PARTNERS))
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
        backend="nccl",
        device=asked.device,
    )
