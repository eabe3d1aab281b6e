"""A user's conftest.py, with a measurement in it."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist


def sum_over_node(*, factor: float = 1.0) -> dict[str, float]:
    """All ranks of a node add up what they have."""
    total = torch.tensor([factor * (int(os.environ["RANK"]) + 1)])
    dist.all_reduce(total)
    return {"sum": total.item(), "size": float(dist.get_world_size())}


@pytest.fixture(scope="session")
def node_sums(cluster):
    return cluster.run(sum_over_node, per="node", factor=2.0)
