"""A part is its host and its UUID, whoever is absent and whatever its number is."""

from __future__ import annotations

import shlex
import socket
from typing import TYPE_CHECKING

import pytest

from tests.support.reports import RESULTS
from tests.support.runs import run_pytest, start_pytest
from tests.unit.reporting.test_earlier_hosts import journal

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ACCEPTANCE = ("-p", "no:cacheprovider", "--pyargs", "tests_acceptance")
SLOW = "--fleet-bad=node3-gpu1:slow"


def simulate(folder: Path, *arguments: str) -> FinishedRun:
    """Four nodes of two GPUs, of which one GPU is slow."""
    folder.mkdir(exist_ok=True)
    return run_pytest(folder, "-p", "pytest_gpucluster.plugin.fleet", "--fleet=4x2", SLOW, *ACCEPTANCE, *arguments)


def test_the_same_part_before_and_after_a_repair(tmp_path: Path) -> None:
    """With node 1 absent the bad GPU keeps its name, and the printed command measures that GPU again once node 1 is back."""
    run = simulate(tmp_path, "--fleet-bad=node1:absent", "-k", "test_bf16_tflops")
    assert run.row("bf16_tflops", "node3-gpu1")["place"]["hostname"] == "gpu-node-3"
    assert run.row("bf16_tflops", "node3-gpu1")["outcome"] == "failed"
    missing = {place for place, outcome in run.outcomes("bf16_tflops").items() if outcome == "missing"}
    assert missing == {"node1-gpu0", "node1-gpu1"}
    assert run.row("bf16_tflops", "node1-gpu0")["place"]["hostname"] == "gpu-node-1"
    assert run.culprit("node1")["place"]["hostname"] == "gpu-node-1"
    assert run.verdict_line.endswith("on 3 of 4 nodes x 2 NVIDIA H200 (absent: gpu-node-1)")
    lines = run.stdout.splitlines()
    assert "absent: gpu-node-1 (rank 2 never joined" in " ".join(run.stdout.split()), run.stdout
    assert any(line.startswith("  absent  gpu-node-1  1 node,") for line in lines)
    assert any(line.startswith("  gpu-node-3  serial SIM-00003-01  node3-gpu1") for line in lines)
    text = "gpu-node-3 gpu 1 serial SIM-00003-01 (node3-gpu1)"
    assert any(line.startswith(f"failed: bf16_tflops at {text}: ") for line in lines)
    assert run.case("test_bf16_tflops[node3-gpu1]").outcome == "failure"

    only = "--gpucluster-only gpu-node-3:GPU-SIMULATED-00003-01 -k test_bf16_tflops"
    assert f"the same command with {only}" in run.row("bf16_tflops", "node3-gpu1")["reason"]
    again = simulate(tmp_path / "again", *shlex.split(only))
    measured = {place for place, outcome in again.outcomes("bf16_tflops").items() if outcome != "not_selected"}
    assert measured == {"node3-gpu1"}
    assert again.row("bf16_tflops", "node3-gpu1")["place"]["uuid"] == "GPU-SIMULATED-00003-01"
    assert again.results["verdict"] == "REJECTED"


def test_a_selected_part_accepts_nothing(tmp_path: Path) -> None:
    """A host that is healthy, and absent ones that are selected: every other part was not selected."""
    good = simulate(tmp_path / "good", "--gpucluster-only=gpu-node-2", "-k", "test_bf16_tflops")
    assert (good.results["verdict"], good.returncode) == ("INCOMPLETE", 0)
    assert {place for place, one in good.outcomes("bf16_tflops").items() if one == "passed"} == {"node2-gpu0", "node2-gpu1"}
    gone = simulate(tmp_path / "gone", "--fleet-bad=node1:absent", "--gpucluster-only=gpu-node-1", "-k", "test_bf16_tflops")
    assert (gone.results["verdict"], gone.returncode) == ("INCOMPLETE", 1)
    assert {one["place"]["hostname"] for one in gone.results["culprits"]} == {"gpu-node-1"}


OWN = socket.gethostname()


@pytest.mark.parametrize(
    ("variables", "number", "absent"),
    [
        ({"GPUCLUSTER_HOSTS": f"gone-7,{OWN}"}, 1, "gone-7"),
        pytest.param({"SLURM_JOB_NODELIST": f"gone-[7],{OWN}"}, 1, "gone-7", marks=pytest.mark.slow),
        pytest.param({"GPUCLUSTER_HOSTS": "gone-7,gone-8"}, 0, "gone-8", marks=pytest.mark.slow),
        ({}, 0, None),
        ({"EARLIER": f"gone-7,{OWN}"}, 1, "gone-7"),
        pytest.param({"EARLIER": "gone-7,gone-8"}, 0, None, marks=pytest.mark.slow),
    ],
    ids=["launcher", "Slurm", "names of another kind", "no list", "earlier run", "earlier run of another cluster"],
)
def test_an_absent_node_of_a_real_run(tmp_path: Path, variables: dict[str, str], number: int, absent: str | None) -> None:
    """By the list it keeps its number and its name; without one nothing says which host it is."""
    options = ("--gpucluster-profile=rehearsal", "--gpucluster-expect=nodes=2,gpus_per_node=2", "-k", "test_bf16_tflops")
    clean = {"GPUCLUSTER_HOSTS": "", "SLURM_JOB_NODELIST": "", "SLURM_STEP_NODELIST": ""}
    if "EARLIER" in variables:
        journal(tmp_path / RESULTS, variables["EARLIER"].split(","))
    run = run_pytest(tmp_path, *ACCEPTANCE, *options, variables={**clean, **variables})
    assert run.returncode == 1, run.stdout
    here, gone = f"node{number}", f"node{1 - number}"
    assert run.outcomes("bf16_tflops") == {
        **{f"{here}-cpu{rank}": "passed" for rank in (0, 1)},
        **{f"{gone}-cpu{rank}": "missing" for rank in (0, 1)},
    }
    assert run.row("bf16_tflops", f"{here}-cpu0")["place"]["hostname"] == OWN
    assert run.row("bf16_tflops", f"{gone}-cpu0")["place"]["hostname"] == absent
    assert run.culprit(gone)["place"]["hostname"] == absent
    assert run.culprit(gone)["evidence"][0].startswith(f"{absent or 'an unknown host'} is absent: ")
    assert f"absent: {absent or '1 unknown host'}" in run.stdout
    assert run.verdict_line.partition(" (absent: ")[2].startswith(f"{absent or '1 unknown host'})")
    shown = run.stdout.partition("BAD PARTS")[2]
    assert f"  absent  {absent or '1 unknown host'}  1 node, 2 expected outcomes missing" in shown
    assert f"absent  {gone}" not in run.stdout
    is_other_kind = variables.get("GPUCLUSTER_HOSTS") == "gone-7,gone-8"
    assert ("no host of this run has a name of the list of hosts (gone-7, gone-8)" in run.verdict_line) == is_other_kind


def test_a_host_that_is_not_in_the_list(tmp_path: Path) -> None:
    """It is more than expected; the listed host is missing, and nothing is judged under its name."""
    run = run_pytest(
        tmp_path,
        "-p",
        "pytest_gpucluster.plugin.fleet",
        "--fleet=3x2",
        "--fleet-bad=node1:absent",
        "--gpucluster-expect=nodes=2,gpus_per_node=2",
        *ACCEPTANCE,
        "-k",
        "test_bf16_tflops",
    )
    assert {place for place, one in run.outcomes("bf16_tflops").items() if one == "missing"} == {"node1-gpu0", "node1-gpu1"}
    assert "which is not among the expected hosts" in run.results["verdict_line"]
    assert run.results["verdict"] == "INCOMPLETE"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ("--gpucluster-only=gpu-node-3:GPU-SIMULATED-00009-01",),
            "gpu-node-3 has no such part; it has gpu0 serial SIM-00003-00",
        ),
        (("--gpucluster-only=gpu-node-9",), "no host of this run has that name; its hosts: gpu-node-0, gpu-node-1"),
        (("--gpucluster-only=gpu-node-1", "--collect-only"), "asks the parts who they are, and this command starts nothing"),
        (("--gpucluster-only=",), "names no part; say HOST"),
    ],
)
def test_another_part_is_a_usage_error(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    """It says what is there instead, touches no file and leaves no process."""
    (tmp_path / RESULTS).mkdir()
    (tmp_path / RESULTS / "results.json").write_text("{}", encoding="utf-8")
    (tmp_path / "junit.xml").write_text("<testsuites/>", encoding="utf-8")
    before = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = ("-p", "pytest_gpucluster.plugin.fleet", "--fleet=4x2", *ACCEPTANCE, "-k", "test_bf16_tflops", *arguments)
    (launch,) = start_pytest(tmp_path, *words)
    try:
        assert launch.end() == 4, launch.output
        launch.gone()
    finally:
        launch.kill_all()
    after = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: text for path, text in after.items() if path.suffix != ".out"} == before
    assert why in launch.output.rpartition("ERROR: ")[2], launch.output
