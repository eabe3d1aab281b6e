"""The results directory of real runs: refused when it cannot be used, an older run kept apart."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from starting import Starter

pytestmark = pytest.mark.e2e

SUITE = """
import pathlib, time

def one(*, wait_for=None):
    while wait_for and not pathlib.Path(wait_for).exists():
        time.sleep(0.02)
    return 1

def test_a(cluster):
    assert list(cluster.run(one, per="gpu", wait_for="go").values()) == [1, 1]
"""


def test_directory_of_another_run_and_of_an_older_one(starter: Starter) -> None:
    """While one run holds the directory the second is refused; afterwards a third keeps the first one's files apart."""
    starter.write(test_a=SUITE)
    folder = starter.folder / "gpucluster-results"
    first = starter.pytest("--gpucluster")
    first.until(lambda: any(event["event"] == "bound" for event in first.journal()), within_s=40, what="first run")
    second = starter.pytest("--gpucluster")
    assert second.end(within_s=30) == 4, second.output
    assert second.output.count("is in use by another run; give this one its own: --gpucluster-results DIR") == 1
    (starter.folder / "go").touch()
    assert first.end(within_s=30) == 0, first.output
    kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    (folder / "notes.txt").write_text("a person's own", encoding="utf-8")
    third = starter.pytest("--gpucluster")
    assert third.end(within_s=60) == 0, third.output
    (older,) = (folder / "previous").iterdir()
    assert {path.name for path in older.iterdir()} == {"journal.jsonl", "results.json", "logs"}
    for name in ("journal.jsonl", "results.json"):
        assert (older / name).read_bytes() == kept[name]
        assert (folder / name).read_bytes() != kept[name]
    assert sum(event["event"] == "started" for event in third.journal()) == 1
    assert (folder / "notes.txt").exists()
    json.loads((folder / "results.json").read_text(encoding="utf-8"))
    third.gone(within_s=2)


def test_directory_that_cannot_be(starter: Starter) -> None:
    """A file in its place, and a file system that takes no directory: a usage error that names the path."""
    starter.write(test_a=SUITE)
    (starter.folder / "taken").write_text("a person's own", encoding="utf-8")
    taken = starter.pytest("--gpucluster", "--gpucluster-results", "taken")
    proc = starter.pytest("--gpucluster", "--gpucluster-results", "/proc/gpucluster")
    for launch, path in ((taken, "taken"), (proc, "/proc/gpucluster")):
        assert launch.end(within_s=40) == 4, launch.output
        launch.gone(within_s=2)
        assert launch.output.count("cannot be written") == 1
        assert path in launch.output
        assert "Traceback" not in launch.output
    assert (starter.folder / "taken").read_text(encoding="utf-8") == "a person's own"
