"""Healthy rehearsals: what is green on a machine without a GPU, and that it is never an acceptance."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.reporting.rebuild import rebuild
from tests.e2e.test_fails_by_value import TIGHT
from tests.support.launching import ACCEPTANCE
from tests.support.runs import Torchrun, run_pytest
from tests.support.thresholds_files import write_limits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MEASURED = {
    "bf16_tflops": ("node0-cpu0", "node0-cpu1"),
    **dict.fromkeys(("fp16_tflops", "tf32_tflops", "fp32_tflops", "fp64_tflops", "int8_tops"), ("node0-cpu0", "node0-cpu1")),
    "hbm_bandwidth": ("node0-cpu0", "node0-cpu1"),
    "busbw[all_reduce]": ("node0",),
    "nodes_reachable": (None,),
}
CHECKS = (
    "base_digest", "data_digest", "lock_step", "all_reduce", "adapter_digest", "finite", "adapters_moved", "restore",
    "generation",
)  # fmt: skip
FINETUNE = (
    "finetune_loss", "finetune_exact_match", "finetune_checks", *(f"finetune_check[{name}]" for name in CHECKS),
    "finetune_loss_limit",
)  # fmt: skip
SPEED = (
    "training_throughput_gpu", "training_throughput_ddp_node", "training_throughput_fsdp_node", "training_scaling_node",
    "finetune_throughput", "finetune_throughput_healthy",
)  # fmt: skip
BY_RULE = {
    "gpu_model": "a rehearsal has no GPU",
    "ecc_uncorrected": "a rehearsal has no GPU memory with ECC",
    "fp8_tflops": "not every CPU build of torch has an FP8 product",
    "inter_node_busbw[all_reduce]": "needs 2 nodes, and 1 is expected",
}


@pytest.fixture(scope="module")
def without_training(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Plain pytest, two ranks, under the limits that the planted faults of test_fails_by_value.py miss."""
    folder = tmp_path_factory.mktemp("healthy")
    limits = write_limits(folder / "tight.yaml", TIGHT)
    return run_pytest(folder, ACCEPTANCE, limits, "-k", "not training")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The handover's line with two ranks: everything, the fine-tune included, by the packaged limits."""
    folder = tmp_path_factory.mktemp("whole")
    return run_pytest(folder, ACCEPTANCE, torchrun=Torchrun(ranks=2))


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Three programs that never rest, for as long as the test runs."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait(10)


@pytest.mark.slow
@pytest.mark.usefixtures("busy_cores")
def test_a_busy_machine_rehearses_all_the_same(tmp_path: Path) -> None:
    """Eight ranks on cores that three other programs want too: slow is no reason to reject a rehearsal."""
    busy = run_pytest(tmp_path, ACCEPTANCE, "--gpucluster-expect=nodes=1,gpus_per_node=8", timeout_s=900)
    assert busy.results["verdict"] == "REHEARSED", busy.stdout[-4000:]
    assert busy.returncode == 0


def test_all_that_was_selected_is_green(without_training: FinishedRun) -> None:
    """Every measured criterion passes at every place, under the tight limits too."""
    for criterion, places in MEASURED.items():
        assert without_training.outcomes(criterion) == dict.fromkeys(places, "passed"), criterion
    for criterion, reason in BY_RULE.items():
        assert set(without_training.outcomes(criterion).values()) == {"skipped"}
        assert {row["reason"] for row in without_training.results["criteria"] if row["criterion"] == criterion} == {reason}
    assert without_training.results["culprits"] == []


def test_what_was_left_out_makes_it_incomplete_and_nothing_else(without_training: FinishedRun) -> None:
    """The verdict says what was not selected; without the gate that is no failure of the command."""
    for criterion in FINETUNE:
        assert without_training.row(criterion)["outcome"] == "not_selected"
    for criterion in SPEED:
        assert set(without_training.outcomes(criterion).values()) == {"not_selected"}
    assert without_training.results["verdict"] == "INCOMPLETE"
    count = sum(row["outcome"] == "not_selected" for row in without_training.results["criteria"])
    assert count == len(FINETUNE) + len(SPEED) + 1  # the rate of a GPU alone is that of two
    assert f"{count} not selected on 1 node x 2 ranks on the CPU; limits changed: " in without_training.verdict_line
    assert without_training.returncode == 0


def test_junit_of_a_rehearsal(without_training: FinishedRun) -> None:
    """The suite's name tells a rehearsal, values are properties, and the last testcase is the verdict."""
    assert without_training.junit is not None
    assert without_training.junit.get("name") == "gpucluster-rehearsal"
    assert [case.name for case in without_training.cases][-1] == "gpucluster.verdict"
    verdict = without_training.case("gpucluster.verdict")
    assert (verdict.outcome, verdict.properties["verdict"]) == ("error", "INCOMPLETE")
    one = without_training.case("test_bf16_tflops[node0-cpu1]")
    assert one.outcome == "passed"
    assert (one.properties["place"], one.properties["rank"], one.properties["unit"]) == ("node0-cpu1", "1", "TFLOPS")
    assert float(one.properties["value"]) == without_training.row("bf16_tflops", "node0-cpu1")["value"]
    assert without_training.case("test_gpu_model[node0-cpu0]").outcome == "skipped"
    assert not [case for case in without_training.cases if "finetune" in case.name or "throughput" in case.name]


def test_terminal_of_a_rehearsal(without_training: FinishedRun) -> None:
    """It is said before anything runs, and changed limits are named at the end."""
    assert "REHEARSAL on the CPU: accepts nothing" in without_training.stdout
    assert without_training.verdict_line.endswith("; limits changed: bf16_tflops, hbm_bandwidth, busbw[all_reduce]")
    assert without_training.results["changed_limits"] == ["bf16_tflops", "hbm_bandwidth", "busbw[all_reduce]"]


def test_lines_stand_before_the_last_words(without_training: FinishedRun) -> None:
    """The line of the last subject is not torn away from the others by pytest's closing messages."""
    text = without_training.stdout
    lines = {found[1]: found.start() for found in re.finditer(r"^([a-z]+) +\d+ criteri", text, re.MULTILINE)}
    assert {"compute", "memory", "links"} <= {*lines}
    assert max(lines.values()) < text.index("generated xml file")


def test_journal(without_training: FinishedRun) -> None:
    """The journal has the expected set before the first outcome, and the verdict last."""
    events = [event["event"] for event in without_training.journal]
    assert events[0] == "started"
    assert events.index("planned") < events.index("outcome")
    assert events[-1] == "verdict"
    planned = next(event["expected"] for event in without_training.journal if event["event"] == "planned")
    assert len(planned) == len(without_training.results["criteria"])


def test_rebuilt_from_its_journal(without_training: FinishedRun, tmp_path: Path) -> None:
    """Rows, places and verdict are those of the run, nodes included."""
    lines = "".join(json.dumps(event) + "\n" for event in without_training.journal)
    (tmp_path / "journal.jsonl").write_text(lines, encoding="utf-8")
    assert rebuild(tmp_path).line == without_training.results["verdict_line"]
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["criteria"] == without_training.results["criteria"]
    nodes = [row["place"]["hostname"] for row in told["criteria"] if row["criterion"] == "busbw[all_reduce]"]
    assert nodes == [socket.gethostname()]


def test_whole_rehearsal_through_torchrun(whole: FinishedRun) -> None:
    """Everything passes, the fine-tune learns, the verdict is REHEARSED."""
    assert whole.returncode == 0, whole.stdout
    assert whole.results["verdict"] == "REHEARSED"
    for criterion in (*MEASURED, *FINETUNE, *SPEED):
        assert set(whole.outcomes(criterion).values()) == {"passed"}, criterion
    assert whole.row("finetune_check[graph_lock_step]")["reason"] == "a rehearsal has no CUDA graphs"
    assert whole.row("finetune_check[step_time_spread]")["reason"] == "the cores of a CPU share too much to be compared"
    assert whole.row("finetune_loss")["value"] < 0.5
    assert whole.row("finetune_exact_match")["value"] >= 0.9
    assert whole.results["changed_limits"] == []


def test_a_rehearsal_is_never_a_pass_in_the_junit(whole: FinishedRun) -> None:
    """Whoever reads only the JUnit sees a skipped verdict, not a green one."""
    verdict = whole.cases[-1]
    assert (verdict.name, verdict.outcome) == ("gpucluster.verdict", "skipped")
    assert "REHEARSED" in verdict.text
    assert whole.junit is not None
    assert (whole.junit.get("name"), whole.junit.get("failures"), whole.junit.get("errors")) == (
        "gpucluster-rehearsal",
        "0",
        "0",
    )


def test_one_session_under_torchrun(whole: FinishedRun) -> None:
    """Rank 1 is an agent: it collects, prints and reports nothing."""
    assert whole.stdout.count("test session starts") == 1
    verdict, report = whole.stdout.rstrip().splitlines()[-2:]
    assert verdict == whole.verdict_line
    assert report.startswith("report: ")
    assert whole.results["environment"]["launched_by"] == "torchrun"
