"""Whole rehearsals as jobs of a real Slurm: a healthy one, and what a site may have wrong. Skipped where Slurm is not."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.inventory.numa import read_threads_of_core
from pytest_gpucluster.inventory.slurm import SlurmNode, parse_node, parse_share
from tests.support.launching import ACCEPTANCE, PYTEST, Launch, environment
from tests.support.real_slurm import HOST, MEMORY_MIB, RealSlurm, running_slurm
from tests.support.runs import RUN_S, collect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

JUDGED = ("slurm_node", "slurm_job")
HEALTHY = ("srun", "-n1", f"--mem={MEMORY_MIB}")


@pytest.fixture(scope="module")
def slurm() -> Iterator[RealSlurm]:
    """One Slurm for all tests of this file."""
    with running_slurm() as running:
        yield running


@pytest.fixture(scope="module")
def num_cpus(slurm: RealSlurm) -> int:
    """The CPUs of the node."""
    text = slurm.ask("scontrol", "-o", "show", "node", HOST)
    return int(text.partition("CPUTot=")[2].split()[0])


def run(folder: Path, slurm: RealSlurm, *started: str, before: str = "") -> FinishedRun:
    """The two criteria in a job; ``before`` is shell that runs first in the job."""
    command = shlex.join([*PYTEST, f"{ACCEPTANCE}/test_slurm.py", "--gpucluster-profile=rehearsal", "--junitxml=junit.xml"])
    kept = {name: value for name, value in environment(measured=False).items() if not name.startswith("SLURM")}
    variables = {**kept, **{name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")}}
    if "LD_LIBRARY_PATH" in slurm.environment:
        variables["LD_LIBRARY_PATH"] = slurm.environment["LD_LIBRARY_PATH"]
    script = ["sh", "-c", f"{before or ':'}; exec {command}"]
    launch = Launch(command=[*started, *script], cwd=folder, environment=variables, name="node0").start()
    try:
        launch.end(within_s=RUN_S)
    finally:
        launch.kill_all()
    return collect([launch])


def outcomes(ran: FinishedRun) -> dict[str, str]:
    """What became of each criterion."""
    return {key: ran.outcomes(key).get("node0", "") for key in JUDGED}


def test_the_whole_node(tmp_path: Path, slurm: RealSlurm, num_cpus: int) -> None:
    """A job with all CPUs and all memory is healthy, and its records are read."""
    ran = run(tmp_path, slurm, *HEALTHY, f"-c{num_cpus}")
    assert outcomes(ran) == dict.fromkeys(JUDGED, "passed"), ran.stdout
    evidence = ran.row("slurm_job", "node0")["evidence"]
    assert (ran.row("slurm_job", "node0")["value"], "found" in evidence) == (0, False), json.dumps(evidence)
    assert evidence["job"] == f"{num_cpus} CPUs, {MEMORY_MIB} MiB, GPUs 0"
    assert "is UP" in evidence["controller"]


def test_a_node_that_is_drained(tmp_path: Path, slurm: RealSlurm, num_cpus: int) -> None:
    """Somebody drains it, and its partition, while the job runs: it fails, with the reason; after that it is healthy again."""
    drain = f"scontrol update nodename={HOST} state=drain reason='bad GPU 3'; scontrol update PartitionName=test State=DRAIN"
    try:
        ran = run(tmp_path, slurm, *HEALTHY, f"-c{num_cpus}", before=drain)
        assert outcomes(ran) == {"slurm_node": "failed", "slurm_job": "passed"}, ran.stdout
        assert "DRAIN: it gets no new jobs (reason: bad GPU 3 [" in str(ran.row("slurm_node", "node0")["evidence"]["found"])
        assert ran.row("slurm_node", "node0")["evidence"]["partitions"] == "test DRAIN"
    finally:
        slurm.ask("scontrol", "update", "PartitionName=test", "State=UP")
        slurm.ask("scontrol", "update", f"nodename={HOST}", "state=resume")
    slurm.until("State=IDLE ", "scontrol", "-o", "show", "node", HOST)


def test_ranks_on_one_core(tmp_path: Path, slurm: RealSlurm, num_cpus: int) -> None:
    """A job with all CPUs whose step has one: advisory, so it passes with the value and the words."""
    if num_cpus < 2 or len(read_threads_of_core(0)) >= num_cpus:
        pytest.skip("one core only: nothing to leave out")
    allocated = ["salloc", "-n1", f"-c{num_cpus}", f"--mem={MEMORY_MIB}"]
    ran = run(tmp_path, slurm, *allocated, "srun", "-n1", "-c1", "--exact")
    row = ran.row("slurm_job", "node0")
    assert (row["value"], outcomes(ran)["slurm_node"]) == (1, "passed"), ran.stdout
    assert "the ranks may use 1 core," in str(row["evidence"]["found"])


def test_memory_that_nothing_holds(tmp_path: Path, slurm: RealSlurm, num_cpus: int) -> None:
    """This Slurm has no cgroups, so nothing holds the job to its memory: advisory, so it passes with the value."""
    ran = run(tmp_path, slurm, "srun", "-n1", f"-c{num_cpus}", "--mem=200")
    assert outcomes(ran) == dict.fromkeys(JUDGED, "passed"), ran.stdout
    assert ran.row("slurm_job", "node0")["advisory"], ran.stdout
    assert "no cgroup holds it to that" in str(ran.row("slurm_job", "node0")["evidence"]["found"])


def test_a_controller_that_is_gone(tmp_path: Path, slurm: RealSlurm, num_cpus: int) -> None:
    """The job's commands ask where nobody listens: an ERROR with Slurm's own words, never green."""
    lost = f"sed 's/^SlurmctldPort=.*/SlurmctldPort=9/' {slurm.folder}/slurm.conf > lost.conf; export SLURM_CONF=$PWD/lost.conf"
    ran = run(tmp_path, slurm, *HEALTHY, f"-c{num_cpus}", before=lost)
    assert outcomes(ran) == dict.fromkeys(JUDGED, "error"), ran.stdout
    assert "Unable to contact slurm controller" in ran.row("slurm_node", "node0")["reason"]


def test_records_of_this_version(slurm: RealSlurm) -> None:
    """The readers take the records of the version that is here, also those of nothing."""
    node = parse_node(slurm.ask("scontrol", "-o", "show", "node", HOST))
    assert isinstance(node, SlurmNode)
    assert (node.name, node.host, node.states, node.memory_mib) == (HOST, HOST, ["IDLE"], MEMORY_MIB)
    assert "not found" in slurm.ask("scontrol", "-o", "show", "node", "no-such-node")
    assert not hasattr(parse_share(slurm.ask("scontrol", "-d", "-o", "show", "job", "999999"), HOST), "cpus")
