"""GPUs beside the fabric of their host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpucluster.health.nvlink import judge_fabric
from pytest_gpucluster.inventory.nvlinks import GpuFabric
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.finding import HERE, Finding

JOINED = GpuFabric(state="completed", error=None, cluster_uuid="0", clique=0, troubles=[])
REFUSED = NotAvailable("Not Supported")


def judge(third: GpuFabric | NotAvailable, *, peer: str | NotAvailable = "switch") -> Finding:
    """Two GPUs that have joined, and this one."""
    fabrics: dict[str, Any] = {"gpu0": JOINED, "gpu1": JOINED, "gpu2": third}
    return judge_fabric({"gpu0": "switch", "gpu1": "switch", "gpu2": peer}, fabrics)


def test_all_have_joined() -> None:
    """Nothing to say."""
    assert (judge(JOINED).judged, judge(JOINED).doubts) == (0, ())


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
    found = judge(replace(JOINED, **change))
    assert (found.bad, found.unknown) == ({"gpu2": (fact,)}, {})


@pytest.mark.parametrize("fabric", [REFUSED, replace(JOINED, state="not_supported"), JOINED])
def test_links_between_gpus_need_no_fabric(fabric: GpuFabric | NotAvailable) -> None:
    """Boards without a switch have none."""
    found = judge(fabric, peer="gpu")
    assert (found.judged, found.doubts) == (0, ())


@pytest.mark.parametrize(
    ("fabric", "peer"), [(REFUSED, "switch"), (replace(JOINED, state="not_supported"), "switch"), (JOINED, REFUSED)]
)
def test_unknown_is_no_health(fabric: GpuFabric | NotAvailable, peer: str | NotAvailable) -> None:
    """A GPU behind a switch that tells of no fabric, or whose links are refused."""
    found = judge(fabric, peer=peer)
    assert (found.bad, list(found.unknown)) == ({}, ["gpu2"])


@pytest.mark.parametrize("cliques", [(0, 1), (0, 0, 1, 1), (0, 1, 2), (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 2)])
def test_without_a_majority_nobody_is_named(cliques: tuple[int, ...]) -> None:
    """GPUs in several cliques of which none has more than half: the host is bad, and no GPU of it is named."""
    fabrics = {f"gpu{number}": replace(JOINED, clique=clique) for number, clique in enumerate(cliques)}
    found = judge_fabric(dict.fromkeys(fabrics, "switch"), fabrics)
    assert [*found.bad] == [HERE]
