"""The job files of deploy/slurm as jobs of a real Slurm with two nodes. Skipped where Slurm is not."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launching import DEADLINE_S, environment
from tests.support.nvml_simulator import build
from tests.support.nvml_simulator import environment as simulated
from tests.support.real_slurm import RealSlurm, own_host, running_slurm
from tests.support.slurm_jobs import FILES, Job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

NODES = ("gpc-a", "gpc-b")


@pytest.fixture(scope="module")
def slurm() -> Iterator[RealSlurm]:
    """One Slurm of two nodes for all tests of this file."""
    with running_slurm(*NODES) as running:
        yield running


def test_a_job_from_submit_to_reports(slurm: RealSlurm, tmp_path: Path) -> None:
    """Both nodes are judged, signed, without a secret on any command line; the exit code is the gate's."""
    job = Job(slurm, tmp_path, "-k", "test_host_memory or test_clock_skew")
    assert job.end() == "COMPLETED", job.told()
    assert "joined 2 of 2 nodes" in job.told()
    assert "not signed" not in job.told()
    assert (job.results / "junit.xml").exists()
    assert job.report()["verdict"] != "ACCEPTED"
    assert (job.results / "report.html").exists() or "report.html" not in job.told()


def test_the_gate_is_the_exit_code(slurm: RealSlurm, tmp_path: Path) -> None:
    """A rehearsal accepts nothing, so the job fails where the gate is on, as it is by default."""
    job = Job(slurm, tmp_path, "-k", "test_clock_skew", GATE="1")
    assert job.end() == "FAILED", job.told()
    assert " ExitCode=0:" not in job.record()


@pytest.mark.parametrize("file", ["accept.sbatch", pytest.param("finetune.sbatch", marks=pytest.mark.slow)])  # the same lines
def test_results_that_cannot_be_written(file: str, slurm: RealSlurm, tmp_path: Path) -> None:
    """As on a shared path that is mounted read-only: the job ends before it starts anything, and says what to change."""
    job = Job(slurm, tmp_path, file=file, RESULTS="/proc/shared")
    assert job.end() == "FAILED", job.told()
    assert "RESULTS=/proc/shared: choose a folder that all nodes share and can write" in job.told()
    assert "torchrun" not in job.told()


def test_a_job_that_is_cancelled_reports(slurm: RealSlurm, tmp_path: Path) -> None:
    """``scancel`` in the run: Slurm's SIGTERM reaches every rank, and the reports are written before its SIGKILL."""
    job = Job(slurm, tmp_path)
    job.wait("measuring", lambda: "joined 2 of 2" in job.told())
    slurm.ask("scancel", job.number)
    assert job.end() == "CANCELLED"
    job.wait("reported", (job.results / "junit.xml").exists)
    assert job.report()["verdict"] == "INCOMPLETE"


@pytest.fixture
def health(slurm: RealSlurm, tmp_path: Path) -> Any:
    """``healthcheck.sh`` on a node whose GPUs are simulated."""
    library = build(tmp_path)
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    command = folder / "gpucluster"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m pytest_gpucluster.cli "$@" --gpus 8\n', encoding="utf-8")
    command.chmod(0o755)

    def run(scenario: str, *, drain: str = "1", script: str = "healthcheck.sh") -> int:
        gpus = simulated(library, scenario)
        paths = {
            name: os.pathsep.join(filter(None, [gpus.get(name), slurm.environment.get(name)]))
            for name in ("LD_LIBRARY_PATH", "PATH")
        }
        variables = {**gpus, **slurm.environment, **paths}
        variables.update(VENV=str(folder.parent), GPUCLUSTER_DRAIN=drain, PYTHONPATH=environment(measured=False)["PYTHONPATH"])
        return subprocess.run([*own_host(NODES[0]), FILES / script], env=variables, check=False, timeout=DEADLINE_S).returncode

    return run


def test_a_bad_node_is_drained_and_freed(slurm: RealSlurm, health: Any) -> None:
    """The reason stands in ``sinfo -R`` whole; a healthy reading frees the node, but not from somebody else's drain."""
    bad = "3.ecc.unc.vol 2"
    assert health(bad, drain="0") == 1
    assert "gpucluster" not in slurm.ask("sinfo", "-R")
    assert health(bad) == 1
    shown = slurm.ask("sinfo", "-R", "--format=%200E %n")
    assert "gpucluster: 2 uncorrected memory errors since the driver was loaded, GPU 3 serial " in shown
    assert health("") == 0
    assert "gpucluster" not in slurm.ask("sinfo", "-R")
    slurm.ask("scontrol", "update", f"nodename={NODES[0]}", "state=drain", "reason=bad cable, ticket 4711")
    for scenario, code in ((bad, 1), ("", 0)):
        assert health(scenario) == code
        assert "bad cable, ticket 4711" in slurm.ask("sinfo", "-R", "--format=%200E %n")
    slurm.ask("scontrol", "update", f"nodename={NODES[0]}", "state=undrain")
    for script in ("prolog.sh", "epilog.sh"):
        assert health(bad, script=script) == 1
        assert health("", script=script) == 0
    assert "gpucluster" not in slurm.ask("sinfo", "-R")
