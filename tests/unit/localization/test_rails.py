"""The adapters of a cluster beside each other: the slow one is named, and none of its partners."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.inventory.nics import NetInterface, Nic, NicPort
from pytest_gpucluster.inventory.reading import NotAvailable, healthy
from pytest_gpucluster.localization.rails import (
    Rail,
    RailRate,
    better_of,
    rail_lags,
    rails_of_interfaces,
    rails_of_nics,
    rates_of,
    slow_rails,
)
from pytest_gpucluster.measurements.pair_matrix import RailEnd, RailRates
from pytest_gpucluster.places import Place
from pytest_gpucluster.protocol.rank import ordered_rounds
from tests_acceptance import test_rails as suite

if TYPE_CHECKING:
    from pytest_gpucluster.localization.parts import Quantity

AGAIN: dict[Quantity, float] = {"bandwidth": 10, "latency": 50}
UNREAD = NotAvailable("No such file or directory")
SIZE = 1_000_000_000
HEALTHY_S, TRIP_S = 0.02, 20e-6


def nic(number: int, *, virtual: bool = False, **port: Any) -> Nic:
    """A healthy adapter but for these fields of its port."""
    ports = [healthy(NicPort, **{"number": 1, **port})]
    return healthy(Nic, device=f"mlx5_{number}", pci=f"0000:{number:02x}:00.0", is_virtual=virtual, ports=ports)


def measured(nodes: int, slow: dict[tuple[int, str], float]) -> list[RailRate]:
    """What one rail of so many nodes shows; ``slow``: by node and direction (``out``, ``in``), how many times its time."""
    names = [f"node{number}" for number in range(nodes)]
    ends: dict[str, list[RailEnd]] = {name: [] for name in names}
    for source, target in (pair for pairs in ordered_rounds(nodes, most=3) for pair in pairs):
        factor = max(slow.get((source, "out"), 1.0), slow.get((target, "in"), 1.0))
        for number in (source, target):  # only the target sees how long it took
            seconds = HEALTHY_S * (factor if number == target else 1.0)
            trip_s = TRIP_S * max(slow.get((end, way), 1.0) for end in (source, target) for way in ("out", "in"))
            end = RailEnd(source=source, target=target, transfer_s=seconds, round_trip_s=trip_s)
            ends[names[number]].append(end)
    rates = {
        name: RailRates(
            name="mlx5_0:1", ends=ends[name], used=[], kinds=[], size_bytes=SIZE, device="",
        )
        for name in names
    }  # fmt: skip
    rail = Rail(name="mlx5_0:1", variables={}, gbit_s=dict.fromkeys(names, 400.0))
    return rates_of(rail, rates)


def test_an_adapter_that_seemed_slow_is_measured_again() -> None:
    """A slow one is slow each time; one that was disturbed is not, and keeps the better of both values."""
    first = measured(4, {(1, "out"): 2.0, (2, "in"): 1.5})
    assert slow_rails(first, AGAIN) == {("node1", "mlx5_0:1"), ("node2", "mlx5_0:1")}
    assert slow_rails(measured(4, {}), AGAIN) == set()
    assert slow_rails(measured(4, {(2, "in"): 1.3}), {"latency": 50}) == set()
    found = better_of(first, measured(4, {(1, "out"): 2.0, (3, "out"): 2.0}))
    assert slow_rails(found, AGAIN) == {("node1", "mlx5_0:1")}
    assert better_of(first, []) == first
    assert [one.node for one in found] == [one.node for one in first]


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 12])
def test_healthy_rails(nodes: int) -> None:
    """Each has the whole rate, and none is behind."""
    seen = measured(nodes, {})
    assert [one.node for one in seen] == [f"node{number}" for number in range(nodes)]
    assert {one.gb_s for one in seen} == {50.0}
    assert {one.share for one in seen} == {1.0}
    assert {one.latency_us for one in seen} == {10.0}
    assert {one.percent for one in rail_lags(seen, "bandwidth").values()} <= {0.0}


@pytest.mark.parametrize("nodes", [3, 4, 5, 12])
@pytest.mark.parametrize("ways", [("out",), ("in",), ("out", "in")])
def test_one_slow_adapter(nodes: int, ways: tuple[str, ...]) -> None:
    """It alone, also if it is slow in one direction only; its partners are healthy with somebody else."""
    seen = measured(nodes, {(1, way): 2.0 for way in ways})
    assert {one.node: one.gb_s for one in seen if one.gb_s < 49} == {"node1": 25.0}
    quantities: tuple[Quantity, ...] = ("bandwidth", "latency")
    for quantity in quantities:
        behind = rail_lags(seen, quantity)
        assert {node for (node, _), one in behind.items() if one.percent > 10} == {"node1"}


def test_of_two_nodes_both_ends_are_named() -> None:
    """Nothing shows which of the two is slow."""
    assert [one.gb_s for one in measured(2, {(1, "out"): 2.0})] == [25.0, 25.0]
    assert rail_lags(measured(2, {(1, "out"): 2.0}), "bandwidth") == {}


def test_two_slow_adapters_that_are_partners() -> None:
    """Both are found, and nobody else."""
    seen = measured(8, {(0, "out"): 2.0, (7, "in"): 4.0})
    assert {one.node for one in seen if one.gb_s < 49} == {"node0", "node7"}


def test_ports_of_another_rate_are_no_siblings() -> None:
    """A port of half the rate carries half, and that is all right."""

    def seen(node: str, rail: str, gb_s: float, gbit_s: float) -> RailRate:
        return RailRate(node=node, rail=rail, gb_s=gb_s, latency_us=5.0, gbit_s=gbit_s, partners=())

    fast = [seen(f"node{number}", "mlx5_0:1", 46.0, 400.0) for number in range(3)]
    half = [seen(f"node{number}", "mlx5_1:1", 23.0, 200.0) for number in range(2)]
    found = rail_lags([*fast, *half], "bandwidth")
    assert {ends: one.percent for ends, one in found.items()} == {(one.node, "mlx5_0:1"): 0.0 for one in fast}


@pytest.mark.parametrize("limit_percent", [10.0, 50.0, 75.0, 100.0])
@pytest.mark.parametrize("quantity", ["bandwidth", "latency"])
def test_within_the_limit_of_each_other_is_alike(quantity: Quantity, limit_percent: float) -> None:
    """Healthy ones that scatter as far as the limit allows are a majority, however wide it is: one is named and not all."""
    ends = {"bandwidth": (1 - limit_percent / 100, 1.0), "latency": (1.0, 1 + limit_percent / 100)}[quantity]
    low, high = ends[0] * 1.0001 + 1e-6, ends[1] * 0.9999
    values = [low, high, high, low, high, high, low, 1e-9 if quantity == "bandwidth" else 100.0]
    seen = [
        RailRate(node=f"n{at}", rail="x", gb_s=value, latency_us=value, gbit_s=None, partners=())
        for at, value in enumerate(values)
    ]
    found = rail_lags(seen, quantity, limit_percent=limit_percent)
    worst = {node for (node, _), one in found.items() if one.percent > 0.999 * max(lag.percent for lag in found.values())}
    assert "n7" in worst
    assert worst == {"n7"} or (limit_percent == 100.0 and quantity == "bandwidth")  # nothing is more than 100 % slower


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 5.0], [4.0, 3.0, 2.0, 1.0, 2.5]])
def test_the_median_is_that_of_the_others(values: list[float]) -> None:
    """Each is left out of its own."""
    seen = [
        RailRate(node=f"n{at}", rail="x", gb_s=value, latency_us=1.0, gbit_s=None, partners=())
        for at, value in enumerate(values)
    ]
    found = rail_lags(seen, "bandwidth")
    assert [found[f"n{at}", "x"].median for at in range(len(values))] == [
        statistics.median([*values[:at], *values[at + 1 :]]) for at in range(len(values))
    ]


def test_the_rails_of_adapters() -> None:
    """Each port that is up, with the nodes that have it, and its exact name for NCCL."""
    hosts: dict[str, list[Nic] | NotAvailable] = {
        "node0": [nic(0), nic(1), nic(2, fabric="roce"), nic(3, virtual=True)],
        "node1": [nic(0, rate_gbit_s=UNREAD), nic(1, state="DOWN"), nic(10)],
        "node2": UNREAD,
    }
    found = {rail.name: rail for rail in rails_of_nics(hosts, "infiniband")}
    assert {name: rail.gbit_s for name, rail in found.items()} == {
        "mlx5_0:1": {"node0": 400.0, "node1": None},
        "mlx5_1:1": {"node0": 400.0},
        "mlx5_10:1": {"node1": 400.0},
    }
    assert found["mlx5_1:1"].variables == {
        "NCCL_IB_HCA": "=mlx5_1:1",  # without = it would match mlx5_10 too
        "NCCL_MNNVL_ENABLE": "0",  # NVLink would carry it in a domain of several nodes
    }


def test_the_rails_of_sockets() -> None:
    """NCCL may not take InfiniBand instead; gloo gets the name as well."""
    hosts: dict[str, list[NetInterface] | NotAvailable] = {
        "node0": [NetInterface(name="eth0", rate_gbit_s=25.0)],
        "node1": [NetInterface(name="eth0", rate_gbit_s=UNREAD)],
        "node2": UNREAD,
    }
    (rail,) = rails_of_interfaces(hosts)
    assert rail.gbit_s == {"node0": 25.0, "node1": None}
    assert rail.variables == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_IB_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_MNNVL_ENABLE": "0",
    }


def rail_of_two(places: list[Place]) -> Results:
    """What two healthy nodes measure through one adapter."""
    ends = [RailEnd(source=one, target=1 - one, transfer_s=HEALTHY_S, round_trip_s=TRIP_S) for one in (0, 1)]
    rates = RailRates(name="", ends=ends, used=[], kinds=[], size_bytes=SIZE, device="")
    return Results(dict.fromkeys(places, rates), {})


@pytest.mark.parametrize(
    ("numbers", "left_out"),
    [
        (((0, 3, 5, 8), (0, 1, 4, 5)), ({"mlx5_3:1", "mlx5_8:1"}, {"mlx5_1:1", "mlx5_4:1"})),
        (((0, 1), (2, 3)), ({"mlx5_0:1", "mlx5_1:1"}, {"mlx5_2:1", "mlx5_3:1"})),
        (((0, 1, 2), (0, 1)), ({"mlx5_2:1"}, set())),
        (((0, 1), (0, 1)), (set(), set())),
    ],
)
def test_every_adapter_is_measured_or_in_an_error(numbers: tuple[tuple[int, ...], ...], left_out: tuple[set[str], ...]) -> None:
    """Hosts that name their adapters differently: what no other host has cannot be measured by name, and is no green."""
    nodes = [Place(id=f"node{number}", node=number, hostname=f"gpu-node-{number}") for number in (0, 1)]
    places = [Place(id=f"node{number}-gpu0", node=number, gpu=0) for number in (0, 1)]
    alone = SimpleNamespace(run=lambda *_, places, **__: rail_of_two(places))
    cluster = SimpleNamespace(nodes=nodes, places=places, with_variables=lambda _: alone)
    hosts = {node.id: [nic(number) for number in chosen] for node, chosen in zip(nodes, numbers, strict=True)}
    measured = suite.RailsMeasured([], {})
    for one in rails_of_nics(hosts, "infiniband"):
        suite.measure(one, 0, cluster, {}, measured)
    for node, names in zip(nodes, left_out, strict=True):
        own = {one.rail for one in measured.rates if one.node == node.id}
        errors = measured.errors.get(node.id, [])
        assert {name for name in names if any(f" {name} was not measured" in str(error) for error in errors)} == names
        assert all(node.label in str(error) and error.culprits == (node,) for error in errors)
        assert len(own) + len(errors) == len(hosts[node.id])
        if names:
            with pytest.raises(suite.MeasurementError):
                suite.raise_errors(measured, node)
