"""Whole runs of two hosts that share a path, or should: each host has a name and mounts of its own."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launching import ACCEPTANCE, python_path
from tests.support.reports import RESULTS
from tests.support.runs import PLANTS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

HOSTS = ("host1", "host2")
FILE = f"{ACCEPTANCE}/test_storage.py"


def can_mount() -> bool:
    """Whether this machine lets us start a process with mounts and a hostname of its own."""
    return subprocess.run(["unshare", "-rm", "--uts", "true"], capture_output=True, check=False).returncode == 0


pytestmark.append(pytest.mark.skipif(not can_mount(), reason="no mounts and hostnames of one's own here (unshare -rm --uts)"))


@pytest.fixture
def shared(starter: Starter) -> Path:
    """The path, with a file of the user's in it."""
    path = starter.folder / "shared"
    path.mkdir()
    (path / "users.txt").write_text("mine", encoding="ascii")
    return path


def start(
    starter: Starter, *shared: Path, options: tuple[str, ...] = (), on_second: str = "true", **variables: str
) -> list[Launch]:
    """Two torchruns as two hosts that share these paths; ``on_second`` is done on the second one first."""
    limits = {
        "schema": 1,
        "extends": "packaged",
        "cluster": {"shared_paths": [*map(str, shared)]},
        "criteria": {"shared_paths": {"deadline_s": 10, "recipe": {"within_s": 1}}},
    }
    (starter.folder / "site.yaml").write_text(json.dumps(limits), encoding="utf-8")
    prefixes = [
        ("unshare", "-rm", "--uts", "sh", "-c", f'hostname {host} && {first} && exec "$@"', "sh")
        for host, first in zip(HOSTS, ("true", on_second), strict=True)
    ]
    starter.environment.update(variables)
    chosen = (FILE, "-k", "shared_paths", "--gpucluster-thresholds=site.yaml", "--junitxml=junit.xml", *options)
    return starter.nodes(*chosen, ranks=1, prefixes=prefixes)


def rows(launches: list[Launch]) -> dict[str, dict[str, Any]]:
    """The rows of results.json by node, once the run is over on both hosts."""
    for launch in launches:
        launch.end()
        launch.gone()
    found = launches[0].results()["criteria"]
    return {row["place"]["id"]: row for row in found if row["criterion"] == "shared_paths"}


@pytest.mark.slow  # by day, the second run of the last test here is one
def test_a_path_that_is_shared(starter: Starter, shared: Path) -> None:
    """Green on both, with locks tried; the user's file is as it was, and nothing else is left."""
    seen = rows(start(starter, shared))
    assert {place: row["outcome"] for place, row in seen.items()} == {"node0": "passed", "node1": "passed"}, seen
    assert [path.name for path in shared.iterdir()] == ["users.txt"]
    assert (shared / "users.txt").read_text(encoding="ascii") == "mine"


def test_a_path_that_is_not_shared(starter: Starter, shared: Path) -> None:
    """The second host has another file system there. Both fail, with both file systems: nobody can tell which is right."""
    launches = start(starter, shared, on_second=f"mount -t tmpfs none {shared}")
    seen = rows(launches)
    assert {place: row["outcome"] for place, row in seen.items()} == {"node0": "failed", "node1": "failed"}, seen
    for row in seen.values():
        assert f"{shared} is not shared: the other host's file does not show here" in row["evidence"]["found"][0]
    assert "(tmpfs none at" in seen["node1"]["evidence"]["found"][0]
    assert "is not shared" in " ".join(launches[0].output.split()), "a long line is wrapped"
    assert [path.name for path in shared.iterdir()] == ["users.txt"]


def test_paths_that_one_host_cannot_use(starter: Starter) -> None:
    """A failure at that host with each reason. Nothing says that the other one shares with anybody: an ERROR, never green."""
    faults = {
        "gone/shared": ("mount -t tmpfs none {path.parent} && mkdir {path.parent}/other", "is not there"),
        "read-only": ("mount -t tmpfs -o ro none {path}", "is mounted read-only"),
        "full": ("mount -t tmpfs -o size=64k none {path} && (head -c 65536 /dev/zero > {path}/full || true)", "is full"),
    }
    paths = [starter.folder / name for name in faults]
    for path in paths:
        path.mkdir(parents=True)
    commands = [fault.format(path=path) for path, (fault, _) in zip(paths, faults.values(), strict=True)]
    seen = rows(start(starter, *paths, on_second=" && ".join(commands)))
    assert {place: row["outcome"] for place, row in seen.items()} == {"node0": "error", "node1": "failed"}, seen
    assert seen["node1"]["evidence"]["found"] == [
        f"{path} {said}" for path, (_, said) in zip(paths, faults.values(), strict=True)
    ]
    reason = " ".join(seen["node0"]["reason"].split())
    assert [str(path) in reason for path in paths] == [True] * 3, reason
    assert "no other host could use it" in reason


def test_a_path_that_hangs_on_one_host(starter: Starter, shared: Path) -> None:
    """Ended at the deadline; the ERROR names that host and the path. No other call waits for it."""
    stale = {"E2E_STALE": HOSTS[1], "PYTHONPATH": python_path(PLANTS)}
    launches = start(starter, shared, options=("-p", "stale"), **stale)
    seen = rows(launches)
    assert {place: row["outcome"] for place, row in seen.items()} == {"node0": "error", "node1": "error"}, seen
    first = seen["node1"]["reason"].splitlines()[0]
    assert str(shared) in first
    assert "host2" in first
    assert "did not return within 10 s" in seen["node1"]["reason"]
    assert "no other host could use it" in seen["node0"]["reason"]
    assert [path.name for path in shared.iterdir()] == ["users.txt"]


def test_a_killed_run_is_tidied_up_by_the_next(starter: Starter, shared: Path) -> None:
    """Every process killed in the middle leaves folders; the next run on these hosts removes them, and nothing else."""
    stale = {"E2E_STALE": HOSTS[1], "PYTHONPATH": python_path(PLANTS)}
    launches = start(starter, shared, options=("-p", "stale"), **stale)
    launches[0].until(lambda: len(list(shared.iterdir())) > 1, what="a folder of the run's own")
    for launch in launches:
        launch.kill_all()
    (left,) = {path.name for path in shared.iterdir()} - {"users.txt"}
    assert left.startswith(".gpucluster-")
    (starter.folder / RESULTS).rename(starter.folder / "killed")
    seen = rows(start(starter, shared))
    assert {row["outcome"] for row in seen.values()} == {"passed"}, seen
    assert sum(row["evidence"].get(f"{shared} leftovers removed", 0) for row in seen.values()) >= 1
    assert [path.name for path in shared.iterdir()] == ["users.txt"]
