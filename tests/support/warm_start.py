"""Starts of ``python -m pytest`` without the two CPU seconds that its imports take.

Each test process keeps one process that has imported pytest and torch and does nothing else. It forks for each launch, while
it has one thread. The fork becomes what a new Python would have been: arguments, variables, folder, descriptors, signals,
session and what ``/proc`` says of them are its own. :func:`start` starts a new Python wherever a fork would differ.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IMPORTED = ("pytest", "torch.distributed", "rich.console", "jinja2", "msgspec", "yaml", "importlib.metadata", "email.message")
"""What each run imports. No module of this project and no plugin of pytest: pytest rewrites the asserts of those."""
AT_START = ("PYTHON", "LD_", "COVERAGE", "OMP_", "TORCH_", "MALLOC_", "GLIBC_", "LC_", "LANG")
"""Variables that a process reads when it starts. ``PYTHONPATH`` is no such: the fork has the path of its own."""
LIBRARIES = "LD_LIBRARY_PATH"
"""Differs in tests with a simulated NVML: from the second launch with the same folder on, another process forks for them."""
ROOM_BYTES = 32_000
"""For what ``/proc`` shows of a fork: the arguments, and as much again for the variables."""


@dataclass(slots=True)
class Warm:
    """A fork, seen from the test process, with what :class:`subprocess.Popen` says of a child."""

    pid: int
    _ending: socket.socket
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            self._ending.settimeout(timeout)
            try:
                told = self._ending.recv(16)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0) from None
            assert told, "the process that forks has ended"
            self.returncode = int(told)
            self._ending.close()
        return self.returncode


def start(
    command: Sequence[str], *, cwd: Path, variables: Mapping[str, str], output: int, plain: Mapping[str, str]
) -> Warm | None:
    """Start ``python -m MODULE ...`` as a fork in a session of its own; None where a new Python has to be started.

    ``plain``: the variables of a launch to which nothing was added. Nothing that is read at a start may differ from them.
    """
    usual = {*plain.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).parents[1] / "e2e" / "plants")}
    if (
        [*command[:2]] != [sys.executable, "-m"]
        or not hasattr(os, "pidfd_open")
        or not usual.issuperset(variables.get("PYTHONPATH", "").split(os.pathsep))
        or any(variables.get(name) != plain.get(name) for name in {*_at_start(variables), *_at_start(plain)} - {LIBRARIES})
        or sum(len(text) + 1 for text in command) > ROOM_BYTES
        or sum(len(name) + len(text) + 2 for name, text in variables.items()) > ROOM_BYTES
    ):
        return None
    forking = _forks().of(tuple(sorted(_at_start(variables).items())), at_once=variables.get(LIBRARIES) == plain.get(LIBRARIES))
    launch = {"command": [*command], "cwd": str(cwd), "variables": dict(variables)}
    return forking.fork(launch, output) if forking is not None else None


def _at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in variables.items() if name.startswith(AT_START) and name != "PYTHONPATH"}


class _Forks:
    """The processes that fork: one of plain launches, and one of those with the simulated NVML that was used last."""

    def __init__(self) -> None:
        self._running: dict[tuple[tuple[str, str], ...], _Forking] = {}
        self._asked: set[tuple[tuple[str, str], ...]] = set()
        self._leaving: list[_Forking] = []

    def of(self, variables: tuple[tuple[str, str], ...], *, at_once: bool) -> _Forking | None:
        """The one with these variables; None where it would be started for the first launch and not ``at_once``."""
        if variables not in self._running:
            is_first = variables not in self._asked
            self._asked.add(variables)
            if is_first and not at_once:
                return None
            for other in [*self._running][1:]:
                self._leaving.append(self._running.pop(other))
                self._leaving[-1].leave()
            self._running[variables] = _Forking(dict(variables))
        return self._running[variables]

    def end(self) -> None:
        """Have them end, and wait for that."""
        for forking in self._running.values():
            forking.leave()
        for forking in (*self._running.values(), *self._leaving):
            forking.process.wait()


@functools.cache
def _forks() -> _Forks:
    """Those of this test process, which end with it."""
    made = _Forks()
    atexit.register(made.end)
    return made


class _Forking:
    """A process that forks; it ends with this one."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept = {name: text for name, text in os.environ.items() if not name.startswith(AT_START)}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), "x" * ROOM_BYTES],
                env={**kept, **variables, "GPUCLUSTER_TEST_ROOM": "x" * ROOM_BYTES},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def leave(self) -> None:
        """Have it end when the last of its forks has ended."""
        self._control.close()

    def fork(self, launch: Mapping[str, object], output: int) -> Warm:
        """Fork; what becomes of it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._control, [json.dumps(launch).encode()], [output, theirs.fileno()])
        pid = ours.recv(16)
        assert pid, "the process that forks has ended"
        return Warm(int(pid), ours)


# In the process that forks.


def serve(control: socket.socket) -> dict[str, object]:
    """Fork for each launch until the test process ends; returns in a fork, with what it was asked to be."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            if key.fileobj is not control:
                _report_end(selector, key)
                continue
            launch, fds, _, _ = socket.recv_fds(control, 3 * ROOM_BYTES, 2)
            if not launch:
                selector.unregister(control)
                continue
            pid = os.fork()
            if pid == 0:
                os.dup2(fds[0], 1)
                os.dup2(fds[0], 2)
                _close([*fds, *(other.fd for other in selector.get_map().values())])
                selector.close()
                return dict(json.loads(launch))
            os.close(fds[0])
            _send(fds[1], pid)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, fds[1]))
    sys.exit(0)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _send(fd: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the test process may have ended
        os.write(fd, str(number).encode())


def _report_end(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    pid, ending = key.data
    selector.unregister(key.fileobj)
    _send(ending, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    _close([key.fd, ending])


def become(command: list[str], variables: dict[str, str], cwd: str, *, path: list[str]) -> NoReturn:
    """Go on as ``python -m MODULE ...``; ``path`` is that of a Python without ``PYTHONPATH``."""
    os.setsid()
    os.chdir(cwd)
    _show(command, variables)
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv[:], sys.argv[:] = command, ["-m", *command[3:]]
    given = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = dict.fromkeys([cwd, *given, *path])
    sys.modules["__main__"] = types.ModuleType("__main__")
    runpy._run_module_as_main(command[2])  # type: ignore[attr-defined]
    sys.exit(0)


def _show(command: list[str], variables: dict[str, str]) -> None:
    """Let ``/proc`` show these arguments and variables, in the place of those that this process was started with."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    arguments, end, first, last = map(int, fields[45:49])  # proc_pid_stat(5): arg_start to env_end
    texts = (command, arguments, end), ([f"{name}={text}" for name, text in variables.items()], first, last)
    with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        for shown, start_at, end_at in texts:
            memory.seek(start_at)
            memory.write(b"".join(os.fsencode(text) + b"\0" for text in shown).ljust(end_at - start_at, b"\0"))


def main() -> None:
    """Import, then serve."""
    control = socket.socket(fileno=int(sys.argv[1]))
    path = sys.path[1:]
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # one that only the fork's own PYTHONPATH has
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    launch = serve(control)
    control.detach()
    become(**launch, path=path)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
