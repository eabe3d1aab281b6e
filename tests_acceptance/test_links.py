"""Collectives inside a node."""

from __future__ import annotations

import pytest

from pytest_gpucluster.measurements import collectives

pytestmark = pytest.mark.links


@pytest.fixture(scope="session")
def all_reduce_in_node(cluster, recipe):
    """All-reduce over the GPUs of each node, all nodes at once."""
    return cluster.run(collectives.all_reduce, per="node", **recipe("busbw[all_reduce]"))


@pytest.mark.parametrize("collective", ["all_reduce"])
def test_busbw(collective, all_reduce_in_node, node, criterion):
    """Bus bandwidth as nccl-tests counts it, the slowest rank's time, the sum verified."""
    measured = {"all_reduce": all_reduce_in_node}[collective]
    timing = measured[node]
    criterion.require(
        measured.repeated(node, "busbw_gb_s", "spans_busbw_gb_s"),
        evidence={
            "NVLS": timing.nvls,
            "NCCL": timing.nccl_version,
            "us": timing.time_us,
            "ranks": timing.world_size,
            **timing.evidence,
        },
    )
