"""The Python stacks of a worker that hangs or has crashed.

faulthandler writes the stacks from a signal handler, also during a C++ wait, thread after thread. Then it passes the signal
on to its default action, which ends the process. So the signal cannot wake a wait and let the worker go on: what it would do
then would change what its peers are seen to do.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import time
from pathlib import Path

from pytest_gpucluster.protocol.rank import is_gone
from pytest_gpucluster.worker import raised

ASK = signal.SIGUSR1
ANSWER_S = 3.0
PAUSE_S = 0.02
SHOWN_CHARACTERS = 6000
CRASH = b"Fatal Python error"
OWN_PACKAGE = Path(__file__).parents[1]
OWN_WORKER = OWN_PACKAGE / "worker" / "worker.py"
OWN_THREADS = [OWN_PACKAGE / name for name in ("worker/flight_recorder.py", "worker/gpu_watch.py", "inventory/telemetry.py")]


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
    before = len(_text(path))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, ASK)
        os.kill(pid, signal.SIGCONT)
    deadline_s = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline_s and not is_gone(pid):
        time.sleep(PAUSE_S)
    stacks = _without_own_frames(_text(path)[before:].partition(CRASH)[0])[:SHOWN_CHARACTERS]
    return "" if f'"{raised.__file__}", line' in stacks else stacks


def of_crash(path: Path) -> str:
    """The stacks of a worker that SIGSEGV, SIGBUS, SIGABRT, SIGFPE or SIGILL ended; empty if it ended otherwise."""
    text = _text(path)
    return _without_own_frames(text)[:SHOWN_CHARACTERS] if text.startswith(CRASH) else ""


def _text(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def _without_own_frames(stacks: bytes) -> str:
    """The stacks from the most recent call back to where this package's worker called the function.

    The thread that is in the function, or that crashed, comes first: faulthandler writes it last, and nobody reads so far.
    Threads of this package are left out.
    """
    threads = [thread.splitlines() for thread in stacks.decode("utf-8", "replace").split("\n\n") if thread.strip()]
    kept = [itertools.takewhile(_is_above_worker, lines) for lines in sorted(threads, key=_place) if not _is_own(lines)]
    return "\n\n".join("\n".join(lines) for lines in kept).strip()


def _is_above_worker(line: str) -> bool:
    """Whether a line is none of the worker's own frames, of which that of the call of the function comes first."""
    return f'"{OWN_WORKER}"' not in line or "in _reply" not in line


def _place(thread: list[str]) -> int:
    """0 for the head of a crash, 1 for the thread that is looked for, 2 for others."""
    if thread[0].startswith(CRASH.decode()):
        return 0
    return 1 if not all(map(_is_above_worker, thread)) or thread[0].startswith("Current thread") else 2


def _is_own(thread: list[str]) -> bool:
    """Whether a thread is one of this package, that reads the flight recorder or NVML beside the function."""
    return all(map(_is_above_worker, thread)) and any(f'"{file}", line' in line for line in thread for file in OWN_THREADS)
