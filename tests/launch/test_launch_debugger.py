"""Debuggers: ``--pdb`` under torchrun, ``breakpoint()`` in a function that runs inline, output by place with ``-s``."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import MARK, PYTEST, TORCHRUN, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class Terminal:
    """A person at a terminal: reads what appears, types lines."""

    def __init__(self, starter: Starter, command: Sequence[str]) -> None:
        """Start the command with a pseudo-terminal as stdin, stdout and stderr."""
        self._own, theirs = pty.openpty()
        environment = {**starter.environment, MARK: "terminal", "TERM": "dumb"}
        self._process = subprocess.Popen(
            command, cwd=starter.folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def wait_for(self, text: str, *, within_s: float = 60) -> None:
        """Read until ``text`` appears after what was typed last."""
        deadline_s, start = time.monotonic() + within_s, len(self.seen)
        while text not in self.seen[start:]:
            if not self._read(deadline_s):
                raise AssertionError(f"no {text!r} in:\n{self.seen}")

    def type(self, line: str) -> None:
        """One line."""
        os.write(self._own, line.encode() + b"\n")

    def end(self, *, within_s: float = 60) -> int:
        """Its exit status."""
        deadline_s = time.monotonic() + within_s
        while self._process.poll() is None and self._read(deadline_s):
            pass
        return self._process.wait(max(0.1, deadline_s - time.monotonic()))

    def close(self) -> None:
        """End what is left of it."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._own)

    def _read(self, deadline_s: float) -> bool:
        ready, _, _ = select.select([self._own], [], [], max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._own, 65536)
        except OSError:  # Linux says EIO when the other side is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


def test_pdb_under_torchrun(starter: Starter) -> None:
    """The prompt is rank 0's; agents and workers wait for as long as it takes, and the next test still measures."""
    starter.write(test_fails=FAILS)
    where = ("--nproc-per-node=2", "--master-port", str(free_port()))
    terminal = Terminal(starter, [*TORCHRUN, *where, "-m", *PYTEST, "--gpucluster", "--pdb", "test_fails.py"])
    try:
        terminal.wait_for("(Pdb)")
        terminal.type("p 'ranks are', ranks")
        terminal.wait_for("('ranks are', [0, 1])")
        time.sleep(3)  # longer than a beat: nobody takes the controller for dead
        terminal.type("continue")
        assert terminal.end() != 0
        assert "1 failed, 1 passed" in terminal.seen
        assert terminal.seen.count("(Pdb)") == 2
    finally:
        terminal.close()


def test_breakpoint_inline(starter: Starter) -> None:
    """It stops inside the measured function, with its variables, in the pytest process."""
    starter.write(test_stops=STOPS)
    command = [sys.executable, "-m", *PYTEST, "--gpucluster", "--gpucluster-inline", "test_stops.py"]
    terminal = Terminal(starter, command)
    try:
        terminal.wait_for("(Pdb)")
        terminal.type("p 'secret is', secret")
        terminal.wait_for("('secret is'")
        assert "('secret is', 42)" in terminal.seen
        terminal.type("continue")
        assert terminal.end() == 0, terminal.seen
        assert "run inline, for a debugger" in terminal.seen
    finally:
        terminal.close()


def test_output_by_place(starter: Starter) -> None:
    """With -s each line of a worker stands behind its place; without, it is in the log of its rank only."""
    starter.write(test_fails=FAILS)
    shown = starter.torchrun("--gpucluster", "-s", "test_fails.py")
    assert shown.end(within_s=60) != 0
    assert "[node0-cpu0] hello from 0" in shown.output
    assert "[node0-cpu1] hello from 1" in shown.output
    hidden = starter.pytest("--gpucluster", "test_fails.py", "--gpucluster-results=other")
    assert hidden.end(within_s=60) == 1
    assert "hello from" not in hidden.output
    assert "hello from 1" in (starter.folder / "other" / "logs" / "rank1.log").read_text()
