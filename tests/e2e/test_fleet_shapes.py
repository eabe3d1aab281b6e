"""Healthy fleets of every shape from 1x1 to 8x8: green or skipped by rule, nobody named; a missing limit is said at once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.support.fleets import not_green, simulate
from tests.support.thresholds_files import write_limits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

EVERY_SHAPE = [f"{nodes}x{gpus}" for nodes in range(1, 9) for gpus in range(1, 9)]
FEW = {"1x1", "2x3", "8x1"}
"""By day: one GPU, two nodes of an odd number, nodes of one GPU; the other shapes at night."""


def assert_green(folder: Path, fleet: str, *arguments: str) -> None:
    """Nothing is red or in error, nobody is named, and the run was a whole one."""
    run = simulate(folder, fleet, *arguments)
    assert not_green(run) == {}, run.stdout[-4000:]
    assert run.results["culprits"] == []
    assert run.results["verdict"] == "REHEARSED"
    assert run.returncode == 0


@pytest.mark.parametrize("fleet", [pytest.param(one, marks=() if one in FEW else pytest.mark.slow) for one in EVERY_SHAPE])
def test_a_healthy_fleet_is_green(tmp_path: Path, fleet: str) -> None:
    """Whatever its shape: no limit is missing, and nothing is measured over one GPU that needs two."""
    assert_green(tmp_path, fleet)


@pytest.mark.parametrize("fleet", ["4x1", pytest.param("2x5", marks=pytest.mark.slow)])
def test_a_healthy_fleet_is_green_in_a_soak(tmp_path: Path, fleet: str) -> None:
    """The criteria of a soak have the same rules and sizes."""
    assert_green(tmp_path, fleet, "--gpucluster-level=soak:2s")


AT_A_GPU = ("slow", "hbm", "ecc", "pattern", "corrupt", "pcie", "throttled", "reset", "xid", "dead", "hung", "nvlink")
AT_A_NODE = ("cable", "odd", "clock", "nvls", "pair")


def planted_pair(seed: int) -> tuple[str, tuple[str, str], set[str]]:
    """A fleet, two faults on two of its nodes, and the places that are to be named."""
    draw = random.Random(f"planted {seed}")
    nodes, gpus = draw.choice([(3, 2), (3, 3), (4, 2)])
    one, other = draw.choice(AT_A_GPU), draw.choice([*AT_A_GPU, *AT_A_NODE])
    faults, guilty = [], set()
    for kind, node in zip((one, other), draw.sample(range(nodes), 2), strict=True):
        gpu = f"node{node}-gpu{draw.randrange(gpus)}"
        faults.append(f"{gpu if kind in (*AT_A_GPU, 'pair') else f'node{node}'}:{kind}")
        guilty.add(gpu if kind in AT_A_GPU else f"node{node}")
    return f"{nodes}x{gpus}", (faults[0], faults[1]), guilty


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_of_two_planted_faults_both_are_named_and_nobody_else(tmp_path: Path, seed: int) -> None:
    """On two nodes, a GPU and another GPU or a whole node: exactly the guilty, whatever else they spoil."""
    fleet, faults, guilty = planted_pair(seed)
    run = simulate(tmp_path, fleet, bad=faults)
    named = {one["place"] and one["place"]["id"] for one in run.results["culprits"]}
    assert named == guilty, (fleet, faults)
    assert run.returncode == 1


def test_what_is_in_each_node_is_skipped_with_its_rule(tmp_path: Path) -> None:
    """The GPUs of a node count, not those of the cluster."""
    run = simulate(tmp_path, "5x1", "-k", "busbw_scaling")
    row = run.row("busbw_scaling")
    assert (row["outcome"], row["reason"]) == ("skipped", "needs 2 GPUs in each node, and 1 is expected")
    assert run.results["culprits"] == []


def test_a_rack_of_one_node_is_no_slow_domain(tmp_path: Path) -> None:
    """Four GPUs reach 650 GB/s where 72 reach 870: ``busbw`` judges these, and the domain of several nodes is judged here."""
    run = simulate(tmp_path, "19x4", "--gpucluster-profile=gb200-nvl72", "-k", "domain_busbw")
    row = run.row("domain_busbw[all_reduce]")
    assert (row["outcome"], row["value"] > 720, len(row["evidence"]["domains"])) == ("passed", True, 2), run.stdout[-2000:]


def test_a_missing_limit_is_said_before_the_run_begins(tmp_path: Path) -> None:
    """A node of 9 GPUs has no limit: one line before the first test, then an error of the settings that names no part."""
    run = simulate(tmp_path, "2x9", "-k", "test_bf16_tflops or test_busbw and all_reduce and links")
    said = "gpucluster: will be an ERROR: "
    assert run.stdout.count(said) == 1, "once, not for each node"
    assert "'busbw[all_reduce]' has no limit for 9 GPUs" in run.stdout.partition(said)[2].split("\n")[0]
    assert run.stdout.index(said) < run.stdout.index("joined 2 of 2 nodes")
    assert {*run.outcomes("busbw[all_reduce]").values()} == {"error"}
    assert {one["kind"] for one in run.results["culprits"]} <= {"settings"}
    assert not any(one["place"] for one in run.results["culprits"])


@pytest.mark.parametrize(
    ("fleet", "fault"),
    [
        pytest.param("1x4", "node0-gpu1:pair", marks=pytest.mark.slow),  # by day, 4x4 of test_simulated_fleet.py has it
        ("1x2", "node0-gpu0:pair"),
        pytest.param("3x3", "node2-gpu2:pair", marks=pytest.mark.slow),
        pytest.param("2x8", "node1-gpu7:pair", marks=pytest.mark.slow),
    ],
)
def test_a_pair_that_speaks_through_the_host_rejects_its_node(tmp_path: Path, fleet: str, fault: str) -> None:
    """In nodes of any size, also where a single pair has no other to be compared with."""
    run = simulate(tmp_path, fleet, bad=(fault,))
    node = fault.partition("-")[0]
    failed = {where: kinds.get("failed") for where, kinds in not_green(run).items()}
    assert failed == {f"gpu-{node.replace('node', 'node-')}": {"gpu_pairs"}}
    assert (run.results["verdict"], run.returncode) == ("REJECTED", 1)
    assert [(one["kind"], one["place"]["id"]) for one in run.results["culprits"]] == [("link", node)]
    found = run.row("gpu_pairs", node)["evidence"]["found"]
    assert len(found) == 2, "both directions of one pair, and no other"


@pytest.mark.slow
def test_a_slow_scratch_disk_is_a_remark_unless_the_site_requires_it(tmp_path: Path) -> None:
    """Decision 31: no two hosts were measured; one line of a site's limits makes it count."""
    kinds = {}
    for severity in ("advisory", "required"):
        folder = tmp_path / severity
        folder.mkdir()
        entries = {f"slow_host[scratch_{way}]": {"severity": severity} for way in ("read", "write")}
        site = write_limits(folder / "site.yaml", entries)
        kinds[severity] = not_green(simulate(folder, "3x2", site, "-m", "platform", bad=("node0:disk",)))["gpu-node-0"]
    named = {"slow_host[scratch_write]", "slow_host[scratch_read]"}
    assert kinds["advisory"]["advisory"] >= named
    assert kinds["required"]["failed"] == named


@pytest.mark.parametrize(
    ("fleet", "faults", "nodes", "behind"),
    [
        ("8x2", ("node5:uplink", "node4:trunk"), {"node5"}, (0, 8)),
        ("8x2", ("node1:uplink", "node4:trunk"), {"node1"}, (0, 8)),
        pytest.param("12x2", ("node1:sockets", "node9:trunk"), {"node1"}, (8, 12), marks=pytest.mark.slow),
        pytest.param("12x2", ("node1:uplink", "node4:trunk"), {"node1"}, (4, 8), marks=pytest.mark.slow),
    ],
)
def test_a_bad_node_and_a_bad_switch_are_both_culprits(
    tmp_path: Path, fleet: str, faults: tuple[str, ...], nodes: set[str], behind: tuple[int, int]
) -> None:
    """Whether the node is behind that switch or behind another one. Of two switches, the way between them is to blame."""
    run = simulate(tmp_path, fleet, "-k", "inter_node_busbw and all_reduce or busbw_scaling", bad=faults)
    found = {one["kind"]: one for one in run.results["culprits"]}
    assert {one["place"]["id"] for one in run.results["culprits"] if one["kind"] == "node"} == nodes
    assert {*found} == {"node", "switch"}
    assert found["switch"]["places"] == [f"node{number}" for number in range(*behind)]
    criteria = {"inter_node_busbw[all_reduce]", "busbw_scaling"}
    assert {*found["switch"]["criteria"]} == {*found["node"]["criteria"]} == criteria
    assert "to blame" in found["switch"]["evidence"][0]
    way = "the way between switch leaf0 and switch leaf1" if fleet == "8x2" else "the way out of switch leaf"
    assert way in " ".join(run.stdout.partition("BAD PARTS")[2].split())


@pytest.mark.parametrize(
    ("fault", "named", "confidence", "rest"),
    [
        ("node3:trunk", "node4", "medium", "at the uplinks of switch leaf1: no other node is behind that"),
        ("node4:uplink", "node4", "medium", "at the uplinks of switch leaf1: no other node is behind that"),
        ("node2:uplink", "node2", "high", "take the node out of service"),
    ],
)
def test_a_node_alone_behind_its_switch(tmp_path: Path, fault: str, named: str, confidence: str, rest: str) -> None:
    """Seen from the other nodes, it and the way out of its switch look the same: both are to be looked at."""
    run = simulate(tmp_path, "5x2", "-k", "inter_node_busbw and all_reduce or busbw_scaling", bad=(fault,))
    (found,) = run.results["culprits"]
    assert (found["place"]["id"], found["confidence"]) == (named, confidence)
    assert rest in " ".join(run.stdout.partition("BAD PARTS")[2].split())
