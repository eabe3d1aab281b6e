"""How a worker ended, and what that blames."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.agent.spawner import describe_exit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_gpucluster.errors import Part

VMSTAT = Path("/proc/vmstat")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """How many processes the kernel has ended for want of memory, on the whole host and in this process's cgroup.

    None where it is not said. A container may show no count of its host.
    """

    host: int | None
    cgroup: int | None


def read_oom_kills() -> OomKills:
    """The counts now."""
    counts = (_read_count(file) for file in _files_of_cgroup())
    return OomKills(host=_read_count(VMSTAT), cgroup=next((count for count in counts if count is not None), None))


def _read_count(file: Path) -> int | None:
    try:
        counts = dict(line.split(" ", 1) for line in file.read_text(encoding="ascii").splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def _files_of_cgroup() -> Iterator[Path]:
    """Where the count of this process's cgroup may be: by the cgroup's path, else at the root that a container shows."""
    try:
        lines = [line.split(":", 2) for line in OWN_CGROUP.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return
    for controllers, path in (line[1:] for line in lines if len(line) == 3):
        if not controllers:
            folder, name = CGROUPS, "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = CGROUPS / "memory", "memory.oom_control"
        else:
            continue
        yield folder / path.lstrip("/") / name
        yield folder / name


def describe_end(status: int, *, oom_kills_before: OomKills) -> tuple[str, Part]:
    """How the worker with this wait status ended, in words, and what is to blame.

    SIGKILL is the kernel's only where a count of :func:`read_oom_kills` has grown since the worker was started. A crash may
    be the fault of any part, and an exit code is the function's own doing.
    """
    words = f"the worker {describe_exit(status)}"
    if os.WIFEXITED(status):
        return words, "software"
    if os.WTERMSIG(status) != signal.SIGKILL:
        return words, "unknown"
    kills = read_oom_kills()
    in_cgroup, here = _growth(oom_kills_before.cgroup, kills.cgroup), _growth(oom_kills_before.host, kills.host)
    if not in_cgroup and not here:
        return words, "unknown"
    where = f"{in_cgroup} in this cgroup, whose limit may be below the host's memory" if in_cgroup else f"{here} here"
    return f"{words} (out of host memory: the kernel's OOM killer ended {where})", "host"


def _growth(before: int | None, now: int | None) -> int:
    return max(0, now - before) if before is not None and now is not None else 0
