"""The files beside results.json: written whole, never at the cost of the run, and never over its records."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.commands.main import main
from pytest_gpucluster.page import outputs
from pytest_gpucluster.page.outputs import Wanted, write_outputs
from pytest_gpucluster.page.render import embedded_results
from tests.support.fleet_records import failed, fleet, outcomes
from tests.support.result_files import document, of_version_2, text_of
from tests.unit.reporting.test_rebuild import journal

if TYPE_CHECKING:
    from pathlib import Path

PLACES = fleet(2, 4)
GOOD = document(outcomes(PLACES), PLACES)
BAD = document(outcomes(PLACES, [failed("bf16_tflops", "node1-gpu2", 543.25)]), PLACES)


def results_in(folder: Path, members: Any = BAD) -> Path:
    """A results directory of a run that has ended, without its journal, as kept runs are."""
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_bytes(text_of(members))
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file with its content."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_all_files(tmp_path: Path) -> None:
    """Page and metrics in the directory; summary and metrics where they are wanted; GitHub's summary is appended to."""
    folder, step = results_in(tmp_path / "r"), tmp_path / "step.md"
    step.write_text("# before\n", encoding="utf-8")
    wanted = Wanted(
        summary=tmp_path / "new" / "s.md",
        metrics=tmp_path / "node" / "m.prom",
        termination=tmp_path / "dev" / "termination-log",
        environment={"GITHUB_STEP_SUMMARY": str(step), "GITHUB_ACTIONS": "true"},
    )
    said = write_outputs(folder, wanted)
    assert said.problems == ()
    assert said.annotations[0].startswith("::error title=REJECTED::")
    assert set(files_in(folder)) == {"results.json", "report.html", "metrics.prom"}
    assert (tmp_path / "node" / "m.prom").read_bytes() == (folder / "metrics.prom").read_bytes()
    assert step.read_text(encoding="utf-8") == "# before\n" + (tmp_path / "new" / "s.md").read_text(encoding="utf-8")
    assert stat.S_IMODE((folder / "metrics.prom").stat().st_mode) & 0o444  # another user's collector reads it
    message = (tmp_path / "dev" / "termination-log").read_text(encoding="utf-8")
    assert message.startswith("REJECTED")
    assert "gpu-node-1 GPU 2" in message
    assert write_outputs(folder, Wanted()).annotations == ()


@pytest.mark.parametrize(
    "fault", [RuntimeError("x"), RecursionError(), MemoryError(), KeyError("k"), OSError(28, "No space left")]
)
def test_a_page_that_fails_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    """Nothing is raised; the other files are written."""

    def fail(*_: object) -> str:
        raise fault

    monkeypatch.setattr(outputs, "page_from", fail)
    said = write_outputs(results_in(tmp_path), Wanted())
    assert len(said.problems) == 1
    assert said.problems[0].startswith("report.html could not be written: ")
    assert set(files_in(tmp_path)) == {"results.json", "metrics.prom"}


@pytest.mark.parametrize("name", ["model_of", "page_from", "metrics_of", "markdown_of", "annotations_of", "termination_of"])
def test_a_fault_in_any_part_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nothing is raised, whichever of them fails: the verdict and the JUnit file come after it. The fault is said."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(outputs, name, fail)
    folder, step = results_in(tmp_path / "r"), tmp_path / "step.md"
    wanted = Wanted(
        summary=tmp_path / "s.md",
        metrics=tmp_path / "m.prom",
        termination=tmp_path / "t",
        environment={"GITHUB_STEP_SUMMARY": str(step), "GITHUB_ACTIONS": "true"},
    )
    said = write_outputs(folder, wanted)
    assert said.problems
    assert all(problem.endswith("could not be written: RuntimeError: planted") for problem in said.problems), said.problems
    written = {
        "page_from": (folder / "report.html").exists(),
        "metrics_of": (folder / "metrics.prom").exists() or (tmp_path / "m.prom").exists(),
        "markdown_of": (tmp_path / "s.md").exists() or step.exists(),
        "annotations_of": bool(said.annotations),
        "termination_of": (tmp_path / "t").exists(),
    }
    assert written == {one: name not in (one, "model_of") for one in written}


def test_every_file_that_cannot_be_is_named(tmp_path: Path) -> None:
    """A folder in the way of each: a sentence for each, and no temporary file stays."""
    folder = results_in(tmp_path / "r")
    for name in ("report.html", "metrics.prom"):
        (folder / name).mkdir()
    (tmp_path / "s.md").mkdir()
    wanted = Wanted(
        summary=tmp_path / "s.md", metrics=tmp_path / "s.md" / "m", environment={"GITHUB_STEP_SUMMARY": str(tmp_path)}
    )
    said = write_outputs(folder, wanted)
    assert [problem.partition(" could")[0] for problem in said.problems] == [
        "report.html", "metrics.prom", str(tmp_path / "s.md"), "$GITHUB_STEP_SUMMARY",
    ]  # fmt: skip
    assert list(folder.glob(".*.tmp")) == []


def test_results_that_cannot_be_read(tmp_path: Path) -> None:
    """Half a file: one sentence, and no page of a guess."""
    folder = results_in(tmp_path)
    (folder / "results.json").write_bytes(text_of(BAD)[:500])
    said = write_outputs(folder, Wanted())
    assert len(said.problems) == 1
    assert "is damaged" in said.problems[0]
    assert set(files_in(folder)) == {"results.json"}


def test_a_link_in_the_place_of_the_page_is_not_followed(tmp_path: Path) -> None:
    """It could lead anywhere."""
    folder, victim = results_in(tmp_path / "r"), tmp_path / "victim"
    victim.write_text("mine", encoding="utf-8")
    (folder / "report.html").symlink_to(victim)
    said = write_outputs(folder, Wanted())
    assert "symbolic link" in said.problems[0] or "report.html" in said.problems[0]
    assert victim.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_report_of_a_kept_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, version: int) -> None:
    """Of a directory or a file, of both versions: the page beside it, nothing else; 1 as the verdict is not good."""
    records = outcomes(PLACES, [failed("bf16_tflops", "node1-gpu2", 543.25)])
    folder = results_in(tmp_path / "r", BAD if version == 1 else of_version_2(BAD, records, PLACES))
    before = files_in(folder)
    assert main(["report", str(folder if kind == "folder" else folder / "results.json")]) == 1
    after = files_in(folder)
    page = after.pop("report.html")
    assert after == before
    assert embedded_results(page.decode()) == before["results.json"]
    assert capsys.readouterr().out.splitlines()[1] == f"page {folder / 'report.html'}"


def test_report_elsewhere(tmp_path: Path) -> None:
    """``-o`` touches nothing in the directory, and 0 is for a good verdict."""
    folder = results_in(tmp_path / "r", GOOD)
    before = files_in(folder)
    assert main(["report", str(folder), "-o", str(tmp_path / "new" / "page.html")]) == 0
    assert files_in(folder) == before
    assert "<h1>ACCEPTED</h1>" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")


def test_report_of_a_run_that_was_killed(tmp_path: Path) -> None:
    """From the journal: with ``-o`` only the page, else all reports."""
    journal(tmp_path)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 1
    assert set(files_in(tmp_path)) == {"journal.jsonl", "page.html"}
    assert "Rebuilt from the journal" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 1
    assert {"report.html", "results.json", "junit.xml", "metrics.prom"} < set(files_in(tmp_path))


def test_results_of_a_run_that_goes_on_are_older_than_its_journal(tmp_path: Path) -> None:
    """A killed run leaves unfinished results: its journal knows more."""
    journal(tmp_path)
    unfinished = {**GOOD, "environment": {"unfinished": True}, "verdict": "INCOMPLETE"}
    (tmp_path / "results.json").write_bytes(text_of(unfinished))
    main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")])
    assert "Rebuilt from the journal" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{r}/none"], "none cannot be read: No such file"),
        (["{empty}"], "holds no run: there is neither results.json nor journal.jsonl"),
        (["{half}"], "is not whole JSON"),
        (["{newer}"], "has schema_version 9"),
        (["{r}", "-o", "{r}/results.json"], "an input or another report"),
        (["{r}/results.json", "-o", "{r}/results.json"], "an input or another report"),
        (["{r}", "-o", "{empty}"], "cannot be written: it is a directory"),
        (["{r}", "-o", "{r}/results.json/x.html"], "cannot be written: "),
        (["{r}", "-o", "x.html", "--junitxml", "j.xml"], "-o makes the page alone"),
        (["{named}/run.json", "-o", "{named}/../named/run.json"], "an input or another report"),
        (["{r}", "--junitxml", "{r}/results.json"], "an input or another report"),
        (["{r}", "--junitxml", "{r}/link.xml"], "an input or another report"),
        (["{r}", "--journal", "{named}/run.json", "--junitxml", "{named}/run.json"], "an input or another report"),
        (["{r}", "--junitxml", "{r}/j.xml"], "journal.jsonl cannot be read"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """A sentence, exit code 4, and no file is touched."""
    results_in(tmp_path / "r")
    (tmp_path / "r" / "link.xml").symlink_to("results.json")
    (tmp_path / "empty").mkdir()
    results_in(tmp_path / "named").joinpath("results.json").rename(tmp_path / "named" / "run.json")
    results_in(tmp_path / "half").joinpath("results.json").write_bytes(text_of(BAD)[:-9])
    results_in(tmp_path / "newer").joinpath("results.json").write_text(
        json.dumps({**BAD, "schema_version": 9}), encoding="utf-8"
    )
    before = files_in(tmp_path)
    folders = {name: str(tmp_path / name) for name in ("r", "empty", "half", "newer", "named")}
    assert main(["report", *(word.format(**folders) for word in arguments)]) == 4
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert files_in(tmp_path) == before
