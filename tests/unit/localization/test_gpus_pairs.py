"""The pairs of a node's GPUs: which take the host, and which are worse than the others of their kind."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.inventory.pci_tree import PciNode, PciPath, Position, nearness, position
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.localization.gpus import GpuPair, pair_lags, pairs_of
from pytest_gpucluster.measurements.pair_matrix import PairMatrix

if TYPE_CHECKING:
    from pytest_gpucluster.localization.parts import Quantity

UNREAD = NotAvailable("No such file or directory")


def matrix(size: int = 4, **bad: tuple[float, float]) -> list[GpuPair]:
    """Pairs of GPUs behind one switch, all alike but for the ``bad`` ones, such as ``g1g2=(GB/s, us)``."""
    pairs = []
    for source, target in itertools.permutations(range(size), 2):
        gb_s, latency_us = bad.get(f"g{source}g{target}", (390.0, 5.0))
        pairs.append(pair(f"g{source}", f"g{target}", gb_s=gb_s, latency_us=latency_us))
    return pairs


def pair(source: str = "g0", target: str = "g1", **fields: Any) -> GpuPair:
    """A healthy pair but for these fields."""
    healthy = {"way": "NV18", "gb_s": 390.0, "latency_us": 5.0, "path": "P2P/CUMEM", "peer_access": True}
    return GpuPair(source=source, target=target, **{**healthy, **fields})


@pytest.mark.parametrize(
    ("fields", "takes_host"),
    [
        ({}, False),
        ({"path": "P2P/CUMEM/read P2P/IPC"}, False),
        ({"path": "SHM/direct/direct"}, True),
        ({"path": "P2P/CUMEM SHM/direct/direct"}, True),
        ({"path": "NET/Socket"}, True),
        ({"path": "NET/IB/GDRDMA", "peer_access": None}, True),
        ({"path": None, "peer_access": False}, True),
        ({"peer_access": False}, True),
        ({"path": None}, False),
        ({"peer_access": None}, False),
        ({"path": None, "peer_access": None}, None),
    ],
)
def test_who_takes_the_host(fields: dict[str, Any], *, takes_host: bool | None) -> None:
    """By NCCL's log or by CUDA; unknown only where neither tells."""
    assert pair(**fields).takes_host is takes_host


def test_both_ends_are_named() -> None:
    """With the topology's word and what was logged."""
    text = pair(path="SHM/direct/direct", peer_access=False).why
    assert text == "NV18, SHM/direct/direct; CUDA refuses peer access"


@pytest.mark.parametrize(
    ("quantity", "value", "percent"), [("bandwidth", (195.0, 5.0), 50.0), ("latency", (390.0, 15.0), 200.0)]
)
def test_one_slow_pair(quantity: Quantity, value: tuple[float, float], percent: float) -> None:
    """It alone is behind, in its one direction and in its one quantity."""
    found = pair_lags(matrix(g1g2=value), quantity)
    assert len(found) == 12
    assert found["g1", "g2"].percent == pytest.approx(percent)
    assert {ends for ends, one in found.items() if one.percent > 1} == {("g1", "g2")}
    other: Quantity = "latency" if quantity == "bandwidth" else "bandwidth"
    assert {one.percent for one in pair_lags(matrix(g1g2=value), other).values()} == {0.0}


def test_healthy_pairs() -> None:
    """None is behind."""
    assert {one.percent for one in pair_lags(matrix(), "bandwidth").values()} == {0.0}


def test_a_lost_link_does_not_make_siblings_strangers() -> None:
    """A GPU with 17 of 18 NVLinks is compared with those that have all."""
    lost = [pair("g0", "g1"), pair("g1", "g0"), pair("g0", "g2"), pair("g2", "g1", way="NV17", gb_s=368.0)]
    assert pair_lags(lost, "bandwidth")["g2", "g1"].percent == pytest.approx(5.64, abs=0.01)


def test_other_kinds_are_no_siblings() -> None:
    """Pairs of two sockets are slower than those below a switch, and a kind of two pairs is not judged."""
    near = [pair(f"g{one}", f"g{other}", way="PIX", gb_s=50.0) for one, other in itertools.permutations(range(3), 2)]
    far = [pair("g0", "g3", way="SYS", gb_s=20.0), pair("g3", "g0", way="SYS", gb_s=20.0)]
    found = pair_lags([*near, *far], "bandwidth")
    assert set(found) == {(one.source, one.target) for one in near}
    assert {one.percent for one in found.values()} == {0.0}


def test_the_matrix_becomes_pairs() -> None:
    """Row to source, column to target, with the word of the two positions."""
    measured = PairMatrix(
        gb_s=[[None, 10.0], [20.0, None]],
        latency_us=[[None, 1.0], [2.0, None]],
        paths=[[None, "P2P/IPC"], [None, None]],
        peer_access=[[None, True], [False, None]],
        device="x",
    )
    positions = {name: Position(addresses=None, nvlinks=links) for name, links in (("a", 18), ("b", 17))}
    assert pairs_of(measured, positions) == [
        GpuPair(source="a", target="b", way="NV17", gb_s=10.0, latency_us=1.0, path="P2P/IPC", peer_access=True),
        GpuPair(source="b", target="a", way="NV17", gb_s=20.0, latency_us=2.0, path=None, peer_access=False),
    ]


def way(*addresses: str, numa_node: str | NotAvailable = "0") -> PciPath:
    """A way up the tree."""
    link = {"speed_gt_s": 32.0, "max_speed_gt_s": 32.0, "width": 16, "max_width": 16, "redirects_peers": False}
    return PciPath(numa_node=numa_node, nodes=[PciNode(address=address, **link) for address in addresses])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other", "word"),
    [
        (way("0:1b:00.0", "0:11:01.0"), way("0:5b:00.0", "0:51:01.0"), "NODE"),
        (way("0:1b:00.0", "0:11:01.0"), way("0:5b:00.0", "0:51:01.0", numa_node="1"), "SYS"),
        (way("0:1b:00.0", "0:11:01.0"), way("0:5b:00.0", "0:51:01.0", numa_node="-1"), None),
        (way("0:1b:00.0", "0:11:01.0"), way("0:5b:00.0", "0:51:01.0", numa_node=UNREAD), None),
        (way("0:1b:00.0", "0:11:01.0"), way("0:1c:00.0", "0:11:02.0"), "PHB"),
        (way("0:1b:00.0", "0:1a:00.0", "0:19:00.0"), way("0:1c:00.0", "0:1a:01.0", "0:19:00.0"), "PIX"),
        (way("0:1b:00.0"), None, None),
        (way("0:1b:00.0"), UNREAD, None),
    ],
)
def test_the_word_of_two_positions(one: PciPath, other: PciPath | NotAvailable | None, word: str | None) -> None:
    """As ``nvidia-smi topo -m`` has it; NVLinks to a switch come first."""
    assert nearness(position(one), position(other)) == nearness(position(other), position(one)) == word
    assert nearness(position(one, nvlinks=18), position(other, nvlinks=12)) == "NV12"
