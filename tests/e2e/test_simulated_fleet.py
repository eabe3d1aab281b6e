"""The real suite on a simulated fleet: planted faults show as themselves and nowhere else, and nothing is ever accepted."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from typing import TYPE_CHECKING

import jsonschema
import pytest

from pytest_gpucluster.fleet.simulation import FAULTS
from pytest_gpucluster.reporting.rebuild import rebuild
from pytest_gpucluster.reporting.results import SCHEMA_FILE
from tests.support import REPOSITORY, reports
from tests.support.fleets import not_green, simulate
from tests.support.launching import ACCEPTANCE
from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SAID = "SIMULATED fleet, no GPU was measured"
PRODUCTS = ("bf16_tflops", "fp16_tflops", "fp8_tflops", "tf32_tflops", "fp32_tflops", "fp64_tflops", "int8_tops")
COMPARED = ("bf16_tflops", "bf16_sustained", "fp32_tflops", "bf16_at_clock", "training_throughput_gpu")
MOVED_BETWEEN_NODES = [f"inter_node_busbw[{name}]" for name in ("all_gather", "reduce_scatter", "all_to_all")]
BAD: dict[str, dict[str, dict[str, set[str]]]] = {
    "node0-gpu0:late": {},
    "node0-gpu0:mig": {"gpu-node-0 gpu 0": {"failed": {"mig_disabled"}}, "gpu-node-0": {"failed": {"drift"}}},
    "node0-gpu2:nvlink": {"gpu-node-0": {"failed": {"nvlink_links"}, "advisory": {"slow_pair[bandwidth]"}}},
    "node0-gpu3:reset": {"gpu-node-0 gpu 3": {"failed": {"recovery_action"}}},
    "node0-gpu1:xid": {"gpu-node-0 gpu 1": {"failed": {"xid_during_run"}}},
    "node0-gpu1:pair": {
        "gpu-node-0": {"failed": {"gpu_pairs"}, "advisory": {"slow_pair[bandwidth]", "slow_pair[latency]"}}
    },
    "node1-gpu0:hbm": {"gpu-node-1 gpu 0": {"failed": {"hbm_bandwidth", "straggler[hbm_bandwidth]"}}},
    "node1-gpu1:pattern": {"gpu-node-1 gpu 1": {"failed": {"hbm_pattern"}}},
    "node1-gpu2:ecc": {"gpu-node-1 gpu 2": {"failed": {"ecc_uncorrected", "remapped_rows"}}},
    "node1-gpu3:corrupt": {"gpu-node-1 gpu 3": {"failed": {"silent_corruption"}}},
    "node2-gpu0:pcie": {
        "gpu-node-2 gpu 0": {
            "failed": {
                "host_to_device", "device_to_host", "straggler[host_to_device]", "straggler[device_to_host]", "pcie_link",
            },
            "advisory": {"host_to_device_all", "device_to_host_all"},
        }
    },
    "node2-gpu1:dead": {
        "gpu-node-2 gpu 1": {
            "error": {"bf16_sustained", "bf16_at_clock", "straggler[bf16_sustained]", "straggler[bf16_at_clock]"}
        }
    },
    "node2-gpu2:hung": {"gpu-node-2 gpu 2": {"error": {"hbm_pattern", "hbm_pattern_coverage"}}},
    "node2-gpu3:throttled": {
        "gpu-node-2 gpu 3": {"failed": {"clocks_under_load", "bf16_sustained", "straggler[bf16_sustained]"}}
    },
    "node3-gpu0:slow": {
        "gpu-node-3 gpu 0": {
            "failed": {*PRODUCTS, "bf16_sustained", "bf16_at_clock", *(f"straggler[{name}]" for name in COMPARED)}
        },
        "gpu-node-3": {"failed": {"training_scaling_node"}},
        "cluster": {"failed": {"training_scaling_cluster", "finetune_checks", "finetune_check[step_time_spread]"}},
    },
    "node3:cable": {"gpu-node-3": {"failed": {"nic_ports"}}},
    "node3:rail": {
        "gpu-node-3": {"advisory": {"rail_bandwidth", "slow_rail[bandwidth]", "slow_rail[latency]"}},
        "cluster": {"failed": {"inter_node_busbw[all_reduce]", "busbw_scaling"}, "advisory": {*MOVED_BETWEEN_NODES}},
    },
    "node3:odd": {"gpu-node-3": {"failed": {"drift"}}},
    "node3:clock": {"gpu-node-3": {"failed": {"clock_skew"}}},
    "node3:dimm": {"gpu-node-3": {"failed": {"drift"}, "advisory": {"slow_host[host_memory]"}}},
    "node3:disk": {"gpu-node-3": {"advisory": {"slow_host[scratch_write]", "slow_host[scratch_read]"}}},
    "node3:nvls": {
        "gpu-node-3": {"failed": {"busbw[all_reduce]"}, "advisory": {"busbw[all_gather]", "busbw[reduce_scatter]"}}
    },
    "node3:uplink": {
        "cluster": {"failed": {"inter_node_busbw[all_reduce]", "busbw_scaling"}, "advisory": {*MOVED_BETWEEN_NODES}}
    },
    "node3:sockets": {
        "cluster": {
            "failed": {
                "transport", "inter_node_busbw[all_reduce]", "busbw_scaling", "training_scaling_cluster",
                "finetune_throughput_healthy",
            },
            "advisory": {*MOVED_BETWEEN_NODES},
        }
    },
}  # fmt: skip
"""By planted fault: where what is not green."""
PLANTED_PAIR = [("node0-gpu1", "node0-gpu2"), ("node0-gpu2", "node0-gpu1")]
WITHOUT_A_RANK = ("absent", "busy", "lost", "versions")
"""Faults that take every measurement over all GPUs along."""
NOT_ONE_EACH = ("shared", "clique", "fast", "links", "trunk", "guest", "loaded", "noisy", "model")
"""A fault of which no value tells, one of other GPUs, a wrong clock, two that are searched, three that are gone in a second
look (test_second_chance.py), and one that leaves no siblings: each has tests of its own."""


def with_rails(folder: Path) -> str:
    """The option for limits that ask for each adapter by itself."""
    (folder / "site.yaml").write_text("extends: packaged\ncluster: {rails: measured}\n", encoding="utf-8")
    return "--gpucluster-thresholds=site.yaml"


def test_collectives_of_a_slow_node_are_missed(tmp_path: Path) -> None:
    """On nodes of 4 GPUs, which have limits; the healthy node beside it passes. Limits that no GPU was run on are advisory."""
    run = simulate(tmp_path, "2x4", "-k", "test_busbw and links or test_latency", bad=("node1:nvls",))
    found = {(where, kind): set(names) for where, kinds in not_green(run).items() for kind, names in kinds.items()}
    missed = {key: names for key, names in found.items() if key[1] != "not_selected"}
    assert missed == {("gpu-node-1", kind): names for kind, names in BAD["node3:nvls"]["gpu-node-3"].items()}
    for name in ("busbw[all_to_all]", "busbw[broadcast]", "busbw[send_recv]", "latency[all_reduce]"):
        assert run.outcomes(name) == {"node0": "passed", "node1": "passed"}
    rows = run.row("busbw[all_gather]", "node0")["evidence"]["sizes"]
    assert {(row["dtype"], row["bytes"]) for row in rows} >= {("bfloat16", 8 << 30), ("float32", 1000 << 20)}
    assert run.row("latency[all_reduce]", "node1")["evidence"]["sizes"][0]["bytes"] == 8 << 30


def test_the_node_that_slows_all_is_named(tmp_path: Path) -> None:
    """Smaller groups are measured at once; results.json and the screen name that node, and what the others reach without it.

    Each of its GPUs is measured with the one of its number elsewhere: the whole node is slow, not one way out of it.
    """
    run = simulate(tmp_path, "6x4", "-k", "inter_node_busbw and all_reduce or busbw_scaling", bad=("node4:uplink",))
    assert {row["outcome"] for row in run.results["criteria"] if row["outcome"] != "not_selected"} == {"failed"}
    (culprit,) = run.results["culprits"]
    assert (culprit["kind"], culprit["place"]["id"], culprit["confidence"]) == ("node", "node4", "high")
    assert set(culprit["criteria"]) == {"inter_node_busbw[all_reduce]", "busbw_scaling"}
    assert "groups with it missed the limit" in culprit["evidence"][0]
    reason = run.row("inter_node_busbw[all_reduce]")["reason"]
    assert re.search(r"the rest 193\.3 GB/s on \d nodes, searched \d+ smaller groups in \d+ rounds, ", reason)
    assert_ways_are_measured(run, r"each of its 4 GPUs is slow by itself \(best 24\.1\d; 48\.3\d GB/s between good nodes\)")


def assert_ways_are_measured(run: FinishedRun, said: str) -> None:
    """The row of the collective says it of node 4, in its evidence and its reason."""
    row = run.row("inter_node_busbw[all_reduce]")
    assert re.fullmatch(said, row["evidence"]["node4 by GPU"])
    assert re.search(said, " ".join(row["reason"].split()))


def test_one_way_out_of_a_node_is_slow(tmp_path: Path) -> None:
    """Each GPU is measured with the one of its number elsewhere: the node is to blame, and its GPU 1 is named."""
    run = simulate(tmp_path, "6x4", "-k", "inter_node_busbw and all_reduce", bad=("node4:rail",))
    (culprit,) = run.results["culprits"]
    assert (culprit["kind"], culprit["place"]["id"]) == ("node", "node4")
    assert_ways_are_measured(run, r"by itself only the way of gpu1 24\.1\d is slow \(48\.3\d GB/s between good nodes\)")


def test_the_leaf_switch_that_slows_all_is_named(tmp_path: Path) -> None:
    """Its uplinks carry half: its four nodes are fast with each other, and none of them is to blame."""
    run = simulate(tmp_path, "12x2", "-k", "inter_node_busbw and all_reduce or busbw_scaling", bad=("node5:trunk",))
    (culprit,) = run.results["culprits"]
    assert (culprit["kind"], culprit["place"]) == ("switch", None)
    assert culprit["places"] == ["node4", "node5", "node6", "node7"]
    named = ", ".join(f"gpu-node-{node} (node{node})" for node in range(4, 8))
    assert culprit["evidence"][0] == f"the way out of switch leaf1 is to blame: {named}"
    assert {*culprit["criteria"]} == {"inter_node_busbw[all_reduce]", "busbw_scaling"}
    assert "what leaves switch leaf1 " in run.row("inter_node_busbw[all_reduce]")["reason"]


def test_the_node_that_uses_no_fabric_is_named(tmp_path: Path) -> None:
    """NCCL's own log says which node took sockets; the bandwidth alone would say that it is slow."""
    run = simulate(tmp_path, "4x2", "-k", "test_transport", bad=("node2:sockets",))
    (culprit,) = run.results["culprits"]
    assert (culprit["kind"], culprit["place"]["id"]) == ("host", "node2")
    assert run.row("transport")["evidence"]["off the fabric"] == {"node2": "4 of 4 connections"}
    assert "nvidia_peermem" in culprit["action"]


def test_a_bad_node_beside_a_bad_leaf_switch(tmp_path: Path) -> None:
    """Both are culprits: the node as a node, and the way out of the switch with the nodes behind it."""
    run = simulate(tmp_path, "16x2", "-k", "inter_node_busbw and all_reduce", bad=("node5:trunk", "node14:uplink"))
    node, switch = sorted(run.results["culprits"], key=lambda culprit: culprit["kind"])
    assert (node["kind"], node["place"]["id"]) == ("node", "node14")
    assert (switch["kind"], switch["places"]) == ("switch", ["node4", "node5", "node6", "node7"])
    assert "what leaves switch leaf1" in run.row("inter_node_busbw[all_reduce]")["evidence"]


@pytest.mark.slow
def test_of_two_leaf_switches_the_way_between_them_is_named(tmp_path: Path) -> None:
    """Nothing tells whose uplinks carry half; the nodes of both are told, and none is to blame."""
    run = simulate(tmp_path, "8x2", "-k", "inter_node_busbw and all_reduce", bad=("node5:trunk",))
    (culprit,) = run.results["culprits"]
    assert (culprit["kind"], culprit["place"], len(culprit["places"])) == ("switch", None, 8)
    assert culprit["evidence"][0].startswith("the way between switch leaf0 and switch leaf1 is to blame: gpu-node-0 (node0), ")


MEASURED_BY_A_WRONG_CLOCK = {
    *PRODUCTS, "bf16_sustained", "hbm_bandwidth", "host_to_device", "device_to_host", "host_to_device_all",
    "device_to_host_all", "training_throughput_gpu", *(f"straggler[{name}]" for name in COMPARED if name != "bf16_at_clock"),
    "straggler[hbm_bandwidth]", "straggler[host_to_device]", "straggler[device_to_host]",
}  # fmt: skip


@pytest.mark.fault
def test_a_wrong_clock_is_an_error_and_accuses_nobody(tmp_path: Path) -> None:
    """Of four GPUs one is ten times too fast: neither passed, and neither the other one nor its node is called slow."""
    chosen = "tflops or tops or bf16_sustained or hbm_bandwidth or host_to or to_host or training or straggler"
    run = simulate(tmp_path, "1x4", "-k", chosen, bad=("node0-gpu1:fast",))
    found = not_green(run)
    assert {(where, kind): found[where][kind] for where in found for kind in found[where] if kind != "not_selected"} == {
        ("gpu-node-0 gpu 1", "error"): MEASURED_BY_A_WRONG_CLOCK,
        ("gpu-node-0", "error"): {"training_scaling_node"},
    }
    reason = run.row("bf16_tflops", "node0-gpu1")["reason"]
    assert "TFLOPS is more than the hardware can: the measurement is wrong (at most 1071 TFLOPS is possible" in reason
    assert [one for one in run.results["culprits"] if one["place"] is not None] == []


def expected(bad: dict[str, dict[str, dict[str, set[str]]]]) -> dict[str, dict[str, set[str]]]:
    """What all these faults do together."""
    found: dict[str, dict[str, set[str]]] = {}
    for effects in bad.values():
        for where, by_outcome in effects.items():
            for outcome, criteria in by_outcome.items():
                found.setdefault(where, {}).setdefault(outcome, set()).update(criteria)
    return found


def assert_said_everywhere(run: FinishedRun, word: str) -> None:
    """Whichever file somebody reads first says that the fleet is simulated."""
    assert run.results["verdict"] == word
    assert run.results["verdict_line"].startswith(f"{word}: {SAID}: ")
    assert run.verdict_line == f"verdict {run.results['verdict_line']}"
    assert run.stdout.count(SAID) >= 2, "at the begin and at the end"
    assert run.results["simulated"] is not None
    assert run.junit is not None
    assert run.junit.get("name") == "gpucluster-rehearsal"
    assert [one.get("value") for one in run.junit.findall("properties/property[@name='simulated']")] == [SAID]
    verdict = run.case("gpucluster.verdict")
    assert SAID in verdict.message
    assert verdict.properties["simulated"] == SAID
    assert run.journal[0]["facts"]["simulated"] == run.results["simulated"]
    assert SAID in next(event["line"] for event in run.journal if event["event"] == "verdict")
    uuids = [row["place"]["uuid"] for row in run.results["criteria"] if row["place"] and row["place"]["uuid"]]
    assert all("SIMULATED" in uuid for uuid in uuids)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[FinishedRun, Path]:
    """Two healthy GPUs, with the gate, switched on by the environment alone."""
    folder = tmp_path_factory.mktemp("healthy")
    switched_on = {"PYTEST_ADDOPTS": "-p pytest_gpucluster.plugin.fleet --fleet=1x2"}
    return run_pytest(folder, ACCEPTANCE, "--gpucluster-gate", variables=switched_on), folder


def test_a_healthy_fleet_is_rehearsed_and_never_accepted(healthy: tuple[FinishedRun, Path]) -> None:
    """All passes by the limits of real GPUs, and the gate stays closed."""
    run, _ = healthy
    assert not_green(run) == {}, run.stdout[-4000:]
    assert "without an estimate" not in " ".join(run.stdout.split())
    assert_said_everywhere(run, "REHEARSED")
    assert run.case("gpucluster.verdict").outcome == "skipped"
    assert run.returncode == 1


@pytest.mark.fault
@pytest.mark.parametrize(
    ("bad", "blamed"), [(("node0-gpu2:slow",), ["node0-gpu2"]), (("node0-gpu2:slow", "node0:nvls"), ["node0", "node0-gpu2"])]
)
def test_a_gpu_that_others_wait_for_is_to_blame_alone(tmp_path: Path, bad: tuple[str, ...], blamed: list[str]) -> None:
    """Its node trains as slowly as that GPU, which is no fault of the node; a fault of the node is named beside it."""
    run = simulate(tmp_path, "1x8", "-k", "bf16_tflops or training or busbw", bad=bad)
    assert run.row("training_scaling_node", "node0")["outcome"] == "failed"
    assert sorted(one["place"]["id"] for one in run.results["culprits"]) == blamed


def test_a_rebuilt_report_says_it_too(healthy: tuple[FinishedRun, Path], tmp_path: Path) -> None:
    """Also where the line of the plan, or the first line of the journal, is damaged."""
    run, folder = healthy
    for damaged in (None, '"event": "started"', '"event": "planned"'):
        copy = tmp_path / f"copy {damaged is None} {damaged and damaged[10:17]}"
        shutil.copytree(folder / reports.RESULTS, copy)
        journal = copy / "journal.jsonl"
        lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
        journal.write_text(
            "".join(line[: len(line) // 2] + "\n" if damaged is not None and damaged in line else line for line in lines),
            encoding="utf-8",
        )
        verdict = rebuild(copy)
        assert verdict.word == ("REHEARSED" if damaged is None else "INCOMPLETE")
        assert SAID in verdict.line
        assert SAID in (copy / "junit.xml").read_text(encoding="utf-8")
        assert SAID in (copy / "results.json").read_text(encoding="utf-8")
    assert run.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fleet=2",), "'2' is no fleet; say NODESxGPUS"),
        (("--fleet-bad=node0:slwo",), "Did you mean 'slow'"),
        (("--gpucluster-inline",), "a simulated fleet runs neither under torchrun nor with --gpucluster-inline"),
        (("--gpucluster-profile=b200",), "a simulated fleet needs the profile of a GPU, and 'b200' is none"),
        (("-n", "2"), "a simulated fleet needs no GPU and one process; leave -n out"),
    ],
)
def test_what_cannot_be_simulated_is_wrong_usage(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """One sentence, no traceback, and no file."""
    run = run_pytest(tmp_path, "-p", "pytest_gpucluster.plugin.fleet", ACCEPTANCE, *arguments)
    assert run.returncode == 4
    assert message in run.stdout
    assert "Traceback" not in run.stdout
    assert run.results == {}


@pytest.mark.slow
def test_three_of_64_nodes_drift(tmp_path: Path) -> None:
    """Each is named, in its row, in the table and in one line; the others are alike."""
    bad = ("node5:odd", "node17:odd", "node40:dimm")
    run = simulate(tmp_path, "64x1", "-k", "drift", bad=bad)
    failed = {row["place"]["id"]: row["evidence"]["found"] for row in run.results["criteria"] if row["outcome"] == "failed"}
    kernel = "kernel: 6.5.0-simulated, 62 of 64 have 6.8.0-simulated"
    memory = "memory GiB: 1511, 63 of 64 have 2015"
    assert failed == {"node5": [kernel], "node17": [kernel], "node40": [memory]}
    assert {one["place"]["id"] for one in run.results["culprits"] if one["kind"] == "host"} == {*failed}
    table = {fact["name"]: fact for fact in run.row("drift_coverage")["evidence"]["facts"]}
    assert [one["part"] for one in table["kernel"]["outliers"]] == ["node5", "node17"]
    assert (table["NICs"]["usual"], table["NICs"]["alike"]) == ("8 MT4129", 64)
    jsonschema.validate(run.results, json.loads(SCHEMA_FILE.read_text(encoding="utf-8")))
    said = "facts compared over 64 nodes; 3 parts differ: node5 (kernel), node17 (kernel), node40 (memory GiB)"
    assert said in " ".join(run.stdout.split())


@pytest.mark.slow
def test_two_interfaces_have_no_siblings(tmp_path: Path) -> None:
    """Two healthy nodes with one interface each: the rates are told, and nothing is open for that."""
    chosen = (with_rails(tmp_path), "--gpucluster-profile=lab-2x2", "--gpucluster-level=standard", "-k", "rail")
    run = simulate(tmp_path, "2x2", *chosen)
    for quantity in ("bandwidth", "latency"):
        assert run.outcomes(f"slow_rail[{quantity}]") == {"node0": "passed", "node1": "passed"}
        rates = run.row(f"slow_rail[{quantity}]", "node0")["evidence"]["rates"]
        assert rates == ["eth0: 4.8 GB/s, 38 us"]
    assert "no two other adapters to compare with" in " ".join(run.stdout.split())


@pytest.mark.parametrize("bad", ["node1-gpu1:model", "node1:model"])
def test_a_mixed_cluster(tmp_path: Path, bad: str) -> None:
    """One GPU, or one node, of another model: those alone are named, and no other is slow beside them."""
    run = simulate(tmp_path, "3x2", "-k", "gpu_model or gpu_memory or bf16_tflops or hbm_bandwidth or drift", bad=(bad,))
    bad_gpus = {"node1-gpu1"} if "gpu" in bad else {"node1-gpu0", "node1-gpu1"}
    failed = {row["place"]["id"] for row in run.results["criteria"] if row["outcome"] == "failed" and row["place"]}
    assert failed - {"node1"} == bad_gpus
    blamed = {(one["kind"], one["place"]["id"]) for one in run.results["culprits"] if one["place"]["gpu"] is not None}
    assert blamed == {("gpu", place) for place in bad_gpus}
    assert "NVIDIA H200, " in run.verdict_line
    assert "NVIDIA H100 80GB HBM3" in run.row("gpu_model", "node1-gpu1")["reason"]


def test_every_fault_is_planted_here() -> None:
    """A new fault needs its line in one of the tests below."""
    assert {fault.partition(":")[2] for fault in BAD} | {*WITHOUT_A_RANK, *NOT_ONE_EACH} == set(FAULTS)


@pytest.mark.parametrize("profile", ["h200-sxm", pytest.param("h100-sxm", marks=pytest.mark.slow)])
def test_each_fault_shows_as_itself_and_nowhere_else(tmp_path: Path, profile: str) -> None:
    """Sixteen GPUs with every fault that leaves all ranks in the run. The healthy ones are green."""
    run = simulate(tmp_path, "4x4", with_rails(tmp_path), f"--gpucluster-profile={profile}", bad=tuple(BAD))
    assert not_green(run) == expected(BAD), run.stdout[-4000:]
    assert_said_everywhere(run, "REJECTED")
    assert run.returncode == 1
    assert run.results["simulated"]["faults"] == list(BAD)
    evidence = run.row("gpu_pairs", "node0")["evidence"]
    assert [one.split(": ")[0] for one in evidence["found"]] == [f"{one} -> {other}" for one, other in PLANTED_PAIR]
    assert len(evidence["pairs"]) == 12
    assert {(one["source"], one["target"]) for one in evidence["pairs"] if one["gb_s"] < 100} == {*PLANTED_PAIR}
    assert run.row("slow_pair[bandwidth]", "node0")["evidence"]["worst"].startswith("node0-gpu1 -> node0-gpu2 (NV")
    first, second = (f"gpu-node-0 gpu {gpu} serial SIM-00000-0{gpu} (node0-gpu{gpu})" for gpu in (1, 2))
    assert f"slow_pair[bandwidth] at {first} -> {second}" in run.row("slow_pair[bandwidth]", "node0")["reason"]
    assert "more advisory misses, in results.json" in run.stdout, "the terminal shows the first ten"
    for criterion in ("rail_bandwidth", "slow_rail[bandwidth]", "slow_rail[latency]"):
        assert f"{criterion} at gpu-node-3 (node3) mlx5_5:1: " in run.row(criterion, "node3")["reason"], "by name, and no other"


@pytest.mark.parametrize(
    ("fleet", "fault"), [("2x4", "node1-gpu2:links"), pytest.param("1x8", "node0-gpu7:links", marks=pytest.mark.slow)]
)
def test_the_gpu_that_slows_its_node_is_named(tmp_path: Path, fleet: str, fault: str) -> None:
    """Its NVLinks carry half: of all pairs those with it are slow, so the GPU is to blame, and not its node."""
    run = simulate(tmp_path, fleet, "--gpucluster-level=quick", "-k", "test_busbw and all_reduce", bad=(fault,))
    gpu, node = fault.partition(":")[0], fault.partition("-")[0]
    (culprit,) = run.results["culprits"]
    assert (culprit["kind"], culprit["place"]["id"]) == ("gpu", gpu)
    row = run.row("busbw[all_reduce]", node)
    assert row["outcome"] == "failed"
    assert f"slow with every other GPU: {gpu} (the slowest pair 198" in row["evidence"]["pairs"]


def test_a_node_without_nvls_blames_none_of_its_gpus(tmp_path: Path) -> None:
    """Each of its pairs is as fast as others: the node is to blame, and the text says where to look."""
    run = simulate(tmp_path, "1x8", "--gpucluster-level=quick", "-k", "test_busbw and all_reduce", bad=("node0:nvls",))
    (culprit,) = run.results["culprits"]
    assert (culprit["kind"], culprit["place"]["id"]) == ("node", "node0")
    assert "each pair of its GPUs is as fast as others" in run.row("busbw[all_reduce]", "node0")["evidence"]["pairs"]


@pytest.mark.parametrize("bad", [None, "node2-gpu0:slow"])
def test_nodes_of_one_gpu_by_the_profile_of_the_docs(tmp_path: Path, bad: str | None) -> None:
    """The site's five lines as they stand there: all that a slow network promises is green; a slow GPU is named."""
    page = (REPOSITORY / "docs/how-to/one-gpu-nodes.md").read_text(encoding="utf-8")
    (tmp_path / "one-gpu.yaml").write_text(page.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    limits = ("--gpucluster-thresholds=one-gpu.yaml", "--gpucluster-profile=site", "--gpucluster-level=standard")
    run = simulate(tmp_path, "4x1", *limits, bad=(bad,) if bad else ())
    assert run.outcomes("training_scaling_cluster") == {None: "skipped"}
    assert run.row("training_scaling_cluster")["reason"].endswith("the profile promises sockets")
    assert [one["place"]["id"] for one in run.results["culprits"]] == ([] if bad is None else [bad.split(":")[0]])
    assert not not_green(run) or bad


NVL72 = "--gpucluster-profile=gb200-nvl72"
IN_RACKS = "nvlink_domain or transport or busbw and all_reduce"


@pytest.mark.parametrize(("fleet", "of_domains"), [("3x4", "skipped"), pytest.param("36x4", "passed", marks=pytest.mark.slow)])
def test_racks_of_nvlink(tmp_path: Path, fleet: str, of_domains: str) -> None:
    """Within a rack, and over two: all is green, and the verdict says that these limits were never tried."""
    run = simulate(tmp_path, fleet, NVL72, "-k", IN_RACKS)
    assert {outcome for kinds in not_green(run).values() for outcome in kinds} == {"not_selected"}
    assert run.outcomes("domain_busbw[all_reduce]") == {None: of_domains}
    assert {*run.outcomes("nvlink_domain").values()} == {"passed"}
    limit = run.row("inter_node_busbw[all_reduce]")["limit"]
    assert limit == ("> 720 GB/s" if fleet == "3x4" else "> 670 GB/s")
    assert "; its limits were never tried on GB200 NVL72" in run.verdict_line


@pytest.mark.slow
def test_racks_without_a_limit(tmp_path: Path) -> None:
    """Twenty nodes are more than a rack, and nobody published such a number: an error that says how to add one."""
    run = simulate(tmp_path, "20x4", NVL72, "-k", "inter_node_busbw and all_reduce")
    assert run.outcomes("inter_node_busbw[all_reduce]") == {None: "error"}
    assert "Say the limit for 20x4 under 'shapes'" in run.row("inter_node_busbw[all_reduce]")["reason"]


def test_a_node_outside_the_nvlink_domain_of_its_rack(tmp_path: Path) -> None:
    """Named by what NVML tells and by the search for slow nodes, as one culprit, with what to look at."""
    run = simulate(tmp_path, "4x4", NVL72, "-k", IN_RACKS, bad=("node2:clique",))
    (culprit,) = run.results["culprits"]
    assert (culprit["kind"], culprit["place"]["id"]) == ("node", "node2")
    assert {*culprit["criteria"]} == {"nvlink_domain", "inter_node_busbw[all_reduce]"}
    assert "imex" in culprit["action"]
    assert run.outcomes("nvlink_domain") == {"node0": "passed", "node1": "passed", "node2": "failed", "node3": "passed"}
    assert run.outcomes("transport") == {None: "passed"}, "it speaks to the others by the promised network"


@pytest.mark.parametrize(
    ("fault", "where", "outcome"),
    [
        ("node1:absent", {"node1-gpu0", "node1-gpu1"}, "missing"),
        pytest.param("node1-gpu1:busy", {"node1-gpu1"}, "error", marks=pytest.mark.slow),
        pytest.param("node1:versions", {"node1-gpu0", "node1-gpu1"}, "error", marks=pytest.mark.slow),
        pytest.param("node0:versions", {"node0-gpu0", "node0-gpu1"}, "error", marks=pytest.mark.slow),
    ],
)
def test_parts_that_take_no_part(tmp_path: Path, fault: str, where: set[str], outcome: str) -> None:
    """What is measured at a GPU by itself is missed at these places only; what all measure together is missed as a whole.

    The simulated hosts are the expected list: an absent node keeps its number.
    """
    run = simulate(tmp_path, "4x2", "-m", "compute or memory", bad=(fault,))
    for criterion in ("bf16_tflops", "silent_corruption", "hbm_bandwidth", "straggler[hbm_bandwidth]"):
        found = run.outcomes(criterion)
        assert {place for place, one in found.items() if one != "passed"} == where, run.stdout[-4000:]
        assert {found[place] for place in where} <= {outcome, "error"}
    assert_said_everywhere(run, "INCOMPLETE")


@pytest.mark.parametrize("fault", ["node1-gpu1:busy", "node1:lost", pytest.param("node1:versions", marks=pytest.mark.slow)])
def test_no_test_is_blamed_for_what_others_measured(tmp_path: Path, fault: str) -> None:
    """Fixtures that tests share measure more than one thing; what a test did not come to read is no error of the last test."""
    run = simulate(tmp_path, "2x2", "-m", "fabric or links or platform", bad=(fault,))
    blamed = [row["reason"] for row in run.results["criteria"] if "did not read" in (row["reason"] or "")]
    assert blamed == [], run.stdout[-4000:]
    assert_said_everywhere(run, "INCOMPLETE")


@pytest.mark.parametrize(
    ("fault", "gpu", "places"),
    [("node1-gpu1:shared", 0, (0, 1)), pytest.param("node1-gpu0:shared", 1, (0, 1), marks=pytest.mark.slow)],
)
def test_two_ranks_that_claim_one_gpu(tmp_path: Path, fault: str, gpu: int, places: tuple[int, int]) -> None:
    """All values are good, and the verdict names GPU, places and host: another GPU was never measured."""
    run = simulate(tmp_path, "2x4", bad=(fault,))
    claims = " and ".join(f"gpu-node-1 gpu {place} (node1-gpu{place})" for place in places)
    assert f"one GPU in two places: GPU-SIMULATED-00001-{gpu:02d} answers at {claims}" in run.results["verdict_line"]
    assert not_green(run) == {}, run.stdout[-4000:]
    assert_said_everywhere(run, "INCOMPLETE")
    assert run.returncode == 0, "nothing failed; --gpucluster-gate asks for more"


@pytest.mark.slow
def test_everything_at_once(tmp_path: Path) -> None:
    """Ten nodes that never come, one that is lost, one with other versions, a late one, a shared GPU, a slow one.

    Each node is one culprit with one cause, and what is healthy is green.
    """
    absent = tuple(range(1, 20, 2))
    faults = ("node2:lost", "node4:versions", "node6-gpu1:late", "node8-gpu1:shared", "node10-gpu2:slow")
    run = simulate(tmp_path, "20x3", "-m", "compute or health", bad=(*(f"node{node}:absent" for node in absent), *faults))
    slow, lost, versions = "node10", "node2", "node4"
    blamed = {(one["kind"], one["place"]["id"], one["place"]["hostname"]) for one in run.results["culprits"]}
    assert blamed == {
        ("gpu", f"{slow}-gpu2", "gpu-node-10"),
        ("node", lost, "gpu-node-2"),
        ("software", versions, "gpu-node-4"),
        *(("node", f"node{number}", f"gpu-node-{number}") for number in absent),
    }
    causes = {one["place"]["id"]: one["evidence"][0] for one in run.results["culprits"]}
    assert causes[lost] == "all 3 ranks alike: its agent on gpu-node-2 has been silent for 10 s"
    assert causes[versions].startswith("all 3 ranks alike: its node runs torch 0.0.0+simulated instead of ")
    assert sum("has been silent" in line and line.startswith("not measured") for line in run.stdout.splitlines()) == 1
    assert sum("its node runs" in line and line.startswith("not measured") for line in run.stdout.splitlines()) == 1
    assert Counter(run.outcomes("bf16_tflops").values()) == {"passed": 3 * 9 - 1, "failed": 1, "error": 3, "missing": 30}
    assert Counter(run.outcomes("bf16_sustained").values()) == {"passed": 23, "failed": 1, "error": 6, "missing": 30}
    assert (
        "one GPU in two places: GPU-SIMULATED-00008-00 answers at gpu-node-8 gpu 0 (node8-gpu0)" in run.results["verdict_line"]
    )
    assert_said_everywhere(run, "REJECTED")


@pytest.mark.slow
def test_a_fleet_of_128_gpus(tmp_path: Path) -> None:
    """Sixteen nodes, two bad GPUs, one node that never joins: each is counted once and named as what it is."""
    bad = ("node3-gpu5:slow", "node9-gpu0:hbm", "node12:absent")
    run = simulate(tmp_path, "16x8", bad=bad)
    found = Counter(row["outcome"] for row in run.results["criteria"])
    assert found["failed"] == len(BAD["node3-gpu0:slow"]["gpu-node-3 gpu 0"]["failed"]) + 1 + 2
    assert set(run.outcomes("bf16_tflops").values()) == {"passed", "failed", "missing"}
    assert Counter(run.outcomes("bf16_tflops").values()) == {"passed": 119, "failed": 1, "missing": 8}
    assert Counter(run.outcomes("hbm_bandwidth").values()) == {"passed": 119, "failed": 1, "missing": 8}
    assert Counter(run.outcomes("busbw[all_reduce]").values()) == {"passed": 15, "missing": 1}
    assert run.outcomes("nodes_reachable") == {None: "missing"}
    hosts = {row["place"]["hostname"] for row in run.results["criteria"] if row["place"] and row["outcome"] == "failed"}
    assert hosts == {"gpu-node-3", "gpu-node-9"}
    assert run.results["simulated"]["faults"] == list(bad)
    assert_said_everywhere(run, "REJECTED")
