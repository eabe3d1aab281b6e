"""What cannot be measured is an error that names the rank, the rest goes on, and nobody waits for the dead."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import ACCEPTANCE
from tests.support.runs import run_pytest
from tests.support.thresholds_files import in_rehearsal, write_limits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

DEADLINE_S = 15.0
"""A busy machine needs seconds for the other place's product, which has to end before."""
FINETUNE = ("finetune_loss", "finetune_exact_match", "finetune_checks")
SELECTED = " or ".join(f"test_{key}" for key in ("bf16_tflops", "nodes_reachable", "hbm_bandwidth", "busbw", *FINETUNE))
"""The faults strike once each: other criteria are measured by the same functions."""
AT_ONCE_S = 30.0
"""Far below the deadline of a call, which is 60 s or more: peers were released, and did not wait for the dead."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where the two runs below take place."""
    return tmp_path_factory.mktemp("died"), tmp_path_factory.mktemp("hung")


@pytest.fixture(scope="module")
def died(folders: tuple[Path, Path]) -> FinishedRun:
    """Rank 1 raises in the product, is killed in the all-reduce, leaves during the training."""
    planted = {"E2E_PLANT": json.dumps({"gemm": "raises", "all_reduce": "killed", "finetune": "exits"})}
    return run_pytest(folders[0], ACCEPTANCE, "-k", SELECTED, "-p", "planted", variables=planted)


@pytest.fixture(scope="module")
def hung(folders: tuple[Path, Path]) -> FinishedRun:
    """Rank 1 hangs in the product and in the training, leaves in the all-reduce, raises in the copy."""
    short = in_rehearsal(deadline_s=DEADLINE_S)
    limits = write_limits(folders[1] / "short.yaml", {"bf16_tflops": short, "finetune_loss": short})
    planted = {
        "E2E_PLANT": json.dumps({"gemm": "hangs", "all_reduce": "exits", "hbm_bandwidth": "raises", "finetune": "hangs"})
    }
    return run_pytest(folders[1], ACCEPTANCE, "-k", SELECTED, limits, "-p", "planted", variables=planted)


def struck_s(folder: Path, name: str) -> float:
    """When the planted fault struck, in seconds since 1970."""
    return float((folder / f"struck-{name}").read_text(encoding="utf-8"))


def test_raised(died: FinishedRun) -> None:
    """Type, text, traceback and last output of rank 1; the other place keeps its value."""
    assert died.outcomes("bf16_tflops") == {"node0-cpu0": "passed", "node0-cpu1": "error"}
    assert died.row("bf16_tflops", "node0-cpu0")["value"] > 0
    assert died.row("bf16_tflops", "node0-cpu1")["value"] is None
    case = died.case("test_bf16_tflops[node0-cpu1]")
    assert (case.outcome, case.properties["failure_type"]) == ("error", "error")
    assert "gemm was not measured: rank 1 (node0-cpu1, " in case.text
    assert "ArithmeticError: planted: the product is wrong" in case.text
    assert 'planted.py", line ' in case.text
    assert "a word before the end" in case.text


def test_killed_in_a_collective(died: FinishedRun) -> None:
    """The cause on top, the consequence below, no blame for the rank that waited."""
    case = died.case("test_busbw[node0-all_reduce]")
    assert case.outcome == "error"
    assert "all_reduce was not measured: rank 1 (node0-cpu1, " in case.text
    assert re.search("died: SIGKILL, last in all_(reduce|gather)", case.text)  # the ranks gather how long a round took
    assert "rank 0 waited in all_reduce and did not finish because of it" in case.text
    assert died.row("busbw[all_reduce]", "node0")["outcome"] == "error"


def test_left_with_exit_code_0(died: FinishedRun) -> None:
    """Leaving quietly is no success: all that is judged from it is an error that names rank 1."""
    for criterion in ("finetune_loss", "finetune_exact_match", "finetune_checks"):
        assert died.row(criterion)["outcome"] == "error"
        case = died.case(f"test_{criterion}")
        assert case.outcome == "error"
        assert "finetune was not measured: rank 1 (node0-cpu1, " in case.text
        assert "left with exit code 0" in case.text


def test_goes_on_after_each(died: FinishedRun, hung: FinishedRun) -> None:
    """Criteria between and after the faults run and pass, on fresh workers where the old ones died."""
    for ran in (died, hung):
        assert ran.row("nodes_reachable")["outcome"] == "passed"
    assert set(died.outcomes("hbm_bandwidth").values()) == {"passed"}
    assert hung.row("hbm_bandwidth", "node0-cpu0")["outcome"] == "passed"


def test_nobody_waits_for_the_dead(died: FinishedRun, hung: FinishedRun, folders: tuple[Path, Path]) -> None:
    """The journal has the outcome soon after the fault, wherever the others were."""
    first, second = folders
    assert died.settled_s("busbw[all_reduce]", "node0") - struck_s(first, "all_reduce") < AT_ONCE_S
    assert died.settled_s("finetune_loss") - struck_s(first, "finetune") < AT_ONCE_S
    assert hung.settled_s("busbw[all_reduce]", "node0") - struck_s(second, "all_reduce") < AT_ONCE_S


def test_hung_alone(hung: FinishedRun, folders: tuple[Path, Path]) -> None:
    """At the deadline, with the Python stack of the place where it hangs; the other place keeps its value."""
    assert hung.outcomes("bf16_tflops") == {"node0-cpu0": "passed", "node0-cpu1": "error"}
    case = hung.case("test_bf16_tflops[node0-cpu1]")
    assert case.outcome == "error"
    assert "gemm was not measured: rank 1 (node0-cpu1, " in case.text
    assert f"did not return within {DEADLINE_S:g} s" in case.text
    assert "in _hangs" in case.text
    took_s = hung.settled_s("bf16_tflops", "node0-cpu1") - struck_s(folders[1], "gemm")
    assert DEADLINE_S - 0.5 < took_s < DEADLINE_S + AT_ONCE_S


def test_hung_before_a_collective(hung: FinishedRun, folders: tuple[Path, Path]) -> None:
    """At the deadline it is said who never arrived, and where the others wait."""
    case = hung.case("test_finetune_loss")
    assert case.outcome == "error"
    assert "rank 1 (node0-cpu1, " in case.text
    assert "never arrived in barrier" in case.text
    assert "rank 0 waited in barrier" in case.text
    assert hung.settled_s("finetune_loss") - struck_s(folders[1], "finetune") < DEADLINE_S + AT_ONCE_S


def test_left_in_a_collective(hung: FinishedRun) -> None:
    """As a kill: named, and no one else is blamed."""
    text = hung.case("test_busbw[node0-all_reduce]").text
    assert "rank 1 (node0-cpu1, " in text
    assert "left with exit code 0" in text
    assert hung.outcomes("hbm_bandwidth") == {"node0-cpu0": "passed", "node0-cpu1": "error"}


def test_only_rank_1_is_a_culprit(died: FinishedRun, hung: FinishedRun) -> None:
    """One culprit with every criterion that it spoilt, on the word of errors only."""
    for ran, spoilt in ((died, {"bf16_tflops", "busbw[all_reduce]"}), (hung, {"bf16_tflops", "hbm_bandwidth"})):
        assert [culprit["place"]["id"] for culprit in ran.results["culprits"]] == ["node0-cpu1"]
        culprit = ran.culprit("node0-cpu1")
        assert spoilt <= set(culprit["criteria"])
        assert culprit["confidence"] == "medium"


def test_findings_are_told_once(died: FinishedRun) -> None:
    """Three criteria judged from one lost training are one piece of evidence."""
    evidence = died.culprit("node0-cpu1")["evidence"]
    assert len(set(evidence)) == len(evidence) == 3


def test_errors_make_it_incomplete(died: FinishedRun, hung: FinishedRun) -> None:
    """Nothing failed and something was not measured: INCOMPLETE, exit 1, the verdict an error."""
    for ran in (died, hung):
        assert (ran.returncode, ran.results["verdict"]) == (1, "INCOMPLETE")
        assert "not measured" in ran.verdict_line
        assert (ran.cases[-1].name, ran.cases[-1].outcome) == ("gpucluster.verdict", "error")
