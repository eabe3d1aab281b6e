"""Recall and false alarms of a comparison of 1,024 GPUs, at the noise of repeats that real GPUs gave."""

from __future__ import annotations

import json
import random
import statistics
from functools import lru_cache
from typing import Any

import pytest

from pytest_gpucluster.records.changes import JudgedValue, Pair, find_changes, smallest_losses
from tests.support import REPOSITORY

KEPT = REPOSITORY / "docs" / "results" / "2026-11-21-h200x4-9b14f94" / "repeatability"
"""Eight rounds on one H200: every repeat of each round, for ten criteria."""
NUM_GPUS, BAD = 1024, 77
PRODUCTS = ("TFLOPS", "TOPS")
POOL = 2_000
AIM_RECALL, AIM_ALARMS = 0.99, 0.01
SHIFTS = (-0.03, 0.0, 0.02)
DAY = 6
NIGHT = pytest.param(100, marks=pytest.mark.slow)


@lru_cache(maxsize=1)
def noise() -> dict[str, tuple[str, list[float]]]:
    """For each criterion its unit, and how far the value of a run lies from the median of all, as a share of it.

    A value of one of the eight rounds, moved by chance by half of their standard deviation.
    """
    chance = random.Random(0)
    found: dict[str, tuple[str, list[float]]] = {}
    for file in sorted(KEPT.glob("*.json")):
        kept = json.loads(file.read_text(encoding="utf-8"))
        for one in kept["criteria"]:
            values = [entry[one["criterion"]]["value"] / one["median"] - 1 for entry in kept["rounds"]]
            sigma = statistics.stdev(values)
            found[one["criterion"]] = (one["unit"], [chance.choice(values) + chance.gauss(0, sigma / 2) for _ in range(POOL)])
    return found


def pair_of_runs(seed: int, *, loses: frozenset[str] = frozenset(), loss: float = 0.02) -> dict[str, list[Pair]]:
    """Two runs of 1,024 GPUs; the second one is a little faster or slower as a whole, and one GPU loses in ``loses``."""
    chance = random.Random(seed)
    found: dict[str, list[Pair]] = {}
    for name, (_, drawn) in noise().items():
        before, after = chance.choices(drawn, k=NUM_GPUS), chance.choices(drawn, k=NUM_GPUS)
        shift = 1 + SHIFTS[seed % len(SHIFTS)]
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            values = (1 + old, (1 + new) * shift * (1 - loss * (number == BAD and name in loses)))
            change = (values[1] - values[0]) / values[0]
            found.setdefault(name, []).append(Pair(part=("gpu", str(number)), before=values[0], after=values[1], change=change))
    return found


def criteria() -> dict[str, JudgedValue]:
    """What the comparison knows of each quantity."""
    return {name: JudgedValue(unit=unit, is_floor=True) for name, (unit, _) in noise().items()}


def named(pairs: dict[str, list[Pair]]) -> set[Any]:
    """The parts that lost beyond noise."""
    return {one.part[1] for one in find_changes(pairs, criteria()) if one.change < 0 and one.part is not None}


def share(number: int, *, loses: frozenset[str] = frozenset(), loss: float = 0.02) -> tuple[float, float]:
    """In how many of so many pairs the GPU that lost is named, and in how many any other one is."""
    found = [named(pair_of_runs(seed, loses=loses, loss=loss)) for seed in range(number)]
    return sum(str(BAD) in parts for parts in found) / number, sum(bool(parts - {str(BAD)}) for parts in found) / number


@pytest.mark.parametrize("number", [DAY, NIGHT])
def test_a_gpu_that_loses_two_percent_of_its_speed_is_named(number: int) -> None:
    """In all products, as with a lower clock: recall at least 0.99, and no other GPU is named in more than 1 % of pairs."""
    products = frozenset(name for name, (unit, _) in noise().items() if unit in PRODUCTS)
    assert len(products) >= 7
    recall, alarms = share(number, loses=products)
    assert recall >= AIM_RECALL
    assert alarms <= AIM_ALARMS


@pytest.mark.parametrize("number", [DAY, NIGHT])
def test_healthy_pairs_raise_no_alarm(number: int) -> None:
    """At most 1 % of pairs name any GPU."""
    assert max(share(number)) <= AIM_ALARMS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16_tflops", "fp16_tflops", "fp32_tflops", "hbm_bandwidth", "host_to_device"])
def test_a_loss_in_one_quantity_alone_is_named_where_it_is_quiet(name: str) -> None:
    """Two percent in one quantity whose rounds spread by 0.03 to 0.13 %; in the others it is not (docs/records.md)."""
    recall, alarms = share(20, loses=frozenset({name}))
    assert recall >= AIM_RECALL
    assert alarms <= AIM_ALARMS


def test_a_loss_within_the_noise_is_not_named() -> None:
    """The recall above is no habit of naming: half a percent is below what is ever named."""
    assert share(DAY, loses=frozenset({"bf16_tflops"}), loss=0.005) == (0.0, 0.0)


LOUD = ("fp64_tflops", "fp8_tflops", "tf32_tflops")
QUIET = ("bf16_tflops", "fp16_tflops", "fp32_tflops", "hbm_bandwidth", "host_to_device", "device_to_host")


def with_loss(pairs: dict[str, list[Pair]], name: str, loss: float) -> dict[str, list[Pair]]:
    """The pairs, in which one GPU lost so much in one quantity alone."""
    old = pairs[name][BAD]
    after = old.after * (1 - loss)
    lost = Pair(part=old.part, before=old.before, after=after, change=(after - old.before) / old.before)
    return {**pairs, name: [*pairs[name][:BAD], lost, *pairs[name][BAD + 1 :]]}


@pytest.mark.parametrize("number", [2, NIGHT])
def test_the_comparison_knows_what_it_can_find(number: int) -> None:
    """The loss that it promises to find is found, a fifth of that is not; 2 % lie beyond it in three loud quantities alone."""
    found: dict[tuple[str, float], int] = {}
    for seed in range(number):
        pairs = pair_of_runs(seed)
        least = smallest_losses(pairs, criteria())
        assert {name for name in QUIET if least[name] > 0.02} == set()
        assert {name for name in LOUD if least[name] <= 0.02} == set()
        for name, share_of_it in ((name, part) for name in least for part in (1.0, 0.2)):
            hit = str(BAD) in named(with_loss(pairs, name, share_of_it * least[name]))
            found[name, share_of_it] = found.get((name, share_of_it), 0) + hit
    assert min(found[name, 1.0] for name in noise()) >= 0.97 * number - 1
    assert max(found[name, 0.2] for name in noise()) == 0


def best_possible(name: str, *, loss: float = 0.02, alarms: float = AIM_ALARMS) -> float:
    """The recall of a judge that knows the noise exactly, and has this one quantity to judge: no comparison finds more."""
    values = sorted(noise()[name][1])
    chance = random.Random(1)
    before, after = (chance.choices(values, k=400_000) for _ in ("before", "after"))
    changes = sorted((1 + new) / (1 + old) - 1 for old, new in zip(before, after, strict=True))
    limit = changes[int(alarms / NUM_GPUS * len(changes))]
    return sum((1 + change) * (1 - loss) - 1 < limit for change in changes) / len(changes)


@pytest.mark.slow
def test_no_comparison_finds_two_percent_of_a_loud_quantity() -> None:
    """So decision 90 asks for none; in a quiet one it is always found."""
    assert max(best_possible(name) for name in LOUD) < 0.3
    assert min(best_possible(name) for name in QUIET) >= AIM_RECALL
