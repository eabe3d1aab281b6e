"""What starts the runs of these tests: a run that hangs says where, and none carries the tool that measures the tests."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import warm_start
from tests.support.launching import PYTEST, TORCHRUN, environment
from tests.support.processes import MARK
from tests.support.runs import run_pytest

if TYPE_CHECKING:
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


FACTS = """
import json, os, signal, sys, tempfile
from pathlib import Path

def test_facts():
    shown = [Path("/proc/self", name).read_text().rstrip("\\0").split("\\0") for name in ("cmdline", "environ")]
    facts = {
        "started": [sys.argv, sys.orig_argv, sys.path, sys.modules["__main__"].__spec__.name],
        "variables": dict(os.environ),
        "shown": [shown[0], sorted(shown[1])],
        "places": [os.getcwd(), tempfile.gettempdir(), os.getsid(0) == os.getpid()],
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "input": os.readlink("/proc/self/fd/0"),
        "sockets": [fd.name for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.is_socket()],
    }
    Path(sys.argv[-1]).write_text(json.dumps(facts))
"""


@pytest.mark.e2e
def test_a_fork_is_as_a_new_python(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program can see of itself is the same in a launch that was forked; so are its output and its exit code."""
    starter.write(test_facts=FACTS)
    found, outputs, started = [], [], warm_start.start
    for is_warm in (True, False):
        monkeypatch.setattr(warm_start, "start", started if is_warm else lambda *_given, **_named: None)
        launch = starter.pytest("-q", "-s", "-p", "no:gpucluster", "test_facts.py", "--", "test_facts.py", A="b")
        assert isinstance(launch._process, warm_start.Warm) is is_warm
        assert launch.end() == 0, launch.output
        launch.gone()
        facts: dict[str, Any] = json.loads((starter.folder / "test_facts.py").read_text(encoding="utf-8"))
        (starter.folder / "test_facts.py").write_text(FACTS, encoding="utf-8")
        assert facts["variables"].pop(MARK) == launch.mark
        facts["shown"][1].remove(f"{MARK}={launch.mark}")
        found.append(facts)
        outputs.append(launch.output.rpartition(" in ")[0])
    assert found[0] == found[1]
    assert outputs[0] == outputs[1]
    assert "1 passed" in outputs[0]


@pytest.mark.e2e
@pytest.mark.parametrize("number", [9, 15])
def test_a_fork_that_a_signal_ends(starter: Starter, number: int) -> None:
    """Its status says so, as that of a child does."""
    starter.write(test_ends=f"import os\n\ndef test_ends():\n    os.kill(os.getpid(), {number})\n")
    launch = starter.pytest("-p", "no:gpucluster", "test_ends.py")
    assert isinstance(launch._process, warm_start.Warm)
    assert launch.end() == -number


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (["unshare", "-rm", *PYTEST], {}),
        ([sys.executable, "-c", "pass"], {}),
        ([*PYTEST, "x" * warm_start.ROOM_BYTES], {}),
        (PYTEST, {"A": "x" * warm_start.ROOM_BYTES}),
        (PYTEST, {"PYTHONPATH": "/with/a/sitecustomize"}),
        (PYTEST, {"PYTHONHASHSEED": "7"}),
        (TORCHRUN, {"OMP_NUM_THREADS": "2"}),
        (PYTEST, {"LD_PRELOAD": "other.so"}),
        (PYTEST, {"COVERAGE_PROCESS_CONFIG": "..."}),
        (PYTEST, {"LD_LIBRARY_PATH": "/the/first/launch/with/it"}),
    ],
    ids=["prefix", "no module", "long command", "many variables", "path", "hashes", "torchrun", "preload", "measured", "nvml"],
)
def test_a_new_python_where_a_fork_would_differ(command: list[str], variables: dict[str, str], tmp_path: Path) -> None:
    """What Python reads once, when it starts, a fork has from another process."""
    plain = environment(measured=False)
    with Path(os.devnull).open("wb") as output:
        given = {"cwd": tmp_path, "variables": {**plain, **variables}, "output": output.fileno(), "plain": plain}
        assert warm_start.start(command, **given) is None
