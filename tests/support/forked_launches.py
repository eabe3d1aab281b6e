"""Starts pytest or torchrun as a fork of a Python that has imported both, and torch: 5 and 3 CPU seconds less for each start.

Each launch is a process of its own, in a session of its own, with its own environment, folder, arguments, signals and output,
as ``python -m pytest`` would be. It differs in its parent, and in its command line, which is that of the process that forks.
What a new Python reads before its first line cannot be given to a fork: such launches are started as programs
(:func:`can_fork`). Runs measured for coverage are, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import itertools
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODULES = ("pytest", "torch.distributed.run")
LOADS = ("--gpucluster", "-q", "-p", "no:cacheprovider", "no_such_file")
"""A wrong usage, by which pytest itself loads what each run imports: with its asserts rewritten."""
AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "CUDA_", "TORCH_", "COVERAGE", "PYTEST_", "HF_")
"""Variables that a Python, its libraries and torch read once."""
LIBRARY = "libnvidia-ml.so.1"
POLL_S = 0.02
UNMARKED = "0" * 32


class Forked:
    """What :class:`subprocess.Popen` is for a program that was started: the number of the process, and its end."""

    def __init__(self, pid: int, status: Path) -> None:
        """``status`` is written when the process has ended."""
        self.pid, self._status = pid, status

    def poll(self) -> int | None:
        """The exit status, None while it runs; negative for a signal."""
        return int(self._status.read_text(encoding="ascii")) if self._status.exists() else None

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
    if [*command[:2]] != [sys.executable, "-m"] or command[2] not in MODULES or not sys.platform.startswith("linux"):
        return False
    foreign = {*_at_start(environment).items()} ^ {*_at_start(forking).items()}
    paths = {*environment.get("PYTHONPATH", "").split(os.pathsep)} - {*forking.get("PYTHONPATH", "").split(os.pathsep)}
    ours = all(repository in Path(path, "x").parents for path in paths if path)
    return ours and not foreign and "COVERAGE_PROCESS_START" not in environment and _can_load(environment, forking)


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    free = ("PYTHONPATH", "LD_LIBRARY_PATH", "PYTEST_", "PYTHONDONTWRITEBYTECODE")
    return {name: text for name, text in environment.items() if name.startswith(AT_START) and not name.startswith(free)}


def _libraries(environment: Mapping[str, str]) -> list[Path]:
    """The simulated NVML of an environment, which a fork loads by its path."""
    folders = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return [path for folder in folders if folder and (path := Path(folder, LIBRARY)).exists()]


def _can_load(environment: Mapping[str, str], forking: Mapping[str, str]) -> bool:
    changed = environment.get("LD_LIBRARY_PATH") != forking.get("LD_LIBRARY_PATH")
    found = _libraries(environment)
    return not changed or (bool(found) and found[0].read_bytes().startswith(b"\x7fELF"))


class Forking:
    """The process that forks, with the environment that it starts with; it ends when this process does."""

    def __init__(self, environment: Mapping[str, str], *, mark: str) -> None:
        """``mark`` names a variable that each fork has of its own, of 32 digits."""
        self._mark, self._numbers = mark, itertools.count()
        self._statuses = tempfile.TemporaryDirectory(prefix="forked-")
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=self._statuses.name,
            env={**environment, mark: UNMARKED},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._process.communicate)

    def fork(self, command: Sequence[str], *, cwd: Path, environment: Mapping[str, str], output: Path) -> Forked:
        """Start the command as a fork; ``output`` takes all that it prints."""
        status = Path(self._statuses.name, str(next(self._numbers)))
        paths = {"cwd": str(cwd), "output": str(output.resolve()), "status": str(status)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({"command": [*command], "environment": {**environment}, "mark": self._mark, **paths}) + "\n"
        )
        self._process.stdin.flush()
        return Forked(int(self._process.stdout.readline()), status)


# In the process that forks.


def _write_mark(name: str, text: str) -> None:
    """Change a variable in the block that the kernel shows as ``/proc/PID/environ``, in which its place is kept free."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    ctypes.memmove(libc.getenv(name.encode()), text.encode(), len(UNMARKED))


def _become(row: dict[str, Any]) -> NoReturn:
    """Go on as ``python -m MODULE ARGUMENTS``, in the folder and with the environment of the row."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    nothing, printed = os.open(os.devnull, os.O_RDONLY), os.open(row["output"], os.O_WRONLY | os.O_APPEND)
    for source, target in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(source, target)
    os.closerange(3, 256)
    os.chdir(row["cwd"])
    _write_mark(row["mark"], row["environment"][row["mark"]])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(row["environment"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.getcwd(), *paths, *(path for path in sys.path if path not in before)]  # noqa: PTH109 -- as Python
    importlib.invalidate_caches()
    for library in _libraries(os.environ)[:1]:
        ctypes.CDLL(str(library))  # a later load by its name finds it
    random.seed()
    module = row["command"][2]
    sys.orig_argv[:], sys.argv[:] = row["command"], ["-m", *row["command"][3:]]
    sys.modules.pop(module if module != "pytest" else "", None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


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
                if (pid := os.fork()) == 0:
                    _become(row)
                statuses[pid] = row["status"]
                os.write(1, f"{pid}\n".encode())


def main() -> None:
    """Import what launches import, and serve."""
    import pytest  # noqa: PLC0415 -- here, as a program

    del sys.path[0]  # the folder of this file
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
    gc.collect()
    gc.freeze()  # a fork then copies no page for what it never frees
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _serve(ended)


if __name__ == "__main__":
    main()
