"""The GPU that is slow with every other one of its node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.localization.gpus import SlowGpus, slow_gpus, usual_pair_gb_s
from pytest_gpucluster.measurements.pair_matrix import PairMatrix

if TYPE_CHECKING:
    from collections.abc import Mapping

GPUS = tuple(f"node0-gpu{gpu}" for gpu in range(4))


def matrix(slow: Mapping[tuple[int, int], float] | None = None, *, gpus: int = 4, usual: float = 395.0) -> PairMatrix:
    """Pairs at the usual rate, but for these."""
    rates = [
        [None if row == column else (slow or {}).get((row, column), usual) for column in range(gpus)] for row in range(gpus)
    ]
    nothing = [[None] * gpus for _ in range(gpus)]
    return PairMatrix(
        gb_s=rates,
        latency_us=nothing,  # type: ignore[arg-type]  # not looked at
        paths=nothing,  # type: ignore[arg-type]
        peer_access=nothing,  # type: ignore[arg-type]
        device="NVIDIA H200",
    )


def both_ways(gpu: int, gb_s: float) -> dict[tuple[int, int], float]:
    """Every pair of a GPU at this rate."""
    return {pair: gb_s for other in range(4) if other != gpu for pair in ((gpu, other), (other, gpu))}


def find(found: PairMatrix) -> SlowGpus:
    """In a node of four, beside a healthy node."""
    return slow_gpus(GPUS, found, usual_pair_gb_s({"node0": found, "node1": matrix()}))


def test_nobody_in_a_healthy_node() -> None:
    """And the words point elsewhere."""
    found = find(matrix())
    assert (found.gpus, found.pairs) == ((), ())
    assert "each pair of its GPUs is as fast as others (the slowest pair 395; 395 GB/s is the median" in found.text


@pytest.mark.parametrize(
    "slow",
    [
        both_ways(2, 180.0),
        {(2, other): 180.0 for other in (0, 1, 3)},  # what it sends
        {(other, 2): 180.0 for other in (0, 1, 3)},  # what it receives
    ],
    ids=["both ways", "as source", "as target"],
)
def test_a_gpu_that_is_slow_with_all(slow: dict[tuple[int, int], float]) -> None:
    """Whichever direction is loaded; its pairs are not told again."""
    found = find(matrix(slow))
    assert (found.gpus, found.pairs) == (("node0-gpu2",), ())
    assert found.text.startswith("slow with every other GPU: node0-gpu2 (the slowest pair 180; 395 GB/s")


def test_two_bad_gpus() -> None:
    """Each is slow with all others."""
    assert find(matrix({**both_ways(0, 150.0), **both_ways(3, 200.0)})).gpus == ("node0-gpu0", "node0-gpu3")


def test_one_bad_pair_names_no_gpu() -> None:
    """Both of its GPUs work with the others: the pair is told."""
    found = find(matrix({(1, 2): 20.0, (2, 1): 20.0}))
    assert (found.gpus, found.pairs) == ((), (("node0-gpu1", "node0-gpu2"), ("node0-gpu2", "node0-gpu1")))
    assert found.text.startswith("2 slow pairs: node0-gpu1 -> node0-gpu2, node0-gpu2 -> node0-gpu1 (the slowest pair 20;")


def test_a_node_whose_pairs_are_all_slow_names_no_gpu() -> None:
    """None of them stands out; the other node shows what is usual."""
    bad = matrix({pair: 100.0 for gpu in range(4) for pair in both_ways(gpu, 100.0)})
    found = slow_gpus(GPUS, bad, usual_pair_gb_s({"node0": bad, "node1": matrix(), "node2": matrix()}))
    assert found.gpus == ()
    assert len(found.pairs) == 12
    assert "and 6 more" in found.text


@pytest.mark.parametrize("share", [0.81, 0.95])
def test_a_little_slower_is_not_slow(share: float) -> None:
    """One NVLink of 18 that is lost takes 5.6 %: slow_pair finds that."""
    assert find(matrix(both_ways(1, share * 395.0))).gpus == ()
