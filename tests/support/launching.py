"""Starts real runs as a user would, waits for conditions, and finds every process of a run by its mark."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import psutil
import pytest

from tests.support import REPOSITORY, processes, reports
from tests.support.forked_launches import WITH_ROOM, Forked, Forking, behind_a_program, can_fork, standing_in
from tests.support.processes import MARK, POLL_S, command_of, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ACCEPTANCE = str(REPOSITORY / "tests_acceptance")
INSTALLED = Path(__file__).with_name("installed")
"""Makes the plugin count as installed where it is not: a folder with its entry point."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
FOREIGN = ("PYTEST_", "TORCHELASTIC_", "GPUCLUSTER_", "NCCL_", "FAKE_NVML", "XDG_CONFIG_HOME")
FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
MEASURING = "COVERAGE_PROCESS"
OTHER_PLUGINS = ("hypothesispytest", "allure_pytest", "html", "html_fixtures", "metadata", "ctrf", "anyio", "pytest_reportlog")
"""What this environment has installed for other tests. Half of the CPU time that the start of a pytest takes."""
DEADLINE_S = 120.0
"""For what takes seconds: only a run that hangs takes so long, on a busy machine too."""
LOOKS = 2
"""In a row that find no process of a launch; a single one may miss a process that starts a program just then."""
GONE_S = 28.0
"""From the end of a run to the end of its last process. torchrun kills what is left after 30 s; a run ends by itself."""
DUMP_S = 2.0


def environment(*, measured: bool) -> dict[str, str]:
    """The variables of this process without those of the pytest or torchrun that runs these tests, and without other plugins.

    ``measured`` keeps what makes coverage measure a child. Coverage's tracer takes a lock in Python code: a signal there may
    leave the lock locked, and the run hangs. So a run that gets signals is not measured.
    """
    foreign = FOREIGN if measured else (*FOREIGN, MEASURING)
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN_NAMES and not name.startswith(foreign)}
    bytecode = {} if kept.get("PYTHONPYCACHEPREFIX") else {"PYTHONDONTWRITEBYTECODE": "1"}  # never beside the sources
    without = {"PYTEST_ADDOPTS": " ".join(f"-p no:{name}" for name in OTHER_PLUGINS)}
    return {**kept, **bytecode, **without, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}


def python_path(*folders: Path) -> str:
    """A PYTHONPATH with ``folders`` first, under which pytest finds the plugin by its entry point, installed or not."""
    is_installed = any(point.name == "gpucluster" for point in metadata.entry_points(group="pytest11"))
    paths = [*folders, REPOSITORY, *filter(None, [os.environ.get("PYTHONPATH")]), *([] if is_installed else [INSTALLED])]
    return os.pathsep.join(map(str, paths))


def under_torchrun(*arguments: str, ranks: int, nodes: int = 1, address: str = "127.0.0.1") -> list[list[str]]:
    """The command of each node that runs pytest under torchrun, all nodes on this machine; ``address`` of the first one."""
    shape = (f"--nproc-per-node={ranks}", f"--nnodes={nodes}", f"--master-addr={address}", f"--master-port={free_port()}")
    return [[*TORCHRUN, *shape, f"--node-rank={node}", *PYTEST[1:], *arguments] for node in range(nodes)]


FORKS = threading.Lock()
"""Threads of a test start launches one after the other: one process forks all of them, and answers one at a time."""


@dataclass(slots=True, kw_only=True)
class Launch:
    """One command line, started in a session of its own; ``output`` grows while it runs."""

    command: Sequence[str]
    cwd: Path
    environment: Mapping[str, str]
    name: str = "launch"
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _process: subprocess.Popen[bytes] | Forked | None = None

    def start(self) -> Launch:
        """Start it and return at once."""
        marked = {**self.environment, MARK: self.mark}
        with self._file().open("wb") as output:
            if self._is_forked(marked, output):
                return self
            behind = behind_a_program(self.command, self.environment, repository=REPOSITORY)
            self._process = subprocess.Popen(
                behind or self.command,
                cwd=self.cwd,
                env={**marked, **WITH_ROOM} if behind else marked,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=hear_interrupts,  # noqa: PLW1509 -- one thread, and nothing but a signal's default
            )
        return self

    def _is_forked(self, marked: Mapping[str, str], output: IO[bytes]) -> bool:
        """Start it as a fork, where it can be one."""
        made = standing_in(self.command, marked, cwd=self.cwd, output=output, repository=REPOSITORY)
        stand_in, command, variables = made or (None, self.command, marked)
        if forked := is_forked(command, variables):
            with FORKS:
                number = stand_in and stand_in.pid
                paths = {"cwd": self.cwd, "output": self._file()}
                self._process = forking().fork(command, environment=variables, stand_in=number, **paths)
        if stand_in is not None:
            with stand_in:
                stand_in.wait(DEADLINE_S) if forked else stand_in.kill()
        return forked

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

    @property
    def has_ended(self) -> bool:
        """Whether the first process has ended."""
        assert self._process is not None
        return self._process.poll() is not None

    # Waiting. Where the time is up, the run is killed and the test fails with what the run printed.

    def end(self, *, within_s: float = DEADLINE_S) -> int:
        """Wait for the first process to end; its exit status."""
        assert self._process is not None
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            left = "\n".join(f"{process.pid}: {command_of(process)[:150]}" for process in self.alive())
            self._give_up(f"{self.name} did not end in {within_s:.3g} s; alive were\n{left}")

    def wait_for(self, text: str, *, within_s: float = DEADLINE_S) -> None:
        """Wait until ``text`` was printed."""
        self.until(lambda: text in self.output, what=f"{text!r} in the output", within_s=within_s)

    def until(self, holds: Callable[[], bool], *, what: str, within_s: float = DEADLINE_S) -> None:
        """Wait until a condition holds."""
        deadline_s = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > deadline_s:
                self._give_up(f"no {what} within {within_s:g} s:")
            time.sleep(POLL_S)

    def gone(self, *, within_s: float = GONE_S) -> None:
        """Wait until no process of this launch is left."""
        deadline_s, looks = time.monotonic() + within_s, 0
        while (left := self.alive()) or (looks := looks + 1) < LOOKS:
            if left:
                looks = 0
            if left and time.monotonic() > deadline_s:
                told = "; ".join(f"{process.pid} {command_of(process)[-300:]}" for process in left)
                self._give_up(f"{within_s:g} s later it left processes behind: {told}")
            time.sleep(POLL_S)

    # Its processes.

    def alive(self) -> list[psutil.Process]:
        """Every live process of this launch."""
        return processes.marked(self.mark)

    def agent_of(self, rank: int) -> psutil.Process:
        """The process that is the agent of ``rank``; what it forked has the same command line."""
        words = ("pytest_gpucluster.agent.main", f'"rank":{rank},')
        found = {process.pid: process for process in self.alive() if all(word in command_of(process) for word in words)}
        first = [process for process in found.values() if process.ppid() not in found]
        assert len(first) == 1, found
        return first[0]

    def controller(self) -> psutil.Process:
        """The process of rank 0 under torchrun."""
        (found,) = (one for one in self.alive() if one.ppid() == self.pid and one.environ().get("RANK") == "0")
        return found

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Every process of this launch is stopped meanwhile."""
        stopped = self.alive()
        for process in stopped:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def kill_all(self) -> None:
        """SIGKILL every process of this launch, by pid."""
        processes.kill_marked(self.mark)
        if self._process is not None:
            self._process.wait()

    def _give_up(self, why: str) -> NoReturn:
        """Kill the run and fail with its output, the stacks of its pytests last: pytest dumps them at SIGABRT."""
        for process in self.alive():
            command = command_of(process)
            if "-m pytest " in command and TORCHRUN[-1] not in command:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGABRT)
        time.sleep(DUMP_S)
        self.kill_all()
        raise AssertionError(f"{why}\n{self.output}") from None

    # What it left behind.

    def results(self, folder: str = reports.RESULTS) -> dict[str, Any]:
        """results.json."""
        return reports.read_results(self.cwd / folder)

    def journal(self, folder: str = reports.RESULTS) -> list[dict[str, Any]]:
        """The events of the journal so far."""
        return reports.read_journal(self.cwd / folder)

    def cases(self, file: str = "junit.xml") -> list[reports.Case]:
        """The testcases of the JUnit file, in its order."""
        return reports.cases_of(reports.read_suite(self.cwd / file))

    def junit(self, file: str = "junit.xml") -> dict[str, str]:
        """Outcome of each testcase of the JUnit file by name."""
        return {case.name: case.outcome for case in self.cases(file)}


@functools.cache
def forking() -> Forking:
    """What starts this process's launches of pytest and torchrun."""
    return Forking(environment(measured=False), repository=REPOSITORY)


def is_forked(command: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether :func:`forking` can start it."""
    return can_fork(command, variables, forking=environment(measured=False), repository=REPOSITORY)


def finished(
    command: Sequence[str], *, cwd: Path, variables: Mapping[str, str], within_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """What :func:`subprocess.run` makes of a command, with its output as text; a fork where it can be one.

    Raises:
        subprocess.TimeoutExpired: It still runs after ``within_s``.
    """
    if not is_forked(command, variables):
        ways: dict[str, Any] = {"capture_output": True, "text": True, "timeout": within_s}
        return subprocess.run(command, cwd=cwd, env=variables, check=False, **ways)
    with tempfile.TemporaryDirectory(prefix="finished-") as folder:
        output, errors = files = [Path(folder, name) for name in ("output", "errors")]
        for file in files:
            file.touch()
        with FORKS:
            fork = forking().fork(command, cwd=cwd, environment=variables, output=output, errors=str(errors))
        try:
            code = fork.wait(within_s)
        finally:
            fork.send_signal(signal.SIGKILL)
        return subprocess.CompletedProcess(command, code, *(file.read_text(encoding="utf-8") for file in files))


def hear_interrupts() -> None:
    """A job in the background of a shell ignores SIGINT, and so would all it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Starter:
    """Makes launches in one folder and ends whatever is left of them."""

    def __init__(self, folder: Path) -> None:
        """Launches start in ``folder``, with their temporary files below it."""
        self.folder = folder
        self._launches: list[Launch] = []
        temporary = folder / "tmp"
        temporary.mkdir()
        self.environment = {**environment(measured=False), "TMPDIR": str(temporary)}
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)

    def write(self, **files: str) -> None:
        """Files of the suite: ``write(test_x="...")`` makes ``test_x.py``."""
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text, encoding="utf-8")

    def start(self, command: Sequence[str], *, name: str, **variables: str) -> Launch:
        """Start any command; ``variables`` are added to the environment."""
        launch = Launch(command=command, cwd=self.folder, environment={**self.environment, **variables}, name=name)
        self._launches.append(launch)
        return launch.start()

    def pytest(self, *arguments: str, **variables: str) -> Launch:
        """Start ``python -m pytest``, without torchrun."""
        return self.start([*PYTEST, *arguments], name="pytest", **variables)

    def torchrun(self, *arguments: str, ranks: int = 2, options: Sequence[str] = (), **variables: str) -> Launch:
        """Start pytest under torchrun on this machine; ``options`` are torchrun's."""
        chosen = options or ("--master-port", str(free_port()))
        command = [*TORCHRUN, f"--nproc-per-node={ranks}", *chosen, *PYTEST[1:], *arguments]
        return self.start(command, name="torchrun", **variables)

    def nodes(self, *arguments: str, ranks: int, prefixes: Sequence[Sequence[str]], address: str = "127.0.0.1") -> list[Launch]:
        """Start one torchrun a node, each behind a command of its own (``unshare ...``); ``address`` is the first one's."""
        commands = under_torchrun(*arguments, ranks=ranks, nodes=len(prefixes), address=address)
        paired = enumerate(zip(prefixes, commands, strict=True))
        return [self.start([*prefix, *command], name=f"node{node}") for node, (prefix, command) in paired]

    def end_all(self) -> list[str]:
        """Kill what still runs; the command lines of that. What ends just now has none, and is not left behind."""
        left = [command for launch in self._launches for process in launch.alive() if (command := command_of(process))]
        for launch in self._launches:
            launch.kill_all()
        return left

    def temporary_files(self) -> Iterator[Path]:
        """What the launches left in their temporary folder."""
        return (self.folder / "tmp").iterdir()


@contextlib.contextmanager
def starter_in(folder: Path) -> Iterator[Starter]:
    """A starter whose launches are over at the end; a process left behind fails the test and is killed."""
    made = Starter(folder)
    yield made
    left = made.end_all()
    assert not left, f"left behind: {left}"


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    """Starts runs in a folder of its own."""
    with starter_in(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared_starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """The same for a launch that several tests of a module look at."""
    with starter_in(tmp_path_factory.mktemp("shared")) as made:
        yield made
