"""Expected and not there: every testcase of an absent place is an error ``missing``, never an absence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import ACCEPTANCE
from tests.support.runs import Torchrun, run_pytest

if TYPE_CHECKING:
    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PER_GPU = ("bf16_tflops", "hbm_bandwidth")
TOGETHER = {
    "busbw[all_reduce]": "node0",
    "host_to_device_all": "node0-cpu0",
    "nodes_reachable": None,
    "finetune_loss": None,
    "finetune_exact_match": None,
    "finetune_checks": None,
}
TESTS = {
    "busbw[all_reduce]": "test_busbw[node0-all_reduce]",
    "host_to_device_all": "test_host_to_device_all[node0-cpu0]",
}


@pytest.fixture(scope="module")
def one_short(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Three places promised, two ranks started."""
    folder = tmp_path_factory.mktemp("missing")
    planted = {"E2E_PLANT": json.dumps({"finetune": "healthy"})}
    arguments = (ACCEPTANCE, "--gpucluster-expect", "nodes=1,gpus_per_node=3", "-p", "planted")
    return run_pytest(folder, *arguments, torchrun=Torchrun(ranks=2), variables=planted)


def test_absent_place_is_missing(one_short: FinishedRun) -> None:
    """Missing at the place that nobody answers for, passed at the two that are there."""
    for criterion in PER_GPU:
        assert one_short.outcomes(criterion) == {"node0-cpu0": "passed", "node0-cpu1": "passed", "node0-cpu2": "missing"}
        case = one_short.case(f"test_{criterion}[node0-cpu2]")
        assert (case.outcome, case.properties["failure_type"]) == ("error", "missing")
        assert "not run: node0-cpu2 is missing" in case.text
        assert "2 of 3 expected places answer" in case.text


@pytest.mark.parametrize(("criterion", "place"), TOGETHER.items())
def test_what_all_do_together_is_not_green(one_short: FinishedRun, criterion: str, place: str | None) -> None:
    """A number of two ranks says nothing about three."""
    row = one_short.row(criterion, place)
    assert (row["outcome"], row["value"]) == ("missing", None)
    case = one_short.case(TESTS.get(criterion, f"test_{criterion}"))
    assert case.outcome == "error"
    assert "node0-cpu2 is missing" in case.text


def test_missing_place_is_the_culprit(one_short: FinishedRun) -> None:
    """It is named, with no rank and no hardware, once."""
    assert [culprit["place"]["id"] for culprit in one_short.results["culprits"]] == ["node0-cpu2"]
    culprit = one_short.culprit("node0-cpu2")
    assert (culprit["place"]["rank"], culprit["place"]["uuid"]) == (None, None)
    assert set(PER_GPU) <= set(culprit["criteria"])


def test_never_rehearsed(one_short: FinishedRun) -> None:
    """INCOMPLETE, non-zero, and torchrun's banner says so."""
    assert one_short.returncode != 0
    assert one_short.results["verdict"] == "INCOMPLETE"
    assert one_short.results["expected"] == {"nodes": 1, "gpus_per_node": 3}
    missing = sum(row["outcome"] == "missing" for row in one_short.results["criteria"])
    assert missing > 7
    assert f"{missing} missing" in one_short.verdict_line
    assert (one_short.cases[-1].name, one_short.cases[-1].outcome) == ("gpucluster.verdict", "error")
    assert "verdict INCOMPLETE: " in one_short.stdout
