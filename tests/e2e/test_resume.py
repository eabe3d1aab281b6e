"""Runs on a simulated fleet that go on: what stays, what is judged again, what is refused. No file changes by a refusal."""

from __future__ import annotations

import fcntl
import shutil
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.reporting.rebuild import rebuild
from tests.support.launching import ACCEPTANCE
from tests.support.reports import RESULTS
from tests.support.runs import run_pytest
from tests.support.thresholds_files import write_limits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CHOSEN = ("-p", "pytest_gpucluster.plugin.fleet", "--fleet=1x2", f"{ACCEPTANCE}/test_memory.py", f"{ACCEPTANCE}/test_health.py")
SELECTED = ("-k", "hbm_bandwidth or xid_during_run or ecc_growth", f"--gpucluster-results={RESULTS}")


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which another program held one GPU."""
    folder = tmp_path_factory.mktemp("unfinished")
    run = run_pytest(folder, *CHOSEN, *SELECTED, "--fleet-bad=node0-gpu1:busy")
    assert run.outcomes("hbm_bandwidth") == {"node0-gpu0": "passed", "node0-gpu1": "error"}, run.stdout
    return folder


@pytest.fixture
def folder(unfinished: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return shutil.copytree(unfinished, tmp_path / "copy")


def go_on(folder: Path, *arguments: str) -> FinishedRun:
    """The same command without the other program."""
    return run_pytest(folder, *CHOSEN, *SELECTED, *arguments)


def test_the_other_program_has_left(folder: Path) -> None:
    """What had passed stays, the rest is measured, counters and Xids are judged over both parts; a third part has no work."""
    before = len((folder / RESULTS / "journal.jsonl").read_bytes())
    run = go_on(folder)
    assert {place: run.row("hbm_bandwidth", place)["part"] for place in ("node0-gpu0", "node0-gpu1")} == {
        "node0-gpu0": 1,
        "node0-gpu1": 2,
    }
    assert {*run.outcomes("hbm_bandwidth").values(), *run.outcomes("ecc_growth").values()} == {"passed"}
    assert run.row("ecc_growth", "node0-gpu0")["part"] == 2
    assert "2 outcomes stay" not in run.stdout
    assert "part 2 of the run in " in run.stdout
    assert "measured in 2 parts: part 1 from " in run.verdict_line
    assert run.case("test_hbm_bandwidth[node0-gpu0]").outcome == "passed", "though pytest did not run it in this part"
    spans = [event["spans"] for event in run.journal if event["event"] == "soak_earlier"]
    assert [len(one) for one in spans[-1].values()] == [2, 2], "the first part, and the time between"
    assert (folder / RESULTS / "journal.jsonl").stat().st_size > before
    assert rebuild(folder / RESULTS).line == run.results["verdict_line"]


def test_what_another_test_found_is_measured_again(folder: Path) -> None:
    """A test of that name in another file may have required any number: `tests_acceptance` took its outcome for its own."""
    journal = folder / RESULTS / "journal.jsonl"
    text = journal.read_text(encoding="utf-8")
    assert "test_memory.py::test_hbm_bandwidth" in text
    journal.write_text(text.replace("test_memory.py::test_hbm_bandwidth", "test_own.py::test_hbm_bandwidth"), encoding="utf-8")
    run = go_on(folder)
    assert (run.row("hbm_bandwidth", "node0-gpu0")["part"], run.row("hbm_bandwidth", "node0-gpu1")["part"]) == (2, 2)
    assert run.case("test_hbm_bandwidth[node0-gpu0]").outcome == "passed"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("limits", "the file of limits is another one"),
        pytest.param("seed", "the simulated fleet is another one", marks=pytest.mark.slow),
        ("part", "gpu-node-0 gpu 0 has another serial number: it was SIM-SWAPPED, and is SIM-00000-00"),
        pytest.param("failed", "FAILED in the run", marks=pytest.mark.slow),
        pytest.param("edited", "passed in it with a value that is not > 4.1 TB/s: it was edited", marks=pytest.mark.slow),
        ("running", "is in use by another run"),
    ],
)
def test_another_run_is_refused(folder: Path, kind: str, said: str) -> None:
    """With the difference, the exit code 4, and no file changed."""
    journal = folder / RESULTS / "journal.jsonl"
    text = journal.read_text(encoding="utf-8")
    if kind == "part":
        text = text.replace("SIM-00000-00", "SIM-SWAPPED")
    if kind in {"failed", "edited"}:  # of a run that came to its end nothing is taken: another one begins
        lines = text.replace('"outcome": "error"', f'"outcome": "{"failed" if kind == "failed" else "passed"}"').splitlines()
        text = "".join(f"{line}\n" for line in lines[:-1])
    journal.write_text(text, encoding="utf-8")
    other = {"limits": write_limits(folder / "limits.yaml", {}), "seed": "--fleet-seed=7"}.get(kind, "-q")
    with (folder / RESULTS / ".lock").open("rb") as lock:
        if kind == "running":
            fcntl.flock(lock, fcntl.LOCK_EX)
        run = go_on(folder, other)
    assert run.returncode == 4, run.stdout
    assert said in run.stdout
    assert journal.read_text(encoding="utf-8") == text
