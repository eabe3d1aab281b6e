"""NVIDIA's ``dcgmi``: found, run under a deadline, and asked which GPU has which of its numbers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, ClassVar

from pytest_gpucluster.text import one_line, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpucluster.errors import Part

PROGRAM = "dcgmi"
MOST_BYTES = 2 << 20
"""So much of what it prints is read; a report on 16 GPUs has less than a tenth of that."""
GRACE_S = 30.0
"""After SIGTERM ``dcgmi diag`` stops the test in the host engine, for which it waits 25 s (dcgmi/Diag.cpp of DCGM 4.6.0)."""
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_VERSION = re.compile(r"version:?\s*(\d+(?:\.\d+)+)", re.IGNORECASE)
_ROW = re.compile(r"^\|\s*(?P<number>\d*)\s*\|\s*(?P<fact>.*?)\s*\|\s*$")
_UUID = re.compile(r"^Device UUID:\s*(GPU-[0-9a-fA-F-]+)$")


class DcgmError(Exception):
    """``dcgmi`` could not be run to its end, or what it printed cannot be read: nothing is known of the hardware."""

    blames: ClassVar[Part] = "software"


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmGpu:
    """A GPU as DCGM numbers it. Its number is neither CUDA's nor always NVML's: the host engine keeps it for its lifetime."""

    number: int
    uuid: str


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


def find_program() -> str | None:
    """The path of ``dcgmi``; None where it is not installed."""
    return shutil.which(PROGRAM)


def run(program: str, arguments: Sequence[str], *, within_s: float, grace_s: float = GRACE_S) -> Ended:
    """Run ``dcgmi`` in a process group of its own, and end that group if it takes longer.

    Raises:
        DcgmError: it cannot be started, or had to be ended.
    """
    command = " ".join((PROGRAM, *arguments))
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as complained:
        try:
            child = subprocess.Popen(  # noqa: S603 -- found on PATH, without a shell
                [program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=complained,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 -- one system call; a worker that is killed leaves no diagnostic
            )
        except OSError as error:
            raise DcgmError(f"{command} cannot be started: {error}") from error
        try:
            child.wait(within_s)
        except subprocess.TimeoutExpired:
            raise DcgmError(f"{command} did not end within {within_s:g} s and was ended") from None
        finally:
            _end(child, grace_s)
        return Ended(exit_code=child.returncode, printed=_read(printed), complained=_read(complained))


def _die_with_parent() -> None:
    with contextlib.suppress(AttributeError):  # Linux alone has it
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """End the program gently, so that it stops what the host engine does for it; then kill what is left of its group."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MOST_BYTES).decode("utf-8", errors="replace")


def read_version(program: str, *, within_s: float) -> str | None:
    """What ``dcgmi --version`` says; None where it says none.

    Raises:
        DcgmError: it cannot be run.
    """
    ended = run(program, ["--version"], within_s=within_s)
    found = _VERSION.search(ended.printed)
    return found[1] if found else None


def read_gpus(program: str, *, within_s: float) -> list[DcgmGpu]:
    """The GPUs that the host engine lists.

    Raises:
        DcgmError: the host engine does not answer, or lists no GPU.
    """
    ended = run(program, ["discovery", "-l"], within_s=within_s)
    gpus = parse_discovery(ended.printed)
    if ended.exit_code or not gpus:
        raise DcgmError(
            f"dcgmi discovery -l lists no GPU (exit code {ended.exit_code}: {ended.gist}); "
            "is DCGM's host engine, nv-hostengine, running on this host?"
        )
    return gpus


def parse_discovery(printed: str) -> list[DcgmGpu]:
    """The GPUs of the table of ``dcgmi discovery -l``; those without a UUID, and switches and CPUs, are left out.

    Raises:
        DcgmError: two GPUs have one number, or one UUID.
    """
    found: list[DcgmGpu] = []
    number: int | None = None
    for row in filter(None, map(_ROW.match, printed.splitlines())):
        number = int(row["number"]) if row["number"] else number
        uuid = _UUID.match(row["fact"])
        if uuid and number is not None:
            found.append(DcgmGpu(number=number, uuid=uuid[1]))
    if not len(found) == len({gpu.number for gpu in found}) == len({gpu.uuid for gpu in found}):
        raise DcgmError("dcgmi discovery -l gives two GPUs one number, or one UUID")
    return found
