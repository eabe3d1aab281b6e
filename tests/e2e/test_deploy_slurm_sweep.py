"""``deploy/slurm/sweep.sbatch`` on a real Slurm: each node once, alone; the fabric on those that passed."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.support.real_slurm import RealSlurm, running_slurm
from tests.support.slurm_jobs import Job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

GOOD, DRAINED, CANCELLED, DOWN = ("gpc-1", "gpc-4"), "gpc-2", "gpc-3", "gpc-9"
MEASURES = "--gpus-per-node=0 --exclusive --mem=0 --deadline=now+1day"


@pytest.fixture(scope="module")
def slurm() -> Iterator[RealSlurm]:
    """Four nodes, and one that is down."""
    with running_slurm(*sorted([*GOOD, DRAINED, CANCELLED]), absent=(DOWN,)) as running:
        running.ask("scontrol", "update", f"nodename={DOWN}", "state=down", "reason=power supply, ticket 12")
        yield running


def submit(slurm: RealSlurm, folder: Path, **variables: str) -> Job:
    """The first job of a sweep."""
    chosen = ("-k", "test_host_memory or test_clock_skew or test_slurm_node")
    return Job(slurm, folder, *chosen, file="sweep.sbatch", OPTIONS="--nodes=1", JOB=MEASURES, **variables)


def hosts(results: Path) -> set[str]:
    """The hosts that a run met."""
    read = json.loads((results / "results.json").read_text(encoding="utf-8"))
    return {place["hostname"] for place in read["places"]}


def test_from_one_submission_to_the_fabric(slurm: RealSlurm, tmp_path: Path) -> None:
    """Every node runs once, alone; bad nodes are excluded by name and reason, and the fabric stage has the others."""
    first = submit(slurm, tmp_path)
    assert first.end() == "COMPLETED", first.told()
    assert re.search(rf"left out: {DOWN} is DOWN\S* in Slurm: power supply, ticket 12", first.told())
    started = re.search(r"job (\d+) runs on each of 4 nodes alone: gpc-\[1-4\]\njob (\d+) then", first.told())
    assert started is not None, first.told()
    array, merge = started.groups()
    first.wait("running on all nodes", lambda: len(slurm.ask("squeue", "-h", "-j", array, "-t", "RUNNING").splitlines()) == 4)
    slurm.ask("scontrol", "update", f"nodename={DRAINED}", "state=drain", "reason=bad GPU 3")
    slurm.ask("scancel", f"{array}_{sorted([*GOOD, DRAINED, CANCELLED]).index(CANCELLED)}")
    merged = Job.known(slurm, merge, first.results / "merge.out", first.results)
    assert merged.end() == "COMPLETED", merged.told()
    for node in (*GOOD, DRAINED):
        assert hosts(first.results / "nodes" / node) == {node}
    assert f"excluded {DRAINED}: slurm_node failed: DRAIN: it gets no new jobs (reason: bad GPU 3 " in merged.told()
    assert f"excluded {CANCELLED}: " in merged.told()
    assert re.search(rf"excluded {DOWN}: it never reported; it is DOWN\S* in Slurm: power supply", merged.told())
    assert "passed: 2 of 5 nodes: gpc-[1,4]" in merged.told()
    last = re.search(r"job (\d+) runs on the nodes that passed", merged.told())
    assert last is not None, merged.told()
    fabric = Job.known(slurm, last[1], first.results / "fabric.out", first.results / "fabric")
    assert fabric.end() == "FAILED", fabric.told()
    assert " ExitCode=0:" not in fabric.record(), "a rehearsal accepts nothing, and the gate is on"
    assert " ExcNodeList=gpc-[2-3,9] " in fabric.record()
    assert hosts(first.results / "fabric") == set(GOOD)
    again = submit(slurm, tmp_path)
    assert again.end() == "FAILED"
    assert "holds a sweep already" in again.told()


def test_no_node_can_take_a_job(slurm: RealSlurm, tmp_path: Path) -> None:
    """A sentence, and nothing is submitted."""
    first = submit(slurm, tmp_path, NODES=DOWN)
    assert first.end() == "FAILED"
    assert "none of 1 node can take a job: nothing was submitted" in first.told()
    assert not first.results.exists()
