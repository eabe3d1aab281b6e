"""``gpucluster sweep``: what it submits, in which order, and what it refuses; Slurm's commands are made."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.commands.main import main
from tests.support import fake_slurm

if TYPE_CHECKING:
    from pathlib import Path

JOB = "--gpus-per-node=8 --exclusive --deadline=now+1day"
IDLE = {"gpu-1": "IDLE", "gpu-2": "MIXED", "gpu-3": "IDLE"}
COMMAND = """\
#!/bin/sh
cd {folder} || exit 9
echo "{name} $* | ${{STAGE:-}} ${{SBATCH_PARTITION:-}} ${{SLURM_MEM_PER_NODE:-}}" >> asked.txt
{before}
case "{name} $*" in
    "sbatch --version") cat version.txt;;
    sbatch*) echo 7 >> jobs.txt; echo "$((40 + $(wc -l < jobs.txt)));cluster";;
    "scontrol -o show partition gpu") cat partition.txt;;
    "scontrol -o show node "*) cat nodes.txt;;
esac
"""


class MadeSlurm:
    """A folder on the PATH with Slurm's commands, which write what they are asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "version.txt").write_text("slurm 22.05.8\n", encoding="utf-8")
        self.says(**IDLE)

    def says(self, *, before: str = "", partition: str = "gpu-[1-3]", **states: str) -> None:
        """The nodes, each with its state; ``before`` is shell that each command runs first."""
        records = [fake_slurm.node(state=state).replace("NodeName=vm", f"NodeName={name}") for name, state in states.items()]
        (self.folder / "nodes.txt").write_text("\n".join(records) + "\n", encoding="utf-8")
        text = fake_slurm.PARTITION.replace(" Nodes=vm ", f" Nodes={partition} ")
        (self.folder / "partition.txt").write_text(text, encoding="utf-8")
        for name in ("sbatch", "scontrol", "scancel"):
            command = self.folder / name
            command.write_text(COMMAND.format(folder=self.folder, name=name, before=before), encoding="utf-8")
            command.chmod(0o755)

    @property
    def asked(self) -> list[str]:
        """What changes something, a line each."""
        file = self.folder / "asked.txt"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [line for line in lines if " show " not in line and "--version" not in line]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSlurm:
    """Slurm's commands, asked from a job in partition gpu."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    made = MadeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(made.folder), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_PARTITION", "gpu")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1000")
    return made


def sweep(folder: Path, *words: str) -> int:
    """The exit code."""
    return main(["sweep", str(folder), "--file=sweep.sbatch", f"--job={JOB}", *words])


def test_each_node_gets_its_task(slurm: MadeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Held, given its node, released; then the job that merges. A folder for each node says who is expected."""
    folder = tmp_path / "sweep"
    assert sweep(folder, "--nodes=gpu-[1-3]", "--", "-k", "health") == 0
    of_stage = f"--parsable {JOB} --array=0-2 --hold --nodes=1 --output={folder}/node-%a.out sweep.sbatch -k health"
    of_merge = f"--parsable --dependency=afterany:41 --nodes=1 --output={folder}/merge.out sweep.sbatch -k health"
    assert slurm.asked == [
        f"sbatch --job-name=gpucluster-node {of_stage} | node gpu ",
        *(f"scontrol update JobId=41_{task} ReqNodeList=gpu-{task + 1} |   1000" for task in range(3)),
        "scontrol release 41 |   1000",
        f"sbatch --job-name=gpucluster-merge {of_merge} | merge gpu ",
    ]
    assert sorted(path.name for path in (folder / "nodes").iterdir()) == ["gpu-1", "gpu-2", "gpu-3"]
    assert "job 41 runs on each of 3 nodes alone: gpu-[1-3]\njob 42 then merges" in capsys.readouterr().out


def test_the_last_stage(slurm: MadeSlurm, tmp_path: Path) -> None:
    """On the nodes that passed, and on no other."""
    passed = "--nodes=2 --nodelist=gpu-[1,3] --exclude=gpu-2"
    assert sweep(tmp_path, f"--fabric={passed}") == 0
    (asked,) = slurm.asked
    assert asked.startswith(f"sbatch --job-name=gpucluster-fabric --parsable {JOB} {passed} --output={tmp_path}/fabric.out ")
    assert asked.endswith(" | fabric gpu ")


@pytest.mark.parametrize("state", ["DOWN*", "IDLE+DRAIN", "FAIL", "IDLE*"])
def test_a_node_that_can_take_no_job_is_left_out(
    state: str, slurm: MadeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its task would wait for ever. It has a folder, so that whoever merges misses it."""
    slurm.says(**{**IDLE, "gpu-2": state})
    assert sweep(tmp_path / "sweep") == 0
    assert [line.split()[2:4] for line in slurm.asked if " update " in line] == [
        ["JobId=41_0", "ReqNodeList=gpu-1"],
        ["JobId=41_1", "ReqNodeList=gpu-3"],
    ]
    assert (tmp_path / "sweep" / "nodes" / "gpu-2").is_dir()
    assert "left out: gpu-2 is " in capsys.readouterr().out


def test_no_node_can_take_a_job(slurm: MadeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1; nothing is submitted, and nothing is made."""
    slurm.says(**dict.fromkeys(IDLE, "DOWN"))
    assert sweep(tmp_path / "sweep") == 1
    assert (slurm.asked, (tmp_path / "sweep").exists()) == ([], False)
    assert "none of 3 nodes can take a job: nothing was submitted" in capsys.readouterr().out


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said where the usage is wrong."""
    assert sweep(folder, *words) == 2
    return capsys.readouterr().err


def test_two_sweeps_in_one_folder(slurm: MadeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second is refused before it submits anything."""
    assert sweep(tmp_path) == 0
    jobs = len(slurm.asked)
    said = refused(tmp_path, capsys)
    assert f"{tmp_path} holds a sweep already, perhaps of a job that runs: choose another folder" in said
    assert "(RESULTS in sweep.sbatch)" in said
    assert len(slurm.asked) == jobs


@pytest.mark.parametrize(
    ("folder", "why"), [("/proc/sweep", "No such file or directory"), ("/dev/null/sweep", "Not a directory")]
)
def test_a_folder_that_cannot_be_written(
    folder: str, why: str, slurm: MadeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a shared path that is mounted read-only."""
    said = refused(tmp_path / folder, capsys)
    assert f"{folder} cannot be written: {why}; choose another folder, which all nodes share and can write" in said
    assert slurm.asked == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes=gpu-[1"], "has a bracket without its end"),
        (["--nodes=gpu-[1-3],gpu-7,gpu-8"], "Slurm has no node gpu-[7-8]: correct --nodes (NODES in sweep.sbatch)"),
    ],
)
def test_nodes_that_are_none(
    words: list[str], said: str, slurm: MadeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong list, and names that Slurm does not know."""
    assert said in refused(tmp_path / "sweep", capsys, *words)
    assert slurm.asked == []


def test_a_partition_without_nodes(
    slurm: MadeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or no partition at all: say which nodes."""
    slurm.says(partition="(null)", **IDLE)
    assert "partition gpu names no nodes" in refused(tmp_path / "sweep", capsys)
    monkeypatch.delenv("SLURM_JOB_PARTITION")
    assert "which nodes? Say --nodes" in refused(tmp_path / "sweep", capsys)


def test_no_slurm(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence, not a traceback."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch is not on the PATH: start this on a host of a Slurm cluster" in refused(tmp_path / "sweep", capsys)


@pytest.mark.parametrize(("version", "code"), [("slurm 18.08.9", 2), ("slurm 19.05.0", 0), ("slurm-wlm 25.11.2", 0)])
def test_an_old_slurm(version: str, code: int, slurm: MadeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused by its version, with the one that is needed."""
    (slurm.folder / "version.txt").write_text(f"{version}\n", encoding="utf-8")
    assert sweep(tmp_path / "sweep") == code
    said = f"{version} is too old: Slurm 19.05 brought --gpus-per-node; update Slurm"
    assert (said in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ('case "$*" in *--array*) echo "sbatch: error: Invalid account" >&2; exit 1;; esac', "Invalid account"),
        ('case "$*" in *41_1*) echo "Access denied" >&2; exit 1;; esac', "Access denied"),
        ('case "$*" in *afterany*) echo "too many jobs" >&2; exit 1;; esac', "sbatch refused it: too many jobs"),
        ('case "$*" in *"show node"*) echo "no controller" >&2; exit 1;; esac', "no controller"),
    ],
    ids=["the array", "a change", "the merge", "the nodes"],
)
def test_a_slurm_that_refuses(
    before: str, said: str, slurm: MadeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Slurm's own words; no array is left behind."""
    slurm.says(before=before, **IDLE)
    assert said in refused(tmp_path / "sweep", capsys)
    has_array = any("--hold" in line for line in slurm.asked) and said != "Invalid account"
    assert any(line.startswith("scancel 41 ") for line in slurm.asked) == has_array
