"""What the listener of a node has heard of its GPUs and NVSwitches, and how workers of the node ask it.

The listener's name in the abstract namespace is random, and the agent of the node's first rank writes it into the store. A
connection carries :class:`NodeEvents` and nothing to the listener. Each end refuses another user. Which processes are workers
of the run a worker hears from its own agent, never from the listener.
"""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass

from pytest_gpucluster.protocol.channel import StoreChannel, listener_key
from pytest_gpucluster.protocol.codec import TypedMessage
from pytest_gpucluster.protocol.rank import is_own_user, user_of

VARIABLE = "GPUCLUSTER_EVENTS"
"""Where a worker finds the listener's name; empty without a listener."""
ENDED_VARIABLE = "GPUCLUSTER_ENDED_WORKERS"
"""Where a worker finds :class:`EndedWorkers`."""
ANSWER_S = 5.0
POLL_S = 0.01
MOST_BYTES = 4 << 20
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpu:
    """A GPU by NVML. ``why``: why NVML does not tell its events; None where it does."""

    index: int
    uuid: str
    pci: str
    why: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class XidDetail:
    """What the kernel log says of an Xid beside its code; None for what its line does not say.

    ``severity`` (``Fatal``, ``Nonfatal``), ``unit`` of the NVLink hardware, ``link`` and ``status`` (the error status in
    hexadecimal) stand in Xids 144 to 150. ``cause``: the Xid that came before an Xid 45. ``action``: the recovery that an Xid
    154 asks for, by NVML's name of it.
    """

    severity: str | None = None
    unit: str | None = None
    link: int | None = None
    status: str | None = None
    cause: int | None = None
    action: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeXid:
    """Equal Xids. NVML names the GPU's ``index`` and no process; the kernel log ``pci``, and a ``pid`` where there is one.

    ``age_s``: how long ago the first one came; None for one that the kernel logged before the run. ``detail`` is the log's.
    """

    code: int
    index: int | None = None
    pci: str | None = None
    pid: int | None = None
    age_s: float | None = None
    detail: XidDetail | None = None
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSxid:
    """Equal lines of the kernel log on an error of one NVSwitch. ``switch``: its number by the driver; ``pci``: its address.

    ``severity``: ``Fatal``, ``Non-fatal`` or ``Correctable``; ``link``: a port of the switch; None where the line names none.
    ``is_detail``: the lines add numbers to an error that other lines report. ``is_before``: logged before the run.
    """

    code: int
    switch: int
    pci: str
    severity: str | None = None
    link: int | None = None
    is_detail: bool = False
    count: int = 1
    is_before: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """Lines of the kernel log on a GPU that the driver lost or cannot start, without an Xid.

    ``pci`` is None where the line does not say which GPU. ``count``: of a parsed line, how many GPUs it is about; of a node,
    how many equal lines. ``is_before``: the kernel logged them before the run.
    """

    pci: str | None
    text: str
    count: int = 1
    is_before: bool = False


class EndedWorkers(TypedMessage, frozen=True, kw_only=True):
    """The workers that a rank had before: the pid of each, and when it ended, in seconds of this host's monotonic clock."""

    ended: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWorker:
    """A worker that this rank has or had. ``ended_s``: how long ago it ended; None while it lives."""

    pid: int
    ended_s: float | None = None


class ListenerName(TypedMessage, frozen=True, kw_only=True):
    """The name of a node's listener in the abstract namespace."""

    name: str


class NodeEvents(TypedMessage, frozen=True, kw_only=True):
    """All that was heard. ``nvml_why``, ``log_why``: why this source does not tell all; None where it does.

    ``sees_host_pids``: pids of the kernel log and of this node's processes are of one kind, as outside of containers.
    ``is_ready``: whatever comes from now on is heard, or it is known why not.
    """

    nvml_why: str | None
    log_why: str | None
    sees_host_pids: bool = False
    is_ready: bool = True
    gpus: tuple[NodeGpu, ...] = ()
    xids: tuple[NodeXid, ...] = ()
    sxids: tuple[NodeSxid, ...] = ()
    losses: tuple[NodeLoss, ...] = ()


def new_name() -> str:
    """A name for a listener, which nobody can take before it."""
    return f"gpucluster-events-{secrets.token_hex(16)}"


def listener_of(channel: StoreChannel, group_rank: int) -> str | None:
    """The name of a node's listener by its first agent; None where it has none, or another program wrote it."""
    key = listener_key(group_rank)
    if not channel.has(key):
        return None
    (found,) = channel.take_written([key], ListenerName.read)
    return found.name if isinstance(found, ListenerName) else None


def ask(name: str, *, within_s: float = ANSWER_S) -> NodeEvents:
    """What the listener has heard; ``within_s`` is for the whole of its answer.

    Raises:
        OSError: nobody listens at this name, or a process of another user, or the answer is late.
        MalformedMessageError: the answer is no such message.
    """
    deadline_s = time.monotonic() + within_s
    received = bytearray()
    with socket.socket(socket.AF_UNIX) as line:
        _connect(line, name, deadline_s)
        if not is_own_user(line):
            raise PermissionError(f"user {user_of(line)} has taken its name")
        while len(received) < MOST_BYTES:
            line.settimeout(_left_s(deadline_s))
            data = line.recv(CHUNK_BYTES)
            if not data:
                break
            received += data
    return NodeEvents.read(bytes(received))


def _connect(line: socket.socket, name: str, deadline_s: float) -> None:
    """Connect, also where many others wait to be answered."""
    while True:
        line.settimeout(_left_s(deadline_s))
        try:
            line.connect(f"\0{name}")
        except BlockingIOError:
            time.sleep(POLL_S)
        else:
            return


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("its answer is late")
    return left_s
