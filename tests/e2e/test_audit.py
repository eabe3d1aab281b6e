"""``--gpucluster-audit``: what is bad is named by reading alone, beside somebody else's job, and nothing is ever accepted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support import REPOSITORY
from tests.support.fleets import not_green, simulate
from tests.support.launching import ACCEPTANCE
from tests.support.nvml_simulator import build, environment
from tests.support.runs import run_pytest
from tests.support.strangers import as_stranger, home_of_stranger

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

AUDIT = "AUDIT: looked only, no part was put under load"
BUSY = f"count 2\n1.process.0 4711 {25 * 2**30}\n1.mem.used {25 * 2**30}\nprogram.4711 python3\n"


def test_planted_readings_are_named(tmp_path: Path) -> None:
    """Each by the criterion that reads it. What only shows under load is not found, and is not said to be good."""
    bad = ("node0-gpu2:nvlink", "node1-gpu2:ecc", "node1-gpu1:slow", "node0-gpu3:reset")
    ran = simulate(tmp_path, "2x4", "--gpucluster-profile=h200-sxm", "--gpucluster-audit", "-m", "health", bad=bad)
    found = not_green(ran)
    assert found["gpu-node-0"]["failed"] == {"nvlink_links"}
    assert found["gpu-node-1 gpu 2"]["failed"] == {"ecc_uncorrected", "remapped_rows"}
    assert found["gpu-node-0 gpu 3"]["failed"] == {"recovery_action"}
    assert not [one for one in found.values() if one.keys() & {"error", "missing", "noisy"}]
    assert {row["outcome"] for row in ran.results["criteria"] if row["criterion"] == "bf16_tflops"} == {"not_selected"}
    assert (ran.results["verdict"], ran.returncode) == ("REJECTED", 1)
    page = next((tmp_path / "gpucluster-results").glob("report.html")).read_text(encoding="utf-8")
    for report in (ran.stdout, ran.results["verdict_line"], page):
        assert AUDIT in report


def test_beside_a_job_without_load_or_acceptance(tmp_path: Path) -> None:
    """A healthy, busy GPU: all is read, no error, no ACCEPTED at the lowest level, and the gate stays closed."""
    packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))["criteria"]
    judged = ("gpu_model", "gpu_memory", "remapped_rows")
    entries = {key: {**packaged[key], "profiles": {}} for key in judged}
    plain = {key: {name: value for name, value in one.items() if name != "measured_with"} for key, one in entries.items()}
    limits = {"schema": 1, "profiles": {"h200-sxm": {"gpu": "h200-sxm", "accept_at": "quick"}}, "criteria": plain}
    (tmp_path / "limits.yaml").write_text(json.dumps(limits), encoding="utf-8")
    options = ("--gpucluster-thresholds=limits.yaml", "--gpucluster-level=quick", "--gpucluster-gate", "--gpucluster-audit")
    chosen = (f"{ACCEPTANCE}/test_health.py", "-k", " or ".join(judged))
    ran = run_pytest(tmp_path, *chosen, *options, variables=environment(build(tmp_path), BUSY))
    assert [row["outcome"] for row in ran.results["criteria"]] == ["passed"] * 6, ran.stdout
    assert (ran.results["verdict"], ran.returncode != 0) == ("INCOMPLETE", True)
    assert AUDIT in ran.results["verdict_line"]


def test_as_a_user_who_is_not_root() -> None:
    """The whole command, beside a job: each outcome with its reason, no traceback, and root is never named without its use.

    Torch here has no CUDA, so ``torch_sees_gpus`` fails; nothing else is bad or unread for lack of rights.
    """
    with home_of_stranger() as home:
        variables = {**environment(build(home), BUSY), "HOME": str(home), "TMPDIR": str(home)}
        for file in (home, *home.iterdir()):
            file.chmod(0o755 if file.is_dir() else 0o644)
        command = as_stranger([sys.executable, "-m", "pytest_gpucluster.cli", "audit", "--", "--gpucluster-profile=h200-sxm"])
        done = subprocess.run(command, cwd=home, env=variables, capture_output=True, text=True, timeout=300, check=False)
        said = done.stdout + done.stderr
        results = json.loads((home / "gpucluster-audit" / "results.json").read_text(encoding="utf-8"))
    assert "Traceback" not in said
    assert "ACCEPTED" not in said
    assert (results["verdict"], done.returncode) == ("REJECTED", 1)
    assert AUDIT in results["verdict_line"]
    rows = [row for row in results["criteria"] if row["outcome"] != "not_selected"]
    assert [row["criterion"] for row in rows if row["outcome"] in ("failed", "error", "noisy", "missing")] == [
        "torch_sees_gpus"
    ]
    assert len({row["criterion"] for row in rows if row["outcome"] == "passed"}) >= 25
    reasons = [row["reason"] for row in rows if row["outcome"] != "passed"]
    assert all(reasons)
    asking = [line for line in [*said.splitlines(), *reasons] if re.search(r"\b(as|needs|only|which) root\b", line)]
    assert [line for line in asking if not re.search(r"root would see|which root reads", line)] == []
    assert results["timings"]["measuring_s"] < 20
