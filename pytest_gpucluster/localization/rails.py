"""The rails of a cluster: one adapter of each node, what it carries, and how it compares with the others. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.health.nics import ACTIVE, LINK_UP, nearest_gpus, own_ports
from pytest_gpucluster.inventory.numa import sysfs_address
from pytest_gpucluster.inventory.reading import NotAvailable, or_none
from pytest_gpucluster.judging.agreement import is_majority
from pytest_gpucluster.judging.finding import HERE, Finding
from pytest_gpucluster.localization.parts import Lag, Quantity, lags_of

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.nics import NetInterface, Nic
    from pytest_gpucluster.inventory.nvml import GpuState
    from pytest_gpucluster.measurements.host import NicPaths
    from pytest_gpucluster.measurements.pair_matrix import RailRates

__all__ = [
    "RailRate",
    "better_of",
    "gpus_near",
    "judge_lags",
    "judge_shares",
    "rail_lags",
    "rails_of_interfaces",
    "rails_of_nics",
    "rates_of",
    "slow_rails",
]

BITS_PER_BYTE = 8
NETWORK = {"NCCL_MNNVL_ENABLE": "0"}
"""Keeps NCCL from NVLink between nodes, which would carry a rail's bytes in an NVLink domain."""


@dataclass(frozen=True, slots=True)
class Rail:
    """Adapters of one name. ``gbit_s`` has the nodes whose adapter is up, with the rate of its port, None where not known.

    ``variables``: what makes NCCL, or gloo, use it alone.
    """

    name: str
    variables: Mapping[str, str]
    gbit_s: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RailRate:
    """What an adapter of one node reached: the best of its partners in the worse of its two directions.

    ``gb_s`` is 10^9 bytes a second, ``latency_us`` half a round trip, ``gbit_s`` the rate of its port, None if not known.
    """

    node: str
    rail: str
    gb_s: float
    latency_us: float
    gbit_s: float | None
    partners: tuple[str, ...]

    @property
    def share(self) -> float | None:
        """The part of the port's rate that arrived."""
        return None if self.gbit_s is None else self.gb_s * BITS_PER_BYTE / self.gbit_s


def rails_of_nics(hosts: Mapping[str, Sequence[Nic] | NotAvailable], fabric: str) -> list[Rail]:
    """A rail for each port of this fabric that is up on any node; ``hosts`` by the node's id."""
    found = grouped(
        (f"{nic.device}:{port.number}", (node, or_none(port.rate_gbit_s)))
        for node, nics in hosts.items()
        for nic, port in own_ports(or_none(nics) or [], fabric)
        if (port.state, port.physical_state) == (ACTIVE, LINK_UP)
    )
    return [Rail(name, {"NCCL_IB_HCA": f"={name}", **NETWORK}, dict(rates)) for name, rates in found.items()]


def rails_of_interfaces(hosts: Mapping[str, Sequence[NetInterface] | NotAvailable]) -> list[Rail]:
    """A rail for each network interface that is up on any node, for sockets."""
    every = [(node, one) for node, listed in hosts.items() for one in or_none(listed) or []]
    found = []
    for name, rates in grouped((one.name, (node, or_none(one.rate_gbit_s))) for node, one in every).items():
        sockets = {"NCCL_SOCKET_IFNAME": f"={name}", "GLOO_SOCKET_IFNAME": name, "NCCL_IB_DISABLE": "1", **NETWORK}
        found.append(Rail(name, sockets, dict(rates)))
    return found


def rates_of(rail: Rail, measured: Mapping[str, RailRates]) -> list[RailRate]:
    """What each node's adapter reached; ``measured`` by node id, in the order of the ranks.

    A pair is as fast as its slower end says. A slow adapter is slow with every partner, so the best partner decides: a
    healthy adapter is not blamed for a partner. Of two nodes each has one partner, and both are blamed.
    """
    nodes = list(measured)
    by_pair = grouped(((nodes[end.source], nodes[end.target]), end) for one in measured.values() for end in one.ends)
    transfer_s = {pair: max(end.transfer_s for end in ends) for pair, ends in by_pair.items()}
    trip_s = {pair: max(end.round_trip_s for end in ends) for pair, ends in by_pair.items()}
    return [_rate_of(rail, node, measured[node].size_bytes, transfer_s, trip_s) for node in nodes]


def _rate_of(
    rail: Rail, node: str, size_bytes: int, transfer_s: Mapping[tuple[str, str], float], trip_s: Mapping[tuple[str, str], float]
) -> RailRate:
    out_s = min(seconds for (source, _), seconds in transfer_s.items() if source == node)
    in_s = min(seconds for (_, target), seconds in transfer_s.items() if target == node)
    partners = dict.fromkeys(target for source, target in transfer_s if source == node)
    return RailRate(
        node=node,
        rail=rail.name,
        gb_s=size_bytes / max(out_s, in_s) / 1e9,
        latency_us=min(seconds for pair, seconds in trip_s.items() if node in pair) / 2 * 1e6,
        gbit_s=rail.gbit_s[node],
        partners=tuple(partners),
    )


def rail_lags(rates: Iterable[RailRate], quantity: Quantity, *, limit_percent: float = math.inf) -> dict[tuple[str, str], Lag]:
    """Each adapter, by node and rail, beside all others whose ports have its rate; without two of these it is left out.

    Where one is worse by more than the limit, and no majority is within it of each other, any may be the bad ones: all are
    then as much worse as the worst.
    """
    found: dict[tuple[str, str], Lag] = {}
    for alike in grouped((one.gbit_s, one) for one in rates).values():
        values = [one.gb_s if quantity == "bandwidth" else one.latency_us for one in alike]
        lags = lags_of(values, quantity)
        worst = max((lag.percent for lag in lags), default=0.0)
        ratio = _ratio_within(quantity, limit_percent)
        if worst > limit_percent and not is_majority(_most_alike(sorted(values), ratio), len(lags)):
            lags = [replace(lag, percent=worst) for lag in lags]
        found.update(zip([(one.node, one.rail) for one in alike], lags, strict=False))
    return found


def _ratio_within(quantity: Quantity, percent: float) -> float:
    """By what the least may be multiplied: a rate 75 % below another is a quarter, a latency 75 % above it is 1.75 times."""
    if quantity == "latency":
        return 1 + percent / 100
    return 1 / (1 - percent / 100) if percent < 100 else math.inf


def _most_alike(ordered: Sequence[float], ratio: float) -> int:
    """How many of the values, in order, lie within this ratio of each other, at most."""
    return max(bisect.bisect_right(ordered, low * ratio) - at for at, low in enumerate(ordered))


def slow_rails(rates: Sequence[RailRate], percent: Mapping[Quantity, float]) -> set[tuple[str, str]]:
    """The adapters, by node and rail, that are worse than the others by more than so many per cent."""
    return {
        name
        for quantity, limit in percent.items()
        for name, found in rail_lags(rates, quantity).items()
        if found.percent > limit
    }


def better_of(first: Sequence[RailRate], second: Sequence[RailRate]) -> list[RailRate]:
    """What was seen first, with the better values where an adapter was measured again: a slow one is slow each time."""
    again = {(one.node, one.rail): one for one in second}
    both = [(one, again.get((one.node, one.rail), one)) for one in first]
    return [replace(a, gb_s=max(a.gb_s, b.gb_s), latency_us=min(a.latency_us, b.latency_us)) for a, b in both]


def gpus_near(name: str, paths: NicPaths, gpus: Mapping[int, GpuState | None]) -> list[int]:
    """The numbers of the GPUs that are nearest to an adapter of a host; none if the PCIe tree does not show it."""
    way = paths.paths.get(name)
    if way is None or isinstance(way, NotAvailable) or isinstance(paths.gpu_paths, NotAvailable):
        return []
    numbers = {sysfs_address(state.pci): number for number, state in gpus.items() if state is not None}
    return sorted(numbers[address] for address in nearest_gpus(way, paths.gpu_paths) if address in numbers)


def judge_shares(rates: Sequence[RailRate], *, is_healthy: Callable[[float], bool]) -> Finding:
    """The least part of its port's rate that an adapter of a node carries."""
    shares = {one.rail: one.share for one in rates if one.share is not None}
    return Finding(
        bad={rail: (f"{share:.0%} of its port's rate",) for rail, share in shares.items() if not is_healthy(share)},
        unknown={} if shares else {HERE: ("the rate of no port is known",)},
        value=min(shares.values(), default=None),
        kind="nic",
        evidence={"rails": [{**asdict(one), "share": one.share} for one in rates]},
    )


def judge_lags(rates: Sequence[RailRate], lags: Mapping[str, Lag], *, is_healthy: Callable[[float], bool]) -> Finding:
    """How much worse the worst adapter of a node is than the others of the cluster, in per cent.

    Args:
        rates: of the node's adapters.
        lags: of those that have two others to compare with, by adapter.
        is_healthy: whether so many per cent are within the limit.
    """
    shown = {one.rail: f"{one.gb_s:.4g} GB/s, {one.latency_us:.4g} us" for one in rates}
    if not lags:
        texts = [f"{rail}: {text}" for rail, text in shown.items()]
        remark = f"no two other adapters to compare with: {'; '.join(texts)}"
        return Finding(value=0.0, kind="nic", evidence={"rates": texts}, remark=remark)
    worst = max(lags, key=lambda rail: lags[rail].percent)
    partners = next(one.partners for one in rates if one.rail == worst)
    return Finding(
        bad={rail: (shown[rail],) for rail, lag in lags.items() if not is_healthy(lag.percent)},
        value=lags[worst].percent,
        kind="nic",
        evidence={
            "worst": f"{worst}: {shown[worst]}",
            "median of the others": lags[worst].median,
            "others": lags[worst].siblings,
            "with": list(partners),
        },
    )
