"""Starts real runs, as a user would, and looks after every process of them by a mark in its environment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from xml.etree import ElementTree as ET

import pytest

from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ACCEPTANCE = str(REPOSITORY / "tests_acceptance")
MARK = "GPUCLUSTER_LAUNCH_TEST"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PYTEST = ("pytest", "-p", "no:cacheprovider")
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
GONE_S = 15.0
"""From the end to the last process's: 30 s are promised, 2 are usual, 8 were seen on an overloaded machine of two cores."""
DUMP_S = 2.0
NOT_FOR_RUNS = ("TORCHELASTIC_", "FAKE_NVML", "COVERAGE_PROCESS")
"""COVERAGE_PROCESS: coverage's tracer takes a lock in Python code; an interrupt there keeps it, and the measured run hangs."""
PLAINLY = ("GPUCLUSTER_SECRET", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "CUDA_VISIBLE_DEVICES", "XDG_CONFIG_HOME")


@dataclass(slots=True, kw_only=True)
class Launch:
    """One command line, started in a session of its own; ``output`` grows while it runs."""

    command: Sequence[str]
    cwd: Path
    environment: Mapping[str, str]
    name: str = "launch"
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_s: float = field(default_factory=time.monotonic)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> Launch:
        """Start it and return at once."""
        with self._file().open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env={**self.environment, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_hear_interrupts,  # noqa: PLW1509 -- one thread, and nothing but a signal's default
            )
        return self

    def _file(self) -> Path:
        return self.cwd / f"{self.name}.{self.mark[:8]}.out"

    @property
    def pid(self) -> int:
        """The first process: pytest, or torchrun."""
        assert self._process is not None
        return self._process.pid

    @property
    def output(self) -> str:
        """Everything printed so far, by all ranks."""
        return self._file().read_text(encoding="utf-8", errors="replace")

    def end(self, *, within_s: float) -> int:
        """Its exit status; a run that does not end in time is killed and fails the test."""
        assert self._process is not None
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            left = "\n".join(f"{pid}: {command_of(pid)[:150]}" for pid in self.alive())
            self._give_up(f"{self.name} did not end in {within_s:g} s; alive were\n{left}")

    def wait_for(self, text: str, *, within_s: float) -> float:
        """Wait until ``text`` was printed; the time it was seen (monotonic s)."""
        return self.until(lambda: text in self.output, within_s=within_s, what=f"{text!r} in the output")

    def until(self, holds: Callable[[], bool], *, within_s: float, what: str) -> float:
        """Wait until something holds; the time it did (monotonic s)."""
        deadline_s = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > deadline_s:
                self._give_up(f"no {what} within {within_s:g} s:")
            time.sleep(0.02)
        return time.monotonic()

    def alive(self) -> list[int]:
        """Every process that carries this launch's mark, zombies apart."""
        return [pid for pid in processes() if pid != os.getpid() and environment_of(pid).get(MARK) == self.mark]

    def gone(self, *, within_s: float = GONE_S) -> float:
        """Wait until no process of it is left; the time of that (monotonic s)."""
        deadline_s = time.monotonic() + within_s
        while left := self.alive():
            if time.monotonic() > deadline_s:
                told = "; ".join(f"{pid} {command_of(pid)[-300:]}" for pid in left)
                self._give_up(f"{within_s:g} s later there are still: {told}")
            time.sleep(0.02)
        return time.monotonic()

    def agent_of(self, rank: int) -> int:
        """The process that is the agent of ``rank``."""
        wanted = f'"rank": {rank}, '
        found = [pid for pid in self.alive() if "pytest_gpucluster.agent.main" in command_of(pid) and wanted in command_of(pid)]
        parents = {parent_of(pid) for pid in found}
        first = [pid for pid in found if parent_of(pid) not in found]
        assert len(first) == 1, (found, parents)
        return first[0]

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Every process of this launch is stopped meanwhile."""
        stopped = self.alive()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _give_up(self, why: str) -> NoReturn:
        """Kill it and fail with what it printed, the stacks of its pytests last: at SIGABRT pytest's own plugin dumps them."""
        for pid in self.alive():
            command = command_of(pid)
            if "-m pytest " in command and TORCHRUN[-1] not in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
        time.sleep(DUMP_S)
        self.kill_all()
        raise AssertionError(f"{why}\n{self.output}") from None

    def kill_all(self) -> None:
        """SIGKILL to everything of this launch, by pid."""
        while left := self.alive():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        if self._process is not None:
            self._process.wait()

    # What it left behind.

    def results(self, folder: str = "gpucluster-results") -> dict[str, Any]:
        """results.json; a number that is not finite is an error."""
        text = (self.cwd / folder / "results.json").read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text, parse_constant=_refuse)
        return found

    def journal(self, folder: str = "gpucluster-results") -> list[dict[str, Any]]:
        """The events of journal.jsonl so far; a full disk may tear the last one."""
        file = self.cwd / folder / "journal.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def junit(self, file: str = "junit.xml") -> dict[str, str]:
        """Outcome of each testcase of the JUnit file by name: passed, failure, error or skipped."""
        suite = ET.parse(self.cwd / file).getroot()  # noqa: S314 -- our own file
        return {case.get("name", ""): _outcome(case) for case in suite.iter("testcase")}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _outcome(case: ET.Element) -> str:
    words = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
    return words[0] if words else "passed"


def processes() -> list[int]:
    """All processes of this machine that are not zombies."""
    return [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and state_of(int(entry.name)) not in "ZX"
    ]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def state_of(pid: int) -> str:
    """The process state letter; ``X`` when there is no such process."""
    return _stat(pid)[0]


def parent_of(pid: int) -> int:
    """Pid of its parent."""
    return int(_stat(pid)[1])


def command_of(pid: int) -> str:
    """Its command line."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def environment_of(pid: int) -> dict[str, str]:
    """The environment it was started with; empty when it may not be read."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in data.split(b"\0") if entry)
    return {name: value for name, _, value in pairs}


def free_port() -> int:
    """A TCP port that nobody uses just now, below those that the kernel gives to outgoing connections."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("no free port")


def _hear_interrupts() -> None:
    """A job in the background of a shell ignores SIGINT, and so would all it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def installed(folder: Path) -> str:
    """A PYTHONPATH under which pytest finds the plugin by its entry point, whether it is installed here or not."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    if not any(point.name == "gpucluster" for point in metadata.entry_points(group="pytest11")):
        facts = folder / "pytest_gpucluster-0.1.0.dist-info"
        facts.mkdir(parents=True, exist_ok=True)
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-gpucluster\nVersion: 0.1.0\n", encoding="utf-8")
        (facts / "entry_points.txt").write_text("[pytest11]\ngpucluster = pytest_gpucluster.plugin\n", encoding="utf-8")
        paths.append(str(folder))
    return os.pathsep.join(paths)


class Starter:
    """Makes launches in one folder and ends whatever is left of them."""

    def __init__(self, folder: Path, python_path: str) -> None:
        """Launches start in ``folder``, with their temporary files below it."""
        self.folder = folder
        self._launches: list[Launch] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_FOR_RUNS)}
        for name in (*LAUNCHED, *PLAINLY):
            kept.pop(name, None)
        temporary = folder / "tmp"
        temporary.mkdir()
        self.environment = {**kept, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}

    def write(self, **files: str) -> None:
        """Files of the suite: ``write(test_x="...")`` makes ``test_x.py``."""
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text, encoding="utf-8")

    def pytest(self, *arguments: str, **variables: str) -> Launch:
        """Start ``python -m pytest`` plainly."""
        return self._start([sys.executable, "-m", *PYTEST, *arguments], variables, name="pytest")

    def torchrun(self, *arguments: str, ranks: int = 2, options: Sequence[str] = (), **variables: str) -> Launch:
        """Start pytest under torchrun on this machine; ``options`` are torchrun's."""
        chosen = options or ("--master-port", str(free_port()))
        command = [*TORCHRUN, f"--nproc-per-node={ranks}", *chosen, "-m", *PYTEST, *arguments]
        return self._start(command, variables, name="torchrun")

    def nodes(self, *arguments: str, ranks: int, prefixes: Sequence[Sequence[str]]) -> list[Launch]:
        """Start one torchrun a node, each behind a command of its own (``unshare ...``)."""
        port = str(free_port())
        launches = []
        for node, prefix in enumerate(prefixes):
            where = (f"--nnodes={len(prefixes)}", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")
            command = [*prefix, *TORCHRUN, f"--nproc-per-node={ranks}", *where, "-m", *PYTEST, *arguments]
            launches.append(self._start(command, {}, name=f"node{node}"))
        return launches

    def _start(self, command: Sequence[str], variables: Mapping[str, str], *, name: str) -> Launch:
        launch = Launch(command=command, cwd=self.folder, environment={**self.environment, **variables}, name=name)
        self._launches.append(launch)
        return launch.start()

    def end_all(self) -> list[str]:
        """Kill what still runs; the command lines of that."""
        left = [command_of(pid) for launch in self._launches for pid in launch.alive()]
        for launch in self._launches:
            launch.kill_all()
        return left

    def temporary_files(self) -> Iterator[Path]:
        """What the launches left in their temporary folder."""
        return (self.folder / "tmp").iterdir()


@pytest.fixture(scope="session")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Under which the plugin counts as installed."""
    return installed(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def starter(tmp_path: Path, python_path: str) -> Iterator[Starter]:
    """Starts runs in a folder of its own; a process left behind fails the test and is ended."""
    yield from _watched(Starter(tmp_path, python_path))


@pytest.fixture(scope="module")
def shared_starter(tmp_path_factory: pytest.TempPathFactory, python_path: str) -> Iterator[Starter]:
    """The same for a launch that several tests of a module look at."""
    yield from _watched(Starter(tmp_path_factory.mktemp("shared"), python_path))


def _watched(made: Starter) -> Iterator[Starter]:
    yield made
    left = made.end_all()
    assert not left, f"left behind: {left}"
