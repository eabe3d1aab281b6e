"""GPUs beside the fabric of their host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpucluster.health.nvlink import FabricSeen, judge_fabric
from pytest_gpucluster.inventory.nvlinks import GpuFabric
from pytest_gpucluster.inventory.reading import NotAvailable

JOINED = GpuFabric(state="completed", error=None, cluster_uuid="0", clique=0, troubles=[])
REFUSED = NotAvailable("Not Supported")


def judge(third: GpuFabric | NotAvailable, *, peer: str | NotAvailable = "switch") -> FabricSeen:
    """Two GPUs that have joined, and this one."""
    fabrics: dict[str, Any] = {"gpu0": JOINED, "gpu1": JOINED, "gpu2": third}
    return judge_fabric({"gpu0": "switch", "gpu1": "switch", "gpu2": peer}, fabrics)


def test_all_have_joined() -> None:
    """Nothing to say."""
    assert judge(JOINED) == FabricSeen({}, {})


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"state": "in_progress"}, "its state is in_progress"),
        ({"state": "not_started"}, "its state is not_started"),
        ({"state": "unknown_9"}, "its state is unknown_9"),
        ({"error": "Timeout"}, "its registration failed: Timeout"),
        ({"troubles": ["degraded bandwidth", "unhealthy"]}, "degraded bandwidth, unhealthy"),
        ({"clique": 4}, "in clique 4 of cluster 0"),
        ({"cluster_uuid": "ab"}, "in clique 0 of cluster ab"),
    ],
)
def test_bad_gpu(change: dict[str, Any], fact: str) -> None:
    """Named alone, with what is wrong."""
    assert judge(replace(JOINED, **change)) == FabricSeen({"gpu2": fact}, {})


@pytest.mark.parametrize("fabric", [REFUSED, replace(JOINED, state="not_supported"), JOINED])
def test_links_between_gpus_need_no_fabric(fabric: GpuFabric | NotAvailable) -> None:
    """Boards without a switch have none."""
    assert judge(fabric, peer="gpu") == FabricSeen({}, {})


@pytest.mark.parametrize(
    ("fabric", "peer"), [(REFUSED, "switch"), (replace(JOINED, state="not_supported"), "switch"), (JOINED, REFUSED)]
)
def test_unknown_is_no_health(fabric: GpuFabric | NotAvailable, peer: str | NotAvailable) -> None:
    """A GPU behind a switch that tells of no fabric, or whose links are refused."""
    found = judge(fabric, peer=peer)
    assert (found.bad, list(found.unknown)) == ({}, ["gpu2"])
