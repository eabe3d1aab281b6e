"""Runs a program of the host, such as ``dcgmi`` or ``scontrol``, under a deadline, and ends all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.text import one_line, shortened

MOST_BYTES = 2 << 20
"""So much of what it prints is read: ten times ``dcgmi``'s report on 16 GPUs."""
KILLED_S = 1.0
"""SIGKILL ends a process within this, or not at all: one on a file system that does not answer stays."""
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class ProgramError(Exception):
    """The program could not be started, or did not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A program that ended by itself, with what it printed; a negative ``exit_code`` is a signal's number."""

    exit_code: int
    printed: str
    complained: str

    @property
    def gist(self) -> str:
        """The first line that it printed, of the errors if it printed nothing else."""
        lines = (line.strip() for text in (self.printed, self.complained) for line in text.splitlines())
        return one_line(shortened(next(filter(None, lines), "it printed nothing")))


def run(
    path: str, arguments: Sequence[str], *, within_s: float, grace_s: float = 0.0, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run it in a process group of its own; at the deadline, end that group.

    Args:
        path: the program.
        arguments: its arguments; no shell reads them.
        within_s: the deadline.
        grace_s: from SIGTERM to SIGKILL; 0 for SIGKILL at once.
        environment: its variables; None: those of this process.

    Raises:
        ProgramError: it cannot be started, or had to be ended.
    """
    command = " ".join((Path(path).name, *arguments))
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as complained:
        try:
            child = subprocess.Popen(  # noqa: S603 -- found on PATH, without a shell
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=complained,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 -- one system call; a worker that is killed leaves no program
            )
        except OSError as error:
            raise ProgramError(f"{command} cannot be started: {error.strerror}") from error
        try:
            child.wait(within_s)
        except subprocess.TimeoutExpired:
            raise ProgramError(f"{command}: no answer within {within_s:g} s, so it was ended") from None
        finally:
            _end(child, grace_s)
        return Ended(exit_code=child.returncode, printed=_read(printed), complained=_read(complained))


def run_by_name(
    name: str, arguments: Sequence[str], *, within_s: float, path: str | None = None, absent: str = "is not installed"
) -> Ended | NotAvailable:
    """Run a program of the PATH, or of this ``path``, in no language; why not, where it is absent or :func:`run` cannot."""
    found = shutil.which(name, path=path)
    if found is None:
        return NotAvailable(f"{name} {absent}")
    try:
        return run(found, arguments, within_s=within_s, environment={**os.environ, "LC_ALL": "C"})
    except ProgramError as error:
        return NotAvailable(str(error))


def die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent ends (prctl(2), PR_SET_PDEATHSIG); elsewhere do nothing."""
    with contextlib.suppress(AttributeError):  # Linux alone has it
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """SIGKILL to the process group that ``pid`` leads: a program or a worker, and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """End the program gently, so that it undoes what it began; then kill what is left of its group."""
    if child.poll() is None and grace_s:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    kill_group(child.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(KILLED_S)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MOST_BYTES).decode("utf-8", errors="replace")
