"""Whole runs in a job of a made Slurm: a healthy one, each fault, and no job at all."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pytest_gpucluster.inventory.numa import read_threads_of_core
from tests.support import REPOSITORY, fake_slurm
from tests.support.launching import ACCEPTANCE, PYTEST, Launch, environment
from tests.support.nvml_simulator import build
from tests.support.nvml_simulator import environment as with_gpus
from tests.support.runs import RUN_S, collect

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

JUDGED = ("slurm_node", "slurm_config", "slurm_job")
CORES = len({min(read_threads_of_core(cpu)) for cpu in os.sched_getaffinity(0)})
NODE: dict[str, Any] = {"state": "ALLOCATED", "gres": "gpu:h200:2(S:0)"}
JOB: dict[str, Any] = {"cpus": f"0-{CORES - 1}", "gres": "gpu:h200:2(IDX:0-1)", "memory_mib": 1000}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated NVML."""
    return build(tmp_path_factory.mktemp("nvml"))


def limits() -> dict[str, Any]:
    """The packaged entries, both required, so that each shows in the verdict."""
    packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))["criteria"]
    return {
        "schema": 1,
        "profiles": {"h200-sxm": {"gpu": "h200-sxm", "accept_at": "quick"}},
        "criteria": {key: {**packaged[key], "severity": "required"} for key in JUDGED},
    }


def run(folder: Path, library: Path, *, in_job: bool = True, has_command: bool = True, **changes: Any) -> FinishedRun:
    """The two criteria on two simulated GPUs.

    ``node``, ``job`` and ``partition`` change the records, ``before`` is shell that scontrol runs first; a test of the run
    makes ``between`` the record of the node.
    """
    node, job = ({**made, **changes.get(name, {})} for name, made in (("node", NODE), ("job", JOB)))
    (folder / "limits.yaml").write_text(json.dumps(limits()), encoding="utf-8")
    before = changes.get("before", "")
    partition = changes.get("partition", fake_slurm.PARTITION)
    records = {"node": fake_slurm.node(**node), "job": fake_slurm.job(**job), "partition": partition}
    commands = fake_slurm.install(folder / "bin", **records, before=before)
    if not has_command:
        (commands / "scontrol").unlink()
    (folder / "test_between.py").write_text(
        f"from pathlib import Path\n\ndef test_between():\n    Path({str(commands / 'node.txt')!r})"
        f".write_text({changes.get('between', fake_slurm.node(**node))!r})\n",
        encoding="utf-8",
    )
    options = ("--gpucluster-thresholds=limits.yaml", "--gpucluster-gate", "--junitxml=junit.xml")
    kept = {name: value for name, value in environment(measured=True).items() if not name.startswith("SLURM")}
    gpus = {name: value for name, value in with_gpus(library, "count 2\n").items() if not name.startswith("SLURM")}
    variables = {**gpus, **kept, "LD_LIBRARY_PATH": gpus["LD_LIBRARY_PATH"], "FAKE_NVML": gpus["FAKE_NVML"]}
    variables["PATH"] = f"{commands}{os.pathsep}{variables['PATH']}"
    if in_job:
        variables["SLURM_JOB_ID"] = fake_slurm.JOB_ID
    command = [*PYTEST, f"{ACCEPTANCE}/test_slurm.py", "test_between.py", *options]
    launch = Launch(command=command, cwd=folder, environment=variables, name="node0").start()
    try:
        launch.end(within_s=RUN_S)
    finally:
        launch.kill_all()
    return collect([launch])


def outcomes(ran: FinishedRun) -> dict[str, str]:
    """What became of each criterion."""
    return {key: ran.outcomes(key).get("node0", "") for key in JUDGED}


def test_a_healthy_job(tmp_path: Path, library: Path) -> None:
    """ACCEPTED; a partition that a site has closed is a remark."""
    ran = run(tmp_path, library, partition=fake_slurm.PARTITION.replace("State=UP", "State=DRAIN"))
    assert outcomes(ran) == dict.fromkeys(JUDGED, "passed"), ran.stdout
    assert (ran.results["verdict"], ran.returncode) == ("ACCEPTED", 0)
    assert ran.row("slurm_node", "node0")["remark"] == "partition gpu is DRAIN, not UP"
    assert ran.row("slurm_node", "node0")["evidence"]["partitions"] == "gpu DRAIN"


@pytest.mark.slow
def test_no_command(tmp_path: Path, library: Path) -> None:
    """A container with the job's variables and without Slurm's commands: skipped by rule."""
    if shutil.which("scontrol") is not None:
        pytest.skip("this machine has a scontrol of its own")
    ran = run(tmp_path, library, has_command=False)
    assert outcomes(ran) == dict.fromkeys(JUDGED, "skipped"), ran.stdout


@pytest.mark.parametrize("drains", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_host_that_is_drained_during_the_run(tmp_path: Path, library: Path, *, drains: bool) -> None:
    """Healthy at the start, and drained under load: it fails. The twin stays in service."""
    change = "IDLE+DRAIN" if drains else "IDLE"
    ran = run(tmp_path, library, between=fake_slurm.node(**{**NODE, "state": change}))
    assert ran.outcomes("slurm_node") == {"node0": "failed" if drains else "passed"}, ran.stdout
    evidence = ran.row("slurm_node", "node0")["evidence"]
    assert ("DRAIN" in evidence["node"], "ALLOCATED" in evidence["node at the start"]) == (drains, True)


def test_no_job(tmp_path: Path, library: Path) -> None:
    """Skipped by rule, with the reason, though a scontrol is there."""
    ran = run(tmp_path, library, in_job=False, node={"state": "DOWN"})
    assert outcomes(ran) == dict.fromkeys(JUDGED, "skipped"), ran.stdout
    assert "SLURM_JOB_ID is not set, or scontrol is not on the PATH" in ran.row("slurm_node", "node0")["reason"]


@pytest.mark.parametrize(
    ("bad", "changes", "said"),
    [
        (
            "slurm_node",
            {"node": {"state": "MIXED+DRAIN", "reason": fake_slurm.REASON}},
            "DRAIN: it gets no new jobs (reason: bad GPU 3 [me@x] [root@2026-11-23T12:30:47])",
        ),
        pytest.param(
            "slurm_node",
            {"node": {"state": "DOWN*"}},
            "NOT_RESPONDING: its slurmd does not answer the controller",
            marks=pytest.mark.slow,
        ),
        ("slurm_node", {"job": {"gres": "gpu:h200:3"}}, "NVML shows 2 GPUs, and the job has 3 here"),
        pytest.param(
            "slurm_job",
            {"job": {"gres": "gpu:h200:1(IDX:0)"}},
            "the job has 1 of 2 GPUs here and sees 2",
            marks=pytest.mark.slow,
        ),
        ("slurm_job", {"job": {"cpus": "0-299"}}, f"the ranks may use {CORES} cores, and the job has 300 here"),
    ],
)
def test_one_fault(tmp_path: Path, library: Path, bad: str, changes: dict[str, Any], said: str) -> None:
    """The right criterion fails, at the host, in words; the other passes."""
    ran = run(tmp_path, library, **changes)
    assert outcomes(ran) == {**dict.fromkeys(JUDGED, "passed"), bad: "failed"}, ran.stdout
    assert said in str(ran.row(bad, "node0")["evidence"]["found"])
    (culprit,) = ran.results["culprits"]
    assert (culprit["kind"], culprit["place"]["id"]) == ("host" if bad == "slurm_node" else "settings", "node0")
    assert ran.returncode == 1


@pytest.mark.parametrize(
    ("before", "said"),
    [
        pytest.param("sleep 1000", "no answer within 15 s", marks=pytest.mark.slow),
        ("echo 'slurm_load_node error: Access/permission denied' >&2; exit 1", "Access/permission denied"),
        pytest.param("rm -f node.txt job.txt; echo NodeName=x; exit 0", "is no record of a node", marks=pytest.mark.slow),
    ],
)
def test_slurm_gives_no_answer(tmp_path: Path, library: Path, before: str, said: str) -> None:
    """An ERROR of each that says why, in bounded time; never green."""
    ran = run(tmp_path, library, before=before)
    assert outcomes(ran) == dict.fromkeys(JUDGED, "error"), ran.stdout
    assert said in ran.row("slurm_node", "node0")["reason"]
    assert (ran.results["verdict"], ran.returncode) == ("INCOMPLETE", 1)
