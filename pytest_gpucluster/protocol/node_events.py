"""What the listener of a node has heard of its GPUs and NVSwitches, and how agents and workers of the node talk to it.

A connection to the listener's address in the abstract namespace carries one line of JSON each way: a worker that began, or
nothing, and :class:`NodeEvents`.
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.protocol.codec import TypedMessage

if TYPE_CHECKING:
    from pytest_gpucluster.protocol.channel import Address
    from pytest_gpucluster.protocol.rank import Rank
    from pytest_gpucluster.protocol.secret import Secret

VARIABLE = "GPUCLUSTER_EVENTS"
ANSWER_S = 5.0
NOTE_S = 0.5
MOST_BYTES = 4 << 20
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpu(TypedMessage):
    """A GPU by NVML. ``why``: why NVML does not tell its events; None where it does."""

    index: int
    uuid: str
    pci: str
    why: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class XidDetail(TypedMessage):
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
class NodeXid(TypedMessage):
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
class NodeSxid(TypedMessage):
    """Equal lines of the kernel log on an error of an NVSwitch, and how many; fields as in the log.

    ``is_before``: the kernel logged them before the run.
    """

    code: int
    switch: int
    pci: str
    severity: str | None
    link: int | None
    is_detail: bool
    count: int
    is_before: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss(TypedMessage):
    """Equal lines of the kernel log on a GPU that the driver lost, without an Xid, and how many.

    ``is_before``: the kernel logged them before the run.
    """

    pci: str
    text: str
    count: int
    is_before: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWorker(TypedMessage):
    """A worker of this run. ``ended_s``: how long ago it ended; None while it lives."""

    pid: int
    local_rank: int
    ended_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvents(TypedMessage):
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
    workers: tuple[NodeWorker, ...] = ()


def listener_address(address: Address, secret: Secret | None, rank: Rank) -> str:
    """The name of the node's listener in the abstract namespace. In a signed run nobody else can know it."""
    node = f"{address.host}:{address.port}/{address.run_id}/{rank.group_rank}".encode()
    digest = secret.sign("events", node) if secret is not None else hashlib.sha256(b"events/" + node).hexdigest()
    return f"gpucluster-events-{digest}"


def ask(name: str, *, within_s: float = ANSWER_S) -> NodeEvents:
    """What the listener has heard.

    Raises:
        OSError: nobody listens at this name, or the answer is late.
        MalformedMessageError: the answer is no such message.
    """
    return NodeEvents.read(_exchange(name, b"", within_s=within_s))


def note_worker(name: str, worker: NodeWorker) -> None:
    """Tell the listener that a worker of this run began.

    Raises:
        OSError: nobody listens at this name, or the answer is late.
    """
    _exchange(name, worker.to_json(), within_s=NOTE_S)


def _exchange(name: str, said: bytes, *, within_s: float) -> bytes:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(within_s)
        line.connect(f"\0{name}")
        line.sendall(said + b"\n")
        received = bytearray()
        while (data := line.recv(CHUNK_BYTES)) and len(received) < MOST_BYTES:
            received += data
    return bytes(received)
