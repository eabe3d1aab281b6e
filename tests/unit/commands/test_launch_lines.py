"""``gpucluster launch --show``: what is printed can be run as it is, fits the shape, and explains each of its parts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from pytest_gpucluster.commands import launch_lines, main
from pytest_gpucluster.config import host_list
from pytest_gpucluster.protocol.codec import SECRET_VARIABLE
from tests.support import REPOSITORY
from tests.support.launching import environment
from tests.support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = ("torchrun", "slurm", "kubernetes")
SHAPE = ("--nnodes", "4", "--nproc-per-node", "2")
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[3-4]", "SLURM_GPUS_ON_NODE": "8"}
RECORDS = '#!/bin/sh\nprintf "%s\\0" "$@" > "$OUT/arguments"\ncat > "$OUT/input" || true\n'


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside Slurm, in a folder of the test."""
    for name in [name for name in os.environ if name.startswith("SLURM_")] + [host_list.VARIABLE, SECRET_VARIABLE]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What ``gpucluster launch --show`` prints, a script without a fault."""
    assert main.main(["launch", "--show", *arguments]) == 0
    script = capsys.readouterr().out
    parsed = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False, timeout=60)
    assert parsed.stderr == ""
    return script


def commands(script: str) -> list[list[str]]:
    """The words of each command."""
    return [words for line in script.splitlines() if (words := shlex.split(line, comments=True))]


def recorded(script: str, program: str, folder: Path) -> tuple[list[str], str]:
    """Run the script with a program that records its arguments and its input."""
    (folder / program).write_text(RECORDS, encoding="utf-8")
    (folder / program).chmod(0o755)
    variables = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OUT": str(folder)}
    subprocess.run(["bash", "-eu"], input=script, env=variables, text=True, check=True, timeout=60, cwd=folder)
    arguments = (folder / "arguments").read_text(encoding="utf-8").split("\0")[:-1]
    return arguments, (folder / "input").read_text(encoding="utf-8")


def unexplained(script: str, words: Sequence[str]) -> list[str]:
    """The words that no comment begins with."""
    notes = [line.removeprefix("# ").lstrip("'") for line in script.splitlines() if line.startswith("# ")]
    return [word for word in words if not any(note.startswith(word.split("=")[0]) and "  " in note for note in notes)]


def test_torchrun_shows_the_lines_of_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    """The very lines that are printed without ``--show``, and what each part is for."""
    options = [*SHAPE, "--hosts", "a,b,c,d", "--master-addr", "a", "--", "-k", "bf16 or nccl", "--gpucluster-gate", "own"]
    script = shown(capsys, "torchrun", *options)
    assert main.main(["launch", *options]) == 0
    plain = capsys.readouterr()
    lines = [line for line in script.splitlines() if not line.startswith("#")]
    assert lines == plain.out.splitlines()
    assert SECRET_VARIABLE in plain.err
    assert unexplained(script, commands(script)[0][2:7]) == []
    for words in ("-m pytest ", "-k 'bf16 or nccl' ", "--gpucluster-gate ", "own "):
        assert f"# {words}" in script


def test_without_a_kind_it_is_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    """And node 0 is the first host, or this one."""
    hosts = shown(capsys, "--hosts", "a,b", "--nproc-per-node", "8")
    assert [command[0:2] for command in commands(hosts)] == [["OMP_NUM_THREADS=1", "torchrun"]] * 2
    assert "--master-addr=a" in commands(hosts)[1]
    assert "--master-addr=127.0.0.1" in commands(shown(capsys, "--nnodes", "1", "--nproc-per-node", "8"))[0]


@pytest.mark.long
@pytest.mark.e2e
def test_the_line_of_torchrun_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As it is printed, in a shell."""
    (tmp_path / "test_own.py").write_text("def test_own():\n    open('ran', 'w').close()\n", encoding="utf-8")
    shape = ("--nnodes", "1", "--nproc-per-node", "1", "--master-port", str(free_port()))
    script = shown(capsys, "torchrun", *shape, "--", "-p", "no:cacheprovider", "test_own.py", "-k", "own and not other")
    (tmp_path / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n', encoding="utf-8")
    (tmp_path / "torchrun").chmod(0o755)
    variables = environment(measured=False)
    variables["PATH"] = f"{tmp_path}{os.pathsep}{variables['PATH']}"
    done = subprocess.run(
        ["bash", "-eu"], input=script, env=variables, capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "ran").exists()


SLURM = [
    ((), ["--nodes=4", "--gpus-per-node=2"], []),
    (("--hosts", "a,b,c,d"), ["--nodes=4", "--gpus-per-node=2", "--nodelist=a,b,c,d"], []),
    (
        ("--join-deadline-s", "600", "--master-port", "4000"),
        ["--nodes=4", "--gpus-per-node=2", "--export=ALL,LAUNCH_OPTIONS=--join-deadline-s=600 --master-port=4000"],
        [],
    ),
    (("--", "--pyargs", "tests_acceptance", "-k", "a or b"), ["--nodes=4", "--gpus-per-node=2"], ["-k", "a or b"]),
]


@pytest.mark.parametrize(("given", "options", "behind"), SLURM)
def test_slurm_gets_the_job_of_the_checkout(
    given: Sequence[str], options: list[str], behind: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The file is there, the job file's own suite is not named twice, and each part is explained."""
    script = shown(capsys, "slurm", *SHAPE, *given)
    arguments, _ = recorded(script, "sbatch", tmp_path)
    file = arguments[len(options)]
    assert arguments == [*options, file, *behind]
    assert Path(file).samefile(REPOSITORY / "deploy" / "slurm" / "accept.sbatch")
    assert unexplained(script, [word for word in arguments if word.startswith("-")] + [file]) == []
    assert "#   srun --ntasks-per-node=1 " in script


def test_the_path_is_short_at_the_top_of_the_checkout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the documentation has it."""
    monkeypatch.chdir(REPOSITORY)
    assert commands(shown(capsys, "slurm", *SHAPE))[0][-1] == "deploy/slurm/accept.sbatch"


MANIFEST = """\
data:
  GPUCLUSTER_NODES: "2"     # a comment
  GPUCLUSTER_GPUS: "8"
  LEVEL: standard           # quick, standard
  PYTEST_ADDOPTS: ""        # more
---
spec:
  completions: 2
  parallelism: 2 # all
  limits:
    nvidia.com/gpu: 8
    cpu: "64"
  command: [launch, --join-deadline-s=900]
"""
"""The keys that the job of deploy/kubernetes has."""


@pytest.fixture
def with_manifest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkout that has only that."""
    file = tmp_path / launch_lines.MANIFEST
    file.parent.mkdir(parents=True)
    file.write_text(MANIFEST, encoding="utf-8")
    monkeypatch.setattr(launch_lines, "CHECKOUT", tmp_path)
    return tmp_path


ADDED = [
    ((), "standard", ""),
    (("--pyargs", "tests_acceptance", "--gpucluster-level=soak:8h"), "soak:8h", ""),
    (("--gpucluster-level", "quick", "-k", "a or b"), "quick", "-k 'a or b'"),
    (("-k", 'x & y ~ z | \\ "q"', "--gpucluster-profile=h100-sxm"), "standard", None),
]


@pytest.mark.parametrize(("given", "level", "options"), ADDED)
def test_kubernetes_gets_the_numbers(
    given: Sequence[str], level: str, options: str | None, capsys: pytest.CaptureFixture[str], with_manifest: Path
) -> None:
    """In each place of the manifest; arguments of pytest go through the shell, sed and YAML unchanged. Comments stay."""
    script = shown(capsys, "kubernetes", *SHAPE, "--join-deadline-s", "60", "--", *given)
    arguments, applied = recorded(script, "kubectl", with_manifest)
    assert arguments == ["apply", "-f", "-"]
    variables, job = yaml.safe_load_all(applied)
    added = variables["data"].pop("PYTEST_ADDOPTS")
    assert variables["data"] == {"GPUCLUSTER_NODES": "4", "GPUCLUSTER_GPUS": "2", "LEVEL": level}
    limits = {"nvidia.com/gpu": 2, "cpu": "64"}
    command = ["launch", "--join-deadline-s=60"]
    assert job["spec"] == {"completions": 4, "parallelism": 4, "limits": limits, "command": command}
    assert applied.count("#") == MANIFEST.count("#")
    assert shlex.split(added) == list(given) if options is None else added == options


@pytest.mark.skipif(not (REPOSITORY / launch_lines.MANIFEST).is_file(), reason="there is no such manifest yet")
def test_the_manifest_has_these_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The real one: each number arrives, and no old one is left."""
    _, applied = recorded(shown(capsys, "kubernetes", *SHAPE, "--", "-k", "bf16"), "kubectl", tmp_path)
    documents = {one["kind"]: one for one in yaml.safe_load_all(applied)}
    assert documents["ConfigMap"]["data"] | {"IMAGE": ""} == {
        "IMAGE": "", "GPUCLUSTER_NODES": "4", "GPUCLUSTER_GPUS": "2", "LEVEL": "standard", "PYTEST_ADDOPTS": "-k bf16"
    }  # fmt: skip
    spec = documents["Job"]["spec"]
    assert (spec["completions"], spec["parallelism"]) == (4, 4)
    assert spec["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2


@pytest.mark.parametrize(
    ("option", "value"), [("--", "--gpucluster-results=x"), ("--hosts", "a,b,c,d"), ("--master-port", "4000")]
)
def test_what_kubernetes_decides(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that the manifest would overrule is refused, not lost."""
    assert main.main(["launch", "--show", "kubernetes", *SHAPE, option, value]) == 2
    printed = capsys.readouterr()
    assert f"leave out {value.partition('=')[0] if option == '--' else option}" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_wheel_has_no_template(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The name as in the sources, and where to get it."""
    monkeypatch.setattr(launch_lines, "CHECKOUT", tmp_path)
    script = shown(capsys, kind, *SHAPE)
    assert f" deploy/{kind}/" in script
    assert "comes with the sources of pytest-gpucluster" in script


@pytest.mark.parametrize("kind", KINDS)
def test_slurms_variables_are_enough(kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In an allocation, and in a step of it: the shape is that of the job. Nothing is said of other nodes."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    in_job = shown(capsys, kind)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[3-4]")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert shown(capsys, kind) == in_job
    expected = {
        "torchrun": ["--nnodes=2", "--nproc-per-node=8", "--master-addr=gpu3"],
        "slurm": ["--nodes=2", "--gpus-per-node=8"],
        "kubernetes": ['"2"~', '"8"~'],
    }
    assert [part for part in expected[kind] if part not in in_job] == []
    assert "--nodelist" not in in_job, "the allocation has these nodes already"


WRONG = [
    ((), "--nnodes is needed outside a Slurm job"),
    (("--nnodes", "2"), "--nproc-per-node is needed outside a Slurm job"),
    (("--nnodes", "0", "--nproc-per-node", "8", "--master-addr", "a"), "--nnodes 0 is not a number above zero"),
    ((*SHAPE, "--hosts", "a,b"), "--hosts names 2 hosts, --nnodes says 4"),
    ((*SHAPE, "--run", "--node-rank", "0", "--master-addr", "a"), "--show prints, --run starts"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_usage(kind: str, options: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, a sentence, and no line that somebody might copy."""
    assert main.main(["launch", "--show", kind, *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_slurm_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation of CPUs says nothing of GPUs, and one cannot be guessed."""
    for name, value in JOB.items():
        if name != "SLURM_GPUS_ON_NODE":
            monkeypatch.setenv(name, value)
    assert main.main(["launch", "--show", "slurm"]) == 2
    assert "say --nproc-per-node" in capsys.readouterr().err
    assert "--gpus-per-node=4" in shown(capsys, "slurm", "--nproc-per-node", "4")


def test_torchrun_needs_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    """Of several nodes; the other kinds find one by themselves."""
    assert main.main(["launch", "--show", "torchrun", *SHAPE]) == 2
    assert "--master-addr is needed" in capsys.readouterr().err


def test_an_unknown_kind(capsys: pytest.CaptureFixture[str]) -> None:
    """The usage names the known ones."""
    with pytest.raises(SystemExit) as ended:
        main.main(["launch", "--show", "mpirun", *SHAPE])
    assert ended.value.code == 2
    assert all(kind in capsys.readouterr().err.replace("'", "") for kind in KINDS[:1])


SCRIPTS = [
    "singlenode.sh", "multinode.sh", "run_demo.sh", "tmux_demo.sh", "demo_banner.sh", "demo_status.py", "hardware_info.sh",
    "monitor_nccl.sh", "optimize_env.sh", "discover-environment.sbatch", "smoke_test.sh", "nccl_scaling.sh",
    "nccl_run_with_monitoring.sh", "train_job.sbatch", "run_1gpu", "run_ddp_*", "run_fsdp_*", "benchmark-job.yaml",
]  # fmt: skip


def test_the_page_maps_each_script_to_a_command() -> None:
    """Of the guides that people come from."""
    page = (REPOSITORY / "docs" / "how-to" / "launch.md").read_text(encoding="utf-8")
    table = page.partition("| they have |")[2].partition("\n\n")[0]
    assert [script for script in SCRIPTS if script not in table] == []
