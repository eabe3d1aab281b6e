"""What ends a job of deploy/slurm before its time, on a real Slurm: reports, requeue, resume. Skipped where Slurm is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.real_slurm import RealSlurm, running_slurm
from tests.support.slurm_jobs import Job

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


def test_a_job_at_its_time_limit_reports(slurm: RealSlurm, tmp_path: Path) -> None:
    """Slurm sends SIGTERM two minutes before the limit, which is now: the reports are written, and the job ends by itself."""
    job = Job(slurm, tmp_path, LEVEL="soak:1h")
    job.wait("measuring", lambda: "joined 2 of 2" in job.told())
    slurm.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=2")
    assert job.end() in ("FAILED", "COMPLETED", "TIMEOUT"), job.told()
    assert job.report()["verdict"] == "INCOMPLETE"
    assert (job.results / "junit.xml").exists()


def test_a_node_that_is_lost_ends_the_job(slurm: RealSlurm, tmp_path: Path) -> None:
    """Its slurmd is killed in the run: Slurm names the node, and the ranks of the other one write their reports."""
    job = Job(slurm, tmp_path, LEVEL="soak:1h", OPTIONS="--no-requeue")
    job.wait("measuring", lambda: "joined 2 of 2" in job.told())
    with slurm.lost_node(NODES[1]):
        assert job.end() == "NODE_FAIL", job.told()
        assert "DUE TO NODE FAILURE" in job.told()
        assert NODES[1] in slurm.ask("sinfo", "-R", "--format=%E %n")
        job.wait("reported", (job.results / "results.json").exists)
        assert job.report()["verdict"] == "INCOMPLETE"


@pytest.mark.slow  # by day, a job that has measured is requeued (test_resume_slurm.py)
def test_a_requeued_job_starts_anew(slurm: RealSlurm, tmp_path: Path) -> None:
    """The second start has a port and a name of its own, and its reports are those of a whole run."""
    job = Job(slurm, tmp_path, "-k", "test_host_memory or test_clock_skew")
    job.wait("running", lambda: job.state == "RUNNING" and "2 nodes" in job.told())
    slurm.ask("scontrol", "requeue", job.number)
    job.requeued()
    assert job.end() == "COMPLETED", job.told()
    assert job.report()["verdict"] != "ACCEPTED"


def fine_tune(slurm: RealSlurm, folder: Path) -> Job:
    """A job that trains on two nodes, and has its first checkpoints."""
    options = ("--steps", "150", "--window-steps", "5", "--loss-limit", "none")
    job = Job(slurm, folder, *options, file="finetune.sbatch", PRESET="tiny", EVERY="5")
    job.wait("at step 10", lambda: "step 10 of 150" in job.told())
    return job


def test_a_fine_tune_goes_on_after_a_requeue(slurm: RealSlurm, tmp_path: Path) -> None:
    """USR1, as Slurm sends it before the time limit: checkpoint, exit code 3, requeue, and on from that step."""
    job = fine_tune(slurm, tmp_path)
    slurm.ask("scancel", "--signal=USR1", job.number)
    job.requeued()
    job.wait("completed", lambda: job.state == "COMPLETED")  # FAILED for a moment, before Slurm requeues it
    assert job.told().count("step 5 of 150") == 1, job.told()
    assert '"resumed_at": null' not in job.told().rpartition("RESULT")[2], job.told()


@pytest.mark.slow  # by day, after a requeue, and an acceptance whose node is lost
def test_a_fine_tune_goes_on_after_a_kill(slurm: RealSlurm, tmp_path: Path) -> None:
    """A slurmd is killed: Slurm requeues the job, and it goes on from its checkpoint once the node is back."""
    job = fine_tune(slurm, tmp_path)
    with slurm.lost_node(NODES[1]):
        slurm.ask("scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=killed")  # as Slurm does after a while
        job.wait("requeued", lambda: " Restarts=0 " not in job.record())
    job.requeued()
    job.wait("completed", lambda: job.state == "COMPLETED")
    assert job.told().count("step 5 of 150") == 1, job.told()
    assert '"resumed_at": null' not in job.told().rpartition("RESULT")[2], job.told()
