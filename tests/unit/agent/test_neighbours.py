"""Stopped neighbours are continued or ended, and no other process is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.agent import neighbours
from pytest_gpucluster.agent.neighbours import Neighbours, Process, read_process, send
from pytest_gpucluster.protocol.rank import STOPPED

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read from /proc")

LAUNCHER = """
import os, subprocess, time
for rank in range(2):
    environment = {**os.environ, "RANK": str(rank)}
    child = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)
    print(child.pid, flush=True)
time.sleep(600)  # longer than any test; it does not end with its ranks
"""


def process_of(pid: int) -> Process:
    """A process that exists."""
    found = read_process(pid)
    assert found is not None
    return found


def stop(pid: int) -> None:
    """Stop it, and wait until it is."""
    os.kill(pid, signal.SIGSTOP)
    await_states(pid, STOPPED)


def await_states(pid: int, states: str) -> None:
    """Wait for one of these states; X: it is gone."""
    deadline_s = time.monotonic() + 120
    while True:
        found = read_process(pid)
        if (found.state if found is not None else "X") in states:
            return
        assert time.monotonic() < deadline_s, found
        time.sleep(0.01)


@pytest.fixture
def node() -> Iterator[tuple[int, int, int]]:
    """The pids of a launcher and of what it started as ranks 0 and 1."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    first, second = (int(launcher.stdout.readline()) for _ in range(2))
    yield launcher.pid, first, second
    launcher.kill()
    for pid in (first, second):
        neighbours.send(process_of(pid), signal.SIGKILL) if read_process(pid) else None
    launcher.wait()
    launcher.stdout.close()


@pytest.fixture
def watching(node: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> Neighbours:
    """What the spawner of rank 1 does, with no time between two looks."""
    monkeypatch.setattr(neighbours, "LOOK_S", 0.0)
    monkeypatch.setattr(neighbours, "LAST_LOOK_S", 0.01)
    found = Neighbours(rank=1, local_rank=1, controller=None)
    found._agent, found._torchrun = read_process(node[2]), read_process(node[0])
    return found


def look(watching: Neighbours, times: int) -> None:
    """Look so often."""
    for _ in range(times):
        watching.look()


LOOKS = neighbours.STOPPED_LOOKS + 1
"""The spawner of local rank 1 lets that of local rank 0 go first."""


def test_an_agent_is_continued(watching: Neighbours, node: tuple[int, int, int], capfd: pytest.CaptureFixture[str]) -> None:
    """After its looks and not before, and it is said."""
    stop(node[2])
    look(watching, LOOKS - 1)
    assert process_of(node[2]).state == STOPPED
    look(watching, 1)
    await_states(node[2], "SR")
    assert f"the agent of rank 1 (pid {node[2]}) was stopped for 0 s: it is continued" in capfd.readouterr().err


def test_looks_in_a_row(watching: Neighbours, node: tuple[int, int, int]) -> None:
    """One that went on meanwhile is not stopped for good."""
    stop(node[2])
    look(watching, LOOKS - 1)
    os.kill(node[2], signal.SIGCONT)
    await_states(node[2], "SR")
    look(watching, 1)
    stop(node[2])
    look(watching, LOOKS - 1)
    assert process_of(node[2]).state == STOPPED


def test_the_controller_is_ended(watching: Neighbours, node: tuple[int, int, int], capfd: pytest.CaptureFixture[str]) -> None:
    """Its agent writes the reports then; torchrun, which is stopped too, is left as long as ranks live."""
    stop(node[1])
    stop(node[0])
    look(watching, LOOKS)
    await_states(node[1], "ZX")
    assert "the controller" in capfd.readouterr().err
    look(watching, LOOKS)
    assert process_of(node[0]).state == STOPPED


def test_a_controller_that_a_user_suspended(
    watching: Neighbours, node: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z in a terminal: the user goes on when it pleases."""
    stop(node[1])
    real = neighbours.read_process

    def with_terminal(pid: int) -> Process | None:
        found = real(pid)
        return replace(found, has_terminal=True) if found is not None else None

    monkeypatch.setattr(neighbours, "read_process", with_terminal)
    look(watching, LOOKS)
    assert process_of(node[1]).state == STOPPED


def test_torchrun_is_continued_at_the_end(watching: Neighbours, node: tuple[int, int, int]) -> None:
    """And so are the ranks."""
    for pid in (node[0], node[2]):
        stop(pid)
    os.kill(node[1], signal.SIGKILL)
    watching_ends(watching, within_s=0.5)
    for pid in (node[0], node[2]):
        await_states(pid, "SRZX")


def watching_ends(watching: Neighbours, *, within_s: float) -> None:
    """The agent of the watching spawner has ended."""
    saved, neighbours.LEAVE_S = neighbours.LEAVE_S, within_s
    try:
        watching.linger()
    finally:
        neighbours.LEAVE_S = saved


def test_who_does_not_leave_is_ended(
    watching: Neighbours, node: tuple[int, int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that goes on after it was continued; torchrun and the controller, which may be at work, are not ended."""
    for pid in node:
        stop(pid)
    watching_ends(watching, within_s=1.0)
    await_states(node[2], "ZX")
    assert "did not leave within" in capfd.readouterr().err
    for pid in node[:2]:
        await_states(pid, "SRD")  # at work, or waiting for a disk


def test_nothing_is_stopped(watching: Neighbours) -> None:
    """No wait, and nobody is touched."""
    began_s = time.monotonic()
    watching_ends(watching, within_s=60.0)
    assert time.monotonic() - began_s < 60.0


def test_a_pid_that_is_used_again(node: tuple[int, int, int]) -> None:
    """A process that began at another time is another one."""
    process = process_of(node[2])
    send(replace(process, started=process.started - 1), signal.SIGKILL)
    assert process_of(node[2]).state in "SR"
    send(process, signal.SIGKILL)
    await_states(node[2], "ZX")


def test_no_such_process() -> None:
    """Nothing is known of it."""
    assert read_process(2**30) is None
