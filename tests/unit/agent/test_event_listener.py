"""The listener as a process: it answers its own user and nobody else, takes no message, and is missed when it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.agent import event_listener as module
from pytest_gpucluster.agent.event_listener import Listener, start_listener
from pytest_gpucluster.health.driver_errors import judge_xids
from pytest_gpucluster.inventory.driver_events import KernelLog, XidEvents
from pytest_gpucluster.measurements.health import gpu_xids, node_sxids
from pytest_gpucluster.protocol.node_events import VARIABLE, NodeEvents, NodeXid, ask, new_name
from tests.support.strangers import AS_ROOT, STRANGER, stranger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WITHIN_S = 30.0
HELD_S = 5.0
"""Less than it would take to serve one after another what is held."""


@pytest.fixture
def listener() -> Iterator[tuple[str, int]]:
    """The name and pid of a listener."""
    name = new_name()
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


def test_no_driver(listener: tuple[str, int]) -> None:
    """Why nothing is heard is said in NVML's words."""
    answer = until(listener[0], lambda answer: answer.nvml_why != "NVML has not answered yet")
    assert answer.nvml_why is not None
    assert answer.gpus == ()


@pytest.mark.parametrize("said", [b"", b"\n", b'{"pid": 1, "local_rank": 0}\n', b"\xff" * (1 << 16)])
def test_nobody_can_tell_it_anything(listener: tuple[str, int], said: bytes) -> None:
    """Whoever sends a line, such as one that makes a process a worker of the run, gets the answer that all get."""
    with connected(listener[0]) as line:
        with contextlib.suppress(OSError):
            line.sendall(said)
        told = answer(line)
    assert told is not None
    assert "workers" not in told
    assert NodeEvents.read(told.encode()).xids == ask(listener[0], within_s=WITHIN_S).xids == ()


def test_lines_that_are_held(listener: tuple[str, int]) -> None:
    """Many connections that stay open, say nothing and read nothing: each question is answered at once."""
    name, _ = listener
    until(name, lambda told: told.is_ready)
    with contextlib.ExitStack() as held:
        for _ in range(50):
            line = held.enter_context(connected(name))
            with contextlib.suppress(BrokenPipeError):  # it was answered already
                line.sendall(b"{")
        start_s = time.monotonic()
        ask(name)
        assert time.monotonic() - start_s < HELD_S


def test_an_answer_that_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that fills the line is given up after a time for all of it, however often a few bytes are taken."""
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    name = new_name()
    with socket.socket(socket.AF_UNIX) as taking:
        taking.bind(f"\0{name}")
        taking.listen()
        heard = Listener(taking, XidEvents(), KernelLog(tmp_path / "none"))
        monkeypatch.setattr(heard, "heard", lambda: NodeEvents(nvml_why="x" * (8 << 20), log_why=None))
        with connected(name) as line:

            def sip() -> None:
                with contextlib.suppress(OSError):
                    while line.recv(1):
                        time.sleep(0.1)

            threading.Thread(target=sip, daemon=True).start()
            start_s = time.monotonic()
            heard.step()
            assert 0.4 < time.monotonic() - start_s < HELD_S


@pytest.mark.parametrize("is_before", [False, True])
def test_a_flood_is_told_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_before: bool) -> None:
    """60,000 Xids of three GPUs made an answer that is too long to be taken. All are counted, and the first stand alone."""
    name, seen = new_name(), [(13, 0), (31, 7), (43, 3)]
    flood = [NodeXid(code=code, pci=f"0000:0{gpu}:00", pid=1000 + number % 5) for number in range(20_000) for code, gpu in seen]
    last = NodeXid(code=79, pci="0000:05:00")
    with socket.socket(socket.AF_UNIX) as taking:
        taking.bind(f"\0{name}")
        taking.listen()
        heard = Listener(taking, XidEvents(), KernelLog(tmp_path / "none"))
        if is_before:
            monkeypatch.setattr(heard, "_before", [*flood, last])
        else:
            monkeypatch.setattr(heard, "_logged", [(number * 0.001, one) for number, one in enumerate([*flood, last])])
        threading.Thread(target=heard.step, daemon=True).start()
        told = ask(name, within_s=WITHIN_S)
    assert sum(one.count for one in told.xids) == len(flood) + 1
    assert {(one.code, one.pci) for one in told.xids} == {(one.code, one.pci) for one in [*flood, last]}
    assert all(one.count == 1 for one in told.xids[:1000])
    assert {one.age_s is None for one in told.xids} == {is_before}
    if not is_before:  # which of them a worker may have caused is told by their time
        ages_s = [round(one.age_s) for one in told.xids[1000:] if one.age_s is not None]
        assert 60 <= len({*ages_s}) <= 63


# Another user.


def hear(name: str) -> str | None:
    """What the listener tells whoever connects."""
    with connected(name) as line:
        return answer(line)


def connected(name: str) -> socket.socket:
    """A line to it."""
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(WITHIN_S)
    line.connect(f"\0{name}")
    return line


def answer(line: socket.socket) -> str | None:
    """All that it sends; None if nothing."""
    received = b""
    with contextlib.suppress(ConnectionResetError):  # it does not read what was sent
        while data := line.recv(1 << 16):
            received += data
    return received.decode() or None


def listed() -> bytes:
    """Every name on this host, as any user can list them."""
    return Path("/proc/net/unix").read_bytes()


def play_listener(name: str, said: bytes) -> None:
    """Take a name and answer everybody, until the process ends."""
    taking = socket.socket(socket.AF_UNIX)
    taking.bind(f"\0{name}")
    taking.listen()

    def serve() -> None:
        while True:
            line, _ = taking.accept()
            with line, contextlib.suppress(OSError):
                line.sendall(said)

    threading.Thread(target=serve, daemon=True).start()


@AS_ROOT
def test_another_user_hears_nothing(listener: tuple[str, int]) -> None:
    """He sees the name, and root's listener does not answer him; its own user it does."""
    name, _ = listener
    with stranger() as other:
        assert f"@{name}".encode() in other(listed)
        assert other(hear, name) is None
    assert hear(name) is not None


NOTHING = NodeEvents(nvml_why=None, log_why=None).to_json()
FORGED = NodeEvents(nvml_why=None, log_why=None, xids=(NodeXid(code=79, index=0, age_s=1.0),)).to_json()


@AS_ROOT
@pytest.mark.parametrize("said", [NOTHING, FORGED])
def test_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """He has the name and says that nothing was heard, or that an Xid was: an error of every criterion, and it says who."""
    name = new_name()
    with stranger() as other:
        other(play_listener, name, said)
        assert start_listener(name) is None
        with pytest.raises(PermissionError, match=f"user {STRANGER} has taken its name"):
            ask(name)
        monkeypatch.setenv(VARIABLE, name)
        why = f"the listener of this node does not answer: user {STRANGER} has taken its name"
        assert judge_xids(gpu_xids()).doubts[0].endswith(why)
        assert node_sxids().kernel_log_why == why


@pytest.mark.parametrize("pause_s", [0.05, 30.0])
def test_an_answer_that_comes_slowly(pause_s: float) -> None:
    """A byte now and then does not prolong the time for the whole answer."""
    name = new_name()
    with socket.socket(socket.AF_UNIX) as taking:
        taking.bind(f"\0{name}")
        taking.listen()

        def trickle() -> None:
            line, _ = taking.accept()
            with line, contextlib.suppress(OSError):
                while True:
                    line.sendall(b" ")
                    time.sleep(pause_s)

        threading.Thread(target=trickle, daemon=True).start()
        start_s = time.monotonic()
        with pytest.raises(TimeoutError):
            ask(name, within_s=0.5)
        assert time.monotonic() - start_s < HELD_S


def test_many_who_wait_for_an_answer() -> None:
    """A question waits for its place in the queue, and not beyond its time."""
    name = new_name()
    with socket.socket(socket.AF_UNIX) as taking, contextlib.ExitStack() as held:
        taking.bind(f"\0{name}")
        taking.listen(0)
        held.enter_context(connected(name))
        with pytest.raises(TimeoutError):
            ask(name, within_s=0.2)
        threading.Timer(0.2, lambda: [taking.accept()[0].close(), answer_with(taking, NOTHING)]).start()
        assert ask(name, within_s=WITHIN_S) == NodeEvents.read(NOTHING)


def answer_with(taking: socket.socket, said: bytes) -> None:
    """Answer whoever connects next."""
    line, _ = taking.accept()
    with line:
        line.sendall(said)


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
