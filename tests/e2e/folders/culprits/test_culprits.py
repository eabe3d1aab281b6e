"""Functions that fail in different ways on three ranks; with ``HEALTHY`` set none does."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from finetune_smoke.settings.config import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster import Cluster, Place, Results
    from pytest_gpucluster.judging.criterion import Criterion

HEALTHY = bool(os.environ.get("HEALTHY"))


def typo() -> float:
    """A mistake in a function: every rank raises."""
    known: dict[str, float] = {"loss": 1.0} if HEALTHY else {}
    return known["loss"]


def unset() -> float:
    """A setting that does not fit."""
    if not HEALTHY:
        raise InputError("32 rows a step cannot be shared by 3 ranks: not divisible")
    return 1.0


def wrong_address() -> float:
    """What a kernel with a wrong address looks like, on rank 0."""
    if dist.get_rank() == 0 and not HEALTHY:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return 1.0


def uncorrectable() -> float:
    """What a defective memory looks like, on rank 2."""
    if dist.get_rank() == 2 and not HEALTHY:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    return 1.0


def killed() -> float:
    """Rank 1 dies in front of a barrier."""
    if dist.get_rank() == 1 and not HEALTHY:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return 1.0


def low() -> float:
    """A rate below its limit, on every rank alike."""
    return 100.0 if HEALTHY else 50.0


@pytest.fixture(scope="session")
def died(cluster: Cluster) -> Results:
    """Several criteria read this one measurement."""
    return cluster.run(killed, per="cluster")


@pytest.fixture(scope="session")
def lows(cluster: Cluster) -> Results:
    """The rate of every rank."""
    return cluster.run(low, per="gpu")


@pytest.mark.parametrize("function", [typo, unset])
def test_raised(cluster: Cluster, function: Callable[[], float]) -> None:
    """On every rank alike."""
    assert cluster.run(function, per="gpu").slowest(float) > 0


def test_address(cluster: Cluster) -> None:
    """On one rank."""
    assert cluster.run(wrong_address, per="cluster").value > 0


def test_ecc(cluster: Cluster) -> None:
    """On one rank."""
    assert cluster.run(uncorrectable, per="cluster").value > 0


@pytest.mark.parametrize("part", range(4))
def test_dead(died: Results, part: int) -> None:
    """Four that one death takes along."""
    assert died.value > part / 10


def test_low(lows: Results, place: Place, criterion: Criterion) -> None:
    """Below the limit everywhere."""
    criterion.require(lows[place])


def test_hint(lows: Results, place: Place, criterion: Criterion) -> None:
    """An advisory limit that every rank misses."""
    criterion.require(lows[place], remark="compared with nothing")
