"""How often a run names a healthy GPU, over all that it compares, at the spread that the entries call healthy: simulated."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from pytest_gpucluster.judging.siblings import COMPARED, Healthy, Siblings, compare
from tests.support.healthy_siblings import straggler_entries

if TYPE_CHECKING:
    from pytest_gpucluster.thresholds.resolve import Threshold

MOST = 1 / 1000
SHAPES = [(1, gpus) for gpus in range(3, 9)] + [(2, 2), (2, 3), (2, 8), (3, 1), (3, 5), (4, 1), (4, 4), (8, 1), (8, 8)]
LARGE = [(16, 8), (32, 4), (64, 8), (128, 1), (128, 8)]
VALUES, FEWEST_RUNS, MOST_RUNS = 3_000_000, 12_000, 60_000
"""Values of each quantity and shape, in so many runs as that gives."""


def runs_beyond(entry: Threshold, shape: tuple[int, int], runs: int, draw: torch.Generator) -> torch.Tensor:
    """Whether each run has a GPU beyond the limit and what healthy siblings explain; their own spread may explain more."""
    hosts, gpus = shape
    recipe, number = entry.recipe, hosts * gpus
    means = torch.randn(runs, hosts, 1, generator=draw) * (recipe["between_hosts"] if hosts > 1 else 0.0)
    rates = 1 + means + torch.randn(runs, hosts, gpus, generator=draw) * recipe["floor_spread"]
    lowest, others = rates.reshape(runs, number).sort(dim=1).values.split([1, number - 1], dim=1)
    median = (others[:, (number - 2) // 2] + others[:, (number - 1) // 2]) / 2
    limit_percent = float(entry.limit(gpus=1, cluster={}).value)
    return 100 * (1 - lowest[:, 0] / median) > max(limit_percent, Healthy(**recipe).lowest_percent(number, hosts))


def test_every_compared_quantity_has_its_share() -> None:
    """One more entry leaves less for each."""
    assert len(straggler_entries()) == COMPARED


@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(one, marks=pytest.mark.slow) for one in LARGE)])
def test_a_healthy_run_names_nobody(shape: tuple[int, int]) -> None:
    """In one of 1,000 runs at most, whatever the shape. Of two GPUs nobody is ever named."""
    number = shape[0] * shape[1]
    runs = max(FEWEST_RUNS, min(MOST_RUNS, VALUES // number))
    draw = torch.Generator().manual_seed(20261126 + number)
    named = torch.zeros(runs, dtype=torch.bool)
    for entry in straggler_entries().values():
        named |= runs_beyond(entry, shape, runs, draw)
    assert int(named.sum()) <= MOST * runs, f"{int(named.sum())} of {runs}"


def named_in(entry: Threshold, shape: tuple[int, int], draw: random.Random, slow_percent: float) -> set[int]:
    """Who is named in a run whose first GPU is slower by so much; the others differ as the entry calls healthy."""
    healthy = Healthy(**entry.recipe)
    limit_percent = float(entry.limit(gpus=1, cluster={}).value)
    means = [1 + draw.gauss(0, healthy.between_hosts if shape[0] > 1 else 0) for _ in range(shape[0])]
    rates = dict(enumerate(mean * (1 + draw.gauss(0, healthy.floor_spread)) for mean in means for _ in range(shape[1])))
    rates[0] *= 1 - slow_percent / 100
    hosts = {gpu: gpu // shape[1] for gpu in rates}
    alike = Siblings(rates=rates, models=dict.fromkeys(rates, "H200"), hosts=hosts)
    found = compare(alike, healthy, limit_percent=limit_percent)
    allowed = {gpu: max(limit_percent, one.allowed_percent) for gpu, one in found.items() if one.doubt is None}
    return {gpu for gpu, most in allowed.items() if found[gpu].shortfall.percent > most}


RECALLED = [(1, 3), (1, 4), (1, 8), (2, 4), (2, 8), (8, 8)]


@pytest.mark.parametrize("shape", [*RECALLED, pytest.param((128, 8), marks=pytest.mark.slow)])
def test_a_gpu_that_is_15_percent_slower_is_named(shape: tuple[int, int]) -> None:
    """In at least 95 of 100 runs by one of the quantities at least, and in most by each."""
    draw, runs = random.Random(f"{shape}"), 60 if shape[0] * shape[1] <= 64 else 8
    found = [[0 in named_in(entry, shape, draw, 15.0) for entry in straggler_entries().values()] for _ in range(runs)]
    assert sum(map(any, found)) >= 0.95 * runs
    for quantity, by_run in zip(straggler_entries(), zip(*found, strict=True), strict=True):
        assert sum(by_run) >= 0.8 * runs, quantity
