"""Healthy parts of a simulated fleet lie within every packaged limit, at any seed, and beside any siblings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpucluster.fleet.simulation import LOSSES, MODELS, TYPICAL, Simulation, parse_simulation, spread
from pytest_gpucluster.judging.noise import spread_of
from pytest_gpucluster.judging.siblings import Healthy, Siblings, compare
from pytest_gpucluster.thresholds.specs import load_specs
from tests.support.thresholds_files import packaged

JUDGED = {
    "bf16_tflops": "bfloat16",
    "fp16_tflops": "float16",
    "fp8_tflops": "float8_e4m3fn",
    "tf32_tflops": "tf32",
    "fp32_tflops": "float32",
    "fp64_tflops": "float64",
    "int8_tops": "int8",
    "bf16_sustained": "sustained",
    "bf16_at_clock": "at_clock",
    "hbm_bandwidth": "hbm",
    "host_to_device": "h2d",
    "device_to_host": "d2h",
    "host_to_device_all": "h2d_all",
    "device_to_host_all": "d2h_all",
    "training_throughput_gpu": "train",
    "host_memory": "triad",
    "scratch_write": "write",
    "scratch_read": "read",
}
COMPARED = {
    "bf16_tflops": "slow",
    "fp32_tflops": "slow",
    "bf16_sustained": "throttled",
    "bf16_at_clock": "slow",
    "hbm_bandwidth": "hbm",
    "training_throughput_gpu": "slow",
    "host_to_device": "pcie",
    "device_to_host": "pcie",
}
"""The quantities that are compared, each with a fault that lowers it."""
LOW_FLOORS = ("train", "triad", "write", "read")
LOW_HERE = {"hbm": ("b200-sxm", "gb200-nvl72")}
"""Where published numbers differ by so much that a loss of 10 % passes: siblings find it."""
HOSTS = {"host_memory": "dimm", "scratch_write": "disk", "scratch_read": "disk"}
"""The quantities by which hosts are compared, each with a fault that lowers it."""
SHAPES = ("1x8", "2x8", "4x8", "16x8", "64x8")
SEEDS = range(8)


def hardware(shape: str, *faults: str, gpu: str, seed: int) -> Simulation:
    """The parts of a fleet."""
    return replace(parse_simulation(shape, seed=seed, faults=[*faults]), gpu=gpu)


@pytest.mark.parametrize("gpu", sorted(MODELS))
@pytest.mark.parametrize("criterion", JUDGED)
def test_healthy_parts_pass_and_planted_ones_do_not(criterion: str, gpu: str) -> None:
    """With room for the spread of repeats. What a fault takes is enough, but for low floors, such as that of training."""
    thresholds, quantity = packaged(), JUDGED[criterion]
    limit = thresholds.criteria(thresholds.profiles[gpu])[criterion].limit(gpus=1, cluster={}).value
    parts = [hardware("64x8", gpu=gpu, seed=seed) for seed in SEEDS]
    rates = [part.rate(rank, quantity) for part in parts for rank in range(512)]
    assert spread_of(spread(min(rates), 10)).low > limit
    bound = thresholds.criteria(thresholds.profiles[gpu])[criterion].best_possible(gpus=1, cluster={})
    assert bound is None or bound.allows(spread_of(spread(max(rates), 10)).high)
    losses = [found[quantity] for found in LOSSES.values() if quantity in found]
    is_low = quantity in LOW_FLOORS or gpu in LOW_HERE.get(quantity, ()) or limit == 0
    for loss in () if is_low else losses:
        assert spread_of(spread(max(rates) * loss, 10)).high < limit


@pytest.mark.parametrize("gpu", sorted({*load_specs()} - {*MODELS}))
def test_a_gpu_without_a_column_is_healthy_too(gpu: str) -> None:
    """Every GPU of the table can be simulated: its values follow from its sheet, and lie within every limit of its profile."""
    thresholds = packaged()
    criteria = thresholds.criteria(thresholds.profiles[gpu])
    parts = hardware("2x8", gpu=gpu, seed=0)
    for key, quantity in JUDGED.items():
        if criteria[key].skip is None:
            rates = [parts.rate(rank, quantity) for rank in range(16)]
            assert spread_of(spread(min(rates), 10)).low > criteria[key].limit(gpus=1, cluster={}).value, key
            bound = criteria[key].best_possible(gpus=1, cluster={})
            assert bound is None or bound.allows(spread_of(spread(max(rates), 10)).high), key


def test_a_gpu_of_another_model_has_its_rates() -> None:
    """In an H200's place an H100; in an H100's place an H200."""
    for gpu, other in (("h200-sxm", "h100-sxm"), ("h100-sxm", "h200-sxm"), ("l40s", "h100-sxm")):
        parts = hardware("1x4", "node0-gpu1:model", gpu=gpu, seed=0)
        assert [parts.gpu_of(rank) for rank in range(4)] == [gpu, other, gpu, gpu]
        assert parts.rate(1, "hbm") == hardware("1x4", gpu=other, seed=0).rate(1, "hbm")


@pytest.mark.parametrize("gpu", sorted(MODELS))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("quantity", COMPARED)
def test_no_healthy_part_is_a_straggler(quantity: str, shape: str, gpu: str) -> None:
    """By the packaged tolerances, and the siblings are alike. A bad part is named, whatever the shape, and alone."""
    thresholds, fault = packaged(), COMPARED[quantity]
    entry = thresholds.criteria(thresholds.profiles[gpu])[f"straggler[{quantity}]"]
    limit_percent = entry.limit(gpus=8, cluster={}).value
    for seed in SEEDS:
        for faults in ([], [f"node0-gpu1:{fault}"]):
            parts = hardware(shape, *faults, gpu=gpu, seed=seed)
            ranks = range(parts.world_size)
            siblings = Siblings(
                rates={rank: parts.rate(rank, JUDGED[quantity]) for rank in ranks},
                models=dict.fromkeys(ranks, gpu),
                hosts={rank: rank // 8 for rank in ranks},
            )
            found = compare(siblings, Healthy(**entry.recipe), limit_percent=limit_percent)
            named = [rank for rank, one in found.items() if one.shortfall.is_named(limit_percent)]
            assert named == ([1] if faults else []), seed
            assert {one.doubt for one in found.values()} == {None}, seed


@pytest.mark.parametrize("nodes", [3, 4, 16, 64])
@pytest.mark.parametrize("quantity", HOSTS)
def test_no_healthy_host_is_slow(quantity: str, nodes: int) -> None:
    """By the packaged tolerances. A bad host is named, and alone."""
    thresholds = packaged()
    entry = thresholds.criteria(thresholds.profiles["h200-sxm"])[f"slow_host[{quantity}]"]
    limit_percent = entry.limit(gpus=8, cluster={}).value
    for seed in SEEDS:
        for faults in ([], [f"node1:{HOSTS[quantity]}"]):
            parts = hardware(f"{nodes}x8", *faults, gpu="h200-sxm", seed=seed)
            rates = {node: parts.rate(8 * node, JUDGED[quantity]) for node in range(nodes)}
            siblings = Siblings(rates=rates, models=dict.fromkeys(rates, "host"), hosts={node: node for node in rates})
            found = compare(siblings, Healthy(**entry.recipe), limit_percent=limit_percent)
            assert [node for node, one in found.items() if one.shortfall.is_named(limit_percent)] == ([1] if faults else [])
            assert {one.doubt for one in found.values()} == {None}, seed


def test_repeats_lie_around_their_median() -> None:
    """One repeat is the value itself."""
    assert spread(5.0, 1) == [5.0]
    assert spread_of(spread(700.0, 7)).median == 700.0


def test_this_file_knows_every_quantity() -> None:
    """A new one is judged here too."""
    assert set(JUDGED.values()) == set(TYPICAL)
