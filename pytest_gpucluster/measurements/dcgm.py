"""NVIDIA's own diagnostic, ``dcgmi diag``, run once on each host for the GPUs of this run."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpucluster.inventory import dcgm
from pytest_gpucluster.inventory.dcgm import BAD, DcgmGpu, DiagReport, DiagResult, parse_report
from pytest_gpucluster.inventory.program import Ended
from pytest_gpucluster.protocol.functions import without_device

ASK_S = 30.0
"""Its version, and the list of its GPUs, come within a second."""
FOUND_SOMETHING = (226, 205)
"""Exit codes of a diagnostic that ran and failed: DCGM_ST_NVVS_ERROR (-30) and DCGM_ST_NVVS_ISOLATE_ERROR (-51)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmProgram:
    """``dcgmi`` on a host: its path, None where it is not installed."""

    path: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmDiag:
    """One ``dcgmi diag`` on one host.

    Attributes:
        version: DCGM's; None where neither the report nor the program says it.
        level: what ``-r`` was.
        gpus: the GPUs that were to be tested, with DCGM's numbers.
        results: all that the report says.
        doubts: why what passed is not to be believed, such as an exit code that contradicts the report.
    """

    version: str | None
    level: int
    gpus: list[DcgmGpu]
    results: list[DiagResult]
    doubts: list[str]


@without_device
def dcgm_program() -> DcgmProgram:
    """Look for ``dcgmi`` on this host's PATH."""
    return DcgmProgram(path=dcgm.find_program())


@without_device
def dcgm_diag(*, run: int, within_s: float, uuids: list[str]) -> DcgmDiag:
    """Run ``dcgmi diag -r RUN -j`` for those of ``uuids`` that this host has. Without one of them nothing is run.

    ``run`` is 1 (some seconds), 2 (two minutes), 3 (a quarter of an hour or more) or 4; the program is ended after
    ``within_s``.

    Raises:
        DcgmError: there is no ``dcgmi``, its host engine does not answer, it hangs, or its report cannot be read.
        ValueError: there is no such level.
    """
    if run not in (1, 2, 3, 4):
        raise ValueError(f"dcgmi diag has the levels 1 to 4, not {run}")
    program = dcgm.find_program()
    if program is None:
        raise dcgm.DcgmError("dcgmi is not installed")
    gpus = [gpu for gpu in dcgm.read_gpus(program, within_s=ASK_S) if gpu.uuid in uuids]
    if not gpus:
        version = dcgm.read_version(program, within_s=ASK_S)
        return DcgmDiag(version=version, level=run, gpus=[], results=[], doubts=[])
    numbers = ",".join(str(gpu.number) for gpu in gpus)
    ended = dcgm.run(program, ["diag", "-r", str(run), "-j", "-i", numbers], within_s=within_s)
    try:
        report = parse_report(ended.printed)
    except dcgm.DcgmError as error:
        raise dcgm.DcgmError(f"{error} (exit code {ended.exit_code}: {ended.gist})") from error
    version = report.version or dcgm.read_version(program, within_s=ASK_S)
    return DcgmDiag(version=version, level=run, gpus=gpus, results=report.results, doubts=_doubts(ended, report, gpus))


def _doubts(ended: Ended, report: DiagReport, gpus: list[DcgmGpu]) -> list[str]:
    """Why the report may not be what the diagnostic found."""
    has_bad = any(result.word.casefold() in BAD for result in report.results)
    doubts = []
    if ended.exit_code and not (ended.exit_code in FOUND_SOMETHING and has_bad):
        doubts.append(f"dcgmi diag ended with exit code {ended.exit_code}, which its report does not explain")
    wanted = {gpu.number for gpu in gpus}
    strange = sorted({result.gpu for result in report.results if result.gpu is not None} - wanted)
    if strange:
        doubts.append(f"the report is about GPU {', '.join(map(str, strange))}, which was not requested")
    return doubts
