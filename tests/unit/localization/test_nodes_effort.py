"""What a smaller group is measured with, by how slow the whole was."""

from __future__ import annotations

import pytest

from pytest_gpucluster.localization.nodes import GROUP_S, Effort, effort_of

GIB = 1 << 30
RECIPE = {
    "size_bytes": GIB,
    "large_size_bytes": 8 * GIB,
    "large_from_nodes": 4,
    "iterations": 20,
    "warmup": 5,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("nodes", "busbw_gb_s", "size_gib", "iterations", "warmup"),
    [
        (12, 250.0, 8, 8, 5),  # 66 ms each: all of it
        (3, 250.0, 1, 8, 5),
        (12, 40.0, 8, 6, 1),  # 420 ms each
        (3, 10.0, 1, 8, 5),  # 210 ms each
        (3, 2.0, 1, 2, 1),  # 1.03 s each
        (12, 10.0, 8, 2, 1),  # 1.7 s each: the limit does not hold for a smaller size
        (12, 0.01, 8, 2, 1),  # whatever it takes
        (12, 0.0, 8, 2, 1),
    ],
)
def test_what_fits(nodes: int, busbw_gb_s: float, size_gib: int, iterations: int, warmup: int) -> None:
    """The judged size always, and fewer iterations, never fewer than two."""
    found = effort_of(RECIPE, nodes=nodes, gpus=8 * nodes, busbw_gb_s=busbw_gb_s)
    assert found == Effort(size_bytes=size_gib * GIB, iterations=iterations, warmup=warmup, dtype="bfloat16")
    time_s = (found.iterations + found.warmup) * found.size_bytes * 2 / max(busbw_gb_s * 1e9, 1.0)
    assert time_s <= 1.2 * GROUP_S or (found.iterations, found.warmup) == (2, 1)


def test_a_recipe_with_less() -> None:
    """Nothing is repeated more often than in the criterion itself; without a larger size there is one."""
    recipe = {"size_bytes": 4096, "iterations": 3, "warmup": 0, "dtype": "float32"}
    assert effort_of(recipe, nodes=9, gpus=9, busbw_gb_s=1.0) == Effort(
        size_bytes=4096, iterations=3, warmup=0, dtype="float32"
    )
    slow = effort_of(recipe, nodes=9, gpus=9, busbw_gb_s=1e-6)
    assert (slow.iterations, slow.warmup) == (2, 0)
