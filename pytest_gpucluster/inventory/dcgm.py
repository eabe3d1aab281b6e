"""NVIDIA's ``dcgmi``: found, run under a deadline, and asked which GPU has which of its numbers."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pytest_gpucluster.inventory import program
from pytest_gpucluster.inventory.program import ProgramError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpucluster.errors import Part
    from pytest_gpucluster.inventory.program import Ended

PROGRAM = "dcgmi"
GRACE_S = 30.0
"""After SIGTERM ``dcgmi diag`` stops the test in the host engine, for which it waits 25 s (dcgmi/Diag.cpp of DCGM 4.6.0)."""
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


def find_program() -> str | None:
    """The path of ``dcgmi``; None where it is not installed."""
    return shutil.which(PROGRAM)


def run(path: str, arguments: Sequence[str], *, within_s: float, grace_s: float = GRACE_S) -> Ended:
    """Run ``dcgmi``, and end it if it takes longer.

    Raises:
        DcgmError: it cannot be started, or had to be ended.
    """
    try:
        return program.run(path, arguments, within_s=within_s, grace_s=grace_s)
    except ProgramError as error:
        raise DcgmError(str(error)) from None


def read_version(path: str, *, within_s: float) -> str | None:
    """What ``dcgmi --version`` says; None where it says none.

    Raises:
        DcgmError: it cannot be run.
    """
    ended = run(path, ["--version"], within_s=within_s)
    found = _VERSION.search(ended.printed)
    return found[1] if found else None


def read_gpus(path: str, *, within_s: float) -> list[DcgmGpu]:
    """The GPUs that the host engine lists.

    Raises:
        DcgmError: the host engine does not answer, or lists no GPU.
    """
    ended = run(path, ["discovery", "-l"], within_s=within_s)
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
