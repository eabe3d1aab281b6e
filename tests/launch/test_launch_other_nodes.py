"""Two nodes that were started with other environments: the verdict line and every report name the difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.reporting.rebuild import rebuild
from tests.support.nvml_simulator import build, environment
from tests.support.reports import RESULTS
from tests.support.runs import Torchrun, run_pytest
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

TEST = "def test_joined(cluster, criterion):\n    criterion.require(cluster.world_size)\n"


def test_other_variables_are_named(tmp_path: Path) -> None:
    """By node and variable."""
    (tmp_path / "test_joined.py").write_text(TEST, encoding="utf-8")
    limits = write_limits(tmp_path / "limits.yaml", {"joined": entry()}, extends=False)
    nodes = Torchrun(ranks=1, nodes=({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree", "NCCL_P2P_DISABLE": "1"}))
    ran = run_pytest(tmp_path, "--gpucluster", "test_joined.py", limits, torchrun=nodes)
    names = [term.partition(" on ")[0] for term in ran.results["changed_terms"]]
    assert names == ["NCCL_ALGO=Tree", "NCCL_P2P_DISABLE=1"], ran.stdout
    assert ran.results["verdict"] == "REHEARSED"
    assert all(term in ran.verdict_line for term in ran.results["changed_terms"])
    assert ran.verdict_line.startswith("verdict REHEARSED: 1 passed on 2 nodes x 1 rank on the CPU")
    verdict = rebuild(tmp_path / RESULTS)
    assert verdict.line == ran.results["verdict_line"]
    assert ran.case("gpucluster.verdict").message == ran.results["verdict_line"]
    assert list(verdict.terms.changed_terms) == ran.results["changed_terms"]


def test_other_options_are_named(tmp_path: Path) -> None:
    """The second node has another level, profile and content of the thresholds file: by option, with both texts."""
    (tmp_path / "test_joined.py").write_text(TEST, encoding="utf-8")
    ours = write_limits(tmp_path / "ours.yaml", {"joined": entry()}, extends=False)
    theirs = write_limits(tmp_path / "theirs.yaml", {"joined": entry(min=2)}, extends=False)
    second = f"--gpucluster-level=quick --gpucluster-profile=lab {theirs} --junitxml=theirs.xml"
    nodes = Torchrun(ranks=1, nodes=({"PYTEST_ADDOPTS": ours}, {"PYTEST_ADDOPTS": second}))
    ran = run_pytest(tmp_path, "--gpucluster", "test_joined.py", torchrun=nodes)
    names = [term.partition(" on ")[0] for term in ran.results["changed_terms"]]
    assert names[:2] == ["--gpucluster-level=quick", "--gpucluster-profile=lab"], ran.stdout
    assert [name.startswith("--gpucluster-thresholds=a file with the SHA-256 ") for name in names[2:]] == [True], names
    assert ran.results["verdict"] == "REHEARSED"
    assert all(term in ran.verdict_line for term in ran.results["changed_terms"])


def test_one_meaning_in_two_spellings_is_no_difference(tmp_path: Path) -> None:
    """A copy of the file, the level that is meant anyway, each node's own files for reports, and an equal variable."""
    (tmp_path / "test_joined.py").write_text(TEST, encoding="utf-8")
    ours, theirs = (write_limits(tmp_path / f"{name}.yaml", {"joined": entry()}, extends=False) for name in ("ours", "theirs"))
    second = f"--gpucluster-level=standard {theirs} --gpucluster-results=elsewhere --junitxml=theirs.xml"
    alike = {"NCCL_ALGO": "Ring"}
    nodes = Torchrun(ranks=1, nodes=({"PYTEST_ADDOPTS": ours, **alike}, {"PYTEST_ADDOPTS": second, **alike}))
    ran = run_pytest(tmp_path, "--gpucluster", "test_joined.py", torchrun=nodes)
    assert (ran.results["changed_terms"], ran.results["verdict"]) == ([], "REHEARSED"), ran.stdout


@pytest.mark.parametrize("hides", [True, pytest.param(False, marks=pytest.mark.slow)])  # by day, the first node hides none
def test_gpus_that_the_second_node_hides_are_named(tmp_path: Path, *, hides: bool) -> None:
    """Its third GPU is in no test, so the verdict line says so by the node's name; where nothing is hidden it says nothing."""
    (tmp_path / "nvml").mkdir()
    library = build(tmp_path / "nvml")
    first = environment(library, "count 2\n")
    second = {**environment(library, "count 3\n" if hides else "count 2\n"), "CUDA_VISIBLE_DEVICES": "0,2" if hides else "0,1"}
    (tmp_path / "test_joined.py").write_text(TEST, encoding="utf-8")
    limits = write_limits(tmp_path / "limits.yaml", {"joined": entry()})
    ran = run_pytest(
        tmp_path,
        "--gpucluster",
        "--gpucluster-profile=lab-2x2",
        limits,
        "test_joined.py",
        torchrun=Torchrun(ranks=2, nodes=(first, second)),
    )
    hidden = [term for term in ran.results["changed_terms"] if "hide" in term]
    assert len(hidden) == int(hides), ran.stdout
    for term in hidden:
        assert term.startswith("CUDA_VISIBLE_DEVICES hides 1 of 3 GPUs on ")
        assert term in ran.verdict_line
        assert term in ran.case("gpucluster.verdict").message
        assert ran.case("gpucluster.verdict").properties["changed_term"] == term
    assert ran.results["verdict"] != "ACCEPTED"
