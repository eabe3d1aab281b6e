"""The competitor comes when somebody works on the GPU, and not before; over the simulated NVML, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.nvml_simulator import build, environment, plant
from tests.support.scripts import BENCHMARKS

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = BENCHMARKS / "competitor.py"
OPTIONS = ("--gpu=1", "--device=cpu", "--after-s=0", "--seconds=0.2")
WORK = {"busy": "count 2\n1.util 97\n", "used": "count 2\n1.process.0 4711 1000\n"}
ELSEWHERE = {"busy": "count 2\n0.util 97\n1.util 30\n", "used": "count 2\n0.process.0 4711 1000\n"}


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the simulated library."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.mark.long
@pytest.mark.parametrize("when", list(WORK))
def test_comes_when_somebody_works_there(simulator: Path, when: str) -> None:
    """It waits, comes and leaves, and says each with its pid."""
    variables = environment(simulator, ELSEWHERE[when])
    command = [sys.executable, str(SCRIPT), *OPTIONS, f"--when={when}"]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first: dict[str, Any] = json.loads(process.stdout.readline())
        assert (first["event"], first["pid"]) == ("waits", process.pid)
        assert first["uuid"].startswith("GPU-00000001")
        plant(variables, WORK[when])
        came, left = (json.loads(line) for line in process.stdout)
    assert (came["event"], left["event"], process.returncode) == ("came", "left", 0)
    assert left["products"] > 0


@pytest.mark.long
@pytest.mark.parametrize("when", list(WORK))
def test_work_elsewhere_is_not_waited_for(simulator: Path, when: str) -> None:
    """Another GPU's, or a little."""
    command = [sys.executable, str(SCRIPT), *OPTIONS, f"--when={when}", "--within-s=0.5"]
    ran = subprocess.run(
        command, env=environment(simulator, ELSEWHERE[when]), capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, len(ran.stdout.splitlines())) == (1, 1)
    assert "nobody came to GPU 1 within 0.5 s" in ran.stderr
