"""Collectives inside a node."""

from __future__ import annotations

import pytest

from pytest_gpucluster.measurements import collectives

pytestmark = pytest.mark.links


@pytest.fixture(scope="session")
def all_reduce_in_node(cluster, recipe):
    """All-reduce over the GPUs of each node, all nodes at once."""
    return cluster.run(collectives.all_reduce, per="node", **recipe("busbw[all_reduce]"))


def in_node(operation, cluster, recipe):
    """Another collective over the GPUs of each node."""
    return cluster.run(collectives.collective, per="node", operation=operation, **recipe(f"busbw[{operation}]"))


@pytest.fixture(scope="session")
def all_gather_in_node(cluster, recipe):
    """Every GPU gets the part of every other."""
    return in_node("all_gather", cluster, recipe)


@pytest.fixture(scope="session")
def reduce_scatter_in_node(cluster, recipe):
    """Every GPU gets its part of the sum."""
    return in_node("reduce_scatter", cluster, recipe)


@pytest.fixture(scope="session")
def all_to_all_in_node(cluster, recipe):
    """Every GPU sends a part of its own to every other."""
    return in_node("all_to_all", cluster, recipe)


@pytest.fixture(scope="session")
def broadcast_in_node(cluster, recipe):
    """Every GPU gets what the first one has."""
    return in_node("broadcast", cluster, recipe)


@pytest.fixture(scope="session")
def send_recv_in_node(cluster, recipe):
    """Every GPU sends to the next one, all at once."""
    return in_node("send_recv", cluster, recipe)


@pytest.fixture(scope="session")
def smallest_all_reduce(cluster, recipe):
    """All-reduce of so few bytes that only its latency counts."""
    return cluster.run(collectives.all_reduce, per="node", **without_sizes(recipe("latency[all_reduce]")))


@pytest.fixture(scope="session")
def all_reduce_by_size(cluster, recipe):
    """All-reduce at the sizes that are shown, by MiB."""
    asked = recipe("latency[all_reduce]")
    few = {**without_sizes(asked), "iterations": 5, "warmup": 2}
    return {
        mib: cluster.run(collectives.all_reduce, per="node", **{**few, "size_bytes": mib << 20}) for mib in asked["shown_mib"]
    }


def without_sizes(recipe):
    """The recipe of one all-reduce."""
    return {key: value for key, value in recipe.items() if key != "shown_mib"}


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"])
def test_busbw(collective, node, criterion, request):
    """Bus bandwidth as nccl-tests counts it, the slowest rank's time, what arrived verified."""
    measured = request.getfixturevalue(f"{collective}_in_node")
    timing = measured[node]
    criterion.require(
        measured.repeated(node, "busbw_gb_s", "spans_busbw_gb_s"),
        evidence={
            "NVLS": timing.nvls,
            "NCCL": timing.nccl_version,
            "us": timing.time_us,
            "p50 us": timing.p50_us,
            "p99 us": timing.p99_us,
            "ranks": timing.world_size,
            **timing.evidence,
        },
    )


@pytest.mark.parametrize("collective", ["all_reduce"])
def test_latency(collective, smallest_all_reduce, all_reduce_by_size, node, criterion):
    """Time of the smallest all-reduce; beside it the bus bandwidth at the sizes of common reports."""
    measured = {"all_reduce": smallest_all_reduce}[collective]
    timing = measured[node]
    criterion.require(
        timing.time_us,
        evidence={
            "bytes": timing.size_bytes,
            "p50 us": timing.p50_us,
            "p99 us": timing.p99_us,
            "ranks": timing.world_size,
            **{f"GB/s at {mib} MiB": found[node].busbw_gb_s for mib, found in all_reduce_by_size.items()},
        },
    )
