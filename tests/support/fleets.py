"""Runs the acceptance suite on a simulated fleet, and reads what is not green."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.launching import ACCEPTANCE
from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runs import FinishedRun


def simulate(folder: Path, fleet: str, *arguments: str, bad: tuple[str, ...] = ()) -> FinishedRun:
    """The acceptance suite on a simulated fleet."""
    planted = [f"--fleet-bad={fault}" for fault in bad]
    return run_pytest(folder, "-p", "pytest_gpucluster.plugin.fleet", f"--fleet={fleet}", *planted, ACCEPTANCE, *arguments)


def not_green(run: FinishedRun) -> dict[str, dict[str, set[str]]]:
    """The criteria that are neither passed nor skipped, by place in words and outcome; advisory misses too."""
    found: dict[str, dict[str, set[str]]] = {}
    for row in run.results["criteria"]:
        outcome = "advisory" if row["advisory"] else row["outcome"]
        if outcome not in ("passed", "skipped"):
            place = row["place"]
            where = "cluster" if place is None else place["hostname"] or place["id"]
            where += f" gpu {place['gpu']}" if place is not None and place["gpu"] is not None else ""
            found.setdefault(where, {}).setdefault(outcome, set()).add(row["criterion"])
    return found
