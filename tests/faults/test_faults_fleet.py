"""Faults of a whole fleet, planted in a simulated one: the controller's death, a disk that fills, few open files."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import TYPE_CHECKING

import jsonschema  # type: ignore[import-untyped]  # its stubs would be one more thing to install
import pytest

from tests.support import reports
from tests.support.launching import ACCEPTANCE

if TYPE_CHECKING:
    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

SAID = "SIMULATED fleet, no GPU was measured"
FLEET = ("-p", "pytest_gpucluster.plugin.fleet", ACCEPTANCE, "--junitxml=junit.xml")
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
def test_a_controller_that_dies_late(starter: Starter, bad: tuple[str, ...]) -> None:
    """An agent writes the reports from the journal, with all that was measured; the run is accepted by nobody."""
    launch = starter.pytest(*FLEET, "--fleet=4x8", *(f"--fleet-bad={one}" for one in bad))
    launch.until(lambda: num_outcomes(launch) > 700, what="700 outcomes")
    os.kill(launch.pid, signal.SIGKILL)
    launch.end()
    launch.gone(within_s=REPORTS_S)
    measured = num_outcomes(launch)
    found = launch.results()
    jsonschema.validate(found, reports.SCHEMA)
    assert is_whole(launch), launch.output
    counted = Counter(row["outcome"] for row in found["criteria"])
    assert counted["passed"] + counted["failed"] + counted["skipped"] >= measured > 700
    assert counted["missing"] > 0
    assert found["verdict"] == ("REJECTED" if bad else "INCOMPLETE")
    assert SAID in found["verdict_line"]
    assert found["simulated"]["faults"] == [*bad]
    cases = launch.cases()
    assert len(cases) == len([row for row in found["criteria"] if row["outcome"] != "not_selected"]) + 1
    assert SAID in cases[-1].message
    assert cases[-1].outcome == ("failure" if bad else "error")
