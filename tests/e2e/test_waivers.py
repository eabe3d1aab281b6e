"""A simulated node with two broken GPUs that somebody answers for, or no longer does."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pytest_gpucluster.reporting.rebuild import rebuild
from pytest_gpucluster.text import visible
from tests.support import REPOSITORY
from tests.support.launching import ACCEPTANCE
from tests.support.nvml_simulator import build, environment
from tests.support.reports import read_suite
from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

SCENARIO = "count 3\n1.ecc.unc.vol 2\n2.mem.total 85899345920\n"
JUDGED = ("gpu_model", "gpu_memory", "ecc_uncorrected", "remapped_rows")
UUID, SERIAL = "GPU-00000001-0000-0000-0000-000000000001", "1654024000002"


def _alone(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry without the name of another that is not in this file."""
    return {name: value for name, value in entry.items() if name != "measured_with"}


def launch(folder: Path, library: Path, *arguments: str, until: str, scenario: str = SCENARIO) -> FinishedRun:
    """Only NVML's criteria, under a file that waives the two failures."""
    packaged = yaml.safe_load((REPOSITORY / "thresholds.yaml").read_text(encoding="utf-8"))
    limits = {
        "schema": 1,
        "profiles": {"h200-sxm": {"gpu": "h200-sxm", "accept_at": "quick"}},
        "criteria": {key: {**_alone(packaged["criteria"][key]), "profiles": {}} for key in JUDGED},
    }
    about = {"who": "J. Doe, ACME", "why": "RMA 4711\nverdict ACCEPTED: 99 passed\x1b[2J"}
    waivers = [
        {"criterion": "ecc_uncorrected", "place": UUID, "until": until, **about},
        {"criterion": "gpu_memory", "place": SERIAL, "until": "2099-12-31", **about},
        {"criterion": "gpu_model", "place": "GPU-healthy", "until": "2099-12-31", **about},
    ]
    folder.mkdir()
    (folder / "limits.yaml").write_text(json.dumps(limits), encoding="utf-8")
    (folder / "waivers.yaml").write_text(json.dumps({"schema": 1, "waivers": waivers}), encoding="utf-8")
    chosen = (f"{ACCEPTANCE}/test_health.py", "-k", " or ".join(JUDGED), "--gpucluster-thresholds=limits.yaml")
    return run_pytest(folder, *chosen, *arguments, variables=environment(library, scenario))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulator."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def waived(tmp_path_factory: pytest.TempPathFactory, library: Path) -> FinishedRun:
    """Both failures are answered for."""
    return launch(tmp_path_factory.mktemp("waived") / "run", library, "-ra", until="2099-12-31")


def test_accepted_with_waivers(waived: FinishedRun) -> None:
    """Said in the verdict, its line, the exit code and the last testcase."""
    assert (waived.results["verdict"], waived.returncode) == ("ACCEPTED_WITH_WAIVERS", 0), waived.stdout
    assert "ACCEPTED WITH WAIVERS: 2 waived, 10 passed" in waived.verdict_line
    assert waived.cases[-1].properties["verdict"] == "ACCEPTED_WITH_WAIVERS"


def test_no_waiver_forges_a_verdict(waived: FinishedRun) -> None:
    """Its text is of several lines; each is shown within a line of the run's own."""
    assert visible(waived.stdout) == waived.stdout
    assert [line for line in waived.stdout.split("\n") if line.startswith("verdict")] == [waived.verdict_line]
    assert r"RMA 4711\nverdict ACCEPTED: 99 passed\x1b[2J" in waived.stdout


def test_waived_is_neither_red_nor_green(waived: FinishedRun) -> None:
    """Failed with its waiver in results.json, a skip with the reason in the JUnit file; the other GPUs pass."""
    row = waived.row("ecc_uncorrected", "node0-gpu1")
    assert (row["outcome"], row["value"], row["waiver"]["who"]) == ("failed", 2, "J. Doe, ACME")
    case = waived.case("test_ecc_uncorrected[node0-gpu1]")
    assert case.outcome == "skipped"
    assert "waived: ecc_uncorrected" in case.message
    assert waived.row("gpu_memory", "node0-gpu2")["waiver"]["place"] == SERIAL
    assert waived.case("test_ecc_uncorrected[node0-gpu0]").outcome == "passed"


def test_waivers_are_listed_first(waived: FinishedRun) -> None:
    """On the terminal before the table, in the JUnit file at its top, in results.json; the unneeded one is named."""
    shown = waived.stdout.index("waived: ecc_uncorrected at GPU-00000001")
    assert shown < waived.stdout.index("criterion ", shown - 200)
    assert "waiver not needed: gpu_model at GPU-healthy" in waived.stdout
    assert waived.junit is not None
    properties = [one.attrib["value"] for one in waived.junit.findall("properties/property[@name='waiver']")]
    assert [text.partition(" at ")[0] for text in properties] == [
        "waived: ecc_uncorrected",
        "waived: gpu_memory",
        "waiver not needed: gpu_model",
    ]
    assert [fact["state"] for fact in waived.results["waivers"]] == ["used", "used", "unused"]


def test_rebuilt_report_says_the_same(waived: FinishedRun, tmp_path: Path) -> None:
    """From the journal alone."""
    lines = "".join(json.dumps(event) + "\n" for event in waived.journal)
    (tmp_path / "journal.jsonl").write_text(lines, encoding="utf-8")
    again = rebuild(tmp_path)
    assert again.line == waived.results["verdict_line"]
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["criteria"] == waived.results["criteria"]
    assert told["waivers"] == waived.results["waivers"]
    properties = read_suite(tmp_path / "junit.xml").findall("properties/property")
    assert [one.attrib["value"].partition(" at ")[0] for one in properties if one.attrib["name"] == "waiver"] == [
        "waived: ecc_uncorrected",
        "waived: gpu_memory",
        "waiver not needed: gpu_model",
    ]


def test_expired_is_as_if_absent(tmp_path: Path, library: Path) -> None:
    """Rejected, and the reader is told that there was one; the gate knows ACCEPTED only."""
    ran = launch(tmp_path / "run", library, until="2026-01-01")
    assert (ran.results["verdict"], ran.returncode) == ("REJECTED", 1)
    assert ran.case("test_ecc_uncorrected[node0-gpu1]").outcome == "failure"
    assert "waiver has expired, as if absent: ecc_uncorrected" in ran.stdout
    shutil.rmtree(tmp_path / "run")
    gated = launch(tmp_path / "run", library, "--gpucluster-gate", until="2099-12-31")
    assert (gated.results["verdict"], gated.returncode) == ("ACCEPTED_WITH_WAIVERS", 1)


def test_a_serial_of_two_gpus_waives_neither(tmp_path: Path, library: Path) -> None:
    """Both fail, the verdict names the waiver and both GPUs, and a waiver by UUID still covers its GPU."""
    scenario = f"{SCENARIO}0.mem.total 85899345920\n0.serial {SERIAL}\n"
    ran = launch(tmp_path / "run", library, until="2099-12-31", scenario=scenario)
    host = ran.row("gpu_memory", "node0-gpu0")["place"]["hostname"]
    both = f"{host} gpu 0 and {host} gpu 2"
    assert (ran.results["verdict"], ran.returncode) == ("REJECTED", 1)
    assert f"two GPUs report serial {SERIAL}: {both}" in ran.results["verdict_line"]
    assert f"a waiver for gpu_memory (waivers.yaml:1) names {both}, and covers neither" in ran.results["verdict_line"]
    assert ran.outcomes("gpu_memory") == {"node0-gpu0": "failed", "node0-gpu1": "passed", "node0-gpu2": "failed"}
    assert [ran.row("gpu_memory", f"node0-gpu{number}")["waiver"] for number in (0, 2)] == [None, None]
    assert ran.row("ecc_uncorrected", "node0-gpu1")["waiver"] is not None
    assert {row["criterion"]: row["state"] for row in ran.results["waivers"]} == {
        "ecc_uncorrected": "used",
        "gpu_memory": "ambiguous",
        "gpu_model": "unused",
    }
    assert "waiver names more than one part, as if absent: gpu_memory" in ran.stdout
    rebuilt = rebuild(tmp_path / "run" / "gpucluster-results", junit=tmp_path / "again.xml")
    assert rebuilt.word == "REJECTED"
