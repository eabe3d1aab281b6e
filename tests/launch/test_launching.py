"""What starts the runs of these tests: a run that hangs says where, and none carries the tool that measures the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.forked_pytests import run_each
from tests.support.launching import environment
from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launching import Starter

HANGING = """
import time

def test_that_hangs():
    open("inside", "w").close()
    time.sleep(150)
"""
LEAVES = "import subprocess\n\ndef test_leaves():\n    subprocess.Popen(['sleep', '300'], start_new_session=True)\n"


@pytest.mark.e2e
def test_a_run_that_does_not_end_tells_where_it_stood(starter: Starter) -> None:
    """Without that, a hang which nobody can repeat could not be explained either."""
    starter.write(test_hanging=HANGING)
    launch = starter.pytest("-p", "no:gpucluster")
    launch.until((starter.folder / "inside").exists, what="hanging test")
    with pytest.raises(
        AssertionError, match=r"(?s)pytest did not end in 0.1 s.*File .*test_hanging.py\", line 6 in test_that_hangs"
    ):
        launch.end(within_s=0.1)
    assert launch.alive() == []


@pytest.mark.e2e
def test_a_run_that_takes_too_long(tmp_path: Path) -> None:
    """A run beyond its time fails the test and is killed."""
    (tmp_path / "test_hanging.py").write_text(HANGING, encoding="utf-8")
    with pytest.raises(AssertionError, match=r"did not end in 4 s; alive were\n.* -m pytest "):
        run_pytest(tmp_path, "test_hanging.py", timeout_s=4)


@pytest.mark.e2e
def test_a_process_that_outlives_its_run(starter: Starter) -> None:
    """The test fails with its command line, in whatever session the process hides."""
    starter.write(test_leaves=LEAVES)
    launch = starter.pytest("-p", "no:gpucluster")
    assert launch.end() == 0
    with pytest.raises(AssertionError, match=r"left processes behind: .*sleep 300"):
        launch.gone(within_s=1)


def test_runs_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may leave the lock of coverage's tracer locked: the run that it measured never ended."""
    monkeypatch.setenv("COVERAGE_PROCESS_CONFIG", "...")
    assert "COVERAGE_PROCESS_CONFIG" not in environment(measured=False)
    assert "COVERAGE_PROCESS_CONFIG" in environment(measured=True)


FORKED = {
    "passes": "def test_it():\n    print('one')\n",
    "fails": "def test_it():\n    assert 'two' == 2\n",
    "killed": "import os\n\ndef test_it():\n    os.kill(os.getpid(), 9)\n",
}


@pytest.mark.e2e
def test_forks_are_runs_of_their_own(tmp_path: Path) -> None:
    """Each has its folder, its output and its exit code; one that leaves a process behind fails the test."""
    for name, text in FORKED.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_own.py").write_text(text, encoding="utf-8")
    runs = {name: (tmp_path / name, ("-p", "no:cacheprovider", "-s")) for name in FORKED}
    ended = run_each(runs, folder=tmp_path, environment=environment(measured=False))
    assert [(name, one.returncode) for name, one in ended.items()] == [("passes", 0), ("fails", 1), ("killed", -9)]
    assert ("one" in ended["passes"].output, "two" in ended["passes"].output) == (True, False)
    assert ("one" in ended["fails"].output, "two" in ended["fails"].output) == (False, True)
    leaving = "import subprocess\n\ndef test_it():\n    subprocess.Popen(['sleep', '600'])\n"
    (tmp_path / "passes" / "test_own.py").write_text(leaving, encoding="utf-8")
    with pytest.raises(AssertionError, match=r"left behind: .*sleep 600"):
        run_each({"passes": runs["passes"]}, folder=tmp_path, environment=environment(measured=False))
