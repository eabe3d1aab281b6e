"""How a worker ended, and what that blames."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.agent.spawner import describe_exit

if TYPE_CHECKING:
    from pytest_gpucluster.errors import Part

VMSTAT = Path("/proc/vmstat")


def read_oom_kills() -> int | None:
    """How many processes the kernel has ended for want of memory, of the host or of a cgroup; None where it is not said."""
    try:
        counts = dict(line.split(" ", 1) for line in VMSTAT.read_text(encoding="ascii").splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def describe_end(status: int, *, oom_kills_before: int | None) -> tuple[str, Part]:
    """How the worker with this wait status ended, in words, and what is to blame.

    SIGKILL is the kernel's only where the count of :func:`read_oom_kills` has grown since the worker was started. A crash
    may be the fault of any part, and an exit code is the function's own doing.
    """
    words = f"the worker {describe_exit(status)}"
    if os.WIFEXITED(status):
        return words, "software"
    if os.WTERMSIG(status) != signal.SIGKILL:
        return words, "unknown"
    kills = read_oom_kills()
    if kills is not None and oom_kills_before is not None and kills > oom_kills_before:
        return f"{words} (out of host memory: the kernel's OOM killer ended {kills - oom_kills_before} here)", "host"
    return words, "unknown"
