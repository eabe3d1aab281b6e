"""What the machine says of a process: its state, and whether it has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.protocol.rank import is_gone, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator

RENAMED = """
import time
with open("/proc/self/comm", "w", encoding="utf-8") as name:
    name.write("Z) gr\\u00f6\\u00dfe")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def renamed() -> Iterator[subprocess.Popen[str]]:
    """A process that calls itself what no ASCII reader takes, and what looks like the state of one that has ended."""
    process = subprocess.Popen([sys.executable, "-c", RENAMED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_any_name(renamed: subprocess.Popen[str]) -> None:
    """A worker may call itself anything: the agent that looks at it goes on."""
    assert state_of(renamed.pid) in ("S", "R")
    assert not is_gone(renamed.pid)


def test_ended_and_not_reaped(renamed: subprocess.Popen[str]) -> None:
    """A zombie has ended, and so has a pid that nobody has."""
    renamed.kill()
    os.waitid(os.P_PID, renamed.pid, os.WEXITED | os.WNOWAIT)
    assert state_of(renamed.pid) == "Z"
    assert is_gone(renamed.pid)
    renamed.wait()
    assert state_of(renamed.pid) is None
    assert is_gone(renamed.pid)
