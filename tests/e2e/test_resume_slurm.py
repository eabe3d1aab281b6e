"""Runs of two nodes that go on in another job of a real Slurm, and after a requeue. Skipped where Slurm is not."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.launch.test_launch_resume import EVERY, SUITE, rows
from tests.support.processes import free_port
from tests.support.real_slurm import RealSlurm, running_slurm
from tests.support.slurm_jobs import Job
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

NODES = ("gpc-a", "gpc-b", "gpc-c")
SAME, SWAPPED = "--nodelist=gpc-a,gpc-b", "--nodelist=gpc-a,gpc-c"
LIMITS = {"first": entry(per="gpu"), "second": entry(per="gpu"), "third": entry()}
RESUME = (
    "exec {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --node-rank=$SLURM_NODEID --master-addr=127.0.0.1 "
    "--master-port={port} -m pytest_gpucluster.cli resume {results}"
)


@pytest.fixture(scope="module")
def slurm() -> Iterator[RealSlurm]:
    """One Slurm of three nodes for all tests of this file."""
    with running_slurm(*NODES) as running:
        yield running


def submit(slurm: RealSlurm, folder: Path, options: str, **variables: str) -> Job:
    """A job of ``accept.sbatch`` with three criteria of our own; the second one waits while ``wait`` is there."""
    (folder / "test_parts.py").write_text(textwrap.dedent(SUITE), encoding="utf-8")
    if not (limits := folder / "limits.yaml").exists():
        write_limits(limits, LIMITS, extends=False)
    chosen = {"PROFILE": "", "SUITE": str(folder / "test_parts.py"), "OPTIONS": options, **variables}
    return Job(slurm, folder, "--gpucluster", f"--gpucluster-thresholds={limits}", **chosen)


def in_the_second(slurm: RealSlurm, folder: Path, options: str) -> Job:
    """Such a job, in the second criterion."""
    (folder / "wait").touch()
    job = submit(slurm, folder, options)
    job.wait("in the second criterion", (folder / "second").exists)
    return job


@pytest.fixture(scope="module")
def killed(slurm: RealSlurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose job was killed, all processes at once, in the second criterion."""
    folder = tmp_path_factory.mktemp("killed")
    job = in_the_second(slurm, folder, f"{SAME} --no-requeue")
    slurm.ask("scancel", "--full", "--signal=KILL", job.number)
    assert job.end() in ("FAILED", "CANCELLED"), job.told()
    (folder / "wait").unlink()
    return folder


def test_a_swapped_node_and_other_limits_are_refused(slurm: RealSlurm, killed: Path) -> None:
    """The job fails with the difference, and no file of the run is touched."""
    journal, limits = killed / "results" / "journal.jsonl", killed / "limits.yaml"
    before, own_limits = journal.read_bytes(), limits.read_text(encoding="utf-8")
    swapped = submit(slurm, killed, SWAPPED)
    assert swapped.end() == "FAILED", swapped.told()
    assert "gpc-c cpu 0 has another hostname: it was gpc-b, and is gpc-c" in swapped.told()
    limits.write_text(own_limits.replace('"min": 1', '"min": 2'), encoding="utf-8")
    other = submit(slurm, killed, SAME)
    assert other.end() == "FAILED", other.told()
    assert "the file of limits is another one" in other.told()
    assert journal.read_bytes() == before
    limits.write_text(own_limits, encoding="utf-8")


@pytest.mark.parametrize("way", ["sbatch", pytest.param("srun", marks=pytest.mark.slow)])  # srun asks the same command
def test_the_run_goes_on_in_another_job(slurm: RealSlurm, killed: Path, tmp_path: Path, way: str) -> None:
    """The same job file with the same RESULTS, or ``gpucluster resume`` as a step of each node: one verdict over both parts."""
    folder = shutil.copytree(killed, tmp_path / "copy") if way == "srun" else killed
    job = submit(slurm, killed, SAME) if way == "sbatch" else None
    if job is None:
        step = RESUME.format(python=sys.executable, port=free_port(), results=folder / "results")
        told = slurm.ask("srun", SAME, "--nodes=2", "--ntasks-per-node=1", "--mpi=none", "sh", "-c", step)
        job = Job.known(slurm, "", folder / "no-output", folder / "results")
    else:
        assert job.end() == "COMPLETED", job.told()
        told = job.told()
    results = job.report()
    assert results["verdict"] == "REHEARSED", told
    found = rows(results)
    assert {found["first", place] for place in EVERY} == {("passed", 1)}
    assert {found["second", place] for place in EVERY} == {("passed", 2)}
    assert [one["outcomes"] for one in results["parts"]] == [2, 3]


@pytest.mark.parametrize("where", ["same", pytest.param("other", marks=pytest.mark.slow)])  # by day, where the run goes on
def test_a_requeued_job(slurm: RealSlurm, tmp_path: Path, where: str) -> None:
    """On the same nodes the run goes on. On others it begins anew, beside what was measured before."""
    job = in_the_second(slurm, tmp_path, "--nodelist=gpc-a" if where == "other" else SAME)
    first = job.results / "journal.jsonl"
    nodes = job.record().partition(" NodeList=")[2].split()[0]  # gpc-a,gpc-b, or gpc-[a-b]
    lost = "gpc-b" if nodes.rstrip("]").endswith("b") else "gpc-c"
    try:
        if where == "other":
            slurm.ask("scontrol", "update", f"nodename={lost}", "state=drain", "reason=lost")
        slurm.ask("scontrol", "requeue", job.number)
        (tmp_path / "wait").unlink()
        job.requeued()
        assert job.end() == "COMPLETED", job.told()
    finally:
        slurm.ask("scontrol", "update", f"nodename={lost}", "state=resume")
    before = first.read_bytes()
    if where == "other":
        job.results = tmp_path / "results-1"
        assert first.read_bytes() == before
    results = job.report()
    assert results["verdict"] == "REHEARSED", job.told()
    assert rows(results)["first", "node0-cpu0"] == ("passed", 1)
    assert len(results.get("parts", [])) == (2 if where == "same" else 0)
