"""The listener as a process: it answers, knows workers that end, and is missed when it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.agent.event_listener import start_listener
from pytest_gpucluster.protocol.node_events import NodeEvents, NodeWorker, ask, note_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WITHIN_S = 30.0


@pytest.fixture
def listener() -> Iterator[tuple[str, int]]:
    """The name and pid of a listener."""
    name = f"gpucluster-events-test-{os.getpid()}-{time.monotonic_ns()}"
    pid = start_listener(name)
    assert pid is not None
    yield name, pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def until(name: str, holds: Callable[[NodeEvents], bool]) -> NodeEvents:
    """The first answer that holds."""
    deadline_s = time.monotonic() + WITHIN_S
    while not holds(answer := ask(name, within_s=WITHIN_S)):
        assert time.monotonic() < deadline_s, answer
        time.sleep(0.1)
    return answer


def test_a_worker_that_ends(listener: tuple[str, int]) -> None:
    """It lives, then it has ended for so long."""
    name, _ = listener
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note_worker(name, NodeWorker(pid=worker.pid, local_rank=3))
    assert ask(name, within_s=WITHIN_S).workers == (NodeWorker(pid=worker.pid, local_rank=3),)
    worker.kill()
    worker.communicate()
    ended = until(name, lambda answer: answer.workers[0].ended_s is not None).workers[0]
    assert ended.ended_s is not None
    assert 0 <= ended.ended_s < WITHIN_S


def test_no_driver(listener: tuple[str, int]) -> None:
    """Why nothing is heard is said in NVML's words."""
    answer = until(listener[0], lambda answer: answer.nvml_why != "NVML has not answered yet")
    assert answer.nvml_why is not None
    assert answer.gpus == ()


def test_garbage_is_survived(listener: tuple[str, int]) -> None:
    """Whoever talks nonsense gets no answer; the next one does."""
    name, _ = listener
    with contextlib.suppress(OSError):
        note_worker(name, NodeWorker(pid=os.getpid(), local_rank="x"))  # type: ignore[arg-type]
    assert ask(name, within_s=WITHIN_S).workers == ()


def test_a_name_that_is_taken(listener: tuple[str, int]) -> None:
    """The second does not start."""
    assert start_listener(listener[0]) is None


def test_it_is_killed(listener: tuple[str, int]) -> None:
    """Nobody answers for it."""
    name, pid = listener
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(OSError, match="refused"):
        ask(name)
