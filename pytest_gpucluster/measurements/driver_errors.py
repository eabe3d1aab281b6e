"""What the driver reported since the run began: Xids of this worker's own GPU, SXids of the NVSwitches of this host."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.driver_events import pci_key
from pytest_gpucluster.inventory.error_codes import xid_of
from pytest_gpucluster.inventory.gpu_index import visible_gpus
from pytest_gpucluster.measurements import timing
from pytest_gpucluster.protocol import node_events
from pytest_gpucluster.protocol.codec import MalformedMessageError
from pytest_gpucluster.protocol.functions import without_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpucluster.protocol.node_events import NodeEvents, NodeGpu, NodeSxid, NodeXid, OwnWorker

READY_S = 30.0
POLL_S = 0.05
OWN_S = 15.0
"""A worker that an Xid ends has ended so long after it at most: the driver reports first, then the call fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidSeen:
    """One Xid. ``pid``: the process that the kernel log names. ``is_own``: a worker of this run can have caused it."""

    code: int
    pid: int | None
    is_own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuXids:
    """The Xids of one GPU during the run, by source; ``before``: what the kernel had logged before it, since the boot.

    ``nvml_why``, ``kernel_log_why``: why this source may not have reported all; None where it has.
    """

    nvml: list[XidSeen]
    nvml_why: str | None
    kernel_log: list[XidSeen]
    kernel_log_why: str | None
    before: list[XidSeen]


@without_device
def gpu_xids() -> GpuXids:
    """Ask the listener of this node what it heard of this worker's own GPU, as soon as it listens.

    A GPU that is lost, or whose driver hangs, is left alone: the listener knows the GPUs of its node.
    """
    name = os.environ.get(node_events.VARIABLE)
    if not name:
        return _nothing("no listener was started")
    try:
        heard = _ask_when_ready(name)
    except (OSError, MalformedMessageError) as error:
        return _nothing(f"the listener of this node does not answer: {error}")
    if not heard.gpus:
        return _nothing(heard.nvml_why or "NVML shows no GPU")
    gpu = _own_gpu(heard)
    if gpu is None:
        return _nothing("NVML does not show this GPU")
    return xids_of(gpu, heard, own_workers())


def own_workers() -> list[OwnWorker]:
    """This worker, and those that its agent had before it."""
    now_s, ended = time.monotonic(), os.environ.get(node_events.ENDED_VARIABLE, "{}")
    before = node_events.EndedWorkers.read(ended.encode()).ended
    own = node_events.OwnWorker
    return [own(pid=os.getpid()), *(own(pid=pid, ended_s=now_s - at_s) for pid, at_s in before)]


def _ask_when_ready(name: str) -> NodeEvents:
    """What was heard; a listener that NVML keeps waiting for long says so itself.

    Raises:
        MalformedMessageError: its answer is none.
        OSError: it does not answer.
    """
    deadline_s = time.monotonic() + READY_S
    while not (heard := node_events.ask(name)).is_ready and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return heard


def xids_of(gpu: NodeGpu, heard: NodeEvents, workers: Sequence[OwnWorker]) -> GpuXids:
    """What was heard of one GPU, which these workers have used."""

    def seen(xid: NodeXid) -> XidSeen:
        return XidSeen(code=xid.code, pid=xid.pid, is_own=_is_own(xid, workers, is_pid_known=heard.sees_host_pids))

    key = pci_key(gpu.pci) if gpu.pci else ""
    logged = [xid for xid in heard.xids if xid.pci is not None and xid.pci == key]
    return GpuXids(
        nvml=[seen(xid) for xid in heard.xids if xid.index == gpu.index],
        nvml_why=heard.nvml_why or gpu.why,
        kernel_log=[seen(xid) for xid in logged if xid.age_s is not None],
        kernel_log_why=heard.log_why or (None if key else "the PCI address of this GPU is not known"),
        before=[seen(xid) for xid in logged if xid.age_s is None],
    )


def _nothing(why: str) -> GpuXids:
    return GpuXids(nvml=[], nvml_why=why, kernel_log=[], kernel_log_why=why, before=[])


def _own_gpu(heard: NodeEvents) -> NodeGpu | None:
    """This worker's GPU: torch's, else the ``LOCAL_RANK``-th that CUDA should show."""
    uuid, uuids = timing.gpu_uuid(), [gpu.uuid for gpu in heard.gpus]
    if uuid is not None:
        return next((gpu for gpu in heard.gpus if gpu.uuid == uuid), None)
    shown = visible_gpus(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return heard.gpus[shown[local_rank]] if local_rank < len(shown) else None


def _is_own(xid: NodeXid, workers: Sequence[OwnWorker], *, is_pid_known: bool) -> bool:
    """Whether a worker of this GPU can have caused it: by its pid, else because it ended at that time.

    The kernel log has pids of the host, which a container does not know. Only a code that a program can cause by itself is
    ever a worker's own. Long after a worker's end its pid is that of another process.
    """
    if xid_of(xid.code).kind != "application" or xid.age_s is None:
        return False
    since_s = [(worker.pid, None if worker.ended_s is None else worker.ended_s - xid.age_s) for worker in workers]
    if xid.pid is not None and is_pid_known:
        return any(pid == xid.pid and (since is None or since <= OWN_S) for pid, since in since_s)
    return any(since is not None and abs(since) <= OWN_S for _, since in since_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SxidSeen:
    """Equal lines on an error of one NVSwitch. ``switch``: its number by the driver; ``pci``: its address.

    ``severity``: the driver's word; ``link``: a port of the switch; None where the line names none. ``is_detail``: the lines
    add numbers to an error that other lines report.
    """

    code: int
    switch: int
    pci: str
    severity: str | None
    link: int | None
    is_detail: bool
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSxids:
    """The SXids of a host's NVSwitches during the run; ``before``: what the kernel had logged before it, since the boot.

    ``kernel_log_why``: why the kernel log may not have reported all; None where it has.
    """

    seen: list[SxidSeen]
    before: list[SxidSeen]
    kernel_log_why: str | None


@without_device
def node_sxids() -> NodeSxids:
    """Ask the listener of this host what it has read in the kernel log."""
    name = os.environ.get(node_events.VARIABLE)
    if not name:
        return NodeSxids(seen=[], before=[], kernel_log_why="no listener was started")
    try:
        return sxids_of(node_events.ask(name))
    except (OSError, MalformedMessageError) as error:
        return NodeSxids(seen=[], before=[], kernel_log_why=f"the listener of this node does not answer: {error}")


def sxids_of(heard: NodeEvents) -> NodeSxids:
    """What was heard of the switches, during the run and before it."""
    return NodeSxids(
        seen=[_seen(one) for one in heard.sxids if not one.is_before],
        before=[_seen(one) for one in heard.sxids if one.is_before],
        kernel_log_why=heard.log_why,
    )


def _seen(one: NodeSxid) -> SxidSeen:
    return SxidSeen(
        code=one.code,
        switch=one.switch,
        pci=one.pci,
        severity=one.severity,
        link=one.link,
        is_detail=one.is_detail,
        count=one.count,
    )
