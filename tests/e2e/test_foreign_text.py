"""What ranks, hosts and files say: no report breaks of it, and nothing of it looks like a line of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.text import visible
from tests.support import reports
from tests.support.launching import PYTEST, Launch, environment, finished
from tests.support.runs import user_folder
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

FORGED = "fine\nverdict ACCEPTED: 95 passed \ufffe"
HOSTNAME = b"h\xe9\nverdict ACCEPTED: 94 passed\x1b[2J"
AS_HOST = f"import os, socket, sys; socket.sethostname({HOSTNAME!r}); os.execvp(sys.argv[1], sys.argv[1:])"
OWN_LINES = ("verdict REJECTED: ", "gpucluster: ", "gpucluster::gpucluster::verdict FAILED")
LIMITS = {
    "rate": entry(per="gpu", min=2, unit="GB/s", why=FORGED),
    "lost": entry(per="gpu", min=1),
    "told": entry(min=1, criterion=f"It is {FORGED}"),
}


def can_have_hostname() -> bool:
    """Whether this machine lets us start a process with a hostname of its own."""
    return subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture(
    scope="module",
    params=[("",), ("", "--tb=native", "-ra"), ("", "--tb=short", "-v", "-rA"), ("", "--tb=line", "-q"), ("true", "-rA")],
    ids=str,
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder after a run, and all that was on its screen. Where ``CI`` is set, pytest shortens no line of its summary."""
    ci, *options = request.param
    folder = user_folder("forged", tmp_path_factory.mktemp("user") / "forged")
    limits = write_limits(folder / "limits.yaml", LIMITS, extends=False)
    host = ("unshare", "--uts", sys.executable, "-c", AS_HOST) if can_have_hostname() else ()
    arguments = ("--gpucluster", limits, "-s", "--junitxml=junit.xml", *options)
    variables = {**environment(measured=True), "NCCL_NOTE": FORGED, "CI": ci}
    launch = Launch(command=[*host, *PYTEST, *arguments], cwd=folder, environment=variables).start()
    assert launch.end() == 1, launch.output
    launch.gone()
    return folder, launch._file().read_text(encoding="utf-8")


def test_no_line_is_forged(run: tuple[Path, str]) -> None:
    """Of the lines that begin as ours do, each is ours; nothing acts on the terminal."""
    _, screen = run
    assert visible(screen) == screen
    ours = [line for line in screen.split("\n") if line.startswith(("verdict", "gpucluster:"))]
    assert [line for line in ours if not line.startswith(OWN_LINES) or "all is well" in line] == []
    assert len([line for line in ours if line.startswith("verdict")]) == 1


def test_every_report_says_what_was_measured(run: tuple[Path, str]) -> None:
    """The JUnit file is XML, and its verdict is the run's; results.json and the journal are strict JSON."""
    folder, _ = run
    cases = {case.name: case for case in reports.cases_of(reports.read_suite(folder / "junit.xml"))}
    results = reports.read_results(folder / reports.RESULTS)
    assert results["verdict"] == cases["gpucluster.verdict"].properties["verdict"] == "REJECTED"
    assert cases["gpucluster.verdict"].message == results["verdict_line"]
    assert cases["test_lost[node0-cpu0]"].outcome == "error"
    assert r"caf\udce9 \ufffe\uffff\x00\x1b[2J\x08\x9b\u202e\u2028" in cases["test_lost[node0-cpu0]"].body
    assert json.dumps([results, reports.read_journal(folder / reports.RESULTS)], ensure_ascii=False).encode()


def test_it_is_rebuilt(run: tuple[Path, str]) -> None:
    """From the journal, with the same verdict."""
    folder, _ = run
    command = [sys.executable, "-m", "pytest_gpucluster.cli", "report", reports.RESULTS]
    env = {**environment(measured=True), "PYTHONIOENCODING": "utf-8:strict"}
    done = finished(command, cwd=folder, variables=env)
    line = reports.read_results(folder / reports.RESULTS)["verdict_line"]
    assert done.stdout == f"verdict {line}\n"
    names = [case.name for case in reports.cases_of(reports.read_suite(folder / reports.RESULTS / "junit.xml"))]
    live = [case.name for case in reports.cases_of(reports.read_suite(folder / "junit.xml"))]
    assert names == live
