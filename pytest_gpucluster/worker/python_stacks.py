"""The Python stacks of a worker that hangs or has crashed.

faulthandler writes the stacks from a signal handler, also during a C++ wait, thread after thread. Then it passes the signal
on to its default action, which ends the process. So the signal cannot wake a wait and let the worker go on: what it would do
then would change what its peers are seen to do.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

from pytest_gpucluster.protocol.rank import is_gone
from pytest_gpucluster.worker import flight_recorder, raised

ASK = signal.SIGUSR1
ANSWER_S = 3.0
PAUSE_S = 0.02
SHOWN_CHARACTERS = 6000
CRASH = b"Fatal Python error"
OWN_WORKER = Path(__file__).with_name("worker.py")


def answer_requests(path: Path) -> None:
    """In the worker's main thread: write all stacks to ``path`` at :data:`ASK`, and at a crash, and end."""
    stacks = path.open("w", encoding="utf-8")  # faulthandler keeps it open as long as the process lives
    faulthandler.enable(stacks)
    signal.signal(ASK, signal.SIG_DFL)
    faulthandler.register(ASK, file=stacks, all_threads=True, chain=True)


def ask(pid: int, path: Path) -> str:
    """In the agent: the stacks of ``pid``, which ends by this; empty if it does not answer within :data:`ANSWER_S`.

    A stopped process goes on by this, and writes them before anything else.

    They are also empty if the function has raised by now: the end of a peer woke it, and the worker writes down what it raised.

    faulthandler reads the frames of threads that go on running, and may crash in doing so (seen once in some 100 dumps while
    another thread ran Python code). Then the stacks end where it crashed.
    """
    before = _size(path)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, ASK)
        os.kill(pid, signal.SIGCONT)
    deadline_s = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline_s and not is_gone(pid):
        time.sleep(PAUSE_S)
    stacks = _without_own_frames(_text(path)[before:].partition(CRASH)[0])[-SHOWN_CHARACTERS:]
    return "" if f'"{raised.__file__}", line' in stacks else stacks


def of_crash(path: Path) -> str:
    """The stacks of a worker that SIGSEGV, SIGBUS, SIGABRT, SIGFPE or SIGILL ended; empty if it ended otherwise."""
    text = _text(path)
    return _without_own_frames(text)[-SHOWN_CHARACTERS:] if text.startswith(CRASH) else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _text(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def _without_own_frames(stacks: bytes) -> str:
    """The stacks from the most recent call back to where this package's worker called the function.

    The thread that reads the flight recorder is left out.
    """
    kept, hidden = [], False
    for thread in stacks.decode("utf-8", "replace").split("\n\n"):
        if f'"{flight_recorder.__file__}", line' in thread:
            continue
        for line in [*thread.splitlines(), ""]:
            hidden = (hidden and line.startswith("  File")) or (f'"{OWN_WORKER}"' in line and "in _reply" in line)
            if not hidden:
                kept.append(line)
    return "\n".join(kept).strip()
