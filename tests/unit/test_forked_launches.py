"""A launch that is a fork cannot be told from a program, by what it sees of itself, and by how it ends."""

from __future__ import annotations

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import REPOSITORY, launching
from tests.support.forked_launches import Forked, can_fork
from tests.support.launching import PYTEST, TORCHRUN, Launch, Starter, environment, starter
from tests.support.processes import MARK, free_port
from tests.support.programs import why_not_working

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["starter"]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

SEEN = """
import gc, json, os, pathlib, platform, resource, signal, sys, threading

FILES = ("cmdline", "environ")

def test_it():
    cmdline, environ = (pathlib.Path(f"/proc/self/{one}").read_text().rstrip("\\0").split("\\0") for one in FILES)
    handlers = {one.name: str(signal.getsignal(one)).split(" at ")[0] for one in signal.valid_signals() if hasattr(one, "name")}
    files = {number: os.readlink(f"/proc/self/fd/{number}") for number in range(3)}
    seen = {
        "arguments": sys.argv[1:], "command": sys.orig_argv[1:], "path": sys.path, "folder": os.getcwd(),
        "environment": dict(os.environ), "handlers": handlers, "input": files[0], "output": files[1] == files[2],
        "session": os.getsid(0) == os.getpgid(0) == os.getpid(), "threads": threading.active_count(),
        "shown": cmdline, "variables": sorted(environ), "cpus": [*os.sched_getaffinity(0)], "umask": os.umask(0o22),
        "gc": gc.isenabled(), "limits": [resource.getrlimit(one) for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "wakes": signal.set_wakeup_fd(-1), "main": sys.modules["__main__"].__spec__.name,
        "hosts": [os.uname().nodename, platform.node()],
    }
    pathlib.Path("seen.json").write_text(json.dumps(seen))

def test_end():
    if end := os.environ.get("END"):
        os.kill(os.getpid(), int(end))
"""

LOOK = """
import json, os, pathlib, resource, signal, sys, threading

def look():
    return {
        "path": sys.path, "folder": os.getcwd(), "environment": dict(os.environ), "parent": os.getppid(), "argv": sys.argv[:1],
        "handlers": {one.name: str(signal.getsignal(one)).split(" at ")[0] for one in signal.Signals},
        "limits": [resource.getrlimit(one) for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "cpus": [*os.sched_getaffinity(0)],
        "files": sum(1 for _ in pathlib.Path("/proc/self/fd").iterdir()), "threads": threading.active_count(),
        "memory": pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45],
    }

def test_look(cluster):
    made = cluster.run(look, per="gpu")
    pathlib.Path("seen.json").write_text(json.dumps({place.id: made[place] for place in made}))
"""
ON_OTHER = ("unshare", "-rm", "--uts", "sh", "-c", 'hostname other && exec "$@"', "sh", "env", "ONE=1")
OWN = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "GPUCLUSTER_EVENTS", "NCCL_RAS_ADDR", MARK, "COLUMNS", "LINES")
"""Of each launch. The last two are of readline, which sets them beside Python, so only exec hands them on."""


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
    assert f"{MARK}={'a' * 32}" in of_fork["variables"]
    assert of_fork == of_program


def by_torchrun(
    starter: Starter, port: int, *arguments: str, ranks: int, before: Sequence[str] = ()
) -> tuple[Launch, dict[str, Any]]:
    """A launch through torchrun, behind another program or none, and what its pytest or its workers saw."""
    for name, text in (("test_seen", SEEN), ("test_look", LOOK)):
        (starter.folder / f"{name}.py").write_text(text, encoding="utf-8")
    options = (f"--nproc-per-node={ranks}", f"--master-port={port}", *PYTEST[1:])
    launch = starter.start([*before, *TORCHRUN, *options, *arguments], name="torchrun")
    assert launch.end() == 0, launch.output
    launch.gone()
    return launch, json.loads((starter.folder / "seen.json").read_text(encoding="utf-8"))


def without_own(seen: dict[str, Any]) -> dict[str, Any]:
    """What is the same in each launch."""
    kept = {name: re.sub(r"(-rank\d-)\w+", r"\1", text) for name, text in seen["environment"].items() if name not in OWN}
    variables = sorted(one for one in seen.get("variables", ()) if one.partition("=")[0] not in OWN)
    return {**seen, "environment": kept, "variables": variables, "parent": None, "memory": None}


@pytest.mark.parametrize("before", [(), ("env", "ONE=1"), ON_OTHER])
def test_a_rank_sees_what_a_program_sees(starter: Starter, monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...]) -> None:
    """A pytest that torchrun starts, which may stand behind another program; it has a session of its own."""
    if before and (why := why_not_working(*before, "true")):
        pytest.skip(f"no hostname and mounts of one's own here: {why}")
    port = free_port()
    fork, of_fork = by_torchrun(starter, port, "-q", "test_seen.py", ranks=1, before=before)
    assert isinstance(fork._process, Forked) != (before[:1] == ("env",))
    monkeypatch.setattr(launching, "can_fork", lambda *_, **__: False)
    monkeypatch.setattr(launching, "behind_a_program", lambda *_, **__: None)
    _, of_program = by_torchrun(starter, port, "-q", "test_seen.py", ranks=1, before=before)
    assert of_fork["command"][:3] == ["-u", "-m", "pytest"]
    assert "RANK=0" in of_fork["variables"]
    assert (of_fork["hosts"] == ["other", "other"]) == (before == ON_OTHER)
    assert without_own(of_fork) == without_own(of_program)


def test_workers_of_both_kinds_of_agents_see_what_a_program_sees(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the controller's own, which it starts, and of a rank that became an agent: forks, whose memory begins as one does.

    Seen: for a day both were programs again, by a variable that the plugin sets, and each launch took 1 to 3 CPU seconds more.
    """
    port = free_port()
    _, of_forks = by_torchrun(starter, port, "--gpucluster", "-q", "test_look.py", ranks=2)
    forks = Path(f"/proc/{launching.forking()._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    assert {seen["memory"] for seen in of_forks.values()} == {forks[45]}  # field 48 of proc_pid_stat(5): its arguments
    monkeypatch.setattr(launching, "can_fork", lambda *_, **__: False)
    _, of_programs = by_torchrun(starter, port, "--gpucluster", "-q", "test_look.py", ranks=2)
    assert {*of_forks} == {*of_programs} == {"node0-cpu0", "node0-cpu1"}
    for place, seen in of_forks.items():
        assert without_own(seen) == without_own(of_programs[place])


def test_threads_start_theirs_at_once(tmp_path: Path) -> None:
    """Each gets its own: two at once read each other's answers, and one of them waited for ever."""

    def version(number: int) -> tuple[int, int]:
        made = environment(measured=False)
        launch = Launch(command=[*PYTEST, "--version"], cwd=tmp_path, environment=made, name=f"launch{number}").start()
        return launch.pid, launch.end()

    with ThreadPoolExecutor(max_workers=8) as pool:
        ended = dict(pool.map(version, range(24)))
    assert len(ended) == 24
    assert set(ended.values()) == {0}


def test_what_forks_for_it_is_none_of_its_processes(starter: Starter) -> None:
    """It ends a moment after the launch, which would have left it behind."""
    starter.write(test_slow="import pathlib, time\n\ndef test_it():\n    pathlib.Path('here').touch()\n    time.sleep(60)\n")
    launch = starter.pytest("test_slow.py")
    launch.until((starter.folder / "here").exists, what="its test")
    assert [process.pid for process in launch.alive()] == [launch.pid]
    launch.kill_all()


def test_it_ends_as_a_program_does(tmp_path: Path) -> None:
    """By a signal, and with the exit code of a failure; each has an output of its own."""
    status = {name: launched(tmp_path / name, END=str(int(getattr(signal, name))))[1] for name in ("SIGKILL", "SIGINT")}
    assert status == {"SIGKILL": -signal.SIGKILL, "SIGINT": 2}


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        (["unshare", *PYTEST], {}),
        (["python3", "-m", "pytest"], {}),
        ([PYTEST[0], "-c", "pytest"], {}),
        ([*PYTEST[:2], "pytest_gpucluster.inventory.detect"], {}),
        (PYTEST, {"PYTHONPATH": "/a/folder/of/a/user"}),
        (PYTEST, {"LD_LIBRARY_PATH": "/a/folder/without/the/library"}),
        (PYTEST, {"PYTHONOPTIMIZE": "1"}),
        (PYTEST, {"TORCH_CPP_LOG_LEVEL": "INFO"}),
        (TORCHRUN, {"OMP_NUM_THREADS": "7"}),
        (TORCHRUN, {"CUDA_VISIBLE_DEVICES": "5"}),
    ],
)
def test_what_a_fork_cannot_be(command: list[str], changes: dict[str, str]) -> None:
    """Another program, other modules, or variables that are read before the first line; without them it can."""
    made = environment(measured=False)
    assert can_fork(PYTEST, made, forking=made, repository=REPOSITORY)
    assert not can_fork(command, {**made, **changes}, forking=made, repository=REPOSITORY)
