"""Stacks of a process that hangs: all of them, however long it takes to write them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.protocol.rank import is_gone
from pytest_gpucluster.worker import python_stacks
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HANGING = """
import sys, threading, time
from pathlib import Path
from pytest_gpucluster.worker import python_stacks

def waits_in_a_thread():
    time.sleep(600)

def hangs_in_the_main_thread():
    print("ready", flush=True)
    time.sleep(600)

python_stacks.answer_requests(Path(sys.argv[1]))
MORE
for _ in range(10):
    threading.Thread(target=waits_in_a_thread, daemon=True).start()
hangs_in_the_main_thread()
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Callable[..., tuple[int, Path]]]:
    """Start a process of many threads that hangs; its pid and the file for its stacks."""
    started: list[subprocess.Popen[str]] = []

    def start(more: str = "") -> tuple[int, Path]:
        path = tmp_path / "stacks"
        command = [sys.executable, "-c", HANGING.replace("MORE", more), str(path)]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid, path

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def test_every_thread_is_there(hanging: Callable[..., tuple[int, Path]]) -> None:
    """The main thread's stack, which comes last, too. The process ends by this, so that it does nothing more."""
    pid, path = hanging("import asyncio; loop = asyncio.new_event_loop(); loop.add_signal_handler(15, print)")
    told = python_stacks.ask(pid, path)
    assert told.count("in waits_in_a_thread") == 10
    assert told.count("in hangs_in_the_main_thread") == 1
    assert is_gone(pid)


def test_a_process_that_is_held(hanging: Callable[..., tuple[int, Path]]) -> None:
    """It writes where it was held, and nothing wakes it before."""
    pid, path = hanging()
    os.kill(pid, signal.SIGSTOP)
    assert python_stacks.ask(pid, path).count("in hangs_in_the_main_thread") == 1
    assert is_gone(pid)


def test_a_function_that_raised_meanwhile(hanging: Callable[..., tuple[int, Path]]) -> None:
    """The end of a peer woke it: the worker writes down what the function raised, and where it waited is not seen any more."""
    raising = "from pytest_gpucluster.worker import raised; raised._chain_of = lambda error: hangs_in_the_main_thread()"
    pid, path = hanging(f"{raising}; raised.failure_of(ValueError())")
    assert python_stacks.ask(pid, path) == ""
    assert is_gone(pid)


def test_a_process_that_is_held_up_while_it_writes(
    hanging: Callable[..., tuple[int, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine takes its core away for a while: it is waited for, until it is done and no longer."""
    monkeypatch.setattr(python_stacks, "ANSWER_S", 60.0)
    pid, path = hanging()
    killing = os.kill
    killing(pid, signal.SIGSTOP)
    monkeypatch.setattr(python_stacks.os, "kill", lambda pid, number: number != signal.SIGCONT and killing(pid, number))
    threading.Timer(1.0, killing, (pid, signal.SIGCONT)).start()
    began_s = time.monotonic()
    assert python_stacks.ask(pid, path).count("in hangs_in_the_main_thread") == 1
    assert 0.9 < time.monotonic() - began_s < python_stacks.ANSWER_S


def test_a_process_that_crashes_over_it(hanging: Callable[..., tuple[int, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Faulthandler may, where a thread runs: nobody waits for a process that is gone, and the crash is not its stack."""
    monkeypatch.setattr(python_stacks, "ANSWER_S", 60.0)
    pid, path = hanging()

    def strike(pid: int, _number: int) -> None:
        with path.open("a") as file:
            file.write("Thread 1:\n  File half\nFatal Python error: Segmentation fault\n")
        killing(pid, signal.SIGKILL)

    killing = os.kill
    monkeypatch.setattr(python_stacks.os, "kill", strike)
    began_s = time.monotonic()
    assert python_stacks.ask(pid, path) == "Thread 1:\n  File half"
    assert time.monotonic() - began_s < python_stacks.ANSWER_S


def dump_of(*threads: list[tuple[str, str]], current: int | None = None) -> str:
    """What faulthandler writes of threads, each its frames as (file, function), the most recent first."""
    told = []
    for number, frames in enumerate(threads):
        head = f"{'Current thread' if number == current else 'Thread'} 0x{number:x} (most recent call first):"
        told.append("\n".join([head, *(f'  File "{file}", line 1 in {function}' for file, function in frames)]))
    return "\n\n".join(told) + "\n"


PACKAGE = REPOSITORY / "pytest_gpucluster"
IN_THREAD = [("threading.py", "run"), ("threading.py", "_bootstrap")]
IN_FUNCTION = [("suite.py", "add_up"), (f"{PACKAGE}/worker/worker.py", "_reply"), (f"{PACKAGE}/worker/worker.py", "main")]


@pytest.mark.parametrize("own", ["worker/gpu_watch.py", "worker/flight_recorder.py", "inventory/telemetry.py"])
def test_the_function_first_and_no_thread_of_our_own(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a thread reads NVML beside the function, and was all that a report had room for."""
    path = tmp_path / "stacks"
    text = dump_of([(f"{PACKAGE}/{own}", "_serve"), *IN_THREAD], [("user.py", "loads"), *IN_THREAD], IN_FUNCTION)
    monkeypatch.setattr(python_stacks, "ANSWER_S", 0.1)
    monkeypatch.setattr(python_stacks.os, "kill", lambda _pid, _number: path.write_text(text))
    lines = python_stacks.ask(os.getpid(), path).splitlines()
    assert [line.rpartition(" ")[2] for line in lines if "File" in line] == ["add_up", "loads", "run", "_bootstrap"]


def test_where_the_function_waits_for_a_thread_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the function's thread, whoever made it wait."""
    path = tmp_path / "stacks"
    monkeypatch.setattr(python_stacks, "ANSWER_S", 0.1)
    text = dump_of([(f"{PACKAGE}/worker/gpu_watch.py", "_look"), *IN_FUNCTION])
    monkeypatch.setattr(python_stacks.os, "kill", lambda _pid, _number: path.write_text(text))
    assert "in _look" in python_stacks.ask(os.getpid(), path)


def test_the_thread_that_crashed_comes_first(tmp_path: Path) -> None:
    """After the words of the crash."""
    path = tmp_path / "stacks"
    path.write_text("Fatal Python error: Segmentation fault\n\n" + dump_of(IN_THREAD, [("suite.py", "crash")], current=1))
    head, _, current, *_ = python_stacks.of_crash(path).splitlines()
    assert (head, current) == ("Fatal Python error: Segmentation fault", "Current thread 0x1 (most recent call first):")


def test_half_a_dump_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text alone is not the end; after the deadline what is there is better than nothing."""
    path = tmp_path / "stacks"
    monkeypatch.setattr(python_stacks, "ANSWER_S", 1.0)
    monkeypatch.setattr(python_stacks.os, "kill", lambda _pid, _number: path.write_text("Thread 1:\n  File half\n"))
    began_s = time.monotonic()
    assert python_stacks.ask(os.getpid(), path) == "Thread 1:\n  File half"
    assert time.monotonic() - began_s >= 1.0


def test_a_process_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stacks, and no error."""
    monkeypatch.setattr(python_stacks, "ANSWER_S", 0.1)
    process = subprocess.Popen(["true"])
    process.wait()
    assert python_stacks.ask(process.pid, tmp_path / "stacks") == ""
    assert python_stacks.of_crash(tmp_path / "stacks") == ""
