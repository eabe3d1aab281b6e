"""Who a rank is, where pids mean the same, and how sets of ranks are written."""

from __future__ import annotations

import contextlib
import functools
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """Who this agent is, in torchrun's words."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int


@functools.cache
def machine() -> str:
    """Where a pid means the same process: this boot of this machine, this pid namespace. Hostnames may be equal."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def state_of(pid: int) -> str | None:
    """The state letter of a process of this machine (``T`` stopped, ``D`` uninterruptible wait, proc(5)); None if unknown."""
    with contextlib.suppress(OSError, IndexError):  # its name stands before the letter, and may be anything
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    return None


def is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended, reaped or not."""
    state = state_of(pid)
    return state in ("Z", "X") if state is not None else Path("/proc/self").exists()


def spans(ranks: Iterable[int]) -> list[list[int]]:
    """``[first, last]`` of each run of consecutive ranks: every agent reads every command, 1024 numbers would cost."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def ranges(numbers: Sequence[int]) -> str:
    """``3, 5, 8-15`` for a set of whole numbers."""
    parts: list[str] = []
    start = previous = None
    for number in [*sorted(numbers), None]:
        if previous is not None and number == previous + 1:
            previous = number
            continue
        if start is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    return ", ".join(parts)
