"""The last collectives of a worker from PyTorch's flight recorder, read while the worker's main thread hangs.

The recorder keeps the state of each collective (scheduled, started, completed) as far as the backend reports it. NCCL does;
gloo reports ``scheduled`` for all. A thread that a signal wakes reads the recorder: Python runs signal handlers in the main
thread only, and the main thread is inside a C++ wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from pytest_gpucluster.protocol.rank import is_gone

ASK = signal.SIGUSR2
SHOWN = 4
ANSWER_S = 2.0
PAUSE_S = 0.02


def answer_requests(path: Path) -> None:
    """In the worker: write the recorder to ``path`` at each :data:`ASK`, which is blocked there from the start."""
    threading.Thread(target=_serve, args=(path,), daemon=True).start()


def _serve(path: Path) -> None:
    while True:
        signal.sigwait({ASK})
        fresh = path.with_suffix(".new")
        fresh.write_bytes(_dump())
        fresh.replace(path)


def _dump() -> bytes:
    """The recorder as JSON; empty if this torch has none, or has it under another name."""
    from torch._C import _distributed_c10d as c10d

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # NCCL has a recorder of its own
        dump: Any = getattr(c10d, name, None)
        data = bytes(dump()) if dump is not None else b""
        if b'"entries"' in data:
            return data
    return b""


def ask(pid: int, path: Path) -> None:
    """In the agent: have ``pid`` write its recorder to ``path``, and wait until it has, ended, or :data:`ANSWER_S` are over."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, ASK)
    deadline_s = time.monotonic() + ANSWER_S
    while not path.exists() and time.monotonic() < deadline_s and not is_gone(pid):
        time.sleep(PAUSE_S)
    time.sleep(PAUSE_S)  # the thread waits again, and runs no Python code while the stacks are read


def summarize(path: Path) -> str:
    """The last collectives as lines, the newest last: ``all_reduce 2: started, Float [4]``; empty if there is no answer."""
    try:
        entries = json.loads(path.read_bytes())["entries"][-SHOWN:]
        return "\n".join(_line(entry) for entry in entries)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""


def _line(entry: dict[str, Any]) -> str:
    name = str(entry["profiling_name"]).rpartition(":")[2]
    return f"{name} {entry['collective_seq_id']}: {entry['state']}, {entry['input_dtypes'][0]} {entry['input_sizes'][0]}"
