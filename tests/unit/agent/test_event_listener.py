"""The listener as a process: it answers, knows workers that end, and is missed when it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.agent.event_listener import Listener, start_listener
from pytest_gpucluster.inventory.driver_events import KernelLog, XidEvents
from pytest_gpucluster.protocol.node_events import NodeEvents, NodeWorker, ask, note_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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


def test_errors_of_switches(tmp_path: Path) -> None:
    """Equal lines are counted, those from before the run apart, and they cross as data."""
    log = tmp_path / "kmsg"
    line = "3,1,5,-;nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up\n"
    log.write_text(line, encoding="utf-8")
    with socket.socket(socket.AF_UNIX) as taking:
        taking.bind(f"\0gpucluster-events-test-{os.getpid()}-{time.monotonic_ns()}")
        taking.listen()
        heard = Listener(taking, XidEvents(), KernelLog(log))
        log.write_text(line * 4, encoding="utf-8")
        taking.settimeout(0)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(taking.getsockname())
            asking.sendall(b"{}\n")
            heard.step()
    events = heard.heard()
    assert [(one.code, one.switch, one.link, one.count, one.is_before) for one in events.sxids] == [
        (20034, 1, 48, 1, True),
        (20034, 1, 48, 3, False),
    ]
    assert NodeEvents.read(events.to_json()) == events
