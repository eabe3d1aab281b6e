"""A process comes to a GPU in the midst of a run, on simulated H200: an ERROR that names it, never a failure of the GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import ACCEPTANCE
from tests.support.nvml_simulator import build, environment
from tests.support.runs import run_pytest, user_folder
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

STRANGER = 4_194_999
HEALTHY = 1.1
"""The planted rate that passes for an H200."""
PLACES = [f"node0-gpu{number}" for number in range(3)]
ALL = dict.fromkeys(PLACES, "passed")
ONE = {**ALL, "node0-gpu1": "error"}
PER_GPU = ("before", "stays", "meanwhile", "reading", "shared", "after", "comes_and_goes", "fails", "hangs", "dies")
PER_NODE = ("meanwhile_node", "after_node", "node")


def variables(folder: Path, *, gpus: int) -> dict[str, str]:
    """The environment of a run on simulated GPUs to which processes can come."""
    processes = folder / "processes"
    processes.mkdir()
    scenario = f"count {gpus}\nprocesses {processes}\nprogram.{STRANGER} /usr/bin/python3\n"
    return {**environment(build(folder), scenario), "E2E_PROCESSES": str(processes)}


# The user's own measurements.


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """folders/visited with three GPUs."""
    folder = user_folder("visited", tmp_path_factory.mktemp("user") / "visited")
    limits = {f"visit_{name}": entry(per="gpu", min=1) for name in PER_GPU}
    limits.update({f"visit_{name}": entry(per="node", min=1) for name in PER_NODE})
    path = folder / "limits.yaml"
    write_limits(path, limits, extends=False)
    document = json.loads(path.read_text(encoding="utf-8"))
    document["profiles"]["h200-sxm"] = {"gpu": "h200-sxm", "accept_at": "quick", "fabric": "none"}
    path.write_text(json.dumps(document), encoding="utf-8")
    arguments = ("--gpucluster", f"--gpucluster-thresholds={path}", "test_visited.py")
    return run_pytest(folder, *arguments, variables=variables(folder, gpus=3))


@pytest.mark.parametrize("name", ["stays", "meanwhile", "comes_and_goes", "fails", "hangs", "dies"])
def test_gpu_that_somebody_came_to_is_an_error(user: FinishedRun, name: str) -> None:
    """It alone, with the process and the place; the others are judged."""
    assert user.outcomes(f"visit_{name}") == ONE
    text = user.case(f"test_visit_{name}[node0-gpu1]").text
    assert f"GPU not idle: 0.6 GiB held by pid {STRANGER} (python3) on " in text
    assert " gpu 1 (node0-gpu1, rank 1, " in text


def test_error_says_when_and_in_what_it_came(user: FinishedRun) -> None:
    """Within the function, or at its end; what failed beside it stands below."""
    assert "came while somebody_comes_and_goes was measured" in user.case("test_visit_comes_and_goes[node0-gpu1]").text
    stays = user.case("test_visit_stays[node0-gpu1]").text  # of the second look: it was there before that began
    assert "came during this run, before " in stays
    assert "first not measured: GPU not idle: " in stays
    assert "planted: the other one has it all" in user.case("test_visit_fails[node0-gpu1]").text
    assert "the worker died: SIGKILL" in user.case("test_visit_dies[node0-gpu1]").text
    assert "did not return within 4 s" in user.case("test_visit_hangs[node0-gpu1]").text


@pytest.mark.parametrize("name", ["before", "after", "reading", "shared"])
def test_what_it_cannot_spoil_is_judged(user: FinishedRun, name: str) -> None:
    """Before it came, after it went, and what does not depend on it: the healthy twins."""
    assert user.outcomes(f"visit_{name}") == ALL


def test_group_with_it_is_an_error(user: FinishedRun) -> None:
    """It came during the call, or was still there; afterwards the group is measured again."""
    assert user.outcomes("visit_node") == user.outcomes("visit_meanwhile_node") == {"node0": "error"}
    assert user.outcomes("visit_after_node") == {"node0": "passed"}
    text = user.case("test_visit_node[node0]").text
    assert f"held by pid {STRANGER} (python3) on " in text
    assert "(node0-gpu1, " in text
    assert "came while group_with_somebody was measured" in text


def test_pairs_with_it_are_errors(user: FinishedRun) -> None:
    """And no others."""
    assert user.case("test_visit_pairs").outcome == "passed"


def test_distributed_test_with_it_is_an_error(user: FinishedRun) -> None:
    """Also where its assert failed: what it saw is not known to be the cluster's."""
    case = user.case("test_visit_distributed")
    assert case.outcome == "error"
    assert "came while test_visit_distributed ran" in case.text


def test_user_run_rejects_nothing(user: FinishedRun) -> None:
    """The process is to blame, and ending it is the advice."""
    assert "failed" not in {row["outcome"] for row in user.results["criteria"]}
    assert user.results["verdict"] == "INCOMPLETE"
    assert [culprit["place"]["id"] for culprit in user.results["culprits"]] == ["node0-gpu1"]
    culprit = user.culprit("node0-gpu1")
    assert culprit["kind"] == "software"
    assert any(f"held by pid {STRANGER}" in line for line in culprit["evidence"])


# The packaged suite.


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[int], dict[str, float]], FinishedRun]:
    """The memory bandwidth and its comparison on four GPUs; ranks that somebody comes to, and ranks that are slow."""

    def start(visited: list[int], slow: dict[str, float]) -> FinishedRun:
        folder = tmp_path_factory.mktemp("suite")
        planted = {
            **variables(folder, gpus=4),
            "E2E_VISITED": json.dumps(visited),
            "E2E_SIBLINGS": json.dumps({"slow": {**dict.fromkeys("0123", HEALTHY), **slow}}),
        }
        run = folder / "run"
        run.mkdir()
        return run_pytest(
            run, ACCEPTANCE, "--gpucluster-level=quick", "-k", "hbm_bandwidth", "-p", "visited", variables=planted
        )

    return start


def test_suite_names_who_came(suite: Callable[..., FinishedRun]) -> None:
    """A GPU at half its rate beside a competitor is not called defective, nor slower than its siblings."""
    ran = suite([2], {"2": 0.5})
    expected = {f"node0-gpu{number}": "error" if number == 2 else "passed" for number in range(4)}
    assert ran.outcomes("hbm_bandwidth") == ran.outcomes("straggler[hbm_bandwidth]") == expected
    assert (ran.results["verdict"], ran.culprit("node0-gpu2")["kind"]) == ("INCOMPLETE", "software")
    assert f"pid {STRANGER} (python3)" in ran.case("test_hbm_bandwidth[node0-gpu2]").text


def test_value_within_the_limit_is_no_value_either(suite: Callable[..., FinishedRun]) -> None:
    """Two GPUs with somebody on them, whose rates do not show it."""
    ran = suite([0, 3], {})
    expected = {f"node0-gpu{number}": "error" if number in (0, 3) else "passed" for number in range(4)}
    assert ran.outcomes("hbm_bandwidth") == expected


def test_suite_without_a_visit(suite: Callable[..., FinishedRun]) -> None:
    """The twins: a slow GPU by itself fails, and this run's own processes are nobody else's."""
    ran = suite([], {"2": 0.5})
    expected = {f"node0-gpu{number}": "failed" if number == 2 else "passed" for number in range(4)}
    assert ran.outcomes("hbm_bandwidth") == ran.outcomes("straggler[hbm_bandwidth]") == expected
    assert ran.results["verdict"] == "REJECTED"
