"""``dcgmi diag`` on one host, by a ``dcgmi`` that the test makes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.inventory.dcgm import DcgmError, DcgmGpu
from pytest_gpucluster.measurements.dcgm import DcgmDiag, dcgm_diag, dcgm_program
from tests.support.dcgm import entity, install, report_2, report_3, report_4

if TYPE_CHECKING:
    from pathlib import Path

UUIDS = {0: "GPU-aa", 1: "GPU-bb", 2: "GPU-cc"}
OURS = ["GPU-aa", "GPU-cc", "GPU-of-another-host"]
REPORT = report_4(software=[entity(0), entity(2)])
FAILED = report_4(software=[entity(0), entity(2, "Fail")])


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first folder of PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "bin"


def diag(uuids: list[str] = OURS, *, run: int = 1, within_s: float = 60.0) -> DcgmDiag:
    """The diagnostic of this host."""
    return dcgm_diag(run=run, within_s=within_s, uuids=uuids)


def test_only_gpus_of_this_run_are_tested(path: Path) -> None:
    """By DCGM's own numbers: the others may be somebody else's."""
    install(path, uuids=UUIDS, report=REPORT)
    found = diag(run=2)
    assert (path / "calls").read_text(encoding="ascii").splitlines() == ["discovery -l", "diag -r 2 -j -i 0,2"]
    assert found.gpus == [DcgmGpu(number=0, uuid="GPU-aa"), DcgmGpu(number=2, uuid="GPU-cc")]
    assert (found.version, found.level, found.doubts, len(found.results)) == ("4.2.3", 2, [], 2)


def test_without_a_gpu_of_this_run_nothing_is_run(path: Path) -> None:
    """Each GPU then has no number."""
    install(path, uuids=UUIDS, report=REPORT)
    assert diag(["GPU-dd"]) == DcgmDiag(version="3.3.9", level=1, gpus=[], results=[], doubts=[])
    assert "diag" not in (path / "calls").read_text(encoding="ascii")


@pytest.mark.parametrize("report", [report_2([0, 2]), report_3([0, 2])], ids=["the program's", "the report's"])
def test_the_version_is_told(path: Path, report: dict[str, object]) -> None:
    """DCGM 2 does not write it into its report."""
    install(path, uuids=UUIDS, report=report)
    assert diag().version == "3.3.9"


@pytest.mark.parametrize(
    ("report", "exit_code", "said"),
    [
        (FAILED, 226, None),
        (FAILED, 205, None),
        (FAILED, 0, None),
        (REPORT, 226, "ended with exit code 226, which its report does not explain"),
        (REPORT, 1, "ended with exit code 1, which its report does not explain"),
        (FAILED, 139, "ended with exit code 139, which its report does not explain"),
        (report_4(software=[entity(0), entity(2), entity(7)]), 0, "about GPU 7, which was not requested"),
    ],
)
def test_doubts(path: Path, report: dict[str, object], exit_code: int, said: str | None) -> None:
    """226 and 205 say that a test failed; any other code, or these without a failure, contradict the report."""
    install(path, uuids=UUIDS, report=report, exit_code=exit_code)
    doubts = diag().doubts
    assert (doubts == []) if said is None else (said in doubts[0])


@pytest.mark.parametrize(
    ("report", "exit_code", "said"),
    [
        ("Segmentation fault (core dumped)", 139, r"printed no JSON \(exit code 139: Segmentation fault"),
        ('{"DCGM Diagnostic": {"test_cat', 0, "not whole"),
        ('{"DCGM Diagnostic": {"runtime_error": "MIG is enabled"}}', 255, "could not run the diagnostic: MIG is enabled"),
        ("", 0, r"no JSON .* it printed nothing"),
    ],
)
def test_no_report(path: Path, report: str, exit_code: int, said: str) -> None:
    """An error with the exit code and what was printed."""
    install(path, uuids=UUIDS, report=report, exit_code=exit_code)
    with pytest.raises(DcgmError, match=said):
        diag()


def test_one_that_hangs(path: Path) -> None:
    """An error that names the command and its time."""
    install(path, uuids=UUIDS, report=REPORT, before='[ "$1" = discovery ] || sleep 1000')
    with pytest.raises(DcgmError, match=r"dcgmi diag -r 1 -j -i 0,2: no answer within 0\.5 s"):
        diag(within_s=0.5)


def test_whether_it_is_there(path: Path) -> None:
    """By PATH; without it nothing can be run."""
    before = dcgm_program().path
    install(path, uuids=UUIDS, report=REPORT)
    assert before != dcgm_program().path == str(path / "dcgmi")


def test_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor is a level that DCGM does not have run."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DcgmError, match="not installed"):
        diag()
    with pytest.raises(ValueError, match="levels 1 to 4, not 9"):
        diag(run=9)
