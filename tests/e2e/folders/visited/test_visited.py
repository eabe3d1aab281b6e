"""A user's measurements on three GPUs, while a process comes to GPU 1, stays or goes."""

# ruff: noqa: ANN001, ANN003, ANN201, ANN202, D103 -- written as users write

from __future__ import annotations

import os
import signal
import time

import pytest
import simulated_gpus
import torch
import torch.distributed as dist

from pytest_gpucluster.protocol.functions import beside_others, without_device

VISITED = 1


def _is_visited() -> bool:
    return int(os.environ["RANK"]) == VISITED


def healthy() -> float:
    """What a GPU of its own can do."""
    return 1.0


def somebody_stays() -> float:
    """A process comes in the midst, and the value suffers."""
    if not _is_visited():
        return 1.0
    simulated_gpus.come(VISITED)
    return 0.1


def somebody_comes_and_goes() -> float:
    """A process comes in the midst, and nobody is there any more when the function returns."""
    if not _is_visited():
        return 1.0
    simulated_gpus.come(VISITED)
    time.sleep(3)
    simulated_gpus.leave(VISITED)
    return 0.1


def fails_beside_somebody() -> float:
    """A process comes, and takes what the function needs."""
    if _is_visited():
        simulated_gpus.come(VISITED)
        raise MemoryError("planted: the other one has it all")
    return 1.0


def hangs_beside_somebody() -> float:
    """A process comes, and this one gets no further."""
    if _is_visited():
        simulated_gpus.come(VISITED)
        time.sleep(600)
    return 1.0


def dies_beside_somebody() -> float:
    """A process comes, and this one is killed."""
    if _is_visited():
        simulated_gpus.come(VISITED)
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def group_with_somebody() -> float:
    """A process comes to one member; what all of them do together suffers."""
    if _is_visited():
        simulated_gpus.come(VISITED)
    total = torch.ones(1)
    dist.all_reduce(total)
    return 0.1


def together() -> float:
    """What a group does by itself."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


@without_device
def reading() -> float:
    """What is only read."""
    return 1.0


@beside_others
def shared() -> float:
    """What others cannot spoil."""
    return 1.0


def send_away() -> None:
    """The process ends; called at one place."""
    simulated_gpus.leave(VISITED)


def _end_visit(cluster) -> None:
    cluster.run(without_device(send_away), places=cluster.places[:1])


@pytest.fixture(scope="session")
def before(cluster):
    return cluster.run(healthy)


@pytest.fixture(scope="session")
def stays(cluster, before):
    return cluster.run(somebody_stays)


@pytest.fixture(scope="session")
def meanwhile(cluster, stays):
    """All that is asked while the process is there, then after its end."""
    found = {
        "alone": cluster.run(healthy),
        "node": cluster.run(together, per="node"),
        "reading": cluster.run(reading),
        "shared": cluster.run(shared),
    }
    _end_visit(cluster)
    return found


@pytest.fixture(scope="session")
def after(cluster, meanwhile):
    return {"alone": cluster.run(healthy), "node": cluster.run(together, per="node")}


def _visited(cluster, function, **arguments):
    found = cluster.run(function, **arguments)
    _end_visit(cluster)
    return found


def test_visit_before(before, place, criterion):
    criterion.require(before[place])


def test_visit_stays(stays, place, criterion):
    criterion.require(stays[place])


def test_visit_meanwhile(meanwhile, place, criterion):
    criterion.require(meanwhile["alone"][place])


def test_visit_meanwhile_node(meanwhile, node, criterion):
    criterion.require(meanwhile["node"][node])


def test_visit_reading(meanwhile, place, criterion):
    criterion.require(meanwhile["reading"][place])


def test_visit_shared(meanwhile, place, criterion):
    criterion.require(meanwhile["shared"][place])


def test_visit_after(after, place, criterion):
    criterion.require(after["alone"][place])


def test_visit_after_node(after, node, criterion):
    criterion.require(after["node"][node])


@pytest.fixture(scope="session")
def comes_and_goes(cluster, after):
    return cluster.run(somebody_comes_and_goes)


def test_visit_comes_and_goes(comes_and_goes, place, criterion):
    criterion.require(comes_and_goes[place])


@pytest.fixture(scope="session")
def fails(cluster, comes_and_goes):
    return _visited(cluster, fails_beside_somebody)


def test_visit_fails(fails, place, criterion):
    criterion.require(fails[place])


@pytest.fixture(scope="session")
def hangs(cluster, fails):
    return _visited(cluster, hangs_beside_somebody, deadline_s=4)


def test_visit_hangs(hangs, place, criterion):
    criterion.require(hangs[place])


@pytest.fixture(scope="session")
def dies(cluster, hangs):
    return _visited(cluster, dies_beside_somebody)


def test_visit_dies(dies, place, criterion):
    criterion.require(dies[place])


@pytest.fixture(scope="session")
def node_visited(cluster, dies):
    return _visited(cluster, group_with_somebody, per="node")


def test_visit_node(node_visited, node, criterion):
    criterion.require(node_visited[node])


@pytest.fixture(scope="session")
def pairs_visited(cluster, node_visited):
    return _visited(cluster, group_with_somebody, per="pair")


def test_visit_pairs(pairs_visited, cluster):
    visited = cluster.places[VISITED]
    for pair in pairs_visited:
        assert (pair in pairs_visited.errors) == (visited in pair)
        assert visited not in pair or pairs_visited.errors[pair].kind == "not_idle"


@pytest.mark.distributed
def test_visit_distributed(rank):
    if rank == 1:
        simulated_gpus.come(1)
    assert rank != 1
