"""NVML's state of this worker's own GPU, idle and under load.

What the driver reported since the run began: Xids of this worker's own GPU, SXids of the NVSwitches of this host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pynvml
import torch

from pytest_gpucluster.inventory import gpu_index, nvml, nvml_calls, pci_tree
from pytest_gpucluster.inventory.driver_events import pci_key
from pytest_gpucluster.inventory.error_codes import xid_of
from pytest_gpucluster.inventory.reading import NotAvailable, or_none
from pytest_gpucluster.inventory.telemetry import Sampler, Watched
from pytest_gpucluster.measurements import gemm, progress, timing
from pytest_gpucluster.protocol import node_events
from pytest_gpucluster.protocol.codec import MalformedMessageError
from pytest_gpucluster.protocol.functions import Simulated, simulated_by, without_device
from pytest_gpucluster.protocol.node_events import NodeEvents, NodeGpu, NodeLoss, NodeSxid, NodeXid, OwnWorker, XidDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth:
    """This worker's GPU as NVML and torch see it.

    ``gpu`` is what NVML says of it; not available on a machine without NVML, where ``nvml_device_count`` is None too, and
    for a GPU that NVML cannot read. ``lost``: it has fallen off the bus or waits for a reset, and ``advice`` says what to do.
    ``torch_sees``: torch can use this very GPU.
    ``pci_gpus`` are the host's GPUs, also those that a container was not given: the name of its driver by PCI address.
    ``nvml_pci`` are the addresses that NVML gives.
    """

    gpu: nvml.GpuState | NotAvailable
    torch_sees: bool
    torch_device_count: int
    nvml_device_count: int | None
    pci_gpus: dict[str, str] | NotAvailable
    nvml_pci: list[str]
    torch_device_name: str | None
    lost: bool = False
    advice: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClocksUnderLoad(Watched):
    """What NVML reported of the GPU while a bfloat16 product kept it busy.

    ``telemetry`` is None without NVML; on a GPU ``nvml_error`` says why. ``tflops`` is the mean rate over all
    ``seconds`` by the host's clock.
    """

    seconds: float
    tflops: float
    nvml_error: str | None


@without_device
def gpu_state() -> GpuHealth:
    """Read NVML for this worker's own GPU: torch's current GPU, otherwise the ``LOCAL_RANK``-th that CUDA should show.

    A GPU that NVML lists and cannot read (lost from the bus) is not available, in NVML's words. The values of its node
    still count.

    Raises:
        NvmlError: the driver cannot be read at all.
    """
    uuid = timing.gpu_uuid()
    of_torch: dict[str, Any] = {
        "torch_sees": uuid is not None,
        "torch_device_count": torch.cuda.device_count(),
        "pci_gpus": pci_tree.read_nvidia_gpus(),
        "torch_device_name": torch.cuda.get_device_name() if uuid else None,
    }
    try:
        with nvml_calls.session():
            addresses = gpu_index.read_addresses()
            of_node = {**of_torch, "nvml_device_count": len(addresses), "nvml_pci": list(filter(None, addresses))}
            try:
                state = nvml.read_gpu(gpu_index.own_index(uuid, timing.gpu_uuids()))
            except nvml_calls.NvmlError as error:
                lost = isinstance(error, (nvml_calls.GpuLostError, nvml_calls.GpuNeedsResetError))
                return GpuHealth(gpu=NotAvailable(str(error)), lost=lost, advice=getattr(error, "advice", None), **of_node)
    except nvml_calls.NvmlLibraryNotFoundError:
        if uuid is not None:
            raise
        return GpuHealth(gpu=NotAvailable("no NVML"), nvml_device_count=None, nvml_pci=[], **of_torch)
    return GpuHealth(gpu=state, **of_node)


@without_device
def gpu_counters() -> nvml.GpuCounters:
    """Read the error counters of this worker's own GPU, the one of :func:`gpu_state`.

    Raises:
        GpuLostError: the GPU has fallen off the bus.
        NvmlError: there is no driver, or NVML cannot read the GPU.
    """
    uuid = timing.gpu_uuid()
    with nvml_calls.session():
        index = gpu_index.own_index(uuid, timing.gpu_uuids())
        with nvml_calls.naming(f"GPU {index}"):
            return nvml.read_counters(nvml_calls.required(pynvml.nvmlDeviceGetHandleByIndex, index))


def _simulated_clocks(call: Simulated) -> ClocksUnderLoad:
    """NVML's event reasons under load."""
    hot = call.has("throttled")
    seen = call.telemetry(clock_mhz=1290.0 if hot else 1620.0, power_w=540.0 if hot else 692.0, hot=hot)
    return ClocksUnderLoad(seconds=call.kwargs["seconds"], tflops=call.rate("sustained"), nvml_error=None, telemetry=seen)


@simulated_by(_simulated_clocks)
def clocks_under_load(*, seconds: float, size: int = 8192) -> ClocksUnderLoad:
    """Run bfloat16 products of order ``size`` back to back for ``seconds`` while NVML is sampled at 10 Hz."""
    product = gemm.bf16_product(size)
    product()
    timing.synchronize()
    progress.report(f"size {size} for {seconds:g} s", 0.0)
    with Sampler(timing.gpu_uuid()) as sampler:
        start_s = time.perf_counter()
        launched = timing.keep_busy(product, seconds=seconds)
        timing.synchronize()
        elapsed_s = time.perf_counter() - start_s
        telemetry = sampler.summary()
    return ClocksUnderLoad(
        seconds=elapsed_s,
        tflops=launched * 2 * size**3 / elapsed_s / 1e12,
        nvml_error=sampler.error,
        telemetry=telemetry,
    )


READY_S = 30.0
POLL_S = 0.05
OWN_S = 15.0
"""A worker that an Xid ends has ended so long after it at most: the driver reports first, then the call fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidSeen:
    """Equal Xids. ``pid``: the process that the kernel log names. ``is_own``: a worker of this run can have caused it.

    ``detail``: what else the kernel log says. ``age_s``: how long ago the first one came; None where it was before the run.
    """

    code: int
    pid: int | None
    is_own: bool
    detail: XidDetail | None = None
    age_s: float | None = None
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuXids:
    """The Xids of one GPU during the run, by source; ``before``: what the kernel had logged before it, since the boot.

    ``nvml_why``, ``kernel_log_why``: why this source may not have reported all; None where it has. ``lost``, ``lost_before``:
    lines of the kernel log on the loss of this GPU without an Xid. A line from before the run is in ``lost`` where NVML cannot
    open the GPU: then it has not come back. ``lost_elsewhere``: such lines on GPUs of this host that NVML does not list, and
    Xids of GPUs that the PCI bus does not show any more either.
    """

    nvml: list[XidSeen]
    nvml_why: str | None
    kernel_log: list[XidSeen]
    kernel_log_why: str | None
    before: list[XidSeen]
    lost: list[str] = field(default_factory=list)
    lost_before: list[str] = field(default_factory=list)
    lost_elsewhere: list[str] = field(default_factory=list)


@without_device
def gpu_xids() -> GpuXids:
    """Ask the listener of this node what it heard of this worker's own GPU, as soon as it listens.

    A GPU that is lost, or whose driver hangs, is left alone: the listener knows the GPUs of its node.
    """
    heard = _heard(_ask_when_ready)
    if isinstance(heard, str):
        return _nothing(heard)
    gpu = _own_gpu(heard) if heard.gpus else None
    why = "NVML does not show this GPU" if heard.gpus else heard.nvml_why or "NVML shows no GPU"
    found = _nothing(why) if gpu is None else xids_of(gpu, heard, own_workers())
    return replace(found, lost_elsewhere=lost_elsewhere(heard, or_none(pci_tree.read_nvidia_gpus()) or ()))


def _heard(ask: Callable[[str], NodeEvents]) -> NodeEvents | str:
    """What the listener of this node heard, or why nobody says it."""
    name = os.environ.get(node_events.VARIABLE)
    if not name:
        return "no listener was started"
    try:
        return ask(name)
    except (OSError, MalformedMessageError) as error:
        return f"the listener of this node does not answer: {error}"


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
        is_own = _is_own(xid, workers, is_pid_known=heard.sees_host_pids)
        return XidSeen(code=xid.code, pid=xid.pid, is_own=is_own, detail=xid.detail, age_s=xid.age_s, count=xid.count)

    key = pci_key(gpu.pci) if gpu.pci else ""
    losses = [one for one in heard.losses if one.pci == key]
    is_back = gpu.why is None and heard.nvml_why is None
    logged = [xid for xid in heard.xids if xid.pci is not None and xid.pci == key]
    return GpuXids(
        nvml=[seen(xid) for xid in heard.xids if xid.index == gpu.index],
        nvml_why=heard.nvml_why or gpu.why,
        kernel_log=[seen(xid) for xid in logged if xid.age_s is not None],
        kernel_log_why=heard.log_why or (None if key else "the PCI address of this GPU is not known"),
        before=[seen(xid) for xid in logged if xid.age_s is None],
        lost=_lines(one for one in losses if not (one.is_before and is_back)),
        lost_before=_lines(one for one in losses if one.is_before and is_back),
    )


def lost_elsewhere(heard: NodeEvents, on_bus: Collection[str]) -> list[str]:
    """The lines on lost GPUs that NVML does not list, and Xids no program causes where the PCI bus has no GPU any more.

    They are left out where the PCI bus has GPUs that are neither listed nor lost: this run was given a part of the host.
    """
    listed, there = ({pci_key(one) for one in some} for some in (filter(None, (gpu.pci for gpu in heard.gpus)), on_bus))
    gone = [xid for xid in heard.xids if xid.pci and there and xid.pci not in there]
    errors = [(xid.pci, xid_of(xid.code)) for xid in gone if xid_of(xid.code).kind not in ("application", "test")]
    losses = [*heard.losses, *(node_events.NodeLoss(pci=pci, text=f"GPU {pci}: {error}") for pci, error in errors)]
    unlisted = [one for one in losses if one.pci not in listed]
    others = there - listed - {one.pci for one in unlisted}
    return [] if others else _lines(unlisted)


def _lines(losses: Iterable[NodeLoss]) -> list[str]:
    """Each line of the log once, of those from before the run and in it."""
    return list(dict.fromkeys(one.text for one in losses))


def _nothing(why: str) -> GpuXids:
    return GpuXids(nvml=[], nvml_why=why, kernel_log=[], kernel_log_why=why, before=[])


def _own_gpu(heard: NodeEvents) -> NodeGpu | None:
    """This worker's GPU: torch's, else the ``LOCAL_RANK``-th that CUDA should show."""
    uuid, uuids = timing.gpu_uuid(), [gpu.uuid for gpu in heard.gpus]
    if uuid is not None:
        return next((gpu for gpu in heard.gpus if gpu.uuid == uuid), None)
    index = gpu_index.expected_index(uuids, int(os.environ.get("LOCAL_RANK", "0")), timing.gpu_uuids())
    return None if index is None else heard.gpus[index]


def _is_own(xid: NodeXid, workers: Sequence[OwnWorker], *, is_pid_known: bool) -> bool:
    """Whether a worker of this GPU can have caused it: by its pid, else because it ended at that time.

    The kernel log has pids of the host, which a container does not know. Only a code that a program can cause by itself is
    ever a worker's own; of an Xid that another one caused, that is the other one. Long after a worker's end its pid is that of
    another process.
    """
    cause = None if xid.detail is None else xid.detail.cause
    if xid_of(cause or xid.code).kind != "application" or xid.age_s is None:
        return False
    since_s = [(worker.pid, None if worker.ended_s is None else worker.ended_s - xid.age_s) for worker in workers]
    if xid.pid is not None and is_pid_known:
        return any(pid == xid.pid and (since is None or since <= OWN_S) for pid, since in since_s)
    return any(since is not None and abs(since) <= OWN_S for _, since in since_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSxids:
    """The SXids of a host's NVSwitches during the run; ``before``: what the kernel had logged before it, since the boot.

    ``kernel_log_why``: why the kernel log may not have reported all; None where it has.
    """

    seen: list[NodeSxid]
    before: list[NodeSxid]
    kernel_log_why: str | None


@without_device
def node_sxids() -> NodeSxids:
    """Ask the listener of this host what it has read in the kernel log."""
    heard = _heard(node_events.ask)
    return NodeSxids(seen=[], before=[], kernel_log_why=heard) if isinstance(heard, str) else sxids_of(heard)


def sxids_of(heard: NodeEvents) -> NodeSxids:
    """What was heard of the switches, during the run and before it."""
    return NodeSxids(
        seen=[one for one in heard.sxids if not one.is_before],
        before=[one for one in heard.sxids if one.is_before],
        kernel_log_why=heard.log_why,
    )
