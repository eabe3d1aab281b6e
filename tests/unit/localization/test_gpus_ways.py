"""Which GPU's way out of a slow node is slow."""

from __future__ import annotations

import math

import pytest

from pytest_gpucluster.localization.gpus import describe_ways, slow_ways

GOOD = {f"gpu{gpu}": 50.0 + gpu / 10 for gpu in range(4)}


@pytest.mark.parametrize(
    ("changes", "slow", "said"),
    [
        ({}, (), "each of its GPUs by itself is as fast as elsewhere (50; 50.15 GB/s between good nodes)"),
        ({"gpu1": 41.0}, (), "each of its GPUs by itself is as fast as elsewhere (41; 50.15 GB/s between good nodes)"),
        ({"gpu1": 25.0}, ("gpu1",), "by itself only the way of gpu1 25 is slow (50.15 GB/s between good nodes)"),
        (
            {"gpu1": 25.0, "gpu3": 12.0},
            ("gpu1", "gpu3"),
            "by itself only the way of gpu1 25, gpu3 12 is slow (50.15 GB/s between good nodes)",
        ),
        (
            dict.fromkeys(GOOD, 25.0),
            tuple(GOOD),
            "each of its 4 GPUs is slow by itself (best 25; 50.15 GB/s between good nodes)",
        ),
        (
            {"gpu1": None, "gpu2": math.nan},
            (),
            "each of its GPUs by itself is as fast as elsewhere (50; 50.15 GB/s between good nodes)",
        ),
    ],
)
def test_ways(changes: dict[str, float | None], slow: tuple[str, ...], said: str) -> None:
    """Beside the same between two good nodes; what was not measured says nothing."""
    node = {**GOOD, **changes}
    assert slow_ways(node, GOOD) == slow
    assert describe_ways(node, GOOD, unit="GB/s") == said


@pytest.mark.parametrize(("node", "good"), [(dict.fromkeys(GOOD), GOOD), (GOOD, dict.fromkeys(GOOD)), ({}, {})])
def test_nothing_to_compare(node: dict[str, float | None], good: dict[str, float | None]) -> None:
    """Nobody is called slow."""
    assert slow_ways(node, good) == ()
    assert describe_ways(node, good, unit="GB/s") == "its GPUs by themselves: not measured"
