"""A usage error touches nothing: one sentence, exit code 4, and every file of an earlier run as it was."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.support.forked_pytests import run_each
from tests.support.launching import environment

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
METHOD = "    def test_m(self):\n        pass\n"
JUDGES = "def test_x(criterion):\n    criterion.require(1.0)\n"
PLUGIN = """
import types

def pytest_addoption(parser):
    parser.addoption("--OPTION", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "MARK: of that plugin")
    config.pluginmanager.register(types.ModuleType("planted"), "PLUGIN")
"""
"""Another plugin, by all that is looked at: its name, its option and its mark."""
FORKED, RERUNS = (
    PLUGIN.replace("PLUGIN", name).replace("OPTION", option).replace("MARK", mark)
    for name, option, mark in (("pytest_forked", "forked", "forked"), ("rerunfailures", "reruns", "flaky"))
)
REPEAT = """
def pytest_generate_tests(metafunc):
    metafunc.fixturenames.append("step")
    metafunc.parametrize("step", range(2))
"""
"""What pytest-repeat does with each test."""
WAIVERS = "schema: 1\nwaivers: []\n"
CASES = {
    "wrong path": ("no_such_file", {}, "not found: no_such_file"),
    "no entry": ("", {"test_a.py": "def test_zz(criterion): pass\n"}, "judges the criterion 'zz'"),
    "distributed method": (
        "",
        {"test_a.py": f"import pytest, unittest\nclass TestA(unittest.TestCase):\n    @pytest.mark.distributed\n{METHOD}"},
        "a distributed test is a function of its file, and no method",
    ),
    "distributed method of a plain class": (
        "",
        {"test_a.py": f"import pytest\nclass TestA:\n    @pytest.mark.distributed\n{METHOD}"},
        "a distributed test is a function of its file, and no method",
    ),
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
    "basetemp over results": ("--basetemp=gpucluster-results", {"test_a.py": JUDGES}, "pytest empties --basetemp"),
    "two reports in one": ("--gpucluster-summary=./junit.xml", {"test_a.py": JUDGES}, "another report"),
    "JUnit file of a long name": (f"--junitxml={'x' * 300}", {"test_a.py": JUDGES}, "File name too long"),
    "summary of a long name": (f"--gpucluster-summary={'x' * 300}", {"test_a.py": JUDGES}, "File name too long"),
    "results in no folder": ("--gpucluster-results=", {"test_a.py": JUDGES}, "--gpucluster-results: an empty path"),
    "results of a long name": (f"--gpucluster-results={'x' * 300}", {"test_a.py": JUDGES}, "cannot be written"),
    "limits of a long name": (f"--gpucluster-thresholds={'x' * 300}", {"test_a.py": JUDGES}, "File name too long"),
    "forked": ("--forked", {"conftest.py": FORKED, "test_a.py": JUDGES}, "--forked is set: pytest-forked runs each test"),
    "forked by its mark": (
        "",
        {"conftest.py": FORKED, "test_a.py": f"import pytest\n@pytest.mark.forked\n{JUDGES}"},
        "test_x is marked forked",
    ),
    "reruns": ("--reruns", {"conftest.py": RERUNS, "test_a.py": JUDGES}, "--reruns is set: a criterion is judged once"),
    "again until it passes": ("-f", {"test_a.py": JUDGES}, "-f (--looponfail) runs tests again"),
    "log over the journal": ("--log-file=gpucluster-results/journal.jsonl", {"test_a.py": JUDGES}, "would replace"),
    "log over the reports": ("--log-file=junit.xml", {"test_a.py": JUDGES}, "another report"),
    "log over limits by its name there": ("-o log_file=limits.yaml", {"test_a.py": JUDGES}, "would replace"),
    "repeated": ("", {"conftest.py": REPEAT, "test_a.py": JUDGES}, "judges the criterion 'x[0]'"),
    "part left out": ("-p no:gpucluster-run", {"test_a.py": JUDGES}, "-p no:gpucluster-run"),
    "part of xdist left out": ("-n 2 -p no:gpucluster-xdist", {"test_a.py": JUDGES}, "-p no:gpucluster-xdist"),
    "exit code left out": ("-p no:gpucluster-exit-code", {"test_a.py": JUDGES}, "-p no:gpucluster-exit-code"),
}

IN_EMPTY_FOLDER = ("no entry", "unknown level", "exit code left out")
"""Refused by day in a folder without an earlier run too: by collection, by an option, by pytest. The others at night."""

EARLY = ("exit code left out", "misspelt option", "results in no folder")
"""Refused before it is known where the results are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A run that was refused, with the files of its folder before and after it."""

    returncode: int
    output: str
    before: dict[str, bytes]
    after: dict[str, bytes]


@pytest.fixture(scope="module")
def refused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Refused]:
    """Each case that was asked for, in a folder of its own: forks of one process."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path)
    chosen = (item.callspec.params for item in items)
    wanted = {(str(params["case"]), bool(params["has_earlier_run"])) for params in chosen}
    folders = {case: made(tmp_path_factory.mktemp("user"), *case) for case in sorted(wanted)}
    before = {case: snapshot(folder) for case, folder in folders.items()}
    asked = ("--gpucluster", "--gpucluster-thresholds=limits.yaml", "--junitxml=junit.xml", "-p", "no:cacheprovider")
    runs = {case: (folder, (*asked, *CASES[case[0]][0].split())) for case, folder in folders.items()}
    ended = run_each(runs, folder=tmp_path_factory.mktemp("forks"), environment=environment(measured=True))
    return {
        case: Refused(returncode=one.returncode, output=one.output, before=before[case], after=snapshot(folders[case]))
        for case, one in ended.items()
    }


def made(folder: Path, case: str, has_earlier_run: bool) -> Path:  # noqa: FBT001 -- a row of the table below
    """A folder with the files of a case, and with those of an earlier run or without."""
    for name, text in {"limits.yaml": LIMITS, **CASES[case][1]}.items():
        (folder / name).write_text(text, encoding="utf-8")
    os.link(folder / next(iter({**CASES[case][1], "limits.yaml": ""})), folder / "hard.xml")
    if has_earlier_run:
        (folder / "gpucluster-results" / "logs").mkdir(parents=True)
        for name, text in HELD.items():
            (folder / "gpucluster-results" / name).write_text(text, encoding="utf-8")
        (folder / "junit.xml").write_text("<testsuites/>", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("case", "has_earlier_run"),
    [
        *((case, True) for case in CASES),
        *(pytest.param(case, False, marks=() if case in IN_EMPTY_FOLDER else pytest.mark.slow) for case in CASES),
    ],
)
def test_nothing_is_touched(refused: dict[tuple[str, bool], Refused], case: str, *, has_earlier_run: bool) -> None:
    """Neither results nor JUnit file; the last line says what is wrong, and whose the results are."""
    run = refused[case, has_earlier_run]
    assert run.returncode == 4, run.output
    assert run.after == run.before
    _, error, last = run.output.rpartition("ERROR: ")
    assert error, run.output
    assert CASES[case][2] in last, run.output
    assert "=====" not in last, run.output
    can_tell = case not in EARLY
    assert ("are of an earlier run" in last) is (has_earlier_run and can_tell)
    assert not re.search(r"[.?!:]; |\n.*; the results in", last), last
    assert "verdict" not in run.output.replace("asks for a verdict", "")
    assert "generated xml" not in run.output


def snapshot(folder: Path) -> dict[str, bytes]:
    """The content of every file below ``folder``."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}
