"""The physical bound of all-reduce between nodes, beside every published number of a healthy cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.thresholds.limit import all_to_all_gb_s, most_by_nvlink_gb_s, most_gb_s, ring_gb_s

H100 = {"nvlink_gb_s": 450.0}
GB200 = {"nvlink_gb_s": 900.0}
PUBLISHED = {
    "handover, 2 x 8 H100": (2, 8, 50, 450, 435.0),
    "CoreWeave, 12 x 8 H100, 1 GiB": (12, 8, 50, 450, 365.9),
    "CoreWeave, 12 x 8 H100, 8 GiB": (12, 8, 50, 450, 386.6),
    "cluster-readiness-engine, 2 x 8 H100 on EFA, 16 GB": (2, 8, 50, 450, 487.9),
    "cluster-readiness-engine, 2 x 8 H100 on TCPXO, 16 GB": (2, 8, 25, 450, 337.1),
    "cluster-readiness-engine, 4 x 4 GB200 on EFA, 16 GB": (4, 4, 50, 900, 191.4),
    "cluster-readiness-engine, 8 x 4 GB300 on RoCE, 16 GB": (8, 4, 100, 900, 376.0),
    "CoreWeave, 144 GB200 as 2 domains of 72, 16 GiB": (2, 72, 50, 900, 810.0),
    "CoreWeave, 1440 GB200 as 20 domains of 72, 16 GiB": (20, 72, 50, 900, 405.0),
}
"""Nodes (or domains), GPUs of each, GB/s of ports a GPU, GB/s of NVLinks a GPU, and the bus bandwidth reached."""


@pytest.mark.parametrize(("nodes", "gpus", "nic", "nvlink", "reached"), PUBLISHED.values(), ids=PUBLISHED)
def test_no_healthy_cluster_is_above_it(nodes: int, gpus: int, nic: float, nvlink: float, reached: float) -> None:
    """A bound that somebody exceeded would be none."""
    assert most_gb_s(nodes=nodes, gpus_per_node=gpus, nic_gb_s_per_gpu=nic, nvlink_gb_s=nvlink) > reached


@pytest.mark.parametrize(
    ("nodes", "gpus", "most"),
    [(2, 8, 750.0), (2, 4, 350.0), (12, 8, 431.8), (2, 1, 50.0), (128, 8, 402.8)],
)
def test_by_hand(nodes: int, gpus: int, most: float) -> None:
    """Figures worked out on paper for ports of 50 GB/s a GPU; 2 nodes of 4 cannot reach more than 350."""
    assert most_gb_s(nodes=nodes, gpus_per_node=gpus, nic_gb_s_per_gpu=50, **H100) == pytest.approx(most, abs=0.05)


def test_nvlinks_bound_what_fast_ports_do_not() -> None:
    """In a node without NVLS 2 GPUs send as much as with it; more GPUs send less with it."""
    assert most_gb_s(nodes=2, gpus_per_node=2, nic_gb_s_per_gpu=10_000, **H100) == pytest.approx(675.0)
    assert most_gb_s(nodes=2, gpus_per_node=8, nic_gb_s_per_gpu=10_000, **H100) == pytest.approx(750.0)


@pytest.mark.parametrize(("gpus", "nic", "ring"), [(8, 50, 400.0), (4, 50, 200.0), (8, 100, 450.0), (1, 50, 50.0)])
def test_rings(gpus: int, nic: float, ring: float) -> None:
    """The ports of a node together, or the NVLinks of a GPU."""
    assert ring_gb_s(gpus_per_node=gpus, nic_gb_s_per_gpu=nic, **H100) == ring


ALL_TO_ALL = {
    "2 x 8 H100": ((2, 8), (50, 450), 93.75),
    "2 x 8 H100, half the ports": ((2, 8), (25, 450), 46.875),
    "8 x 4 GB300": ((8, 4), (100, 900), 110.71),
    "GPUs of one node": ((1, 8), (50, 450), 450),
    "one GPU in each node": ((4, 1), (50, 450), 50),
    "ports faster than NVLinks": ((2, 2), (10_000, 450), 1350),
}
"""Nodes and GPUs of each; GB/s of ports and of NVLinks a GPU; the bound on paper."""


@pytest.mark.parametrize(("shape", "rates", "most"), ALL_TO_ALL.values(), ids=ALL_TO_ALL)
def test_all_to_all(shape: tuple[int, int], rates: tuple[float, float], most: float) -> None:
    """What leaves a node takes the ports of its GPU, what stays the NVLinks."""
    (nodes, gpus), (nic, nvlink) = shape, rates
    found = all_to_all_gb_s(nodes=nodes, gpus_per_node=gpus, nic_gb_s_per_gpu=nic, nvlink_gb_s=nvlink)
    assert found == pytest.approx(most, abs=0.01)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (0, 8), (2, 0)])
def test_nobody_to_exchange_with(nodes: int, gpus: int) -> None:
    """One GPU has no all_to_all."""
    with pytest.raises(ValueError, match="between"):
        all_to_all_gb_s(nodes=nodes, gpus_per_node=gpus, nic_gb_s_per_gpu=50, **H100)


@given(nodes=st.integers(2, 1024), gpus=st.integers(1, 72), nic=st.floats(1, 200))
def test_a_ring_is_within_the_bound(nodes: int, gpus: int, nic: float) -> None:
    """The rate of one algorithm is never above what all of them may reach."""
    ring = ring_gb_s(gpus_per_node=gpus, nic_gb_s_per_gpu=nic, **GB200)
    assert ring <= most_gb_s(nodes=nodes, gpus_per_node=gpus, nic_gb_s_per_gpu=nic, **GB200) * (1 + 1e-12)


@pytest.mark.parametrize(("gpus", "most"), [(8, 1400.0), (72, 1750.7), (2, 900.0)])
def test_in_an_nvlink_domain(gpus: int, most: float) -> None:
    """72 GB200 reach 835 GB/s at 8 GiB (CoreWeave); the bound is that of switches that add up."""
    assert most_by_nvlink_gb_s(gpus=gpus, **GB200) == pytest.approx(most, abs=0.1)
