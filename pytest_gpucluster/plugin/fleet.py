"""A pytest plugin that is never loaded by itself: ``-p pytest_gpucluster.plugin.fleet`` simulates the fleet of a run.

``gpucluster demo`` loads it. Whatever else loads it, the verdict is never ACCEPTED.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator

import pytest

from pytest_gpucluster.fleet.simulation import FAULTS, parse_simulation
from pytest_gpucluster.plugin.pairing import as_usage_error
from pytest_gpucluster.plugin.stash_keys import COMMAND, SIMULATION


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the simulation."""
    group = parser.getgroup("gpucluster simulation", "simulated GPU fleet, which accepts nothing")
    group.addoption("--fleet", metavar="NODESxGPUS", default="1x8", help="its shape (default: 1x8)")
    faults = ", ".join(FAULTS)
    group.addoption("--fleet-bad", metavar="PART:FAULT", action="append", default=[], help=f"a planted fault: {faults}")
    group.addoption("--fleet-seed", metavar="N", type=int, default=0, help="equal seeds give equal values (default: 0)")
    typed = "the command that started pytest, which a user can type again (default: pytest)"
    group.addoption("--fleet-command", metavar="WORDS", type=shlex.split, default=[], help=typed)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, None, None]:
    """Put the simulation where the run looks for it, before anything of the run is made.

    Raises:
        pytest.UsageError: the shape or a fault is not understood, or pytest-xdist is asked for.
    """
    given = early_config.known_args_namespace
    early_config.stash[COMMAND] = tuple(given.fleet_command)
    if getattr(given, "numprocesses", None):
        raise pytest.UsageError("a simulated fleet needs no GPU and one process; leave -n out")
    with as_usage_error():
        early_config.stash[SIMULATION] = parse_simulation(given.fleet, seed=given.fleet_seed, faults=given.fleet_bad)
    return (yield)
