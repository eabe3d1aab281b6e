"""A user's own folder under torchrun: own measurements, and plain torch.distributed in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.runs import Torchrun, run_pytest, user_folder
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LIMITS = {
    "site_rate": entry(per="gpu", min=90, unit="GB/s"),
    "site_sum": entry(per="node", min=20),
    "site_ranks": entry(min=4),
    "site_worst": entry(min=90, unit="GB/s"),
    "site_pairs": entry(min=1),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """folders/site with four ranks."""
    folder = user_folder("site", tmp_path_factory.mktemp("user") / "site")
    limits = write_limits(folder / "limits.yaml", LIMITS, extends=False)
    arguments = ("--gpucluster", "test_site.py", "test_spmd.py", "test_not_everywhere.py", limits)
    return run_pytest(folder, *arguments, torchrun=Torchrun(ranks=4))


def test_function_in_the_test_file_per_gpu(site: FinishedRun) -> None:
    """A number of each place; the slow one fails, with the evidence that the test gave."""
    expected = {f"node0-cpu{number}": "passed" for number in (0, 1, 3)}
    assert site.outcomes("site_rate") == {**expected, "node0-cpu2": "failed"}
    case = site.case("test_site_rate[node0-cpu2]")
    assert case.outcome == "failure"
    assert " cpu 2 (node0-cpu2): 80 GB/s, below 90 GB/s (11.1 % short; limits.yaml:" in case.text
    assert "median 100" in case.text


def test_function_in_conftest_per_node(site: FinishedRun) -> None:
    """A dict, summed over the ranks of the node."""
    row = site.row("site_sum", "node0")
    assert (row["outcome"], row["value"]) == ("passed", 20)
    assert row["evidence"] == {"sum": 20.0, "size": 4.0}


def test_function_in_a_module_beside_per_cluster(site: FinishedRun) -> None:
    """A dataclass, rebuilt as the user's own class."""
    row = site.row("site_ranks")
    assert (row["outcome"], row["value"]) == ("passed", 4)


def test_values_by_place_name_the_worst(site: FinishedRun) -> None:
    """Judged once for the cluster from values by place: the worst decides and is named, in the message and as culprit."""
    row = site.row("site_worst")
    assert (row["outcome"], row["value"]) == ("failed", 80)
    assert " cpu 2 (node0-cpu2, rank 2)" in site.case("test_site_worst").text
    assert {"site_rate", "site_worst"} <= set(site.culprit("node0-cpu2")["criteria"])


def test_values_by_pair_name_the_worst(site: FinishedRun) -> None:
    """The same for pairs, both of whose members are named."""
    row = site.row("site_pairs")
    assert (row["outcome"], row["value"]) == ("failed", 0)
    text = site.case("test_site_pairs").text
    assert "node0-cpu0" in text
    assert "node0-cpu1" in text


@pytest.mark.parametrize("name", ["pairs_in_both_directions", "helpers", "places_and_at_once", "variables_of_a_call"])
def test_results_in_a_users_hands(site: FinishedRun, name: str) -> None:
    """Pairs in both directions, each, slowest, relative_to_fastest, outliers, places and at_once (see folders/site)."""
    case = site.case(f"test_{name}")
    assert case.outcome == "passed", case.text


@pytest.mark.parametrize("name", ["lambda", "method", "partial", "local", "builtin", "torch"])
def test_refused_functions(site: FinishedRun, name: str) -> None:
    """Not at module level: nothing was measured, so an error, in one sentence that says what to do."""
    case = site.case(f"test_refused_function[{name}]")
    assert case.outcome == "error"
    assert "cannot run in a worker: it must be a function at module level" in case.text
    assert "dispatch.py" not in case.text


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tensor-argument", "torch.Tensor is not plain data"),
        ("unknown-place", "no expected place is called node9-gpu0"),
        ("unknown-per", "per='rack' is not one of gpu, host, node, domain, cluster, pair"),
        ("at-once", "at_once=0 is not 'all' or a whole number above zero"),
        ("deadline", "deadline_s=0 is not a time above zero"),
        ("deadline-text", "deadline_s='5' is not a time above zero"),
        ("deadline-true", "deadline_s=True is not a time above zero"),
        ("places-text", "places has 'node0-cpu0', which is no Place: take some of cluster.places"),
        ("places-one-text", "places has 'n', which is no Place: take some of cluster.places"),
    ],
)
def test_refused_arguments(site: FinishedRun, name: str, told: str) -> None:
    """Wrong use of ``cluster.run`` measures nothing: an error with the reason."""
    case = site.case(f"test_refused_argument[{name}]")
    assert case.outcome == "error"
    assert told in case.text


def test_refused_result(site: FinishedRun) -> None:
    """A tensor cannot cross: an error that says what can."""
    case = site.case("test_refused_result")
    assert case.outcome == "error"
    assert "torch.Tensor is not plain data; numbers, text, lists, dicts of text and dataclasses of these can cross" in case.text
    assert "its .tolist() is" in case.text


@pytest.mark.parametrize(
    "name", ["sum", "objects", "alone", "in_node", "parameters[twice-2]", "after_death", "decorated", "rank_by_parameter[7]"]
)
def test_distributed_passes(site: FinishedRun, name: str) -> None:
    """Over the cluster, alone, in the node, with parametrize values, and after a rank has died in the test before."""
    case = site.case(f"test_{name}")
    assert case.outcome == "passed", case.text


@pytest.mark.parametrize("name", ["with_our_package", "measured_with_our_package"])
def test_a_file_that_one_rank_cannot_import(site: FinishedRun, name: str) -> None:
    """Nothing was measured, so an error; the cause names rank and package, and it is software."""
    case = site.case(f"test_{name}")
    assert case.outcome == "error", case.text
    assert "cannot be imported on this rank: ModuleNotFoundError: No module named 'ours'" in case.text
    assert "rank 2 (node0-cpu2" in case.text


@pytest.mark.parametrize(("name", "value"), [("nan", "nan"), ("0", "0"), ("text", "'5'")])
def test_distributed_deadline(site: FinishedRun, name: str, value: str) -> None:
    """A deadline that never comes, or that is no number, is refused before a rank waits for it."""
    case = site.case(f"test_deadline_{name}")
    assert case.outcome == "error"
    assert f"deadline_s={value} is not a time above zero" in case.text


def test_distributed_asynchronous(site: FinishedRun) -> None:
    """Nothing of it ran: a failure, as pytest has it."""
    case = site.case("test_asynchronous")
    assert case.outcome == "failure"
    assert "its body has not run" in case.text


def test_distributed_returns(site: FinishedRun) -> None:
    """A value that a rank returns is pytest's warning of a plain test, with its place; where that is an error, no pass."""
    assert site.case("test_returns").outcome == "passed"
    said = "test_spmd.py::test_returns returned <class 'bool'>.\n  Did you mean to use `assert` instead of `return`?"
    assert said in site.stdout
    assert "test_spmd.py:79: PytestReturnNotNoneWarning: Test functions should return None" in site.stdout
    assert "PytestReturnNotNoneWarning" in site.case("test_returns_where_a_warning_is_an_error").text


def test_distributed_one_rank_wrong(site: FinishedRun) -> None:
    """The values of the failing assert, the rank and its place; a failure, and the place is a culprit."""
    case = site.case("test_one_wrong")
    assert "worker.py" not in case.text
    assert case.outcome == "failure"
    assert "rank 2 (node0-cpu2, " in case.text
    assert "assert 42 == 41" in case.text
    assert not any(f"rank {rank} (" in case.text for rank in (0, 1, 3))
    assert "one_wrong" in site.culprit("node0-cpu2")["criteria"]


@pytest.mark.parametrize(
    ("name", "said"), [("all_wrong", "assert 5 == 4"), ("parameters[twice-3]", "assert (18, 'twice') == (12,")]
)
def test_distributed_all_ranks_wrong(site: FinishedRun, name: str, said: str) -> None:
    """Equal failures are told once, one headline and one traceback; what all see alike is nobody's fault."""
    case = site.case(f"test_{name}")
    assert case.outcome == "failure"
    assert "ranks 0-3 (rank 0 (node0-cpu0, " in case.text
    assert said in case.text
    assert case.body.count("Traceback (most recent call last)") == 1
    assert not [one for one in site.results["culprits"] if name in one["criteria"]]


def test_distributed_skips(site: FinishedRun) -> None:
    """One rank that skips is a failure that names it; if all skip, the test is not selected."""
    case = site.case("test_one_skips")
    assert case.outcome == "failure"
    assert "3 skipped" in case.text
    assert site.case("test_all_skip").outcome == "skipped"
    assert site.outcomes("all_skip") == {None: "not_selected"}


def test_distributed_rank_dies(site: FinishedRun) -> None:
    """An error that names the dead rank first and those that waited below."""
    case = site.case("test_one_dies")
    assert (case.outcome, case.properties["failure_type"]) == ("error", "error")
    assert "rank 1 (node0-cpu1, " in case.text
    assert "died: SIGKILL" in case.text
    assert "ranks 0, 2-3 waited in barrier" in case.text
    assert "one_dies" in site.culprit("node0-cpu1")["criteria"]
    others = [one for one in site.results["culprits"] if one["place"]["id"] != "node0-cpu1"]
    assert not [one for one in others if "one_dies" in one["criteria"]]


def test_distributed_wrong_mark(site: FinishedRun) -> None:
    """A word that the mark does not know could not be carried out: an error with the valid ones."""
    case = site.case("test_wrong_mark")
    assert case.outcome == "error"
    assert "takes per='cluster', 'domain', 'node' or 'gpu' and deadline_s, not 'rack'" in case.text


def test_site_verdict(site: FinishedRun) -> None:
    """REJECTED, exit non-zero; the error file gives torchrun's banner the verdict."""
    assert site.returncode == 1
    assert site.results["verdict"] == "REJECTED"
    assert "traceback : verdict REJECTED: " in site.stdout


def test_a_misspelt_recipe(tmp_path: Path) -> None:
    """An error that names the entry which is called almost so."""
    text = "import pytest\n@pytest.fixture\ndef rate(recipe): return recipe('site_rat')\n"
    (tmp_path / "test_own.py").write_text(f"{text}def test_site_rate(rate, criterion): ...\n", encoding="utf-8")
    limits = write_limits(tmp_path / "limits.yaml", {"site_rate": entry()}, extends=False)
    run = run_pytest(tmp_path, "--gpucluster", "test_own.py", limits)
    assert run.row("site_rate")["outcome"] == "error"
    assert "has no such criterion. Did you mean 'site_rate'?" in run.row("site_rate")["reason"]


@pytest.mark.parametrize("is_set", [True, False])
def test_the_log_of_nccl_is_ours_in_workers(tmp_path: Path, *, is_set: bool) -> None:
    """A site that exports NCCL's logging variables: workers write what is measured, and results.json has both values."""
    (tmp_path / "test_own.py").write_text(READS_ENVIRONMENT, encoding="utf-8")
    limits = write_limits(tmp_path / "limits.yaml", {"own": entry()}, extends=False)
    site = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.log")} if is_set else {}
    run = run_pytest(tmp_path, "--gpucluster", "test_own.py", limits, variables=site)
    assert run.row("own")["outcome"] == "passed", run.stdout
    environment = run.results["environment"]
    assert environment["overridden_variables"].keys() == site.keys()
    assert {name: one["site"] for name, one in environment["overridden_variables"].items()} == site
    assert {name: environment["variables"].get(name) for name in site} == site


READS_ENVIRONMENT = """
import os

def read():
    return dict(os.environ)

def test_own(cluster, criterion):
    for found in cluster.run(read, per="gpu").values():
        assert (found["NCCL_DEBUG"], found["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET,ENV")
        assert found["NCCL_DEBUG_FILE"] == found["GPUCLUSTER_NCCL_LOG"]
        assert "gpucluster-rank" in found["NCCL_DEBUG_FILE"]
    criterion.require(1)
"""
