"""Bandwidth between a GPU and the memory of its host: host to device, device to host, and both at once.

Method, as in nvbandwidth: pinned memory on the GPU's own NUMA node, several copies by the copy engine between two
events (a span), the median of the spans. One more copy is queued before each span, so that the engine already works at
the span's first event. GB/s are 10^9 bytes a second. Every copied element is compared exactly.

Pinned memory comes from mmap and cudaHostRegister. Torch's cache of pinned memory could return memory that an earlier
call has placed on another NUMA node.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpucluster.errors import GpuMemoryError
from pytest_gpucluster.inventory import numa
from pytest_gpucluster.inventory.host_load import HostLoad, HostWatch
from pytest_gpucluster.inventory.numa import Locality
from pytest_gpucluster.inventory.reading import or_none
from pytest_gpucluster.inventory.telemetry import Snapshots, Telemetry, evidence
from pytest_gpucluster.measurements import hbm, progress, timing
from pytest_gpucluster.protocol.functions import Simulated, simulated_by

COPIES_PER_SPAN = 2
"""A disturbance of a shared host lasts about as long as four copies of 512 MiB, 40 ms (2026-11-25): shorter spans miss it.
20 spans of two copies have the medians of 10 spans of four on an H100: 55.09 and 55.08 GB/s up, 55.18 and 55.17 down."""
REMOTE_SPANS = 3
SMALLEST_ON_GPU_BYTES = 1 << 24
"""Copies of less take so little that launching them would be measured."""
FASTER = 1.05
"""If another NUMA node is faster than the GPU's own by more than this factor, sysfs names the wrong node."""
CHUNK = 1 << 18
"""Elements filled and verified at once: 2 MiB, which stay in a CPU's cache."""
SAMPLED_PAGES = 64

_STEP = 2_654_435_761
_MPOL_BIND = 2
_SYSCALLS = {"x86_64": {"mbind": 237, "move_pages": 279}, "aarch64": {"mbind": 235, "move_pages": 239}}
"""Numbers of calls of the kernel by machine: libnuma, which wraps them, is not everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Bandwidth in GB/s (10^9 bytes a second) between a GPU and pinned memory on its own NUMA node.

    ``h2d_gb_s`` and ``d2h_gb_s`` are the median span of that direction alone, ``both_gb_s`` the bytes of both directions
    over the time until both have arrived; ``repeats_*`` the spans. ``h2d_remote_gb_s`` and ``d2h_remote_gb_s`` are the
    same with memory on ``remote_node``, the farthest other NUMA node; None where there is none, where its memory could
    not be had, and in a measurement together with other GPUs.

    ``numa_node`` is the GPU's by sysfs, None where that does not say; then memory lies where the process may have it.
    ``cpus`` is where the measurement ran, ``cpus_allowed`` where this process may run; ``cpus_are_local`` whether
    any of these is on ``numa_node``. ``pages_on`` are the nodes where the memory lay by the kernel, None where it does
    not say. ``memory_nodes`` are all nodes of the machine that have memory. ``telemetry`` is by kind (``h2d``, ``d2h``,
    ``both``), one reading in each span; the link's generation and width are those under load. ``host_load`` is what others
    did on the host before, meanwhile and after; None where the kernel does not say it.
    """

    h2d_gb_s: float
    d2h_gb_s: float
    both_gb_s: float
    repeats_h2d_gb_s: list[float]
    repeats_d2h_gb_s: list[float]
    repeats_both_gb_s: list[float]
    h2d_remote_gb_s: float | None
    d2h_remote_gb_s: float | None
    numa_node: int | None
    remote_node: int | None
    memory_nodes: list[int]
    cpus: str
    cpus_allowed: str
    cpus_are_local: bool | None
    pages_on: list[int] | None
    size_bytes: int
    device: str
    telemetry: dict[str, Telemetry | None] = field(default_factory=dict)
    host_load: HostLoad | None = None

    def evidence(self, way: str) -> dict[str, Any]:
        """The link's PCIe state and the GPU's clock, power, temperature and event reasons in one direction."""
        found = self.telemetry.get(way)
        link = {} if found is None else {"PCIe gen": or_none(found.pcie_gen_max), "PCIe width": or_none(found.pcie_width_min)}
        load = {} if self.host_load is None else {"host load": self.host_load.text}
        return {**link, **evidence(found), **load}

    @property
    def numa_is_known(self) -> bool:
        """Whether memory can be on the right node or a wrong one: the GPU's is known, or there is only one."""
        return self.numa_node is not None or len(self.memory_nodes) == 1

    @property
    def misplaced(self) -> list[str]:
        """In what ways process, memory and GPU are not on one NUMA node; empty where the GPU's node is not known."""
        if self.numa_node is None:
            return []
        found = []
        if not self.cpus_are_local:
            found.append(f"this process may use CPUs {self.cpus_allowed}, none of them on the GPU's NUMA node {self.numa_node}")
        if self.pages_on not in (None, [self.numa_node]):
            found.append(f"memory asked of NUMA node {self.numa_node}, the GPU's, lies on {self.pages_on}")
        for what, near, far in (
            ("host to device", self.h2d_gb_s, self.h2d_remote_gb_s),
            ("device to host", self.d2h_gb_s, self.d2h_remote_gb_s),
        ):
            if far is not None and far > FASTER * near:
                found.append(
                    f"{what}, NUMA node {self.remote_node} reaches {far:.1f} GB/s and the GPU's own {self.numa_node} {near:.1f}"
                )
        return found


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How often each kind is timed, whether all ranks of the group begin each kind together, and its telemetry.

    Each span has one reading of NVML while the copy engine works: some hundred bytes, against two GiB of copies.
    """

    spans: int
    warmup: int
    together: bool
    snapshots: Snapshots


NOISY_TURNS, NOISY_SHARE, NOISY_SPREAD = 13, 0.906, 0.3
"""A disturbed link has its limit as its median, and wide repeats, in every round of a first look (judging/noise.py)."""
LOADED_SHARE = 0.7
"""What is left of a simulated link while others keep the host busy."""


def _simulated(call: Simulated) -> HostLink:
    """Copies between GPU and host; slower while all GPUs of the node copy."""
    together = call.kwargs.get("together", False)
    noisy = call.has("noisy") and call.turn < NOISY_TURNS
    loaded = call.has("loaded") and call.turn == 0
    share = NOISY_SHARE if noisy else LOADED_SHARE if loaded else 1.0
    h2d, d2h = (share * call.rate(f"{way}_all" if together else way) for way in ("h2d", "d2h"))
    wide = NOISY_SPREAD if noisy else 0.003
    number, socket = call.kwargs["iterations"], int(call.place[1] >= call.simulation.gpus_per_node / 2)
    cpus = "56-111" if socket else "0-55"
    return HostLink(
        h2d_gb_s=h2d,
        d2h_gb_s=d2h,
        both_gb_s=1.6 * d2h,
        repeats_h2d_gb_s=call.repeats(h2d, number, relative=wide),
        repeats_d2h_gb_s=call.repeats(d2h, number, relative=wide),
        repeats_both_gb_s=call.repeats(1.6 * d2h, number),
        h2d_remote_gb_s=None if together else 0.8 * h2d,
        d2h_remote_gb_s=None if together else 0.8 * d2h,
        numa_node=socket,
        remote_node=None if together else 1 - socket,
        memory_nodes=[0, 1],
        cpus=cpus,
        cpus_allowed="0-111",
        cpus_are_local=True,
        pages_on=[socket],
        size_bytes=call.kwargs["size_bytes"],
        device=call.device,
        telemetry={way: call.telemetry() for way in ("h2d", "d2h", "both")},
        host_load=call.host_load(loaded=loaded),
    )


@simulated_by(_simulated)
def host_link(*, size_bytes: int, iterations: int, warmup: int, together: bool = False) -> HostLink:
    """Copy ``size_bytes`` between the current GPU and its host, each way alone and both ways at once.

    On a CPU the copies are of its memory to its memory, so that the plumbing runs; the numbers mean nothing.

    Args:
        size_bytes: bytes of the host's buffer and of the GPU's, rounded down to whole pairs of 8-byte numbers; of the
            copies both ways at once, one takes the first half of it and one the second.
        iterations: timed spans of :data:`COPIES_PER_SPAN` copies for each kind.
        warmup: untimed copies of each kind before.
        together: all ranks of the default process group (``per="node"``) begin each kind at the same moment, for what the
            GPUs of a node reach all at once; no other NUMA node is tried then.

    Raises:
        ValueError: too few bytes to measure, no iteration, a negative ``warmup``, ``together`` without a process group.
        MemoryError: the host's NUMA node or the GPU has too little free memory.
        ArithmeticError: what arrived is not what was sent.
    """
    elements = _elements(size_bytes, iterations, warmup)
    locality = numa.read_locality(_pci_address())
    _require_memory(8 * elements, locality)
    allowed = frozenset(os.sched_getaffinity(0))
    local_cpus = allowed & locality.cpus_of(locality.node)
    device = torch.zeros(elements, dtype=torch.int64, device=timing.current_device())
    with HostWatch(reads=torch.cuda.is_available()) as watch, Snapshots(timing.gpu_uuid()) as snapshots:
        recipe = _Recipe(spans=iterations, warmup=warmup, together=together, snapshots=snapshots)
        near, pages_on = _near(device, locality.node, local_cpus, recipe)
        far = None if together else _far(device, locality, allowed, recipe)
    progress.report("done", 1.0)
    medians: dict[str, Any] = {f"{way}_gb_s": statistics.median(spans) for way, spans in near.items()}
    repeats: dict[str, Any] = {f"repeats_{way}_gb_s": spans for way, spans in near.items()}
    return HostLink(
        **medians,
        **repeats,
        h2d_remote_gb_s=None if far is None else statistics.median(far["h2d"]),
        d2h_remote_gb_s=None if far is None else statistics.median(far["d2h"]),
        numa_node=locality.node,
        remote_node=locality.farthest,
        memory_nodes=locality.memory_nodes,
        cpus=numa.format_cpulist(local_cpus or allowed),
        cpus_allowed=numa.format_cpulist(allowed),
        cpus_are_local=None if locality.node is None else bool(local_cpus),
        pages_on=pages_on,
        size_bytes=8 * elements,
        device=timing.device_name(),
        telemetry={way: snapshots.summary(way) for way in ("h2d", "d2h", "both")},
        host_load=watch.load,
    )


def gb_s(moved_bytes: int, seconds: float) -> float:
    """Bandwidth in GB/s, 10^9 bytes a second."""
    return moved_bytes / seconds / 1e9


# What is timed, and what must have arrived.


def _near(
    device: torch.Tensor, node: int | None, cpus: frozenset[int], recipe: _Recipe
) -> tuple[dict[str, list[float]], list[int] | None]:
    """The spans of every kind with memory on the GPU's own node, or wherever it comes to lie, and the nodes of its pages."""
    with _on_cpus(cpus), _host_memory(len(device), node=node) as host:
        pages_on = _pages_on(host)
        progress.report("device to host", 0.0)
        d2h = _device_to_host(host, device, recipe)
        progress.report("host to device", 0.25)
        h2d = _host_to_device(host, device, recipe)
        progress.report("both at once", 0.5)
        both = _both_ways(host, device, recipe)
    return {"h2d": h2d, "d2h": d2h, "both": both}, pages_on


def _far(device: torch.Tensor, locality: Locality, allowed: frozenset[int], recipe: _Recipe) -> dict[str, list[float]] | None:
    """The spans of each direction alone with memory on the farthest other node; None if that node gives no memory."""
    node = locality.farthest
    room_bytes = locality.available_bytes(node)
    if node is None or room_bytes is None or room_bytes < _local_ranks() * device.nbytes:
        return None
    cpus = allowed & locality.cpus_of(node)
    recipe = replace(recipe, spans=min(REMOTE_SPANS, recipe.spans), snapshots=Snapshots(None))
    with _on_cpus(cpus), _host_memory(len(device), node=node) as host:
        pages_on = _pages_on(host)
        is_there = bool(cpus) if pages_on is None else pages_on == [node]
        if not is_there:
            return None
        progress.report(f"NUMA node {node}", 0.75)
        d2h = _device_to_host(host, device, recipe)
        h2d = _host_to_device(host, device, recipe)
    return {"h2d": h2d, "d2h": d2h}


def _device_to_host(host: torch.Tensor, device: torch.Tensor, recipe: _Recipe) -> list[float]:
    """GB/s of each span; leaves pattern 1 in both buffers."""
    _fill(device, seed=1)
    rates = _time("d2h", lambda: _copy(host, device), host.nbytes, recipe)
    _verify("device to host", host, seed=1)
    return rates


def _host_to_device(host: torch.Tensor, device: torch.Tensor, recipe: _Recipe) -> list[float]:
    """GB/s of each span; takes pattern 1 from the host."""
    device.zero_()
    rates = _time("h2d", lambda: _copy(device, host), host.nbytes, recipe)
    _verify("host to device", device, seed=1)
    return rates


def _both_ways(host: torch.Tensor, device: torch.Tensor, recipe: _Recipe) -> list[float]:
    """GB/s of each span, both ways together: the first half goes to the device, the second half comes to the host."""
    half = len(host) // 2
    device[:half].zero_()
    _fill(device[half:], seed=2)
    side: Any = torch.cuda.Stream() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]

    def copy() -> None:
        if side is None:
            _copy(host[half:], device[half:])
            _copy(device[:half], host[:half])
            return
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            _copy(host[half:], device[half:])
        _copy(device[:half], host[:half])
        main.wait_stream(side)

    rates = _time("both", copy, host.nbytes, recipe)
    _verify("host to device while both", device[:half], seed=1)
    _verify("device to host while both", host[half:], seed=2)
    return rates


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source, non_blocking=True)


def _time(way: str, call: Callable[[], None], moved_bytes: int, recipe: _Recipe) -> list[float]:
    """GB/s of each span of a call that moves ``moved_bytes``."""
    snapshot = recipe.snapshots.of(way)
    for _ in range(recipe.warmup):
        call()
    timing.synchronize()
    if recipe.together:
        dist.barrier()
    rates = []
    for _ in range(recipe.spans):
        call()  # still runs while the span is queued
        seconds = timing.time_span(call, launches=COPIES_PER_SPAN, meanwhile=snapshot)
        rates.append(timing.rounded(gb_s(moved_bytes, seconds)))
    return rates


def _pattern(start: int, stop: int, *, seed: int, like: torch.Tensor) -> torch.Tensor:
    """What belongs at these positions: another number at each, so that nothing can lie at the wrong place unseen."""
    return torch.arange(start, stop, dtype=like.dtype, device=like.device).mul_(_STEP).add_(seed)


def _fill(tensor: torch.Tensor, *, seed: int) -> None:
    for start in range(0, len(tensor), CHUNK):
        stop = min(start + CHUNK, len(tensor))
        tensor[start:stop] = _pattern(start, stop, seed=seed, like=tensor)


def _verify(what: str, tensor: torch.Tensor, *, seed: int) -> None:
    """Compare every element where it lies."""
    hbm.verify(what, tensor, lambda part: _pattern(part.start, part.stop, seed=seed, like=tensor), chunk=CHUNK)


# Where the GPU and the memory are.


def _pci_address() -> str | None:
    """PCI address of the current GPU; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


@contextlib.contextmanager
def _on_cpus(cpus: Iterable[int]) -> Iterator[None]:
    """Run this thread on these CPUs, and then where it was before; no CPUs change nothing."""
    before = os.sched_getaffinity(0)
    if chosen := set(cpus):
        os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _host_memory(elements: int, *, node: int | None) -> Iterator[torch.Tensor]:
    """Zeroed int64 of the host, pinned if there is a GPU, on a NUMA node if the kernel lets us place it.

    Where it does not (a container without CAP_SYS_NICE, a cpuset without that node), pages lie where this thread is
    that touches them first; :func:`_pages_on` reads where.
    """
    memory = mmap.mmap(-1, 8 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: the first touch takes longer, nothing else
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.int64)
    if node is not None:
        _bind(tensor, node)
    ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)  # by this very thread; torch would share it out to others
    with _pinned(tensor):
        yield tensor


@contextlib.contextmanager
def _pinned(tensor: torch.Tensor) -> Iterator[None]:
    """Page-lock host memory for the current GPU, and release it when all copies are done; nothing on a CPU."""
    if not torch.cuda.is_available():
        yield
        return
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    try:
        yield
    finally:
        timing.synchronize()
        torch.cuda.check_error(cudart.cudaHostUnregister(tensor.data_ptr()))


def _bind(tensor: torch.Tensor, node: int) -> None:
    """Ask the kernel to take this memory's pages from a NUMA node and no other, even if it must drop caches for them."""
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    bits = ctypes.c_ulong(64 * len(mask) + 1)  # the kernel reads one bit fewer than this
    start, length = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_ulong(tensor.nbytes)
    _calls_kernel("mbind", start, length, _MPOL_BIND, mask, bits, 0)  # whether it did: _pages_on


def _calls_kernel(name: str, *arguments: Any) -> bool:
    """Whether the kernel of this machine has this call, and does it."""
    number = _SYSCALLS.get(platform.machine(), {}).get(name)
    return number is not None and ctypes.CDLL(None).syscall(number, *arguments) == 0


def _pages_on(tensor: torch.Tensor) -> list[int] | None:
    """NUMA nodes of a sample of this memory's pages; None if the kernel does not say."""
    count = min(SAMPLED_PAGES, -(-tensor.nbytes // mmap.PAGESIZE))
    addresses = [tensor.data_ptr() + index * tensor.nbytes // count for index in range(count)]
    pages = (ctypes.c_void_p * count)(*addresses)
    nodes = (ctypes.c_int * count)()
    did = _calls_kernel("move_pages", 0, ctypes.c_ulong(count), pages, None, nodes, 0)
    return sorted(set(nodes)) if did and min(nodes) >= 0 else None


# What is refused.


def _elements(size_bytes: int, iterations: int, warmup: int) -> int:
    """8-byte numbers to copy, an even number of them."""
    if iterations < 1 or warmup < 0:
        raise ValueError(f"iterations must be at least 1 and warmup at least 0, not {iterations} and {warmup}")
    if size_bytes < _smallest_bytes():
        raise ValueError(f"size_bytes must be at least {_smallest_bytes()} on {timing.device_name()}, not {size_bytes}")
    return 2 * (size_bytes // 16)


def _smallest_bytes() -> int:
    return SMALLEST_ON_GPU_BYTES if torch.cuda.is_available() else 16


def _local_ranks() -> int:
    """Ranks of this node, any of which may be measuring at this moment."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _require_memory(size_bytes: int, locality: Locality) -> None:
    """Refuse what does not fit, before the kernel ends this process for it.

    Raises:
        MemoryError: on the host, where every rank of the node may need as much at once, or on the GPU.
    """
    where = "the host" if locality.node is None else f"the host's NUMA node {locality.node}"
    room_bytes = locality.room_bytes(locality.node)
    buffers = 1 if torch.cuda.is_available() else 2
    _require_free(MemoryError, where, buffers * _local_ranks() * size_bytes, room_bytes)
    if torch.cuda.is_available():
        _require_free(GpuMemoryError, timing.device_name(), size_bytes + 32 * CHUNK, int(torch.cuda.mem_get_info()[0]))


def _require_free(error: type[MemoryError], where: str, needed_bytes: int, free_bytes: int) -> None:
    if needed_bytes > free_bytes:
        raise error(f"{needed_bytes / 2**30:.2f} GiB are needed on {where}, {free_bytes / 2**30:.2f} GiB are free")
