"""No value is too good to be true: what no hardware can give is an error, whoever judges it. Every healthy value is below."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.cluster.binding import Binding
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.inventory.identity import Identity
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.failure_text import TOO_LITTLE, TOO_MUCH, Possible
from pytest_gpucluster.judging.finding import Finding
from pytest_gpucluster.judging.noise import Repeats
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.thresholds.lint import load
from pytest_gpucluster.thresholds.resolve import SEEN_PORTS
from tests.support import REPOSITORY
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_gpucluster.thresholds.resolve import Threshold

FILE = packaged()
PROFILES = {name: profile for name, profile in FILE.profiles.items() if not profile.rehearsal}
SHAPES = {"node": (1, 8), "cluster": (2, 8), "gpu": (1, 8)}
A = Place(id="node0-gpu0", node=0, gpu=0, rank=0, hostname="gpu-node-0")
RATES = {"TFLOPS", "TOPS", "TB/s", "GB/s"}
UNKNOWN = {
    "host_memory": "channels and clock of the host's memory are not known",
    "scratch_write": "the disk is not known, and its cache neither",
    "scratch_read": "as scratch_write",
    "shared_write": "the file system's servers and their network are not known",
    "shared_read": "as shared_write",
    "shared_write_all": "as shared_write",
    "shared_read_all": "as shared_write",
}
"""Rates of which nobody knows the greatest one, and why."""
SHEET: dict[str, dict[str, float]] = {
    "h200-sxm": {"bf16_tflops": 989, "bf16_sustained": 989, "bf16_soak": 989, "fp8_tflops": 1979, "hbm_bandwidth": 4.8},
    "a100-sxm": {"bf16_tflops": 312, "hbm_bandwidth": 2.039, "host_to_device": 31.5},
    "b200-sxm": {"bf16_tflops": 2250, "hbm_bandwidth": 7.67, "busbw[all_reduce]": 900},
}
"""What the sheets say, by hand."""


def judge_of(threshold: Threshold, *, nodes: int, gpus: int) -> Criterion:
    """As the fixture gives it in a cluster of this shape."""
    shape = {"nodes": nodes, "gpus_per_node": gpus, "world_size": nodes * gpus}
    group = {"gpu": 1, "node": gpus, "cluster": nodes * gpus}[threshold.per]
    numbers = {} if group in threshold.numbers or "any" in threshold.numbers else {threshold.kind: {"any": 1.0}}
    known = threshold.model_copy(update=numbers)
    place = None if threshold.per == "cluster" else A
    return Criterion(threshold=known, limit=known.limit(gpus=group, cluster=shape), place=place)


def rates() -> Iterator[Any]:
    """Every rate that a profile of GPUs asks for, with its profile."""
    for name, profile in PROFILES.items():
        for key, one in FILE.criteria(profile).items():
            if one.unit in RATES and one.skip is None and key not in UNKNOWN:
                if one.per == "cluster" and profile.nic_gb_s_per_gpu is None and "inter_node" in key:
                    continue  # nobody said what the ports carry, and the limit itself is an error that asks for it
                if one.needs.domains and profile.nodes_per_domain == 1:
                    continue  # skipped by rule
                yield pytest.param(one, id=f"{name}-{key}")


@pytest.mark.parametrize("threshold", list(rates()))
def test_ten_times_what_is_possible_is_an_error(threshold: Threshold) -> None:
    """For each entry and each GPU: neither passed nor failed, as a value, as repeats, by place, and as a finding."""
    nodes, gpus = SHAPES[threshold.per]
    judge = judge_of(threshold, nodes=nodes, gpus=gpus)
    assert judge.limit.bound is not None
    wrong = 10 * judge.limit.bound.value
    ways: list[Any] = [wrong, int(wrong) + 1, Repeats(value=wrong, samples=[wrong] * 5), {judge.place or A: wrong}]
    for value in ways:
        with pytest.raises(MeasurementError, match=TOO_MUCH):
            judge.require(value)
    with pytest.raises(MeasurementError, match=TOO_MUCH):
        judge.judge(Finding(value=wrong))
    assert judge.judged is None
    assert judge.first_error is not None
    judge_of(threshold, nodes=nodes, gpus=gpus).require(max(0.999 * judge.limit.bound.value, judge.limit.value))


@pytest.mark.parametrize(("profile", "key"), [(profile, key) for profile, keys in SHEET.items() for key in keys])
def test_ten_times_the_data_sheet_is_an_error(profile: str, key: str) -> None:
    """By figures that were copied by hand; the sheet's own figure is never too much."""
    judge = judge_of(FILE.criteria(PROFILES[profile])[key], nodes=1, gpus=8)
    with pytest.raises(MeasurementError, match=TOO_MUCH):
        judge.require(10 * SHEET[profile][key])
    judge_of(FILE.criteria(PROFILES[profile])[key], nodes=1, gpus=8).require(SHEET[profile][key])


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [
        ("bf16_tflops", 9890.0, "1071 TFLOPS"),
        ("bf16_tflops", 1100.0, "1071 TFLOPS"),
        ("fp8_tflops", 2200.0, "2141 TFLOPS"),
        ("fp32_tflops", 70.0, "67 TFLOPS"),
        ("hbm_bandwidth", 48.0, "5.1 TB/s"),
        ("host_to_device", 126.0, "66.95 GB/s"),
        ("busbw[all_reduce]", 5000.0, "743.8 GB/s"),
        ("busbw[all_gather]", 600.0, "478.1 GB/s"),
        ("busbw[send_recv]", 600.0, "478.1 GB/s"),
        ("inter_node_busbw[all_reduce]", 3500.0, "796.9 GB/s"),
        ("inter_node_busbw[all_to_all]", 140.0, "99.61 GB/s"),
        ("bf16_at_clock", 1.05, "1 ratio"),
        ("hbm_pattern_coverage", 1.01, "1 ratio"),
        ("finetune_exact_match", 1.5, "1 ratio"),
        ("training_scaling_node", 150.0, "110 %"),
        ("training_scaling_cluster", 150.0, "110 %"),
        ("busbw_scaling", 980.0, "200 %"),
        ("rail_bandwidth", 9.3, "2 ratio"),
    ],
)
def test_the_message(key: str, value: float, most: str) -> None:
    """Whose value, the value, the most that is possible, and what says so."""
    judge = judge_of(FILE.criteria(PROFILES["h200-sxm"])[key], nodes=2, gpus=8)
    with pytest.raises(MeasurementError) as caught:
        judge.require(value)
    text = str(caught.value)
    assert text.startswith(key)
    assert f" {TOO_MUCH} (at most {most} is possible, " in text
    assert f"{key!r} has 'bound: " in text
    assert caught.value.culprits == ()


@pytest.mark.parametrize("key", ["latency[all_reduce]", "launch_latency"])
@pytest.mark.parametrize("value", [0.0, 0.3])
def test_a_time_below_that_of_a_launch(key: str, value: float) -> None:
    """What takes no time was not done."""
    with pytest.raises(MeasurementError, match=rf"{TOO_LITTLE} \(at least 1 us is possible"):
        judge_of(FILE.criteria(PROFILES["h200-sxm"])[key], nodes=1, gpus=8).require(value)


def test_every_rate_has_a_bound_or_a_reason() -> None:
    """A new rate is never without."""
    entries = FILE.criteria(PROFILES["h200-sxm"])
    assert {key for key, one in entries.items() if one.unit in RATES and one.bound is None} == set(UNKNOWN)


def test_a_rehearsal_has_no_bound() -> None:
    """A CPU is judged for a value that is there."""
    for threshold in FILE.criteria(FILE.profiles["rehearsal"]).values():
        assert threshold.best_possible(gpus=2, cluster={"nodes": 1, "gpus_per_node": 2, "world_size": 2}) is None


def test_an_advisory_limit_is_no_way_around_it() -> None:
    """A missed one is a remark; a value that is impossible is an error all the same."""
    judge = judge_of(FILE.criteria(PROFILES["h200-sxm"])["busbw[all_gather]"], nodes=1, gpus=4)
    assert judge.threshold.severity == "advisory"
    with pytest.raises(MeasurementError, match=TOO_MUCH):
        judge.require(3000.0)


def test_what_is_compared() -> None:
    """A test that compares values asks before; where nobody knows a bound, anything is possible."""
    bound = FILE.criteria(PROFILES["h200-sxm"])["bf16_tflops"].best_possible(gpus=1, cluster={})
    can_be = Possible(key="bf16_tflops", bound=bound)
    assert can_be.error(780.0, where="gpu-node-0") is None
    with pytest.raises(MeasurementError, match=f"bf16_tflops at gpu-node-0: 7800 TFLOPS is {TOO_MUCH}"):
        can_be.require(7800.0, where="gpu-node-0")
    Possible(key="host_memory").require(1e9, where="gpu-node-0")


PUBLISHED = {
    "8 H100 with NVLS": ("h100-sxm", "busbw[all_reduce]", 1, 8, 480.0),
    "8 H100, 16 GiB (CoreWeave)": ("h100-sxm", "busbw[all_reduce]", 1, 8, 466.0),
    "8 B200 with NVLS": ("b200-sxm", "busbw[all_reduce]", 1, 8, 729.3),
    "4 GB300": ("gb300-nvl72", "busbw[all_reduce]", 1, 4, 681.0),
    "2 x 8 H100 on EFA": ("h100-sxm", "inter_node_busbw[all_reduce]", 2, 8, 487.9),
    "12 x 8 H100": ("h100-sxm", "inter_node_busbw[all_reduce]", 12, 8, 386.6),
    "72 GB200": ("gb200-nvl72", "inter_node_busbw[all_reduce]", 18, 4, 897.0),
    "144 GB200": ("gb200-nvl72", "inter_node_busbw[all_reduce]", 36, 4, 810.0),
    "2 x 8 H100, all_gather": ("h100-sxm", "inter_node_busbw[all_gather]", 2, 8, 338.6),
    "72 GB200, all_gather": ("gb200-nvl72", "inter_node_busbw[all_gather]", 18, 4, 708.0),
    "2 x 8 H100, all_to_all": ("h100-sxm", "inter_node_busbw[all_to_all]", 2, 8, 79.1),
    "8 x 4 GB300 in one rack, all_to_all": ("gb300-nvl72", "inter_node_busbw[all_to_all]", 8, 4, 684.0),
    "2 x 8 B200": ("b200-sxm", "inter_node_busbw[all_reduce]", 2, 8, 676.0),
    "GB200, host": ("gb200-nvl72", "host_to_device", 1, 4, 201.0),
    "GB300, host": ("gb300-nvl72", "host_to_device", 1, 4, 211.5),
    "A100, host": ("a100-sxm", "host_to_device", 1, 8, 26.3),
    "GB300, BF16": ("gb300-nvl72", "bf16_sustained", 1, 4, 1875.0),
    "GB200, FP8": ("gb200-nvl72", "fp8_tflops", 1, 4, 2907.0),
    "A100, BF16": ("a100-sxm", "bf16_tflops", 1, 8, 271.0),
    "B200, HBM": ("b200-sxm", "hbm_bandwidth", 1, 8, 6.62),
}
"""Healthy values that others published: profile, entry, nodes, GPUs of each, value."""


@pytest.mark.parametrize(("profile", "key", "nodes", "gpus", "value"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_values_are_possible(profile: str, key: str, nodes: int, gpus: int, value: float) -> None:
    """A bound that somebody exceeded would be none."""
    assert allowed(FILE.criteria(PROFILES[profile])[key], nodes, gpus, value)


def allowed(threshold: Threshold, nodes: int, gpus: int, value: float) -> bool:
    """Whether an entry takes a value for possible in a cluster of this shape."""
    shape = {"nodes": nodes, "gpus_per_node": gpus, "world_size": nodes * gpus}
    group = {"gpu": 1, "node": gpus, "cluster": nodes * gpus}[threshold.per]
    bound = threshold.best_possible(gpus=group, cluster=shape)
    return bound is None or bound.allows(value)


KEPT = sorted((REPOSITORY / "docs" / "results").rglob("summary.json"))


@pytest.mark.parametrize("path", KEPT, ids=[str(path.parent.relative_to(REPOSITORY / "docs" / "results")) for path in KEPT])
def test_kept_values_are_possible(path: Path) -> None:
    """Every value of every kept run of GPUs lies within its bound."""
    run = json.loads(path.read_text(encoding="utf-8"))
    if run["profile"] not in PROFILES:
        pytest.skip("no run of GPUs with a packaged profile")
    entries, expected = FILE.criteria(PROFILES[run["profile"]]), run["expected"]
    for key, row in run["criteria"].items():
        for place, value in row["values"].items():
            if value is not None and key in entries and entries[key].unit == row["unit"]:
                assert allowed(entries[key], expected["nodes"], expected["gpus_per_node"], value), (key, place, value)


STATED_GB_S = 2.96
SITE = """\
schema: 1
extends: packaged
profiles:
  site: {{inherits: h100-sxm, gpu: h100-sxm, nodes: 2, gpus_per_node: 1, fabric: {fabric}, nic_gb_s_per_gpu: 2.96}}
"""
BETWEEN = [
    ("inter_node_busbw[all_reduce]", 3.224),
    ("inter_node_busbw[all_gather]", 3.464),
    ("inter_node_busbw[reduce_scatter]", 3.399),
    ("inter_node_busbw[all_to_all]", 3.4),
]
"""What two halves of a host reached over loopback on 2026-11-27; the last one by hand. GB/s."""


@pytest.mark.parametrize(("key", "reached"), BETWEEN)
@pytest.mark.parametrize("fabric", ["sockets", "infiniband", "roce", "efa"])
def test_a_stated_rate_is_no_data_sheet(key: str, reached: float, fabric: str, tmp_path: Path) -> None:
    """A network over sockets may carry more than its guarantee. Bits taken for bytes are an error, as faster ports are."""
    (tmp_path / "site.yaml").write_text(SITE.format(fabric=fabric), encoding="utf-8")
    file = load(tmp_path / "site.yaml")
    bound = file.criteria(file.profiles["site"])[key].best_possible(gpus=2, cluster={"nodes": 2, "gpus_per_node": 1})
    possible = Possible(key=key, bound=bound)
    assert (possible.error(reached, where="x") is None) == (fabric == "sockets")
    assert possible.error(8 * STATED_GB_S, where="x") is not None


FASTER = 100.0
"""GB/s of ports for each GPU where the profile promises 50."""


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 4), (2, 8)])
@pytest.mark.parametrize(
    "key", ["inter_node_busbw[all_reduce]", "inter_node_busbw[all_gather]", "inter_node_busbw[all_to_all]"]
)
def test_ports_that_are_faster_than_promised_are_no_error(key: str, shape: tuple[int, int]) -> None:
    """What the ports carry that are really there is possible; more than that is not, nor is a slower port a tighter bound."""
    entry = FILE.criteria(PROFILES["h100-sxm"])[key]
    facts = {"nodes": shape[0], "gpus_per_node": shape[1], "world_size": shape[0] * shape[1]}

    def most(**ports: float) -> float:
        bound = entry.best_possible(gpus=facts["world_size"], cluster={**facts, **ports})
        assert bound is not None
        return bound.value

    rate = min(shape[1] * FASTER, 450.0)
    if key == "inter_node_busbw[all_to_all]":  # of what a GPU has, only the shares of other nodes leave by its ports
        rate = 0.95 * FASTER * (facts["world_size"] - 1) / (facts["world_size"] - shape[1])
    assert most(nic_gb_s_per_gpu=FASTER) > rate
    assert most(nic_gb_s_per_gpu=FASTER) >= most() == most(nic_gb_s_per_gpu=25.0)
    if shape[1] <= 2:
        assert most() < rate, "the bound of the promise alone was an error here"
    seen = entry.best_possible(gpus=2, cluster={**facts, SEEN_PORTS: FASTER})
    assert Possible(key=key, bound=seen).error(rate, where="x") is None


def test_the_ports_of_the_fastest_node_count() -> None:
    """For each of its GPUs; where no node shows them, the promise stands alone."""
    places = Inventory(num_nodes=2, gpus_per_node=4, device="cuda")

    def bound_with(*ports: float | None) -> float | None:
        known = {
            f"node{node}-gpu0": Identity(
                hostname="h", group_rank=node, local_rank=0, versions={}, torch_gpus=4, ports_gb_s=gb_s
            )
            for node, gb_s in enumerate(ports)
        }
        return Binding(inventory=places, places=places.places, identities=known).nic_gb_s_per_gpu

    assert bound_with(400.0, 200.0) == 100.0
    assert bound_with(None, 200.0) == 50.0
    assert bound_with(None, None) is None


@pytest.mark.parametrize("gpu", ["h100-sxm", "h200-sxm", "l40s"])
def test_no_gpu_has_more_memory_than_its_model(gpu: str) -> None:
    """A card with more is another part, or has said no number."""
    thresholds = packaged()
    profile = thresholds.profiles[gpu]
    assert profile.spec is not None
    most = thresholds.criteria(profile)["gpu_memory"].best_possible(gpus=1, cluster={})
    assert most is not None
    assert most.allows(profile.spec.memory_gib)
    assert not most.allows(1.17 * profile.spec.memory_gib)
    assert not most.allows(2.0**34)
