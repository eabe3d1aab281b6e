"""Scaling: the arithmetic, against published figures, and the entries that depend on each other."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_smoke.model import flops
from finetune_smoke.settings.config import preset
from pytest_gpucluster.errors import ConfigurationError, MeasurementError
from pytest_gpucluster.judging import scaling
from pytest_gpucluster.measurements.collectives import busbw_gb_s
from pytest_gpucluster.thresholds.resolve import FabricRates
from tests.support.thresholds_files import packaged
from tests_acceptance.test_scaling import require_same_work

if TYPE_CHECKING:
    from pytest_gpucluster.thresholds.resolve import Threshold

MIB_1000 = 1000 * 2**20
QWEN2_7B = {"single_rank_gib": 20.0, "sharded_gib": 12.15, "layer_gib": 12.15 / 28}


def entries(profile: str) -> dict[str, Threshold]:
    """The packaged entries for a profile."""
    file = packaged()
    return dict(file.criteria(file.profiles[profile]))


def test_the_client_s_98_percent() -> None:
    """1000 MiB in 4.150 ms on 8 GPUs are 442.2 GB/s, in 4.520 ms on 16 they are 435.0: the report's 442.21 and 434.99."""
    in_node = busbw_gb_s("all_reduce", size_bytes=MIB_1000, time_s=4.150e-3, ranks=8)
    in_cluster = busbw_gb_s("all_reduce", size_bytes=MIB_1000, time_s=4.520e-3, ranks=16)
    assert (round(in_node, 1), round(in_cluster, 1)) == (442.2, 435.0)
    assert scaling.efficiency_percent(in_cluster, of=[in_node]) == pytest.approx(98.37, abs=0.01)
    assert scaling.efficiency_percent(434.99, of=[442.21]) == pytest.approx(98.37, abs=0.01)


def test_the_client_s_training_does_not_scale() -> None:
    """8,561 of 41,480 tokens/s/GPU."""
    limit = entries("h100-sxm")["training_scaling_cluster"].limit(gpus=16, cluster={})
    value = scaling.efficiency_percent(8_561, of=[41_480])
    assert value == pytest.approx(20.64, abs=0.01)
    assert not limit.holds(value)


def test_busbw_is_compared_at_the_size_of_the_report() -> None:
    """1000 MiB, in a node and between nodes by the same recipe."""
    assert entries("h100-sxm")["busbw_scaling"].recipe["size_bytes"] == MIB_1000


def test_efficiency_is_of_the_mean() -> None:
    """One slow GPU of four, to which all others wait, costs 12 % and not nothing."""
    assert scaling.efficiency_percent(85, of=[100, 100, 100, 85]) == pytest.approx(88.3, abs=0.05)


@pytest.mark.parametrize("of", [[], [0.0], [-1.0], [float("nan")]])
def test_nothing_to_compare_with(of: list[float]) -> None:
    """A missing or zero rate is refused, never divided by."""
    with pytest.raises(ValueError, match="cannot be compared"):
        scaling.efficiency_percent(1.0, of=of)


def test_peak_of_a_shared_model() -> None:
    """By hand: half of 12.15 GiB goes to the other rank, two layers of 0.434 come; alone nothing changes."""
    assert scaling.sharded_peak_gib(**QWEN2_7B, ranks=1) == 20.0
    assert scaling.sharded_peak_gib(**QWEN2_7B, ranks=2) == pytest.approx(20 - 6.075 + 0.868, abs=1e-3)
    assert scaling.sharded_peak_gib(**QWEN2_7B, ranks=4) == pytest.approx(20 - 9.1125 + 0.868, abs=1e-3)


@given(st.integers(2, 4096))
def test_more_ranks_never_need_more(ranks: int) -> None:
    """More ranks need less memory each, but never less than what is not sharded."""
    peak = scaling.sharded_peak_gib(**QWEN2_7B, ranks=ranks)
    assert scaling.sharded_peak_gib(**QWEN2_7B, ranks=2 * ranks) < peak
    assert peak > QWEN2_7B["single_rank_gib"] - QWEN2_7B["sharded_gib"]


def test_impossible_memory_is_refused() -> None:
    """A group has a rank, and a model is not larger than the peak of the single rank that holds all of it."""
    with pytest.raises(ValueError, match="at least 1"):
        scaling.sharded_peak_gib(**QWEN2_7B, ranks=0)
    with pytest.raises(ValueError, match="a rank alone holds 12"):
        scaling.sharded_peak_gib(single_rank_gib=10.0, sharded_gib=12.15, layer_gib=0.4, ranks=2)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 1024])
def test_the_limit_tells_sharded_from_whole(ranks: int) -> None:
    """At every size of group: layers that stay whole, or stay gathered, are far outside of what the limit allows."""
    limit = entries("h200-sxm")["memory_scaling_node"].limit(gpus=8, cluster={})
    off = functools.partial(scaling.deviation_percent, of=QWEN2_7B["sharded_gib"])
    due = scaling.sharded_peak_gib(**QWEN2_7B, ranks=ranks)
    assert limit.holds(off(due + 1.0, due))
    assert limit.holds(off(due - 1.0, due))
    assert off(QWEN2_7B["single_rank_gib"], due) > 4 * limit.value
    assert not limit.holds(off(due + QWEN2_7B["sharded_gib"], due))
    assert not limit.holds(off(due - 1.5, due))


@pytest.mark.parametrize(
    ("sharded", "why"),
    [
        ({"rows": 2, "strategy": "fsdp"}, "their recipes differ in rows"),
        ({"strategy": "fsdp"}, "their recipes differ in rows"),
        ({"rows": 4, "compile": "off", "strategy": "fsdp"}, "their recipes differ in compile"),
        ({"rows": 4}, "no recipe has strategy fsdp"),
    ],
)
def test_memory_of_other_work_is_not_compared(sharded: dict[str, Any], why: str) -> None:
    """An error that blames the settings: a healthy GPU would be called bad. The same work passes."""
    require_same_work({"rows": 4}, {"rows": 4, "strategy": "fsdp"})
    with pytest.raises(MeasurementError, match=why) as caught:
        require_same_work({"rows": 4}, sharded)
    assert caught.value.blames == "settings"


def test_sharded_weights_of_the_7b_shape() -> None:
    """28 layers of 233 M weights in bf16."""
    config = preset("7b-shape")
    key = config.hidden_size // config.heads * config.kv_heads
    shape = flops.Shape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.layers,
        vocab=config.vocab_size,
        query=config.hidden_size,
        key=key,
    )
    assert flops.layer_weights(shape) * 2 / 2**30 == pytest.approx(QWEN2_7B["sharded_gib"], abs=0.01)


@pytest.mark.parametrize("profile", ["h100-sxm", "h200-sxm", "lab-2x2", "rehearsal"])
def test_scaling_compares_the_same_work(profile: str) -> None:
    """Weak scaling: one recipe for a GPU, a node and all nodes, FSDP apart from its strategy. Memory rests on it too."""
    found = entries(profile)
    recipes = [found[f"training_throughput_{way}"].recipe for way in ("gpu", "ddp_node", "ddp_cluster")]
    assert recipes[0] == recipes[1] == recipes[2]
    for where in ("node", "cluster"):
        assert found[f"training_throughput_fsdp_{where}"].recipe == {**recipes[0], "strategy": "fsdp"}
    assert recipes[0].get("rows_shared") is False or not preset(recipes[0]["preset"]).rows_shared


@pytest.mark.parametrize("profile", ["h200-sxm", "rehearsal"])
def test_recipes_are_settings_of_the_fine_tune(profile: str) -> None:
    """A misspelt setting would be an error only on the cluster. At least two windows, as the first is left out."""
    found = entries(profile)
    for key in ("training_throughput_gpu", "training_throughput_fsdp_node"):
        recipe = {name: value for name, value in found[key].recipe.items() if name != "preset"}
        config = preset(found[key].recipe["preset"], **recipe)
        assert dataclasses.asdict(config)["steps"] == recipe["steps"]
        assert config.steps >= 2 * config.window_steps


SHAPES = {
    "handover": (2, 8, 435.0, True),
    "2 nodes of 8, one rail at half rate": (2, 8, 218.0, False),
    "published, 96 GPUs": (12, 8, 386.6, True),
    "96 GPUs, 1 GiB": (12, 8, 365.9, True),
    "96 GPUs, one rail at half rate": (12, 8, 193.3, False),
    "4 ports a node": (2, 4, 193.0, True),
    "4 ports a node, one at half rate": (2, 4, 97.0, False),
    "one GPU a node": (2, 1, 46.0, True),
    "1,024 GPUs, half of the rings": (128, 8, 200.0, False),
}
"""Nodes, GPUs of each, bus bandwidth between them, and whether that is healthy."""


@pytest.mark.parametrize(("nodes", "gpus", "busbw", "is_healthy"), SHAPES.values(), ids=SHAPES)
def test_the_limit_between_nodes_fits_the_shape(nodes: int, gpus: int, busbw: float, *, is_healthy: bool) -> None:
    """Clusters with 400 Gb/s a GPU; a site with 200 has half of the limit, but for the shape of the handover."""
    facts = {"nodes": nodes, "gpus_per_node": gpus, "world_size": nodes * gpus}
    limit = entries("h200-sxm")["inter_node_busbw[all_reduce]"].limit(gpus=nodes * gpus, cluster=facts)
    assert limit.holds(busbw) is is_healthy
    assert limit.basis is not None
    assert ("the limit for 2x8" in limit.basis) is ((nodes, gpus) == (2, 8))


MOVED = {
    "2 x 8 H100, ports of 50 GB/s": (2, 8, 50, {"all_gather": (338.6, 300.0), "all_to_all": (79.1, 65.625)}),
    "2 x 8 H100, ports of 25 GB/s": (2, 8, 25, {"all_to_all": (40.2, 32.8125)}),
    "4 x 4 GB200, ports of 50 GB/s": (4, 4, 50, {"all_gather": (191, 150.0), "all_to_all": (58, 43.75)}),
    "8 x 4 GB300, ports of 100 GB/s": (8, 4, 100, {"all_gather": (366, 300.0), "all_to_all": (86, 77.5)}),
}
"""Nodes, GPUs, ports; bus bandwidth at 16 GB (NVIDIA's cluster-readiness-engine), and the limit worked out on paper."""


def rates(nic_gb_s: float | None) -> FabricRates:
    """Those of an H100 or H200, with ports of this rate."""
    return FabricRates(nic_gb_s_per_gpu=nic_gb_s, nvlink_gb_s=450.0, nodes_per_domain=1)


@pytest.mark.parametrize(("nodes", "gpus", "nic", "found"), MOVED.values(), ids=MOVED)
def test_the_other_collectives_have_a_limit_for_any_shape(
    nodes: int, gpus: int, nic: float, found: dict[str, tuple[float, float]]
) -> None:
    """A part of the bound, which healthy clusters reach. No GPU was run on by this program: only a remark."""
    facts = {"nodes": nodes, "gpus_per_node": gpus, "world_size": nodes * gpus}
    for operation, (reached, floor) in found.items():
        entry = entries("h200-sxm")[f"inter_node_busbw[{operation}]"].model_copy(update={"rates": rates(nic)})
        limit = entry.limit(gpus=nodes * gpus, cluster=facts)
        assert limit.value == pytest.approx(floor)
        assert limit.holds(reached)
        assert not limit.holds(0.75 * reached)
        assert entry.severity == "advisory"


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_to_all"])
def test_no_collective_takes_the_number_of_another_shape(operation: str) -> None:
    """Without the rate of the ports there is an error that asks for it."""
    entry = entries("h100-sxm")[f"inter_node_busbw[{operation}]"].model_copy(update={"rates": rates(None)})
    with pytest.raises(ConfigurationError, match="Say 'nic_gb_s_per_gpu' in the profile"):
        entry.limit(gpus=16, cluster={"nodes": 2, "gpus_per_node": 8})


def test_no_number_of_another_shape() -> None:
    """Where the profile does not say what its ports carry, nothing is judged but the stated shape."""
    entry = entries("h100-sxm")["inter_node_busbw[all_reduce]"].model_copy(update={"rates": None})
    assert entry.limit(gpus=16, cluster={"nodes": 2, "gpus_per_node": 8}).value == 350
    with pytest.raises(ConfigurationError, match=r"Say 'nic_gb_s_per_gpu' in the profile, or the limit for 3x8 under 'shapes'"):
        entry.limit(gpus=24, cluster={"nodes": 3, "gpus_per_node": 8})


def test_a_node_counts_for_what_can_cross() -> None:
    """96 H100 keep 78 % of a node's bus bandwidth, and 91 % of what their ports can carry."""
    assert scaling.efficiency_percent(365.9, of=[466.3] * 12) == pytest.approx(78.5, abs=0.1)
    assert scaling.kept_percent(365.9, of=[466.3] * 12, most=400.0) == pytest.approx(91.5, abs=0.1)
    assert scaling.kept_percent(365.9, of=[366.0] * 12, most=400.0) == pytest.approx(100.0, abs=0.1)
