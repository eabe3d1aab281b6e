"""What a function does to its own worker: it ends it, writes into its line, or raises what cannot be printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.launching import Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

ROUNDS, SLOW_ROUNDS = 2, 20
CALLS, SLOW_CALLS = 15, 60

# Workers that leave a child with all their pipes.

DYING = """
import os
import subprocess

import pytest
import torch
import torch.distributed as dist

def leave():
    subprocess.Popen(["sleep", "600"], close_fds=False)
    os._exit(3)

def add_up():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

@pytest.mark.parametrize("call", range(CALLS))
def test_leaves(cluster, call):
    found = cluster.run(leave, per="gpu", places=[cluster.places[call % len(cluster.places)]])
    list(found.values())

def test_after(cluster):
    assert set(cluster.run(add_up, per="cluster").values()) == {cluster.world_size}
"""


def every_call_is_one_error(starter: Starter, *, calls: int) -> None:
    """Run the suite once: an ERROR for each call, which says how the worker left, and nothing else."""
    starter.write(test_dying=DYING.replace("CALLS", str(calls)))
    launch = starter.torchrun("--gpucluster", "--junitxml=junit.xml", "test_dying.py", ranks=2)
    launch.end(within_s=60.0 + 3.0 * calls)
    launch.gone()
    cases = launch.cases()
    dying = [case for case in cases if case.name.startswith("test_leaves")]
    assert [case.outcome for case in dying] == ["error"] * calls, launch.output
    assert all("the worker left with exit code 3" in case.text for case in dying)
    assert {case.name: case.outcome for case in cases}["test_after"] == "passed"


@pytest.mark.parametrize("_round", range(ROUNDS))
def test_workers_that_leave_their_pipes_to_a_child(starter: Starter, _round: int) -> None:
    """The agent lives on, whichever of the two ends it sees first; the child is gone with its worker."""
    every_call_is_one_error(starter, calls=CALLS)


@pytest.mark.slow
@pytest.mark.parametrize("_round", range(SLOW_ROUNDS))
def test_many_workers_that_leave_their_pipes_to_a_child(starter: Starter, _round: int) -> None:
    """The same often: what matters is the order of two events that come at about the same time."""
    every_call_is_one_error(starter, calls=SLOW_CALLS)
