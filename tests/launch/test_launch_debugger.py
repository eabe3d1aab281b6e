"""Debuggers: ``--pdb`` under torchrun, ``breakpoint()`` in a function that runs inline, output by place with ``-s``."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import PYTEST, TORCHRUN
from tests.support.processes import free_port
from tests.support.terminal import Terminal, at_terminal

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from tests.support.launching import Starter

pytestmark = pytest.mark.e2e

FAILS = """
import os

def talk():
    print("hello from", os.environ["RANK"])
    return int(os.environ["RANK"])

def test_fails(cluster):
    ranks = sorted(cluster.run(talk, per="gpu").values())
    assert ranks == [7]

def test_after(cluster):
    assert cluster.world_size == 2
"""
STOPS = """
def look(*, number):
    secret = number + 1
    breakpoint()
    return secret

def test_look(cluster):
    assert cluster.run(look, per="gpu", number=41).value == 42
"""


def typed(starter: Starter, *command: str) -> AbstractContextManager[Terminal]:
    """The command at a terminal."""
    return at_terminal(command, cwd=starter.folder, environment={**starter.environment, "TERM": "dumb"})


def test_pdb_under_torchrun(starter: Starter) -> None:
    """The prompt is rank 0's; agents and workers wait for as long as it takes, and the next test still measures."""
    starter.write(test_fails=FAILS)
    where = ("--nproc-per-node=2", "--master-port", str(free_port()))
    with typed(starter, *TORCHRUN, *where, *PYTEST[1:], "--gpucluster", "--pdb", "test_fails.py") as terminal:
        terminal.wait_for("(Pdb)")
        terminal.type("p 'ranks are', ranks")
        terminal.wait_for("('ranks are', [0, 1])")
        time.sleep(3)  # longer than a beat: nobody takes the controller for dead
        terminal.type("continue")
        assert terminal.end() != 0
        assert re.search(r"[12] failed, 1 passed", terminal.seen)  # the verdict is a test too
        assert terminal.seen.count("(Pdb)") == 2


def test_breakpoint_inline(starter: Starter) -> None:
    """It stops inside the measured function, with its variables, in the pytest process."""
    starter.write(test_stops=STOPS)
    with typed(starter, *PYTEST, "--gpucluster", "--gpucluster-inline", "test_stops.py") as terminal:
        terminal.wait_for("(Pdb)")
        terminal.type("p 'secret is', secret")
        terminal.wait_for("('secret is'")
        assert "('secret is', 42)" in terminal.seen
        terminal.type("continue")
        assert terminal.end() == 0, terminal.seen
        assert "run inline, for a debugger" in terminal.seen


def test_output_by_place(starter: Starter) -> None:
    """With -s each line of a worker stands behind its place; without, it is in the log of its rank only."""
    starter.write(test_fails=FAILS)
    shown = starter.torchrun("--gpucluster", "-s", "test_fails.py")
    assert shown.end() != 0
    assert "[node0-cpu0] hello from 0" in shown.output
    assert "[node0-cpu1] hello from 1" in shown.output
    hidden = starter.pytest("--gpucluster", "test_fails.py", "--gpucluster-results=other")
    assert hidden.end() == 1
    assert "hello from" not in hidden.output
    assert "hello from 1" in (starter.folder / "other" / "logs" / "rank1.log").read_text()
