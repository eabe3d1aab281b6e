"""``--junitxml`` at a link, a device or a pipe is written as pytest writes it, and never replaced."""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import PYTEST, Launch, environment
from tests.support.processes import kill_marked

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LIMITS = """
schema: 1
profiles:
  rehearsal: {gpu: null, rehearsal: true}
criteria:
  x: {criterion: X, per: cluster, unit: s, above: 0, level: quick, why: a test, source: none}
"""
JUDGES = "def test_x(criterion):\n    criterion.require(1.0)\n"
REPORT = "gpucluster.verdict"


THROUGH_A_PIPE = ("bash", "-c", '"$@" | cat; exit "${PIPESTATUS[0]}"', "bash")


def run(folder: Path, junit: str, *, code: int, prefix: tuple[str, ...] = ()) -> str:
    """A whole rehearsal of one criterion; what it printed."""
    (folder / "limits.yaml").write_text(LIMITS, encoding="utf-8")
    (folder / "test_x.py").write_text(JUDGES, encoding="utf-8")
    command = [*prefix, *PYTEST, "--gpucluster", "--gpucluster-thresholds=limits.yaml", f"--junitxml={junit}"]
    launch = Launch(command=command, cwd=folder, environment=environment(measured=True)).start()
    try:
        assert launch.end() == code, launch.output
        launch.gone()
    finally:
        kill_marked(launch.mark)
    return launch.output


def test_a_link(tmp_path: Path) -> None:
    """Its target has the report, whether or not it was there, and the link is a link."""
    (tmp_path / "there.xml").write_text("old", encoding="utf-8")
    for target in ("there.xml", "new.xml"):
        link = tmp_path / f"link to {target}"
        link.symlink_to(tmp_path / target)
        run(tmp_path, link.name, code=0)
        assert link.is_symlink()
        assert REPORT in (tmp_path / target).read_text(encoding="utf-8")


def test_standard_output(tmp_path: Path) -> None:
    """Nothing printed is lost. Up to pytest 9.0 the report goes where its capture has put the standard output.

    Newer ones write it to the standard output itself. Where that is a file, and no pipe, they begin the file anew.
    """
    output = run(tmp_path, "/dev/stdout", code=0, prefix=THROUGH_A_PIPE)
    assert "test session starts" in output
    assert "verdict REHEARSED" in output


def test_a_pipe(tmp_path: Path) -> None:
    """Its reader gets one whole report."""
    pipe = tmp_path / "junit.xml"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text(encoding="utf-8")), daemon=True)
    reader.start()
    run(tmp_path, pipe.name, code=0)
    reader.join(60)
    assert found[0].count(f'name="{REPORT}"') == 1
    assert found[0].rstrip().endswith("</testsuites>")
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
@pytest.mark.parametrize(("minor", "code", "said"), [(3, 0, ""), (7, 1, "No space left on device")], ids=["null", "full"])
def test_a_device(tmp_path: Path, minor: int, code: int, said: str) -> None:
    """It is a device afterwards; a full one costs the exit code, and the verdict is shown."""
    device = tmp_path / "device"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    output = run(tmp_path, device.name, code=code)
    assert stat.S_ISCHR(device.lstat().st_mode)
    assert said in output
    assert "verdict REHEARSED" in output


def to_itself(folder: Path) -> str:
    """A JUnit file that is a loop of links."""
    (folder / "junit.xml").symlink_to(folder / "junit.xml")
    return "junit.xml"


def to_a_folder(folder: Path) -> str:
    """A JUnit file that is a folder."""
    (folder / "junit.xml").mkdir()
    return "junit.xml"


def planted_results(folder: Path) -> str:
    """A link where results.json belongs."""
    (folder / "gpucluster-results").mkdir()
    (folder / "victim").write_text("mine", encoding="utf-8")
    (folder / "gpucluster-results" / "results.json").symlink_to(folder / "victim")
    return "results.json"


@pytest.mark.parametrize("plant", [to_itself, to_a_folder, planted_results])
def test_what_cannot_be_written_safely(tmp_path: Path, plant: Callable[[Path], str]) -> None:
    """A usage error names it, and it stays as it is."""
    name = plant(tmp_path)
    before = {path: path.lstat().st_mode for path in tmp_path.rglob("*")}
    output = run(tmp_path, "junit.xml", code=4)
    assert name in output.rstrip().splitlines()[-1], output
    assert {path: path.lstat().st_mode for path in before} == before
    assert not (tmp_path / "victim").exists() or (tmp_path / "victim").read_text(encoding="utf-8") == "mine"
