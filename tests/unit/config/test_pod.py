"""What a Pod of an Indexed Job knows of itself, and the sentence for each manifest that does not fit."""

from __future__ import annotations

import shlex
import socket
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.commands import launch, main
from pytest_gpucluster.config.pod import PodOfJob, read_pod
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.protocol.rank import own_hostname

if TYPE_CHECKING:
    from pathlib import Path

JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "GPUCLUSTER_NODES": "2",
    "GPUCLUSTER_GPUS": "8",
    "GPUCLUSTER_SERVICE": "gpucluster",
    "GPUCLUSTER_START": "0a1b-uid",
}
ELEVEN = {"GPUCLUSTER_NODES": "11"}
TRAINER = {
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "accept-node-0-0.accept",
    "PET_MASTER_PORT": "29400",
}


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of a Slurm or a Pod that these tests may run in, and a folder to write into."""
    for name in (*JOB, *TRAINER, "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "GPUCLUSTER_SECRET", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def inside(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], hostname: str = "gpucluster-1") -> None:
    """A Pod with these variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)


@pytest.mark.parametrize(
    ("variables", "hostname", "expected"),
    [
        (JOB, "gpucluster-1", (1, 2, 8, "gpucluster-0.gpucluster", None, "0a1b-uid")),
        (JOB, "accept-nodes-0-1", (1, 2, 8, "accept-nodes-0-0.gpucluster", None, "0a1b-uid")),  # a JobSet's
        ({**JOB, "JOB_COMPLETION_INDEX": "0"}, "a-0", (0, 2, 8, "a-0.gpucluster", None, "0a1b-uid")),
        ({**JOB, "JOB_COMPLETION_INDEX": "10"} | ELEVEN, "a-10", (10, 11, 8, "a-0.gpucluster", None, "0a1b-uid")),
        (TRAINER, "accept-node-0-1", (1, 2, 8, "accept-node-0-0.accept", 29400, "")),
        ({**TRAINER, "PET_NPROC_PER_NODE": "auto"}, "x", (1, 2, None, "accept-node-0-0.accept", 29400, "")),
        ({"JOB_COMPLETION_INDEX": "0", "GPUCLUSTER_NODES": "1"}, "alone", (0, 1, None, "alone", None, "")),
        ({"JOB_COMPLETION_INDEX": "0"}, "a-0", (0, None, None, None, None, "")),
    ],
)
def test_a_pod(variables: dict[str, str], hostname: str, expected: tuple[object, ...]) -> None:
    """Of a Job, of a JobSet, and of Kubeflow's Trainer; a single node needs no Service."""
    names = ("index", "num_nodes", "num_gpus", "master_addr", "port", "start")
    assert read_pod(variables, hostname=hostname) == PodOfJob(**dict(zip(names, expected, strict=True)))


def test_no_pod() -> None:
    """Variables of a manifest without the Job's index are no Pod of a Job."""
    assert read_pod({name: value for name, value in JOB.items() if name != "JOB_COMPLETION_INDEX"}, hostname="a") is None


@pytest.mark.parametrize(
    ("changes", "hostname", "words"),
    [
        ({"JOB_COMPLETION_INDEX": "2"}, "a-2", "index 2, and the run has 2 nodes.*set completions and parallelism .* to 2"),
        ({"JOB_COMPLETION_INDEX": "7"}, "a-7", "or GPUCLUSTER_NODES to the number of completions"),
        ({"JOB_COMPLETION_INDEX": ""}, "a-1", "completionMode: Indexed"),
        ({"JOB_COMPLETION_INDEX": "one"}, "a-1", "JOB_COMPLETION_INDEX='one' is no whole number"),
        ({"GPUCLUSTER_NODES": "two"}, "a-1", "GPUCLUSTER_NODES='two' is no whole number: correct it in the manifest"),
        ({"GPUCLUSTER_NODES": "-2"}, "a-1", "no whole number"),
        ({"GPUCLUSTER_NODES": "0"}, "a-1", "the run has 0 nodes"),
        ({"GPUCLUSTER_NODES": ""}, "a-1", r"--nnodes is needed in a Pod without GPUCLUSTER_NODES \(the Job's completions\)"),
        ({"GPUCLUSTER_GPUS": ""}, "a-1", r"--nproc-per-node is needed .* GPUCLUSTER_GPUS \(the container's limit"),
        ({"GPUCLUSTER_GPUS": "all"}, "a-1", "GPUCLUSTER_GPUS='all' is no whole number"),
        ({"GPUCLUSTER_GPUS": "0"}, "a-1", "--nproc-per-node 0 is not a number above zero"),
        ({"GPUCLUSTER_SERVICE": ""}, "a-1", r"--master-addr is needed .* GPUCLUSTER_SERVICE \(the headless Service\)"),
        ({}, "gpu-node-17", "does not end in '-1'.*subdomain 'gpucluster' and no hostNetwork, or say --master-addr"),
    ],
)
def test_a_manifest_that_does_not_fit(
    changes: dict[str, str], hostname: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused before anybody waits, by a sentence that says what to change."""
    inside(monkeypatch, {**JOB, **changes}, hostname)
    with pytest.raises(ConfigurationError, match=words):
        launch.read_job(main._parse(["launch", "--run"]))


def test_no_argument_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what the manifest gives as variables."""
    inside(monkeypatch, JOB)
    job = launch.read_job(main._parse(shlex.split("launch --run -- --pyargs tests_acceptance -k bf16")))
    assert (job.num_nodes, job.num_local, job.node_rank) == (2, 8, 1)
    assert (job.master_addr, job.master_port) == ("gpucluster-0.gpucluster", launch.DEFAULT_PORT)
    assert job.start == "0a1b-uid"
    assert job.pytest_arguments == ("--pyargs", "tests_acceptance", "-k", "bf16")


def test_what_is_said_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options win over variables; an index beyond --nnodes is refused; all options given, no Pod is asked."""
    inside(monkeypatch, {**JOB, "GPUCLUSTER_NODES": "99"}, "some-host")
    options = "--nnodes 3 --nproc-per-node 4 --master-addr 10.0.0.1"
    with pytest.raises(ConfigurationError, match="does not end in"):
        launch.read_job(main._parse(shlex.split(f"launch --run {options}")))
    job = launch.read_job(main._parse(shlex.split(f"launch --run {options} --node-rank 2")))
    assert (job.num_nodes, job.num_local, job.node_rank, job.start) == (3, 4, 2, "")
    inside(monkeypatch, {**JOB, "JOB_COMPLETION_INDEX": "3"}, "a-3")
    with pytest.raises(ConfigurationError, match="index 3, and the run has 3 nodes"):
        launch.read_job(main._parse(shlex.split(f"launch --run {options}")))


def test_slurm_counts_more_than_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm on Kubernetes: a step inside a Pod is Slurm's."""
    step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a,b", "SLURM_GPUS_ON_NODE": "8"}
    inside(monkeypatch, {**JOB, **step}, "gpucluster-1")
    job = launch.read_job(main._parse(["launch", "--run"]))
    assert (job.hosts, job.start) == (("a", "b"), "4711.0")


def test_a_node_is_called_as_the_manifest_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports name the node and not its Pod; without a name, or with an empty one, the hostname counts."""
    inside(monkeypatch, JOB)
    assert own_hostname() == "gpucluster-1"
    monkeypatch.setenv("GPUCLUSTER_HOSTNAME", "")
    assert own_hostname() == "gpucluster-1"
    monkeypatch.setenv("GPUCLUSTER_HOSTNAME", "gpu-17")
    assert own_hostname() == "gpu-17"
    job = launch.read_job(main._parse(["launch", "--run"]))
    assert launch._own_hello(job).hostname == "gpu-17"
    assert job.master_addr == "gpucluster-0.gpucluster"
