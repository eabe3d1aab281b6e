"""A usage error touches nothing: one sentence, exit code 4, and every file of an earlier run as it was."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import PYTEST, Launch, environment
from tests.support.processes import kill_marked

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

HELD = {"results.json": '{"verdict": "ACCEPTED"}', "journal.jsonl": '{"event": "verdict"}\n', "logs/rank0.log": "old\n"}
LIMITS = """
schema: 1
profiles:
  rehearsal: {gpu: null, rehearsal: true}
criteria:
  x: {criterion: X, per: cluster, unit: s, above: 0, level: quick, why: a test, source: none}
  y: {criterion: Y, per: gpu, unit: s, above: 0, level: quick, why: a test, source: none}
"""
JUDGES = "def test_x(criterion):\n    criterion.require(1.0)\n"
WAIVERS = "schema: 1\nwaivers: []\n"
CASES = {
    "wrong path": ("no_such_file", {}, "not found: no_such_file"),
    "no entry": ("", {"test_a.py": "def test_zz(criterion): pass\n"}, "judges the criterion 'zz'"),
    "wrong fixture": ("", {"test_a.py": "def test_y(criterion): pass\n"}, "its test takes the place fixture"),
    "judged twice": ("", {"test_a.py": JUDGES, "test_b.py": JUDGES}, "both judge 'x'"),
    "unknown level": ("--gpucluster-level=often", {"test_a.py": JUDGES}, "'often' is not one of"),
    "unknown profile": ("--gpucluster-profile=h1", {"test_a.py": JUDGES}, "no profile 'h1'"),
    "bad thresholds": ("", {"test_a.py": JUDGES, "limits.yaml": "schema: 1\ncriteria: 3\n"}, "limits.yaml"),
    "empty expectation": ("--gpucluster-expect=", {"test_a.py": JUDGES}, "--gpucluster-expect"),
    "gate that looks": ("--gpucluster-gate --collect-only", {"test_a.py": JUDGES}, "--collect-only judges no test"),
    "misspelt option": ("--gpucluster-lvel quick", {"test_a.py": JUDGES}, "Did you mean '--gpucluster-level'?"),
    "unknown mark": ("-m gpu", {"test_a.py": JUDGES}, "there is no mark gpu; these tests have no marks"),
    "results in a file": ("--gpucluster-results=limits.yaml", {"test_a.py": JUDGES}, "limits.yaml cannot be written"),
    "report over limits": ("--junitxml=./limits.yaml", {"test_a.py": JUDGES}, "would replace"),
    "report over a test": ("--gpucluster-summary=./test_a.py", {"test_a.py": JUDGES}, "would replace"),
    "report over another name": ("--junitxml=hard.xml", {"test_a.py": JUDGES}, "would replace"),
    "report over results": ("--gpucluster-metrics=gpucluster-results/results.json", {"test_a.py": JUDGES}, "would replace"),
    "report over waivers": ("--junitxml=waivers.yaml", {"test_a.py": JUDGES, "waivers.yaml": WAIVERS}, "would replace"),
    "two reports in one": ("--gpucluster-summary=./junit.xml", {"test_a.py": JUDGES}, "another report"),
    "part left out": ("-p no:gpucluster-run", {"test_a.py": JUDGES}, "-p no:gpucluster-run"),
    "exit code left out": ("-p no:gpucluster-exit-code", {"test_a.py": JUDGES}, "-p no:gpucluster-exit-code"),
}

AT_NIGHT = ("report over a test", "report over results", "report over waivers", "two reports in one")
"""Refused as their two siblings that run by day."""
IN_EMPTY_FOLDER = ("no entry", "unknown level", "exit code left out")
"""Refused by day in a folder without an earlier run too: by collection, by an option, by pytest. The others at night."""


def start(folder: Path, *arguments: str) -> Launch:
    """Start an acceptance run in ``folder``, with a JUnit file beside the results."""
    command = [*PYTEST, "--gpucluster", "--gpucluster-thresholds=limits.yaml", "--junitxml=junit.xml", *arguments]
    return Launch(command=command, cwd=folder, environment=environment(measured=True)).start()


@pytest.mark.parametrize(
    ("case", "has_earlier_run"),
    [
        *(pytest.param(case, True, marks=pytest.mark.slow if case in AT_NIGHT else ()) for case in CASES),
        *(pytest.param(case, False, marks=() if case in IN_EMPTY_FOLDER else pytest.mark.slow) for case in CASES),
    ],
)
def test_nothing_is_touched(tmp_path: Path, case: str, *, has_earlier_run: bool) -> None:
    """Neither results nor JUnit file; the last line says what is wrong, and whose the results are."""
    option, files, said = CASES[case]
    for name, text in {"limits.yaml": LIMITS, **files}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    os.link(tmp_path / next(iter({**files, "limits.yaml": ""})), tmp_path / "hard.xml")
    results, junit = tmp_path / "gpucluster-results", tmp_path / "junit.xml"
    if has_earlier_run:
        (results / "logs").mkdir(parents=True)
        for name, text in HELD.items():
            (results / name).write_text(text, encoding="utf-8")
        junit.write_text("<testsuites/>", encoding="utf-8")
    before = snapshot(tmp_path)
    launch = start(tmp_path, *option.split())
    try:
        assert launch.end() == 4, launch.output
        launch.gone()
    finally:
        kill_marked(launch.mark)
    assert {path: text for path, text in snapshot(tmp_path).items() if not path.endswith(".out")} == before
    _, error, last = launch.output.rpartition("ERROR: ")
    assert error, launch.output
    assert said in last, launch.output
    assert "=====" not in last, launch.output
    can_tell = case not in ("exit code left out", "misspelt option")  # refused before it is known where the results are
    assert ("are of an earlier run" in last) is (has_earlier_run and can_tell)
    assert not re.search(r"[.?!:]; |\n.*; the results in", last), last
    assert "verdict" not in launch.output.replace("asks for a verdict", "")
    assert "generated xml" not in launch.output


def snapshot(folder: Path) -> dict[str, bytes]:
    """The content of every file below ``folder``."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}
