"""What ``gpucluster launch`` takes from Slurm's variables, and what it refuses."""

from __future__ import annotations

import shlex

import pytest

from pytest_gpucluster.commands import main
from pytest_gpucluster.commands.sweep import FIRST_PORT, PORTS, SlurmStep, read_step
from pytest_gpucluster.errors import ConfigurationError

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "gpu-[08-10]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu-[08-10]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "2",
    "SLURM_GPUS_ON_NODE": "8",
}
HOSTS = ("gpu-08", "gpu-09", "gpu-10")


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of a Slurm that these tests may run in."""
    for name in STEP:
        monkeypatch.delenv(name, raising=False)


def test_a_step() -> None:
    """Everything but the test to run."""
    port = FIRST_PORT + 4711 * 16 % PORTS
    assert read_step(STEP) == SlurmStep(hosts=HOSTS, node_rank=2, num_gpus=8, port=port, start="4711.0")
    assert read_step({}) is None


def test_a_requeue_shares_nothing_with_the_start_before() -> None:
    """Neither the port nor the name of the start: ranks that were left cannot mix in."""
    starts = [read_step({**STEP, "SLURM_RESTART_COUNT": str(count)}) for count in range(16)]
    assert len({one.port for one in starts if one is not None}) == 16
    assert len({one.start for one in starts if one is not None}) == 16
    assert all(1024 < one.port < 32768 for one in starts if one is not None)


@pytest.mark.parametrize(
    ("changes", "num_gpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_GPUS_PER_NODE": "h100:4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "h200:8"}, 8),
        ({"SLURM_GPUS_ON_NODE": ""}, None),
    ],
)
def test_gpus_of_a_node(changes: dict[str, str], num_gpus: int | None) -> None:
    """In each form that Slurm writes."""
    step = read_step({**STEP, **changes})
    assert step is not None
    assert step.num_gpus == num_gpus


def test_a_batch_script_of_one_node() -> None:
    """It needs no srun."""
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "a", "SLURM_GPUS_ON_NODE": "1"}
    step = read_step(job)
    assert step is not None
    assert (step.hosts, step.node_rank) == (("a",), 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_STEP_ID": None}, "start it on each with srun --ntasks-per-node=1"),
        ({"SLURM_STEP_NUM_TASKS": "24"}, "24 tasks on 3 nodes: one task a node"),
        ({"SLURM_STEP_NODELIST": "gpu-[08"}, "is no list of hosts"),
        ({"SLURM_STEP_NODELIST": ""}, "Slurm set no SLURM_STEP_NODELIST"),
    ],
)
def test_refused(changes: dict[str, str | None], words: str) -> None:
    """Each with what to change."""
    variables = {name: value for name, value in {**STEP, **changes}.items() if value is not None}
    with pytest.raises(ConfigurationError, match=words):
        read_step(variables)


def test_launch_needs_no_argument(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a step; outside one, it says which are needed."""
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert main.main(["launch", "--", "-q"]) == 0
    lines = [shlex.split(line, comments=True) for line in capsys.readouterr().out.splitlines()]
    assert [line[4] for line in lines] == [f"--node-rank={rank}" for rank in range(3)]
    assert lines[0][2:4] == ["--nnodes=3", "--nproc-per-node=8"]
    assert lines[0][5] == "--master-addr=gpu-08"
    assert main.main(["launch", "--nproc-per-node", "2", "--master-port", "29501", "--", "-q"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert "--nproc-per-node=2" in line
    assert "--master-port=29501" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--nnodes is needed outside a Slurm job"),
        (["--nnodes", "2"], "--nproc-per-node is needed"),
        (["--nnodes", "2", "--nproc-per-node", "8"], "--master-addr is needed"),
    ],
)
def test_outside_slurm(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, with the option."""
    assert main.main(["launch", *options, "--", "-q"]) == 2
    assert words in capsys.readouterr().err


def test_a_job_without_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of ranks is asked for."""
    for name, value in {**STEP, "SLURM_GPUS_ON_NODE": ""}.items():
        monkeypatch.setenv(name, value)
    assert main.main(["launch", "--", "-q"]) == 2
    assert "Slurm gave this job no GPU (--gpus-per-node): say --nproc-per-node" in capsys.readouterr().err
