"""Starts pytest or torchrun as a fork of a Python that has imported both, and torch: 5 and 3 CPU seconds less for each start.

Each launch is a process of its own, in a session of its own, with its own environment, folder, arguments, signals and output,
as ``python -m pytest`` would be. What a new Python reads before its first line cannot be given to a fork: such launches are
started as programs (:func:`can_fork`). Runs measured for coverage are, too.

What a launch starts in its turn, a pytest of torchrun or an agent, is forked by the same rule. A second process stands beside
the launch for that, in which nothing has happened yet: it forks, and the launch adopts the fork, which so is its child
(:class:`_Beside`). What replaces itself by its agent forgets all that came since its own start (:func:`_begin_anew`).

A launch behind ``unshare`` or ``ip netns exec`` is a fork that goes into the namespaces of a stand-in, which these programs
start in its place (:func:`standing_in`). A torchrun behind any other program imports for itself, and forks its ranks and
agents then (:func:`behind_a_program`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import inspect
import io
import itertools
import json
import os
import platform
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODULES = ("pytest", "torch.distributed.run", "pytest_gpucluster.commands.torchrun", "pytest_gpucluster.cli")
AGENT = "pytest_gpucluster.agent.main"
FORKED = (*MODULES, AGENT, "pytest_gpucluster.fleet.agents")
LOADS = ("--gpucluster", "-q", "-p", "no:cacheprovider", "no_such_file")
"""A wrong usage, by which pytest itself loads what each run imports: with its asserts rewritten."""
AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "CUDA_", "TORCH_", "COVERAGE", "PYTEST_", "HF_")
"""Variables that a Python, its libraries and torch read once."""
SET_BY_US = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Set by the plugin before it loads torch, in the process that forks too: what lacks it and what has it are one."""
WHOLE_END = "GPUCLUSTER_TEST_WHOLE_END"
"""A variable with which a launch takes all apart at its end, as Python does, and runs each ``__del__``."""
LIBRARY = "libnvidia-ml.so.1"
ENTERED, NOT_ENTERED = ("unshare", "ip"), ("--pid", "--fork", "setpriv")
"""Programs that make or enter namespaces, and what a process that goes into them has not."""
OPENED = {"reads": os.O_RDONLY, "output": os.O_WRONLY | os.O_APPEND, "errors": os.O_WRONLY | os.O_APPEND}
NAMESPACES = ("user", "mnt", "net", "uts")
"""In the order in which a process may enter them."""
POLL_S = 0.02
ROOM, ROOM_OF_VARIABLES = 8192, 32768
"""Bytes that the process that forks keeps for the command lines and the variables of its forks, as the kernel shows them."""
WITH_ROOM = {"ROOM": " " * ROOM_OF_VARIABLES}
ADOPTED_S = 60.0
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
SUBREAPER, DUMPABLE = 36, 4
"""Of prctl(2). ``PR_SET_CHILD_SUBREAPER``: what loses its parent below this process becomes its child. ``PR_SET_DUMPABLE``: its
user may read its variables."""


class Forked:
    """What :class:`subprocess.Popen` is for a program that was started: the number of the process, and its end."""

    def __init__(self, pid: int, status: Path) -> None:
        """``status`` is written when the process has ended."""
        self.pid, self._status = pid, status

    def poll(self) -> int | None:
        """The exit status, None while it runs; negative for a signal."""
        return int(self._status.read_text(encoding="ascii")) if self._status.exists() else None

    def send_signal(self, number: int) -> None:
        """Send it, where the process has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: It still runs after ``timeout`` seconds.
        """
        deadline_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        return code


def can_fork(command: Sequence[str], environment: Mapping[str, str], *, forking: Mapping[str, str], repository: Path) -> bool:
    """Whether a fork of a process with the environment ``forking`` can be what this command would start."""
    if [*command[:2]] != [sys.executable, "-m"] or command[2] not in FORKED or not sys.platform.startswith("linux"):
        return False
    foreign = {*_at_start(environment).items()} ^ {*_at_start(forking).items()}
    paths = {*environment.get("PYTHONPATH", "").split(os.pathsep)} - {*forking.get("PYTHONPATH", "").split(os.pathsep)}
    ours = all(repository in Path(path, "x").parents for path in paths if path)
    return ours and not foreign and "COVERAGE_PROCESS_START" not in environment and _can_load(environment, forking)


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    free = ("PYTHONPATH", "LD_LIBRARY_PATH", "PYTEST_", "PYTHONDONTWRITEBYTECODE", "TORCH_NCCL_")
    read = {name: text for name, text in environment.items() if name.startswith(AT_START) and not name.startswith(free)}
    return {**SET_BY_US, **read}


def _libraries(environment: Mapping[str, str]) -> list[Path]:
    """The simulated NVML of an environment, which a fork loads by its path."""
    folders = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return [path for folder in folders if folder and (path := Path(folder, LIBRARY)).exists()]


def _can_load(environment: Mapping[str, str], forking: Mapping[str, str]) -> bool:
    changed = environment.get("LD_LIBRARY_PATH") != forking.get("LD_LIBRARY_PATH")
    found = _libraries(environment)
    return not changed or (bool(found) and found[0].read_bytes().startswith(b"\x7fELF"))


def behind_a_program(command: Sequence[str], environment: Mapping[str, str], *, repository: Path) -> list[str] | None:
    """What stands for a torchrun behind another program; None for any other command. The variable ROOM is to be added."""
    words, torchrun = [*command], [sys.executable, "-m", MODULES[1]]
    at = next((index for index in range(1, len(words)) if words[index : index + 3] == torchrun), None)
    if at is None or "COVERAGE_PROCESS_START" in environment or not sys.platform.startswith("linux"):
        return None
    return [*words[:at], sys.executable, __file__, str(repository), " " * ROOM, *words[at:]]


def standing_in(
    command: Sequence[str], environment: Mapping[str, str], *, cwd: Path, output: IO[bytes], repository: Path
) -> tuple[subprocess.Popen[bytes], list[str], dict[str, str]] | None:
    """A process in the namespaces in which the command would run, the rest of the command, and its variables there.

    None where the programs before it do more: other process ids, another user, another copy of ours, or what comes after it.
    """
    words, ours = [*command], repository / "pytest_gpucluster"
    before = words[: -1 - words[::-1].index(sys.executable)] if sys.executable in words else []
    replaced = "sh" not in before or any(word.endswith('exec "$@"') for word in before)
    if not replaced or not {*before[:1]} <= {*ENTERED} or not before or {*before} & {*NOT_ENTERED}:
        return None
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output}
    made = subprocess.Popen([*before, "cat"], cwd=cwd, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]
    with contextlib.suppress(OSError):
        made.stdin.write(b"\n")
        made.stdin.flush()
        its = Path(f"/proc/{made.pid}")
        if made.stdout.read(1) and its.stat().st_uid == os.geteuid() and (its / f"root/{ours}").samefile(ours):
            variables = os.fsdecode((its / "environ").read_bytes()).rstrip("\0").split("\0")
            return made, words[len(before) :], dict(one.split("=", 1) for one in variables)
    with made:
        made.kill()
    return None


class Forking:
    """The process that forks, with the environment that it starts with; it ends when this process does."""

    def __init__(self, environment: Mapping[str, str], *, repository: Path) -> None:
        """Import, with these variables; ``repository`` has the tests that PYTHONPATH of a fork may name."""
        self._numbers = itertools.count()
        self._statuses = tempfile.TemporaryDirectory(prefix="forked-")
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(repository), " " * ROOM],
            cwd=self._statuses.name,
            env={**environment, **WITH_ROOM},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._process.communicate)

    def fork(self, command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], output: Path, **more: Any) -> Forked:
        """Start the command as a fork; ``output`` takes all that it prints.

        ``more`` may have ``reads``, its input; ``errors``, what takes its standard error; and ``stand_in``, the number of the
        process whose place it takes.
        """
        status = Path(self._statuses.name, str(next(self._numbers)))
        paths = {"cwd": str(cwd), "output": str(output.resolve()), "errors": str(output.resolve()), "status": str(status)}
        row = {"command": [*command], "environment": {**environment}, "reads": os.devnull, "stand_in": None, **paths, **more}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(row) + "\n")
        self._process.stdin.flush()
        return Forked(int(self._process.stdout.readline()), status)


# In the process that forks.


@dataclass
class _AtFirst:
    """What a fork begins with, and what it forgets all else for when it replaces itself."""

    repository: Path = Path()
    modules: set[str] = field(default_factory=set)
    path: list[str] = field(default_factory=list)
    finders: list[Any] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    filters: list[Any] = field(default_factory=list)


AT_FIRST = _AtFirst()


def _show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Write both where the kernel shows them, as far as there is room: ``/proc/PID/cmdline`` and ``/proc/PID/environ``."""
    numbers = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    arguments, its_end, variables, their_end = map(int, numbers[45:49])  # fields 48 to 51 of proc_pid_stat(5)
    for begin, end, words in (
        (arguments, its_end, command),
        (variables, their_end, [f"{name}={text}" for name, text in environment.items()]),
    ):
        text = b"\0".join(map(os.fsencode, words))
        ctypes.memmove(begin, text[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def _become(row: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Go on as the command of the row; ``files``: the descriptors that are 0, 1 and 2 then, and those that it keeps."""
    signal.set_wakeup_fd(-1)
    _reset_signals(row["ignored"])
    signal.pthread_sigmask(signal.SIG_SETMASK, row["blocked"])
    for name, limits in row["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    os.umask(row["umask"])
    os.sched_setaffinity(0, row["cpus"])
    _take_files({number: files[index] for index, number in enumerate([0, 1, 2, *row["kept"]])})
    os.chdir(row["cwd"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    forking = {**os.environ}
    os.environ.clear()
    os.environ.update(row["environment"])
    _show(row["command"], row["environment"])
    beside = _Beside(forking) if _words_of(row["command"])[2] in MODULES else None
    if "-u" in row["command"][1:2]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    paths = dict.fromkeys(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)
    sys.path[:] = [os.getcwd(), *paths, *(path for path in sys.path if path not in before)]  # noqa: PTH109 -- as Python
    importlib.invalidate_caches()
    for library in _libraries(os.environ)[:1]:
        ctypes.CDLL(str(library))  # a later load by its name finds it
    if beside is not None:
        AT_FIRST.path = [*sys.path]
        beside.serve_this()
    random.seed()
    _run(row["command"])


def _reset_signals(ignored: Sequence[int]) -> None:
    """As a new Python has them, started by a process that ignores these."""
    for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(one, signal.SIG_IGN if one in (*ignored, signal.SIGPIPE, signal.SIGXFSZ) else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_files(wanted: Mapping[int, int]) -> None:
    """Have exactly these files open: number -> descriptor."""
    above = 1 + max({*wanted, *wanted.values()})
    held = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for number, descriptor in wanted.items()}
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 -- numbers
        if number not in held.values():
            with contextlib.suppress(OSError):
                os.close(number)
    for number, descriptor in held.items():
        os.dup2(descriptor, number)
        os.close(descriptor)


def _run(command: Sequence[str]) -> NoReturn:
    """Run the module as ``__main__``, and end as Python does, but take nothing apart: with torch that takes 0.3 CPU seconds."""
    _, _, module, *arguments = _words_of(command)
    sys.orig_argv[:], sys.argv[:] = command, ["-m", *arguments]
    sys.modules.pop(module if module != "pytest" else "", None)
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if WHOLE_END in os.environ:
            raise
        code = ended.code
    except BaseException as error:  # noqa: BLE001 -- shown, as Python ends
        sys.excepthook(*sys.exc_info())
        code = error
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    number = code if isinstance(code, int) else int(code is not None)
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError:
        number = number or 120
    if isinstance(code, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(number & 0xFF)


def _words_of(command: Any) -> list[str]:
    """A command line without ``-u``; for what is none of Python's, three words that are none."""
    words = [*command] if isinstance(command, list | tuple) else []
    words = [word for index, word in enumerate(words) if (index, word) != (1, "-u")]
    return words if len(words) > 2 and {*map(type, words)} == {str} else [""] * 3


class _Beside:
    """The process beside a launch that forks for it, and how the launch has it do so."""

    def __init__(self, forking: Mapping[str, str]) -> None:
        """Fork it; ``forking``: the environment with which the first Python began. It ends when this process does."""
        self._owner, self._forking, self._lock = os.getpid(), forking, threading.Lock()
        self._line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(2 * ADOPTED_S)
        self._pid = os.fork()
        if self._pid == 0:
            self._line.close()
            for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
                with contextlib.suppress(OSError):
                    signal.signal(one, signal.SIG_IGN)
            nothing = os.open(os.devnull, os.O_RDWR)
            _take_files({0: nothing, 1: nothing, 2: nothing, its.fileno(): its.fileno()})
            os.environ.clear()
            os.environ.update(forking)
            _show([], forking)  # without the mark: it ends a moment after the launch, which leaves nothing behind
            _fork_for(its)
        its.close()

    def serve_this(self) -> None:
        """From now on, what this process starts or becomes is a fork wherever it can be one."""
        self._execute, self._exec = subprocess.Popen._execute_child, os.execv  # type: ignore[attr-defined]
        parameters = inspect.signature(self._execute)

        def execute(popen: Any, *given: Any) -> None:
            if not self._start(popen, parameters.bind(popen, *given).arguments):
                self._execute(popen, *given)

        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
        os.execv = self._replace  # type: ignore[assignment]

    def _can(self, words: list[str], environment: Mapping[str, str]) -> bool:
        is_owner = os.getpid() == self._owner
        return is_owner and can_fork(words, environment, forking=self._forking, repository=AT_FIRST.repository)

    def _start(self, popen: Any, given: Mapping[str, Any]) -> bool:
        """Be :meth:`subprocess.Popen._execute_child`; False where it has to be a program."""
        words, environment = _words_of(given["args"]), {**(os.environ if given["env"] is None else given["env"])}
        usual: dict[str, Any] = dict.fromkeys(("executable", "preexec_fn", "gid", "gids", "uid"))
        usual |= {"close_fds": True, "shell": False, "restore_signals": True, "umask": -1, "process_group": -1}
        if any(given.get(name, value) != value for name, value in usual.items()) or not self._can(words, environment):
            return False
        row = {
            "command": given["args"],
            "environment": environment,
            "cwd": os.fspath(given["cwd"] or Path.cwd()),
            "session": bool(given["start_new_session"]),
            "parent": self._owner,
            "kept": sorted(map(int, given["pass_fds"])),
            **_of_this_process(),
        }
        pairs = (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2))
        files = [number if given[name] == -1 else given[name] for name, number in pairs]
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._line, [json.dumps(row).encode()], [*files, *row["kept"]])
                popen.pid = int(self._line.recv(64))
            finally:
                prctl(SUBREAPER, 0, 0, 0, 0)
        popen._child_created = True
        popen._close_pipe_fds(*(given[name] for name in PIPES))
        return True

    def _replace(self, path: str, command: list[str]) -> None:
        """Be :func:`os.execv`."""
        words = _words_of(command)
        if self._can(words, os.environ) and _is_one_thread():
            kept = self._line.fileno()
            if words[2] not in MODULES:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                self._owner, kept = -1, -1  # what it starts are programs
            _begin_anew(words, kept=kept)
        self._exec(path, command)


def _of_this_process() -> dict[str, Any]:
    """What a program gets from the process that starts it, besides files and variables."""
    umask = os.umask(0)
    os.umask(umask)
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in ("RLIMIT_NOFILE", "RLIMIT_CORE")}
    return {
        "ignored": [int(one) for one in signal.valid_signals() if signal.getsignal(one) == signal.SIG_IGN],
        "blocked": [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "limits": limits,
        "umask": umask,
        "cpus": sorted(os.sched_getaffinity(0)),
    }


def _fork_for(line: socket.socket) -> NoReturn:
    """Fork for each message on the line until its end, by a process in between, which ends at once: so it can be adopted."""
    while True:
        said, files, _, _ = socket.recv_fds(line, 4 << 20, 64)
        if not said:
            os._exit(0)
        if (between := os.fork()) == 0:
            if os.fork() == 0:
                _be_adopted(json.loads(said), line, files)
            os._exit(0)
        for descriptor in files:
            os.close(descriptor)
        os.waitpid(between, 0)


def _be_adopted(row: dict[str, Any], line: socket.socket, files: Sequence[int]) -> NoReturn:
    deadline_s = time.monotonic() + ADOPTED_S
    while os.getppid() != row["parent"]:
        if time.monotonic() > deadline_s:
            os._exit(1)
        time.sleep(0.001)
    try:
        if row["session"]:
            os.setsid()
        line.send(str(os.getpid()).encode())
        line.close()
        _become(row, files)
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 -- shown as Python would, and never goes on as the process that forks
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None


def _is_one_thread() -> bool:
    return len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208 -- numbers


def _begin_anew(command: Sequence[str], *, kept: int) -> NoReturn:
    """Go on as this command in this process: without what it has imported, opened for itself, and set since it was forked.

    ``kept`` is a descriptor that stays open, or -1.
    """
    signal.set_wakeup_fd(-1)
    _reset_signals(_of_this_process()["ignored"])
    faulthandler.cancel_dump_traceback_later()
    faulthandler.disable()
    atexit._clear()
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 -- numbers
        with contextlib.suppress(OSError):
            if descriptor != kept and not os.get_inheritable(descriptor):
                os.close(descriptor)
    for name in sys.modules.keys() - AT_FIRST.modules:
        del sys.modules[name]
    sys.path[:], sys.meta_path[:], sys.path_hooks[:] = AT_FIRST.path, AT_FIRST.finders, AT_FIRST.hooks
    warnings.filters[:] = AT_FIRST.filters  # type: ignore[index]
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    gc.enable()
    importlib.invalidate_caches()
    _show(command, os.environ)
    _run(command)


def _take_place(pid: int) -> None:
    """Go into the namespaces of a process, and end it."""
    library = ctypes.CDLL(None, use_errno=True)
    pairs = [(f"/proc/self/ns/{kind}", f"/proc/{pid}/ns/{kind}") for kind in NAMESPACES]
    for descriptor in [os.open(its, os.O_RDONLY) for own, its in pairs if not Path(its).samefile(own)]:
        if library.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns of {pid}")
        os.close(descriptor)
    library.prctl(DUMPABLE, 1, 0, 0, 0)
    platform._uname_cache = None  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)


def _reap(statuses: dict[int, str]) -> None:
    """Write how each that has ended did."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            part = Path(f"{statuses[ended[0]]}.part")
            part.write_text(str(os.waitstatus_to_exitcode(ended[1])), encoding="ascii")
            part.replace(statuses.pop(ended[0]))


def _serve(ended: int) -> None:
    """Fork for each line of standard input, until its end; ``ended`` wakes it up when a process has ended."""
    statuses: dict[int, str] = {}
    given = b""
    while True:
        ready, _, _ = select.select([0, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _reap(statuses)
        if 0 in ready:
            if not (read := os.read(0, 65536)):
                return
            *lines, given = (given + read).split(b"\n")
            for row in map(json.loads, lines):
                files = [os.open(row[name], how | os.O_NOCTTY) for name, how in OPENED.items()]
                if (pid := os.fork()) == 0:
                    os.setsid()
                    if row["stand_in"] is not None:
                        _take_place(row["stand_in"])
                    _become({**row, **_of_this_process(), "kept": []}, files)
                for descriptor in files:
                    os.close(descriptor)
                statuses[pid] = row["status"]
                os.write(1, f"{pid}\n".encode())


def main() -> None:
    """Import what launches import, and serve."""
    import pytest  # noqa: PLC0415 -- here, as a program

    AT_FIRST.repository, folder, command = Path(sys.argv[1]), Path.cwd(), sys.argv[3:]
    del sys.path[0]  # the folder of this file
    os.environ.pop("ROOM")
    variables = {**os.environ}
    os.chdir("/")  # a test's folder may have a conftest
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where it began as a job in the background
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = pytest.main([*LOADS])
        for module in MODULES:
            importlib.import_module(module)
    assert code == pytest.ExitCode.USAGE_ERROR, printed.getvalue()
    planted = "pytest_gpucluster.measurements"  # tests plant faults in them before anything else imports them
    assert not [name for name in sys.modules if name.startswith(planted)]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which that usage error left to the plugin
    tempfile.tempdir = None  # each fork has its own
    os.environ.clear()
    os.environ.update(variables)
    gc.collect()
    gc.freeze()  # a fork then copies no page for what it never frees
    AT_FIRST.modules = {*sys.modules}
    AT_FIRST.finders, AT_FIRST.hooks, AT_FIRST.filters = [*sys.meta_path], [*sys.path_hooks], [*warnings.filters]
    if command:
        row = {"command": command, "environment": variables, "cwd": str(folder), "kept": [], **_of_this_process()}
        _become(row, [0, 1, 2])
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _serve(ended)


if __name__ == "__main__":
    main()
