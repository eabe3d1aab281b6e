"""``--gpucluster-gate`` on three simulated GPUs: 0 where all is well, and no hook makes a 0 of one broken GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.e2e.test_gate_exit_code import HOOKS
from tests.support import REPOSITORY
from tests.support.launching import ACCEPTANCE
from tests.support.nvml_simulator import build, environment
from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

FAST = ("session finish, last", "os._exit in a test", "unconfigure leaves")
"""The other hooks are tried here at night, and always in the file that lists them."""
JUDGED = ("gpu_model", "gpu_memory", "remapped_rows")
HEALTHY, BROKEN = "count 3\n", "count 3\n2.mem.total 85899345920\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulator."""
    return build(tmp_path_factory.mktemp("nvml"))


def launch(folder: Path, library: Path, scenario: str, hook: str = "") -> FinishedRun:
    """Three of NVML's criteria, with the gate, and a conftest with one hook."""
    packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))
    entries = {key: {**packaged["criteria"][key], "profiles": {}} for key in JUDGED}
    criteria = {
        key: {name: value for name, value in entry.items() if name != "measured_with"} for key, entry in entries.items()
    }
    limits = {"schema": 1, "profiles": {"h200-sxm": {"gpu": "h200-sxm", "accept_at": "quick"}}, "criteria": criteria}
    (folder / "limits.yaml").write_text(json.dumps(limits), encoding="utf-8")
    (folder / "conftest.py").write_text(hook, encoding="utf-8")
    (folder / "test_plain.py").write_text("def test_plain():\n    pass\n", encoding="utf-8")
    chosen = (f"{ACCEPTANCE}/test_health.py", "test_plain.py", "-k", " or ".join((*JUDGED, "test_plain")))
    variables = environment(library, scenario)
    return run_pytest(folder, *chosen, "--gpucluster-thresholds=limits.yaml", "--gpucluster-gate", variables=variables)


def test_open_for_accepted(tmp_path: Path, library: Path) -> None:
    """Every GPU is as promised: ACCEPTED, and 0."""
    ran = launch(tmp_path, library, HEALTHY)
    assert (ran.results.get("verdict"), ran.returncode) == ("ACCEPTED", 0), ran.stdout


@pytest.mark.parametrize("hook", [pytest.param(hook, marks=() if hook in FAST else pytest.mark.slow) for hook in HOOKS])
def test_closed_for_rejected(tmp_path: Path, library: Path, hook: str) -> None:
    """One GPU has too little memory. The hook chooses 0, and the exit code is not 0."""
    ran = launch(tmp_path, library, BROKEN, HOOKS[hook])
    assert ran.returncode == 1, ran.stdout
    if hook not in ("another main", "os._exit at import"):  # which run no test
        assert ran.results.get("verdict") == "REJECTED", ran.stdout
