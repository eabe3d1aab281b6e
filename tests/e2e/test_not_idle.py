"""A simulated node of two H200, one with somebody else on it: an ERROR wherever that one would be measured, never a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.launching import ACCEPTANCE
from tests.support.nvml_simulator import build, environment
from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

UUID = "GPU-00000001-0000-0000-0000-000000000001"
BUSY = f"""count 2
1.process.0 4711 {25 * 2**30}
1.mem.used {25 * 2**30}
program.4711 python3
"""
HUNG = "count 2\n1.delay_ms.nvmlDeviceGetUtilizationRates 600000\n"
CHOSEN = ("no_foreign_process", "gpu_model", "ecc_uncorrected", "bf16_tflops", "hbm_bandwidth", "busbw")


def launch(folder: Path, scenario: str, *arguments: str) -> FinishedRun:
    """Some criteria of the packaged suite on the simulated node; torch sees no GPU, so nothing can really be measured."""
    simulated = environment(build(folder), scenario)
    (folder / "run").mkdir()
    return run_pytest(
        folder / "run",
        ACCEPTANCE,
        "--gpucluster-level=quick",
        "-k",
        " or ".join(CHOSEN),
        *arguments,
        variables=simulated,
    )


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The second GPU has a process of 25 GiB."""
    return launch(tmp_path_factory.mktemp("busy"), BUSY)


@pytest.mark.parametrize("criterion", ["no_foreign_process", "bf16_tflops", "hbm_bandwidth"])
def test_busy_gpu_is_not_measured(busy: FinishedRun, criterion: str) -> None:
    """An error that names process, host, place and UUID."""
    row = busy.row(criterion, "node0-gpu1")
    assert (row["outcome"], row["value"]) == ("error", None)
    case = busy.case(f"test_{criterion}[node0-gpu1]")
    assert (case.outcome, case.properties["failure_type"]) == ("error", "error")
    assert "GPU not idle: 25.0 GiB held by pid 4711 (python3) on " in case.text
    assert " gpu 1 (node0-gpu1, rank 1, " in case.text
    assert UUID in case.text


def test_idle_neighbour_is_no_part_of_it(busy: FinishedRun) -> None:
    """Its own check passes; what it cannot measure has its own reason (here: torch sees no GPU)."""
    assert busy.row("no_foreign_process", "node0-gpu0")["outcome"] == "passed"
    assert "torch sees 0 GPUs" in busy.case("test_bf16_tflops[node0-gpu0]").text
    assert "not idle" not in busy.case("test_bf16_tflops[node0-gpu0]").text


def test_group_with_it_is_not_measured(busy: FinishedRun) -> None:
    """The node's collectives: an error that names the busy GPU."""
    assert busy.row("busbw[all_reduce]", "node0")["outcome"] == "error"
    text = busy.case("test_busbw[node0-all_reduce]").text
    assert "GPU not idle: 25.0 GiB held by pid 4711 (python3) on " in text
    assert " gpu 1 (node0-gpu1, rank 1, " in text


def test_health_is_read_all_the_same(busy: FinishedRun) -> None:
    """By NVML, which nobody disturbs."""
    for criterion in ("gpu_model", "ecc_uncorrected"):
        assert busy.outcomes(criterion) == {"node0-gpu0": "passed", "node0-gpu1": "passed"}


def test_it_is_no_hardware_failure(busy: FinishedRun) -> None:
    """INCOMPLETE and not REJECTED; what runs there is to blame, and ending it is the advice."""
    assert "failed" not in {row["outcome"] for row in busy.results["criteria"]}
    assert busy.results["verdict"] == "INCOMPLETE"
    assert busy.returncode != 0
    culprit = busy.culprit("node0-gpu1")
    assert (culprit["kind"], culprit["place"]["uuid"]) == ("software", UUID)
    assert any("held by pid 4711" in line for line in culprit["evidence"])
    assert "end what holds the GPU" in culprit["action"]


def test_driver_that_hangs_does_not_hang_the_run(tmp_path: Path) -> None:
    """Not read at that place, within the deadline; everything else goes on."""
    ran = launch(tmp_path, HUNG, "-p", "impatient")
    assert ran.outcomes("no_foreign_process") == {"node0-gpu0": "passed", "node0-gpu1": "error"}
    text = ran.case("test_no_foreign_process[node0-gpu1]").text
    assert "who is on the GPU was not read: rank 1 (node0-gpu1, " in text
    assert "did not return within 3 s" in text
    assert ran.outcomes("ecc_uncorrected") == {"node0-gpu0": "passed", "node0-gpu1": "passed"}
    assert "torch sees 0 GPUs" in ran.case("test_bf16_tflops[node0-gpu1]").text
