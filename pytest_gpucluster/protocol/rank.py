"""A rank and its process: torchrun's numbers, process states, whose a process is, ranks in short form, pairs in rounds."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import asdict

from pytest_gpucluster.protocol.codec import TypedMessage

if TYPE_CHECKING:
    from typing_extensions import Self

STOPPED = "T"
"""The state letter of a process after SIGSTOP; one that a debugger has stopped has ``t``."""


class Rank(TypedMessage, frozen=True, kw_only=True):
    """One rank by torchrun's numbers. ``group_rank`` is the number of its node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int

    @classmethod
    def local(cls, number: int, num_local: int) -> Self:
        """One of the ranks of a run on this machine alone."""
        return cls(rank=number, world_size=num_local, local_rank=number, local_world_size=num_local, group_rank=0)

    def variables(self, *, node: int) -> dict[str, str]:
        """The environment of a worker that is this rank, on the node with this number in the inventory."""
        numbers = {name.upper(): str(number) for name, number in asdict(self).items()}  # torchrun's names
        return {**numbers, "GPUCLUSTER_NODE": str(node)}


HOSTNAME = "GPUCLUSTER_HOSTNAME"
"""The variable with the name of this machine in reports, where its hostname says something else: that of a Pod, for example."""


def own_hostname() -> str:
    """The name of this machine in reports."""
    return os.environ.get(HOSTNAME) or socket.gethostname()


@functools.cache
def machine() -> str:
    """This boot of this machine and this pid namespace: where a pid means the same process. Hostnames may be equal."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def state_of(pid: int) -> str | None:
    """The state letter of a process of this machine (``T`` stopped, ``D`` uninterruptible wait, proc(5)); None if unknown."""
    return next(iter(stat_of(pid)), None)


def stat_of(pid: int) -> list[str]:
    """The words of ``/proc/PID/stat`` behind the process's name, which may hold anything; none without such a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return []


def is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended, reaped or not."""
    state = state_of(pid)
    return state in ("Z", "X") if state is not None else Path("/proc/self").exists()


CREDENTIALS = struct.Struct("3i")
"""``struct ucred`` of Linux (unix(7)): pid, user, group."""


def user_of(line: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket, by the kernel. Anybody on the host can connect to a name."""
    _, user, _ = CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return int(user)


def is_own_user(line: socket.socket) -> bool:
    """Whether the process at the other end belongs to the same user. Nobody answers another one, and root does not."""
    return user_of(line) == os.getuid()


def bound_to(name: str) -> socket.socket | None:
    """A Unix socket of this name, which does not listen yet; None if another process has the name."""
    taken = socket.socket(socket.AF_UNIX)
    try:
        taken.bind(name)
    except OSError:
        taken.close()
        return None
    return taken


def spans(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """First and last of each run of consecutive ranks: every agent reads every command, so commands are kept short."""
    found: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return tuple(found)


def ranges(numbers: Collection[int]) -> str:
    """``3, 5, 8-15`` for a set of whole numbers."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans(set(numbers)))


def rank_list(ranks: Collection[int]) -> str:
    """``rank 3``, ``ranks 3, 5, 8-15``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


Member = TypeVar("Member")


def rounds_of_pairs(members: list[Member]) -> list[list[tuple[Member, Member]]]:
    """Every pair once, in rounds of disjoint pairs (the circle method): n members need n - 1 rounds, n if n is odd."""
    ring: list[Member | None] = [*members]
    if len(ring) % 2:
        ring.append(None)
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(first, second) for first, second in pairs if first is not None and second is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def ordered_rounds(size: int, *, most: int | None = None) -> list[list[tuple[int, int]]]:
    """Ordered pairs of ``size`` members, by number, in rounds of disjoint pairs; each pair forth, then back.

    ``most``: so many partners of each member at most; None: all.
    """
    rounds = rounds_of_pairs(list(range(size)))[:most]
    return [pairs for forth in rounds for pairs in (forth, [(target, source) for source, target in forth])]
