"""What a slow, throttled or badly set host does to every job: the rate of its memory, and the time of a kernel's launch.

The rate of memory, by NUMA node, is that of STREAM's triad, a = b + s c.

One thread on each core of a node, bound to the core, has a part of each array to itself; it writes that part first, so that
the kernel places it on the node. All threads of a node work at the same time, one node after the other. Three arrays are
counted, as STREAM counts them: two read and one written. GB/s are 10^9 bytes a second.

The loop is torch's, in one thread for each core: docs/readings-platform.md compares it with C.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pytest_gpucluster.inventory import numa
from pytest_gpucluster.inventory.host_load import HostLoad, HostWatch
from pytest_gpucluster.inventory.reading import EVIDENCE, NOBODY, judged
from pytest_gpucluster.inventory.sysfs import SYS
from pytest_gpucluster.measurements import progress, timing
from pytest_gpucluster.protocol.functions import Simulated, simulated_by, without_device
from pytest_gpucluster.text import counted

ARRAYS = 3
ELEMENT_BYTES = 8
PASSES = 10
"""Triads in one timed span: threads do not wake at the same moment, and that is then a small part of it."""
SCALAR = 3.0
LAUNCH_US = 5.0
"""A simulated launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaRate:
    """The triad's rate on one NUMA node in GB/s, the median span; ``node`` is None on a kernel without NUMA."""

    node: int | None = judged(EVIDENCE, "of `host_memory`; the slowest node is judged")
    triad_gb_s: float = judged(EVIDENCE, "of the same")
    repeats_gb_s: list[float] = judged(NOBODY, "those of the slowest node are judged")
    cpus: str = judged(EVIDENCE, "of the same")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The triad's rate in GB/s on the slowest NUMA node, with its repeats, and on each.

    ``cpus_allowed`` is where this process may run; ``not_measured`` are the nodes with memory on which it may not.
    ``host_load`` is what others did on the host before, meanwhile and after; None where the kernel does not say it.
    """

    triad_gb_s: float = judged("host_memory, slow_host[host_memory]")
    repeats_gb_s: list[float] = judged("host_memory, slow_host[host_memory]")
    nodes: list[NumaRate] = judged(EVIDENCE, "of the same")
    not_measured: list[int] = judged(EVIDENCE, "a remark of `host_memory`: the rank may not run there")
    cpus_allowed: str = judged(EVIDENCE, "of the same")
    size_bytes: int = judged(EVIDENCE, "of the same")
    host_load: HostLoad | None = judged(EVIDENCE, "of the same")

    @property
    def evidence(self) -> dict[str, Any]:
        """The rate on each NUMA node, with the CPUs that reached it."""
        rates = {f"NUMA node {one.node}": f"{one.triad_gb_s:.1f} GB/s by CPUs {one.cpus}" for one in self.nodes}
        load = {} if self.host_load is None else {"host load": self.host_load.text}
        return {**rates, "CPUs allowed": self.cpus_allowed, "GiB each": self.size_bytes / 2**30, **load}


def _simulated_memory(call: Simulated) -> HostMemory:
    """Two sockets, alike."""
    rate = call.rate("triad")
    repeats = call.repeats(rate, call.kwargs["repeats"])
    sockets = enumerate(("0-55", "56-111"))
    return HostMemory(
        triad_gb_s=rate,
        repeats_gb_s=repeats,
        nodes=[NumaRate(node=node, triad_gb_s=rate, repeats_gb_s=repeats, cpus=cpus) for node, cpus in sockets],
        not_measured=[],
        cpus_allowed="0-111",
        size_bytes=call.kwargs["size_bytes"],
        host_load=call.host_load(),
    )


@without_device
@simulated_by(_simulated_memory)
def host_memory(*, size_bytes: int, repeats: int, budget_s: float | None = None) -> HostMemory:
    """Time the triad on every NUMA node of this host on which this process may run.

    Args:
        size_bytes: of the three arrays of one node together; several times its caches, or these are measured.
        repeats: timed spans of :data:`PASSES` triads.
        budget_s: no further span begins on a NUMA node once its part of these seconds is used; one is timed in any case.

    Raises:
        ValueError: no repeat, or less than an element for each core.
        MemoryError: a node has too little free memory.
        ArithmeticError: a sum is wrong.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    cores = cores_by_node(allowed)
    measured: list[NumaRate] = []
    with HostWatch(reads=torch.cuda.is_available()) as watch:
        for number, (node, cpus) in enumerate(cores.items()):
            if not cpus:
                continue
            progress.report("triad" if node is None else f"triad on NUMA node {node}", number / len(cores))
            _require_memory(node, size_bytes)
            limit = {} if budget_s is None else {"budget_s": budget_s / sum(map(bool, cores.values()))}
            rates = _triad(cpus, size_bytes, repeats, **limit)
            measured.append(
                NumaRate(node=node, triad_gb_s=statistics.median(rates), repeats_gb_s=rates, cpus=numa.format_cpulist(cpus))
            )
    slowest = min(measured, key=lambda one: one.triad_gb_s)
    return HostMemory(
        triad_gb_s=slowest.triad_gb_s,
        repeats_gb_s=slowest.repeats_gb_s,
        nodes=measured,
        not_measured=[node for node, cpus in cores.items() if node is not None and not cpus],
        cpus_allowed=numa.format_cpulist(allowed),
        size_bytes=size_bytes,
        host_load=watch.load,
    )


def cores_by_node(allowed: frozenset[int], *, root: Path = SYS) -> dict[int | None, list[int]]:
    """One CPU of each core by NUMA node with memory, of those allowed; all of them at None where no node is known."""
    nodes = {node.number: node.cpus for node in numa.read_nodes(root=root) if node.memory_bytes and node.cpus}
    found: dict[int | None, list[int]] = {number: _one_of_each_core(allowed & cpus, root) for number, cpus in nodes.items()}
    return found if any(found.values()) else {None: _one_of_each_core(allowed, root)}


def _one_of_each_core(cpus: frozenset[int], root: Path) -> list[int]:
    """The first allowed CPU of each core: its other hardware threads share the way to memory."""
    taken: set[int] = set()
    chosen = []
    for cpu in sorted(cpus):
        if cpu not in taken:
            chosen.append(cpu)
            taken |= numa.read_threads_of_core(cpu, root=root)
    return chosen


def _require_memory(node: int | None, size_bytes: int) -> None:
    available = numa.read_locality(None).room_bytes(node)
    if available < size_bytes:
        where = "this host" if node is None else f"NUMA node {node}"
        raise MemoryError(f"{where} has {available / 2**30:.4g} GiB free, and {size_bytes / 2**30:.4g} GiB are needed")


def _triad(cpus: Sequence[int], size_bytes: int, repeats: int, *, budget_s: float = math.inf) -> list[float]:
    """GB/s of each span, over all of these CPUs at once."""
    elements = size_bytes // (ARRAYS * ELEMENT_BYTES * len(cpus))
    if elements < 1 or repeats < 1:
        raise ValueError(f"{size_bytes} bytes, {repeats} times, on {counted(len(cpus), 'CPU')} are nothing to measure")
    together = _Together(len(cpus), repeats, time.perf_counter() + budget_s)
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(len(cpus)) as threads:  # each waits for all others, so no thread gets two parts
            parts = [threads.submit(_work_on, cpu, elements, together) for cpu in cpus]
    finally:
        torch.set_num_threads(before)
    for error in filter(None, (part.exception() for part in parts)):
        if not isinstance(error, threading.BrokenBarrierError):  # which only waited for another one
            raise error
    moved_bytes = PASSES * ARRAYS * ELEMENT_BYTES * elements * len(cpus)
    turns = zip(*(part.result() for part in parts), strict=True)
    spans_s = [max(ended_s for _, ended_s in turn) - min(began_s for began_s, _ in turn) for turn in turns]
    return [round(moved_bytes / span_s / 1e9, 6) for span_s in spans_s]


class _Together:
    """Where all threads meet before each span. One decides for all whether it begins: else some would wait for the others."""

    def __init__(self, threads: int, repeats: int, end_s: float) -> None:
        self.barrier = threading.Barrier(threads, action=self._decide)
        self._left, self._end_s, self._is_first = repeats, end_s, True
        self._begins = True

    def next_begins(self) -> bool:
        """Wait for all threads; whether all of them begin one more span."""
        self.barrier.wait()
        return self._begins

    def _decide(self) -> None:
        self._begins = self._left > 0 and (self._is_first or time.perf_counter() < self._end_s)
        self._left, self._is_first = self._left - 1, False


def _work_on(cpu: int, elements: int, together: _Together) -> list[tuple[float, float]]:
    """Work on this CPU alone, on its part of the arrays and beside the other parts; when each span began and ended."""
    spans_s = []
    with contextlib.ExitStack() as until_done:
        until_done.callback(together.barrier.abort)
        os.sched_setaffinity(0, {cpu})
        torch.set_num_threads(1)
        a, b, c = (torch.full((elements,), float(value), dtype=torch.float64) for value in (0, 1, 2))
        while together.next_begins():
            began_s = time.perf_counter()
            for _ in range(PASSES):
                torch.add(b, c, alpha=SCALAR, out=a)
            spans_s.append((began_s, time.perf_counter()))
        if not bool((a == 1 + 2 * SCALAR).all()):
            raise ArithmeticError(f"a sum of the triad on CPU {cpu} is wrong")
        until_done.pop_all()
    return spans_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLatency:
    """Times of the host in microseconds, each a median.

    ``launch_us`` is the time of one launch of many without waiting, ``round_trip_us`` that of a launch and the wait for its
    end. Both include torch's own part, some 2 us. ``repeats_us`` are the spans behind ``launch_us``. ``host_load`` is as in
    :class:`HostMemory`.
    """

    launch_us: float = judged("launch_latency")
    round_trip_us: float = judged(EVIDENCE, "of `launch_latency`")
    repeats_us: list[float] = judged("launch_latency")
    device: str = judged(NOBODY, "`gpu_model` judges the name")
    host_load: HostLoad | None = judged(EVIDENCE, "of `launch_latency`")


def _simulated_launches(call: Simulated) -> LaunchLatency:
    """The same on every GPU."""
    repeats_us, load = call.repeats(LAUNCH_US, call.kwargs["repeats"]), call.host_load()
    return LaunchLatency(
        launch_us=LAUNCH_US, round_trip_us=2 * LAUNCH_US, repeats_us=repeats_us, device=call.device, host_load=load
    )


@simulated_by(_simulated_launches)
def launch_latency(*, launches: int, repeats: int) -> LaunchLatency:
    """Launch a kernel on one element ``launches`` times in a row, ``repeats`` times; then wait for each.

    Raises:
        ValueError: nothing to repeat.
        ArithmeticError: a launch was lost.
    """
    if launches < 1 or repeats < 1:
        raise ValueError(f"launches = {launches}, repeats = {repeats}: nothing to measure")
    counter = torch.zeros(1, dtype=torch.int64, device=timing.current_device())
    with HostWatch(reads=torch.cuda.is_available()) as watch:
        spans_us = [_row_us(counter, launches) for _ in range(repeats + 1)][1:]  # the first one loads the kernel
        progress.report("round trips", 0.5)
        trips_us = [_row_us(counter, 1) for _ in range(launches)]
    if (total := int(counter.item())) != (repeats + 2) * launches:
        raise ArithmeticError(f"{counted((repeats + 2) * launches, 'launch', 'launches')} added up to {total}")
    return LaunchLatency(
        launch_us=statistics.median(spans_us),
        round_trip_us=statistics.median(trips_us),
        repeats_us=spans_us,
        device=timing.device_name(),
        host_load=watch.load,
    )


def _row_us(counter: torch.Tensor, launches: int) -> float:
    """Microseconds of one launch; a single one is waited for within its time, several are not."""
    timing.synchronize()
    start_s = time.perf_counter()
    for _ in range(launches):
        counter.add_(1)
    if launches == 1:
        timing.synchronize()
    return round(1e6 * (time.perf_counter() - start_s) / launches, 4)
