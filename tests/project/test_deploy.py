"""The files below deploy/: sound shell, a head that a site edits, and no logic of their own."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pytest_gpucluster.commands import healthcheck
from pytest_gpucluster.commands.sweep import read_step
from tests.support import REPOSITORY

SLURM = REPOSITORY / "deploy" / "slurm"
CI = REPOSITORY / "deploy" / "ci"
SCRIPTS = [*sorted(SLURM.iterdir()), CI / "accept.sh"]
BEGIN, END = "# --- a site edits these ---", "# --------------------------"
MOST_LINES = 15
"""Of commands: what needs more belongs into ``gpucluster``."""


def head_of(text: str) -> list[str]:
    """The variables of the head."""
    lines = text.splitlines()
    return [re.split(r"[= ]", line.removeprefix("export "))[0] for line in lines[lines.index(BEGIN) + 1 : lines.index(END)]]


def problems(path: Path) -> list[str]:
    """What is wrong with a script."""
    text = path.read_text(encoding="utf-8")
    body = [line for line in text.partition(END)[2].splitlines() if line.strip() and not line.startswith("#")]
    found = [
        f"{name} is not used" for name in head_of(text) if f"export {name}" not in text and f"${name}" not in "\n".join(body)
    ]
    found += ["it is too long"] if len(body) > MOST_LINES else []
    found += ["it runs code of its own"] if re.search(r"python\S* -c|<<", text) else []
    parsed = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False, timeout=60)
    return found + parsed.stderr.splitlines()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts(path: Path) -> None:
    """Each can be started, and is a template."""
    assert problems(path) == []
    assert path.stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("line", "problem"),
    [("python3 -c 'import os'", "code of its own"), ("if true; then", "unexpected end"), ("true\n" * 16, "too long")],
)
def test_a_script_with_a_fault(line: str, problem: str, tmp_path: Path) -> None:
    """The check itself."""
    path = tmp_path / "x.sh"
    path.write_text(f"#!/bin/bash\n{BEGIN}\nUNUSED=1\n{END}\n{line}\n", encoding="utf-8")
    found = problems(path)
    assert "UNUSED is not used" in found
    assert any(problem in one for one in found), found


@pytest.mark.parametrize("name", ["healthcheck.sh", "prolog.sh", "epilog.sh"])
def test_a_health_check_ends_in_15_s(name: str) -> None:
    """Of the 60 that Slurm gives it, whatever hangs; gpucluster itself has less."""
    given = re.search(r"timeout --kill-after=1 (\d+) ", (SLURM / name).read_text(encoding="utf-8"))
    assert given is not None
    assert healthcheck.WITHIN_S < int(given[1]) <= 15


def started(folder: Path, file: str, *arguments: str, **variables: str) -> list[str]:
    """The words of the ``srun`` that a job file starts."""
    for name, text in (("srun", "printf '%s\\n' \"$@\""), ("scontrol", "echo a")):
        command = folder / name
        command.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        command.chmod(0o755)
    of_slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "a", "SLURMD_NODENAME": "a"}
    given = {**of_slurm, "PATH": f"{folder}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(folder), **variables}
    command_line = ["bash", SLURM / file, *arguments]
    return subprocess.run(command_line, env=given, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


@pytest.mark.parametrize("file", ["accept.sbatch", "finetune.sbatch", "sweep.sbatch"])
def test_a_job_in_a_container(file: str, tmp_path: Path) -> None:
    """What measures is started in the image, which sees the results and where the job was submitted; else no word of it."""
    results = tmp_path / "with a blank" / "r"
    variables = {"RESULTS": str(results), "STAGE": "fabric"}
    image = "/shared/my image.sqsh"
    inside = started(tmp_path, file, "-k", "a or b", CONTAINER=image, **variables)
    assert f"--container-image={image}" in inside
    assert "--no-container-mount-home" in inside
    mounts = next(word for word in inside if word.startswith("--container-mounts=")).partition("=")[2].split(",")
    assert mounts[0] == str(tmp_path)
    assert any(results == place or results.is_relative_to(place) for place in mounts[1:])
    first = inside.index("bash" if file == "finetune.sbatch" else "gpucluster")
    assert not any(word.startswith("--container-") for word in inside[first:])
    outside = started(tmp_path, file, "-k", "a or b", **variables)
    assert outside == [word for word in inside if not word.startswith(("--container-", "--no-container-"))]
    assert outside[-2:] == ["-k", "a or b"]


@pytest.mark.parametrize("file", ["accept.sbatch", "finetune.sbatch", "sweep.sbatch"])
def test_a_job_file_without_slurm(file: str) -> None:
    """Started by bash it says what to do, and makes no folder at the root of the file system."""
    command = ["bash", SLURM / file]
    ran = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode != 0
    assert "submit this file with sbatch" in ran.stderr
    assert not [path for path in map(Path, ("/gpucluster-results", "/finetune")) if path.exists()]


def test_what_was_promised_and_which_suite(tmp_path: Path) -> None:
    """Both are said at the head of the acceptance job; without them, what Slurm gave and the packaged criteria."""
    plain = started(tmp_path, "accept.sbatch")
    assert plain[-2:] == ["--pyargs", "tests_acceptance"]
    assert not any("expect" in word for word in plain)
    given = {"EXPECT": "nodes=4,gpus_per_node=8", "SUITE": "our_criteria", "LEVEL": "quick", "PROFILE": "site"}
    own = started(tmp_path, "accept.sbatch", **given)
    assert own[-2:] == ["--pyargs", "our_criteria"]
    wanted = {"--gpucluster-expect=nodes=4,gpus_per_node=8", "--gpucluster-level=quick", "--gpucluster-profile=site"}
    assert wanted <= set(own)


def test_where_a_requeued_job_measures(tmp_path: Path) -> None:
    """On the nodes of its first start in the same results, on others in new ones; a person's own job goes where it is told."""
    results = tmp_path / "results"

    def chosen(nodes: str, **variables: str) -> str:
        words = started(tmp_path, "accept.sbatch", RESULTS=str(results), SLURM_JOB_NODELIST=nodes, **variables)
        return next(word.partition("=")[2] for word in words if word.startswith("--gpucluster-results="))

    assert chosen("gpc-[a-b]") == str(results)
    assert chosen("gpc-[a,c]") == str(results), "submitted by hand: the run itself refuses other nodes"
    assert chosen("gpc-[a-b]", SLURM_RESTART_COUNT="1") == str(results)
    assert chosen("gpc-[a,c]", SLURM_RESTART_COUNT="2") == f"{results}-2"
    assert (results / "slurm-nodes").read_text(encoding="utf-8") == "gpc-[a-b]\n"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    """No finding."""
    checked = subprocess.run(["shellcheck", *SCRIPTS], capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stdout


def test_the_page_of_ci_explains_every_variable() -> None:
    """Of the head of its script."""
    page = (REPOSITORY / "docs" / "how-to" / "ci.md").read_text(encoding="utf-8")
    assert [name for name in head_of((CI / "accept.sh").read_text(encoding="utf-8")) if f"`{name}`" not in page] == []


def test_the_page_explains_every_variable() -> None:
    """And every directive of the acceptance job that a site may ask about."""
    page = (REPOSITORY / "docs" / "how-to" / "slurm.md").read_text(encoding="utf-8")
    text = (SLURM / "accept.sbatch").read_text(encoding="utf-8")
    heads = {name for path in SLURM.glob("*.sbatch") for name in head_of(path.read_text(encoding="utf-8"))}
    assert [name for name in sorted(heads) if f"`{name}`" not in page] == []
    explained = {*re.findall(r"--([\w-]+)", page), "job-name", "output"}
    assert set(re.findall(r"#SBATCH --([\w-]+)", text)) <= explained


@pytest.mark.parametrize(("job", "restarts"), [(1, 0), (4711, 0), (4711, 3), (4711, 16), (999_999, 15)])
def test_the_port_of_the_fine_tune_is_that_of_a_launch(job: int, restarts: int) -> None:
    """The job file cannot ask ``gpucluster launch``, whose ranks are torchrun's: it reckons the same port."""
    line = next(line for line in (SLURM / "finetune.sbatch").read_text(encoding="utf-8").splitlines() if "MASTER_PORT=" in line)
    variables = {"SLURM_JOB_ID": str(job), "SLURM_RESTART_COUNT": str(restarts), "MASTER_ADDR": "x"}
    script = f"{line}\necho $MASTER_PORT"
    printed = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=True, timeout=60)
    step = read_step({**variables, "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "a"})
    assert step is not None
    assert printed.stdout.strip() == str(step.port)
