"""What a run leaves besides its records, and that a page which cannot be made changes nothing but a sentence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.commands.main import main
from pytest_gpucluster.page.render import embedded_results
from tests.support.fleets import simulate

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]
BROKEN = """
from pytest_gpucluster.page import outputs

def page_from(model):
    raise RuntimeError("planted")

outputs.page_from = page_from
"""


def test_a_run_with_a_page_and_one_whose_page_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same verdict and exit code; the page beside results.json holds it; its bundle is valid."""
    (tmp_path / "broken_page.py").write_text(BROKEN, encoding="utf-8")
    summary, results = tmp_path / "s.md", tmp_path / "gpucluster-results"
    chosen = ("-k", "test_bf16_tflops", f"--gpucluster-summary={summary}", f"--gpucluster-results={results}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    good = simulate(tmp_path, "1x2", *chosen, bad=("node0-gpu1:slow",))
    page = (results / "report.html").read_text(encoding="utf-8")
    assert embedded_results(page) == (results / "results.json").read_bytes()
    assert "<h1>REJECTED</h1>" in page
    assert summary.read_text(encoding="utf-8").startswith("# REJECTED\n")
    assert "\n::error title=REJECTED::" in good.stdout
    assert "report.html, results.json" in " ".join(good.stdout.split())
    assert main(["bundle", str(results), "-o", str(tmp_path / "b.zip")]) == main(["verify", str(tmp_path / "b.zip")]) == 0
    assert [line[:3] for line in capsys.readouterr().out.splitlines()[-13:-1]].count("ok ") == 11  # and UNSIGNED
    for cut in (0, 1):
        rebuilt_equals(results, tmp_path / str(cut), cut=cut)
    capsys.readouterr()
    bad = simulate(tmp_path, "1x2", "-p", "broken_page", *chosen, bad=("node0-gpu1:slow",))
    assert bad.returncode == good.returncode == 1
    assert bad.results["verdict"] == good.results["verdict"] == "REJECTED"
    assert "report.html could not be written: RuntimeError: planted" in " ".join(bad.stdout.split())
    assert not (results / "report.html").exists()


def rebuilt_equals(results: Path, copy: Path, *, cut: int) -> None:
    """From a whole journal results and page are those of the run, to the byte; from a cut one the GPUs keep their name."""
    copy.mkdir()
    lines = (results / "journal.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (copy / "journal.jsonl").write_text("".join(lines[: len(lines) - cut]), encoding="utf-8")
    assert main(["report", str(copy)]) == 1
    page = (copy / "report.html").read_text(encoding="utf-8")
    made = json.loads((copy / "results.json").read_bytes())
    assert "<dt>Hardware</dt><dd>NVIDIA H200</dd>" in page
    assert made["environment"].get("rebuilt_from_journal", False) is bool(cut)
    if not cut:
        for name in ("results.json", "report.html", "metrics.prom"):
            assert (copy / name).read_bytes() == (results / name).read_bytes(), name


def test_a_summary_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    """Said before anything is measured, and no file is touched."""
    done = simulate(tmp_path, "1x2", "-k", "test_bf16_tflops", f"--gpucluster-summary={tmp_path}")
    assert done.returncode == 4
    assert "cannot be written: it is a directory" in done.stdout.replace("\n", " ")
    assert not (tmp_path / "gpucluster-results" / "results.json").exists()
