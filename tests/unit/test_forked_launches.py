"""A launch that is a fork cannot be told from a program, by what it sees of itself, and by how it ends."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import REPOSITORY, launching
from tests.support.forked_launches import Forked, can_fork
from tests.support.launching import PYTEST, TORCHRUN, Launch, environment
from tests.support.processes import MARK

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SEEN = """
import gc, json, os, pathlib, signal, sys, threading

def test_it():
    handlers = {one.name: str(signal.getsignal(one)).split(" at ")[0] for one in signal.valid_signals() if hasattr(one, "name")}
    files = {number: os.readlink(f"/proc/self/fd/{number}") for number in range(3)}
    block = pathlib.Path("/proc/self/environ").read_bytes().split(b"\\0")
    seen = {
        "arguments": sys.argv[1:], "command": sys.orig_argv[1:], "path": sys.path, "folder": os.getcwd(),
        "environment": dict(os.environ), "handlers": handlers, "input": files[0], "output": files[1] == files[2],
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(), "threads": threading.active_count(),
        "marked": [one.decode() for one in block if one.startswith(b"GPUCLUSTER_TEST_LAUNCH=")], "gc": gc.isenabled(),
        "wakes": signal.set_wakeup_fd(-1), "main": sys.modules["__main__"].__spec__.name,
    }
    pathlib.Path("seen.json").write_text(json.dumps(seen))

def test_end():
    if end := os.environ.get("END"):
        os.kill(os.getpid(), int(end))
"""


def launched(folder: Path, **variables: str) -> tuple[Launch, int, dict[str, Any]]:
    """A pytest that writes what it sees: the launch, its exit status, and that."""
    folder.mkdir(exist_ok=True)
    (folder / "test_seen.py").write_text(SEEN, encoding="utf-8")
    made = {**environment(measured=False), **variables}
    launch = Launch(command=[*PYTEST, "-q", "test_seen.py"], cwd=folder, environment=made, mark="a" * 32).start()
    status = launch.end()
    launch.gone()
    return launch, status, json.loads((folder / "seen.json").read_text(encoding="utf-8"))


def test_it_sees_what_a_program_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder, arguments, paths, variables, signals, input and output; the mark by which its processes are found."""
    fork, status, of_fork = launched(tmp_path / "one", OF_THIS="test")
    assert isinstance(fork._process, Forked)
    (tmp_path / "one").rename(tmp_path / "forked")
    monkeypatch.setattr(launching, "can_fork", lambda *_, **__: False)
    program, other, of_program = launched(tmp_path / "one", OF_THIS="test")
    assert not isinstance(program._process, Forked)
    assert (status, fork.output.split(" in ")[0]) == (other, program.output.split(" in ")[0])
    assert of_fork["marked"] == [f"{MARK}={'a' * 32}"]
    assert of_fork == of_program


def test_it_ends_as_a_program_does(tmp_path: Path) -> None:
    """By a signal, and with the exit code of a failure; each has an output of its own."""
    status = {name: launched(tmp_path / name, END=str(int(getattr(signal, name))))[1] for name in ("SIGKILL", "SIGINT")}
    assert status == {"SIGKILL": -signal.SIGKILL, "SIGINT": 2}


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        (["unshare", *PYTEST], {}),
        (["python3", "-m", "pytest"], {}),
        ([PYTEST[0], "-m", "pytest_gpucluster.cli"], {}),
        (PYTEST, {"PYTHONPATH": "/a/folder/of/a/user"}),
        (PYTEST, {"LD_LIBRARY_PATH": "/a/folder/without/the/library"}),
        (PYTEST, {"PYTHONOPTIMIZE": "1"}),
        (TORCHRUN, {"OMP_NUM_THREADS": "7"}),
        (TORCHRUN, {"CUDA_VISIBLE_DEVICES": "5"}),
    ],
)
def test_what_a_fork_cannot_be(command: list[str], changes: dict[str, str]) -> None:
    """Another program, other modules, or variables that are read before the first line; without them it can."""
    made = environment(measured=False)
    assert can_fork(PYTEST, made, forking=made, repository=REPOSITORY)
    assert not can_fork(command, {**made, **changes}, forking=made, repository=REPOSITORY)
