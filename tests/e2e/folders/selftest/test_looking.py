"""Tests under the names that look for slow GPUs and wrong bits, so that the self-test before them is one of this run."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations

import pytest


@pytest.mark.parametrize("quantity", ["bf16_tflops", "hbm_bandwidth"])
def test_straggler(quantity, criterion):
    criterion.require(0)


def test_silent_corruption(criterion):
    criterion.require(0)


def test_after(cluster):
    assert cluster.world_size
