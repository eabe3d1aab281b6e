"""``gpucluster demo``: the acceptance suite on a simulated fleet, for a look at what a run prints and writes."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

from pytest_gpucluster.fleet.hardware import require_model
from pytest_gpucluster.fleet.simulation import parse_simulation

if TYPE_CHECKING:
    import argparse

RESULTS_DIR = "gpucluster-demo"
"""Where the results lie: never among those of real runs."""


def command(chosen: argparse.Namespace) -> list[str]:
    """The pytest command that runs the demo.

    Raises:
        ConfigurationError: a shape, a fault or a profile that cannot be simulated.
    """
    parse_simulation(chosen.fleet, seed=chosen.seed, faults=chosen.bad)
    require_model(chosen.profile)
    fleet = ["-p", "pytest_gpucluster.plugin.fleet", f"--fleet={chosen.fleet}", f"--fleet-seed={chosen.seed}"]
    planted = [f"--fleet-bad={fault}" for fault in chosen.bad]
    suite = ["-p", "no:cacheprovider", "--pyargs", "tests_acceptance", *chosen.beyond]
    again = shlex.join(["gpucluster", *chosen.typed, "--", *chosen.beyond])
    where = [f"--fleet-command={again}", f"--gpucluster-profile={chosen.profile}", f"--gpucluster-results={RESULTS_DIR}"]
    return [sys.executable, "-m", "pytest", *fleet, *planted, *where, *suite]


def main(chosen: argparse.Namespace) -> int:
    """Become pytest; its exit code is that of the run.

    Raises:
        ConfigurationError: as :func:`command`.
    """
    words = command(chosen)
    sys.stdout.flush()
    os.execv(words[0], words)  # noqa: S606 -- this very interpreter
