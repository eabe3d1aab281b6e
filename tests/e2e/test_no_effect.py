"""A run says at its start which limits of the file have no effect, and its verdict does not depend on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

OWN = """schema: 1
extends: packaged
criteria:
  own: {criterion: C, per: cluster, min: 1, unit: count, level: quick, why: a test, source: none}
"""
OTHERS = {
    "none": ("", []),
    "an override wins": ("  bf16_tflops: {above: 650}\n", ["site.yaml:5: no effect for profile rehearsal: thresholds.yaml:"]),
    "a profile not taken": (
        "profiles:\n  site: {inherits: h200-sxm}\n",
        ["site.yaml:6: no effect: profile 'site' is not the profile of this run, rehearsal"],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_the_run_says_it_and_judges_as_before(case: str, tmp_path: Path) -> None:
    """Before the first test and in results.json; exit code and verdict are those of a run without the line."""
    more, expected = OTHERS[case]
    (tmp_path / "site.yaml").write_text(OWN + more, encoding="utf-8")
    (tmp_path / "test_own.py").write_text("def test_own(criterion):\n    criterion.require(1)\n", encoding="utf-8")
    run = run_pytest(tmp_path, "--gpucluster-thresholds=site.yaml", "--gpucluster-expect=gpus_per_node=1", "test_own.py")
    assert (run.returncode, run.row("own")["outcome"], run.results["verdict"]) == (0, "passed", "INCOMPLETE"), run.stdout
    found = run.results["remarks"]
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True))
    printed = [line for line in run.stdout.splitlines() if "site.yaml:" in line and "no effect" in line]
    assert printed == [f"gpucluster: {line}" for line in found]
