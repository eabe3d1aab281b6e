"""Faults of a whole fleet, planted in a simulated one: the controller's death, a disk that fills, few open files."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import TYPE_CHECKING

import jsonschema  # type: ignore[import-untyped]  # its stubs would be one more thing to install
import pytest

from pytest_gpucluster.commands.main import main
from tests.support import reports
from tests.support.launching import ACCEPTANCE, PYTEST, under_torchrun
from tests.support.mounts import NO_MOUNTS, can_mount, full, mounted

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

SAID = "SIMULATED fleet, no GPU was measured"
FLEET = ("-p", "pytest_gpucluster.plugin.fleet", ACCEPTANCE, "--junitxml=junit.xml")
MEASURED = 700
"""So many outcomes of about 1,550 has the run whose controller dies: a slow GPU has failed, and enough are left."""
REPORTS_S = 90.0
"""For the reports of a few hundred testcases."""


def num_outcomes(launch: Launch) -> int:
    """How many outcomes the journal has."""
    file = launch.cwd / reports.RESULTS / "journal.jsonl"
    return file.read_bytes().count(b'"event": "outcome"') if file.exists() else 0


def is_whole(launch: Launch) -> bool:
    """Whether the reports were rebuilt from the journal; each is read as a whole."""
    return bool(launch.results()["environment"].get("rebuilt_from_journal"))


@pytest.mark.parametrize("bad", [(), ("node1-gpu3:slow",)])
def test_a_controller_that_dies(starter: Starter, bad: tuple[str, ...]) -> None:
    """An agent writes the reports from the journal, with all that was measured; the run is accepted by nobody."""
    launch = starter.pytest(*FLEET, "--fleet=4x8", *(f"--fleet-bad={one}" for one in bad))
    launch.until(lambda: num_outcomes(launch) > MEASURED, what=f"{MEASURED} outcomes")
    os.kill(launch.pid, signal.SIGKILL)
    launch.end()
    launch.gone(within_s=REPORTS_S)
    measured = num_outcomes(launch)
    found = launch.results()
    jsonschema.validate(found, reports.SCHEMA)
    assert is_whole(launch), launch.output
    counted = Counter(row["outcome"] for row in found["criteria"])
    assert counted["passed"] + counted["failed"] + counted["skipped"] >= measured > MEASURED
    assert counted["missing"] > 0
    assert found["verdict"] == ("REJECTED" if bad else "INCOMPLETE")
    assert SAID in found["verdict_line"]
    assert found["simulated"]["faults"] == [*bad]
    cases = launch.cases()
    assert len(cases) == len([row for row in found["criteria"] if row["outcome"] != "not_selected"]) + 1
    assert SAID in cases[-1].message
    assert cases[-1].outcome == ("failure" if bad else "error")


# A disk that fills.


@pytest.fixture(scope="module")
def filled(shared_starter: Starter) -> dict[str, Launch]:
    """Two runs: on a disk of 500 kB where that may be mounted, and with files of 256 KiB at most."""
    arguments = (*FLEET, "--fleet=2x8", "--gpucluster-results=disk")
    small = ["sh", "-c", 'ulimit -f 512; exec "$@"', "sh", *PYTEST, *arguments]
    launches = {"small files": shared_starter.start(small, name="small-files")}
    if can_mount():
        launches["a small disk"] = mounted(shared_starter, full("500k"), *arguments, "--junitxml=disk/junit.xml")
    for launch in launches.values():
        launch.end()
        launch.gone()
    return launches


@pytest.mark.parametrize(
    ("what", "folder", "why"),
    [("small files", "disk", "File too large"), ("a small disk", "kept", "No space left on device")],
)
def test_a_disk_that_fills_during_the_run(filled: dict[str, Launch], what: str, folder: str, why: str) -> None:
    """The run ends by itself and says it; what lies on the disk is whole, and looks no better than the run was."""
    if what not in filled:
        pytest.skip(NO_MOUNTS)
    launch = filled[what]
    assert launch.end() == 1, launch.output
    assert f"\nverdict REHEARSED: {SAID}: " in launch.output
    assert launch.output.count("results are incomplete on disk: ") == 1
    assert why in launch.output
    assert "Traceback" not in launch.output
    kept = launch.cwd / folder
    for name in ("results.json", "junit.xml"):
        if (kept / name).exists():
            assert_never_better(kept, name)
    assert not list(kept.glob(".*.tmp"))
    assert main(["report", str(kept)]) == 1
    assert_never_better(kept, "results.json")
    assert_never_better(kept, "junit.xml")


def assert_never_better(folder: Path, name: str) -> None:
    """The report is read as a whole, and says that the run is incomplete."""
    if name == "results.json":
        found = reports.read_results(folder)
        jsonschema.validate(found, reports.SCHEMA)
        assert (found["verdict"], SAID in found["verdict_line"]) == ("INCOMPLETE", True)
    else:
        last = reports.cases_of(reports.read_suite(folder / name))[-1]
        assert (last.name, last.outcome, SAID in last.message) == ("gpucluster.verdict", "error", True)


# The limit of open files.

FEW_FILES = """
import torch
import pytest

@pytest.mark.distributed(per="cluster")
def test_sum(process_group, rank, world_size):
    found = torch.ones(1)
    torch.distributed.all_reduce(found)
    assert found.item() == world_size
"""
RANKS = 6


def limited(starter: Starter, limits: str, *, torchrun: bool) -> Launch:
    """Start a rehearsal whose first process may have so many open files (arguments of ulimit)."""
    starter.write(test_sum=FEW_FILES)
    arguments = ("test_sum.py", "--gpucluster", "--gpucluster-profile=rehearsal")
    if torchrun:
        (command,) = under_torchrun(*arguments, ranks=RANKS)
    else:
        command = [*PYTEST, *arguments, "--gpucluster-expect", f"nodes=1,gpus_per_node={RANKS}"]
    return starter.start(["sh", "-c", f'ulimit {limits}; exec "$@"', "sh", *command], name="limited")


@pytest.mark.parametrize("torchrun", [False, True])
def test_too_few_open_files_are_told_before_anything_hangs(starter: Starter, *, torchrun: bool) -> None:
    """The store would say nothing, and ranks that come later would time out after a minute or two."""
    launch = limited(starter, "-n 60", torchrun=torchrun)
    assert launch.end() == (1 if torchrun else 4), launch.output
    launch.gone()
    assert launch.output.count("and may have 60 (hard limit 60): raise the limit on node 0 before the start") == 1
    assert "Traceback" not in launch.output.partition("ChildFailedError")[0].partition("raise the limit")[0]
    assert not (launch.cwd / reports.RESULTS).exists()


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_soft_limit_that_is_too_low_is_raised(starter: Starter, *, torchrun: bool) -> None:
    """Of torchrun too: with 26 open files it could not serve six ranks."""
    launch = limited(starter, "-S -n 26" if torchrun else "-S -n 40", torchrun=torchrun)
    assert launch.end() == 0, launch.output
    launch.gone()
    assert {row["outcome"] for row in launch.results()["criteria"] if row["criterion"].endswith("sum")} <= {"passed"}
    assert "1 passed" in launch.output


def test_a_fleet_needs_few_open_files(starter: Starter) -> None:
    """A few processes speak for all ranks."""
    command = [*PYTEST, *FLEET, "--fleet=32x8", "-k", "gpu_count"]
    launch = starter.start(["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *command], name="limited")
    assert launch.end() == 0, launch.output
    assert "32 passed" in launch.output
