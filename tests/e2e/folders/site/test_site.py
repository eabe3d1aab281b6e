"""A user's own measurements: in this file, in a module beside it, in conftest.py; and what cannot be asked."""

# ruff: noqa: ANN001, ANN201, ANN202, D103 -- written as users write

from __future__ import annotations

import functools
import itertools
import os
import time

import probes
import pytest
import torch
import torch.distributed as dist

from pytest_gpucluster import Place
from pytest_gpucluster.errors import GpuclusterError


def rate(*, slower: int = -1) -> float:
    """Higher is better; one rank is 20 % slow."""
    return 80.0 if int(os.environ["RANK"]) == slower else 100.0


def other_rank() -> float:
    """What the other member of a pair sends."""
    total = torch.tensor([float(os.environ["RANK"])])
    dist.all_reduce(total)
    return total.item() - float(os.environ["RANK"])


def when() -> dict[str, float]:
    """A while on the clock that all processes of this machine share."""
    began_s = time.monotonic()
    time.sleep(0.2)
    return {"began_s": began_s, "ended_s": time.monotonic()}


def seen(*, name: str) -> dict[str, object]:
    """A variable and the worker that has it, after a collective."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return {"value": os.environ.get(name), "pid": os.getpid(), "sum": total.item()}


@pytest.fixture(scope="session")
def rates(cluster):
    return cluster.run(rate, per="gpu", slower=2)


@pytest.fixture(scope="session")
def everyone(cluster):
    return cluster.run(probes.all_ranks, per="cluster", name="site")


@pytest.fixture(scope="session")
def pairs(cluster):
    return cluster.run(other_rank, per="pair")


def test_site_rate(rates, place, criterion):
    criterion.require(rates[place], evidence={"median": 100.0})


def test_site_sum(node_sums, node, criterion):
    criterion.require(node_sums[node]["sum"], evidence=node_sums[node])


def test_site_ranks(everyone, criterion):
    assert isinstance(everyone.value, probes.Seen)
    assert (everyone.value.ranks, everyone.value.names) == ([0, 1, 2, 3], {"given": "site"})
    criterion.require(everyone.value.world_size)


def test_site_worst(rates, criterion):
    criterion.require(rates.each(float))


def test_site_pairs(pairs, criterion):
    criterion.require({pair: pairs[pair] for pair in pairs})


def test_pairs_in_both_directions(pairs, cluster):
    assert len(pairs) == 12
    assert all(pairs[first, second] == second.rank for first, second in pairs)


def test_helpers(rates, cluster):
    slow = cluster.places[2]
    assert list(rates) == list(cluster.places)
    assert rates.slowest(float) == 80.0
    assert rates.each(lambda value: value > 90)[slow] is False
    assert rates.relative_to_fastest(lambda value: 1 / value)[slow] == pytest.approx(0.8)
    assert rates.outliers(float) == {slow: 0.8}


def test_variables_of_a_call(cluster):
    name = "NCCL_IB_HCA"
    set_to = cluster.with_variables({name: "=mlx5_3:1", "GLOO_SOCKET_IFNAME": "lo"})
    first = cluster.run(seen, per="cluster", name=name)
    own = set_to.run(seen, per="cluster", places=cluster.places[:2], name=name)
    again = set_to.run(seen, per="cluster", places=cluster.places[:2], name="GLOO_SOCKET_IFNAME")
    last = cluster.run(seen, per="cluster", name=name)
    assert [own[place]["value"] for place in own] == ["=mlx5_3:1"] * 2
    assert [again[place]["value"] for place in again] == ["lo"] * 2
    assert [one[place]["value"] for one in (first, last) for place in one] == [None] * 8
    pids = [one[place]["pid"] for one in (first, own, again, last) for place in one]
    assert len(set(pids)) == len(pids), "each call has workers of its own, and those after it too"
    assert {last[place]["sum"] for place in last} == {4.0}
    with pytest.raises(GpuclusterError, match="a call cannot set NCCL_NET_PLUGIN; it can set NCCL_ALGO, NCCL_IB_HCA"):
        cluster.with_variables({"NCCL_NET_PLUGIN": "mine.so"})


def test_places_and_at_once(cluster):
    some = cluster.run(when, per="gpu", places=cluster.places[1:], at_once=1)
    assert list(some) == list(cluster.places[1:])
    times = sorted((some[place]["began_s"], some[place]["ended_s"]) for place in some)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))


def _inner():
    def inside():
        return 1.0

    return inside


@pytest.mark.parametrize(
    "function",
    [lambda: 1.0, probes.Probe().measure, functools.partial(rate, slower=1), _inner(), len, torch.ones],
    ids=["lambda", "method", "partial", "local", "builtin", "torch"],
)
def test_refused_function(cluster, function):
    cluster.run(function)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slower": torch.ones(1)},
        {"places": [Place(id="node9-gpu0", node=9, gpu=0)]},
        {"per": "rack"},
        {"at_once": 0},
        {"deadline_s": 0},
        {"deadline_s": "5"},
        {"deadline_s": True},
        {"places": ["node0-cpu0"]},
        {"places": "node0-cpu0"},
    ],
    ids=[
        *("tensor-argument", "unknown-place", "unknown-per", "at-once"),
        *("deadline", "deadline-text", "deadline-true", "places-text", "places-one-text"),
    ],
)
def test_refused_argument(cluster, wrong):
    cluster.run(rate, **wrong)


def test_refused_result(cluster):
    assert cluster.run(probes.tensor)[cluster.places[0]] is not None
