"""The memory limit of a job's cgroups, of both versions, and what hides it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.inventory.host import NO_LIMIT_BYTES, read_memory_limit
from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from pathlib import Path

STEP = "job_12/step_0/user/task_0"
V2 = f"0::/system.slice/slurmstepd.scope/{STEP}\n"
V1 = f"9:devices:/slurm/uid_0/{STEP}\n4:memory:/slurm/uid_0/{STEP}\n0::/\n"


def made(root: Path, text: str, **limits: str) -> int | NotAvailable:
    """A process in these cgroups; ``limits`` by the folder below the job's, ``job`` for itself."""
    is_first = "memory:" in text
    base = root / ("memory/slurm/uid_0" if is_first else "system.slice/slurmstepd.scope")
    base.mkdir(parents=True)
    for folder, limit in limits.items():
        path = base / "job_12" / ("" if folder == "job" else folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(f"{limit}\n")
    (root / "own").write_text(text)
    return read_memory_limit("12", own=root / "own", cgroups=root)


@pytest.mark.parametrize(("text", "none"), [(V2, "max"), (V1, "9223372036854771712")])
def test_limits(tmp_path: Path, text: str, none: str) -> None:
    """The lowest on the way counts; none is none."""
    assert made(tmp_path / "a", text, job="209715200") == 209715200
    assert made(tmp_path / "b", text, job="209715200", step_0="104857600") == 104857600
    assert made(tmp_path / "c", text, job="209715200", step_0=none) == 209715200
    assert made(tmp_path / "d", text, job=none) == NO_LIMIT_BYTES


@pytest.mark.parametrize("text", ["0::/\n", "garbage\n", "4:memory:/\n0::/\n"])
def test_cgroups_that_are_hidden(tmp_path: Path, text: str) -> None:
    """A namespace shows its root alone: nothing is known of the job's cgroup."""
    (tmp_path / "own").write_text(text, encoding="utf-8")
    limit = read_memory_limit("12", own=tmp_path / "own", cgroups=tmp_path)
    assert isinstance(limit, NotAvailable)
    assert "no cgroup of job 12" in limit.why


@pytest.mark.parametrize("text", [V2.replace("job_12", "job_120"), "4:memory:/process_api/1\n0::/\n", "0::/user.slice\n"])
def test_a_process_outside_the_job(tmp_path: Path, text: str) -> None:
    """Its cgroup is another one, so the job holds no memory of it."""
    (tmp_path / "own").write_text(text, encoding="utf-8")
    assert read_memory_limit("12", own=tmp_path / "own", cgroups=tmp_path) == NO_LIMIT_BYTES


def test_a_limit_that_cannot_be_read(tmp_path: Path) -> None:
    """The folder is named."""
    assert "job_12" in str(made(tmp_path, V2))


def test_no_proc(tmp_path: Path) -> None:
    """Is told."""
    assert isinstance(read_memory_limit("12", own=tmp_path / "own"), NotAvailable)
