"""Collective operations over the ranks of the default process group, reported as nccl-tests reports them.

Method: back-to-back launches between two events, several such spans, no barrier inside. **The time is that of the
slowest rank**: the ranks exchange their times, so every rank returns the same values. What arrives is checked exactly,
outside the timing. Small messages have longer spans: there the host's first launch takes as long as what is measured.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.inventory.nccl_log import choice_of
from pytest_gpucluster.inventory.telemetry import GroupTelemetry, Snapshots, Telemetry, Watched, from_rows, to_row
from pytest_gpucluster.measurements import collective_cases, progress, timing
from pytest_gpucluster.measurements.timing import Budget, Launches, warm_up
from pytest_gpucluster.protocol.functions import beside_others
from pytest_gpucluster.protocol.rank import own_hostname
from pytest_gpucluster.text import one_line

BUSBW_FACTOR: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), lambda ranks: (ranks - 1) / ranks),
    **dict.fromkeys(("broadcast", "reduce", "send_recv"), lambda _ranks: 1.0),
}
"""busbw / algbw by operation and number of ranks (nccl-tests, doc/PERFORMANCE.md). Bytes are the whole buffer."""

LAUNCHES_PER_SPAN = 5
"""All-reduce multiplies the buffer by the number of ranks; after so few launches even 1024 ranks do not overflow."""
SMALL_BYTES = 64 << 20
"""Below this the first launch of a span, some 30 us, is several per cent of five. nccl-tests and
benchmarks/reference_loops.py divide by 20 (measured at 1 MiB: 0.63 to 0.95 of theirs by spans of five)."""
LAUNCHES_PER_SMALL_SPAN = 20
"""As ``-n`` of nccl-tests. The buffer of an all-reduce is then zero, which no number of sums makes overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming(Watched):
    """One collective at one size; GB/s are 10^9 bytes a second.

    ``time_us``, ``algbw_gb_s`` and ``busbw_gb_s`` come from the median over spans of the slowest rank's mean a launch.
    ``samples_busbw_gb_s`` are single launches (slowest rank of each), for the spread, and
    ``p50_us`` and ``p99_us`` are of them; ``spans_busbw_gb_s`` are the spans. ``slowest_rank`` is the rank
    with the largest median of its own spans: the others of a collective wait for it, so they differ little.
    ``nvls`` is ``"off"`` where ``NCCL_NVLS_ENABLE=0`` forbids NVLink SHARP, else ``"default"``; it and
    ``nccl_version`` are None without NCCL. ``algorithm`` and ``protocol`` are those that NCCL chose (``NVLS``, ``SIMPLE``);
    None where it does not tell them, as for what is made of sends and receives. ``telemetry`` is of all ranks' GPUs, once
    in each span; None without NVML. ``shortened`` says which repeats fell to keep the budget; None if none did.
    """

    operation: str
    busbw_gb_s: float
    algbw_gb_s: float
    time_us: float
    p50_us: float
    p99_us: float
    size_bytes: int
    dtype: str
    world_size: int
    samples_busbw_gb_s: list[float]
    spans_busbw_gb_s: list[float]
    slowest_rank: int
    nccl_version: str | None
    nvls: str | None
    device: str
    algorithm: str | None = None
    protocol: str | None = None
    shortened: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachability:
    """Which nodes answered in one group over all ranks.

    ``hostnames`` holds the hostnames seen under each node's number (as text); ``round_trip_us`` is the median time of
    the slowest rank to gather a word from every rank.
    """

    nodes: list[int]
    num_nodes: int
    hostnames: dict[str, list[str]]
    world_size: int
    round_trip_us: float


def busbw_gb_s(operation: str, *, size_bytes: int, time_s: float, ranks: int) -> float:
    """Bus bandwidth in GB/s: bytes / time x :data:`BUSBW_FACTOR`."""
    return size_bytes / time_s / 1e9 * BUSBW_FACTOR[operation](ranks)


def all_reduce(
    *, size_bytes: int, iterations: int, warmup: int, dtype: str = "float32", budget_s: float | None = None
) -> CollectiveTiming:
    """In-place sum of a buffer over all ranks of the default group; arguments and errors as of :func:`collective`."""
    return collective("all_reduce", size_bytes=size_bytes, iterations=iterations, warmup=warmup, dtype=dtype, budget_s=budget_s)


def collective(  # noqa: PLR0913 - the recipe of a threshold, all by keyword
    operation: str,
    *,
    size_bytes: int,
    iterations: int,
    warmup: int,
    dtype: str = "float32",
    budget_s: float | None = None,
) -> CollectiveTiming:
    """One of :data:`collective_cases.CASES` over all ranks of the default group.

    Args:
        operation: its name.
        size_bytes: bytes of the larger of what a rank sends and receives, rounded down to whole elements for each rank.
        iterations: timed launches; a span for each :data:`LAUNCHES_PER_SPAN` of them, and after each as many one by one.
            Each span of small messages has up to :data:`LAUNCHES_PER_SMALL_SPAN`.
        warmup: untimed launches before.
        dtype: one of :data:`collective_cases.EXACT`.
        budget_s: where all this takes more seconds, all ranks launch less often; the size stays. None: as long as it takes.

    Raises:
        ValueError: as of :func:`collective_cases.case`, or no iteration.
        ArithmeticError: wrong elements arrived, naming the ranks that saw them; raised on every rank.
    """
    full = launches_of(size_bytes, iterations=iterations, warmup=warmup)
    case = collective_cases.case(operation, size_bytes=size_bytes, dtype=dtype)
    content = 0 if size_bytes < SMALL_BYTES else 1

    def reset() -> None:
        if case.sums_in_place:
            case.sent.fill_(content)

    wrong = case.wrong_elements()  # connects the ranks, too
    budget = Budget(budget_s)
    reset()
    launches = warm_up(case.call, full, budget)
    with Snapshots(timing.gpu_uuid()) as snapshots:
        spans_s, single_s = _time_launches(case.call, launches, snapshots.of("spans"), reset=reset)
    telemetry = gather_telemetry(snapshots.summary("spans"))
    wrong += case.wrong_elements()
    times_s = _of_each_rank([*spans_s, *(single_s or spans_s)], wrong, f"{operation} gave wrong elements")
    whole = max(case.sent, case.received, key=lambda tensor: tensor.numel())
    shortened = launches.words_beside(full, budget.seconds or 0.0)
    timed = _timed(operation, whole, times_s, spans=len(spans_s), telemetry=telemetry, shortened=shortened)
    return _with_choice(timed, case.call)


def launches_of(size_bytes: int, *, iterations: int, warmup: int) -> Launches:
    """How often a collective of this size is launched, if there is time.

    Raises:
        ValueError: no iteration.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, not {iterations}")
    most = LAUNCHES_PER_SMALL_SPAN if size_bytes < SMALL_BYTES else LAUNCHES_PER_SPAN
    spans, singles = max(1, iterations // LAUNCHES_PER_SPAN), min(LAUNCHES_PER_SPAN, iterations)
    return Launches(warmup=warmup, spans=spans, each=min(most, iterations), singles=singles)


def _timed(
    operation: str, buffer: torch.Tensor, of_each_rank_s: list[list[float]], *, spans: int, **seen: Any
) -> CollectiveTiming:
    """From each rank's seconds of the spans, then of the single launches; ``buffer`` is the whole one."""
    ranks = dist.get_world_size()
    times_s = [max(column) for column in zip(*of_each_rank_s, strict=True)]
    time_s = statistics.median(times_s[:spans])
    rates = [busbw_gb_s(operation, size_bytes=buffer.nbytes, time_s=one_s, ranks=ranks) for one_s in times_s]
    singles_us = sorted(one_s * 1e6 for one_s in times_s[spans:])
    return CollectiveTiming(
        operation=operation,
        busbw_gb_s=busbw_gb_s(operation, size_bytes=buffer.nbytes, time_s=time_s, ranks=ranks),
        algbw_gb_s=buffer.nbytes / time_s / 1e9,
        time_us=time_s * 1e6,
        p50_us=statistics.median(singles_us),
        p99_us=singles_us[math.ceil(0.99 * len(singles_us)) - 1],
        size_bytes=buffer.nbytes,
        dtype=str(buffer.dtype).removeprefix("torch."),
        world_size=ranks,
        samples_busbw_gb_s=[timing.rounded(rate) for rate in rates[spans:]],
        spans_busbw_gb_s=[timing.rounded(rate) for rate in rates[:spans]],
        slowest_rank=max(range(ranks), key=lambda rank: statistics.median(of_each_rank_s[rank][:spans])),
        device=timing.device_name(),
        **_nccl_facts(),
        **seen,
    )


@beside_others
def nodes_reached(*, node: int | None = None, iterations: int = 10) -> Reachability:
    """Gather every rank's node number and hostname, and time the round trip.

    Args:
        node: this rank's node number; by default ``GPUCLUSTER_NODE``, which the worker sets.
        iterations: timed round trips, after two untimed ones.

    Raises:
        RuntimeError: neither ``node`` nor ``GPUCLUSTER_NODE`` is given.
    """
    answers = gather_texts(f"{node_number(node)} {own_hostname()}")
    hostnames = grouped((number, hostname) for number, hostname in (one.split(" ", 1) for one in dict.fromkeys(answers)))
    for _ in range(2):
        gather_texts("warm")
    trips_s = [timing.host_seconds(lambda: gather_texts("ping")) for _ in range(iterations)]
    return Reachability(
        nodes=sorted(int(number) for number in hostnames),
        num_nodes=len(hostnames),
        hostnames=hostnames,
        world_size=dist.get_world_size(),
        round_trip_us=statistics.median(timing.slowest(*trips_s)) * 1e6,
    )


def node_number(node: int | None = None) -> int:
    """This rank's node number: ``node`` if given, else ``GPUCLUSTER_NODE``.

    Raises:
        RuntimeError: there is neither.
    """
    if node is None and "GPUCLUSTER_NODE" not in os.environ:
        raise RuntimeError("GPUCLUSTER_NODE is not set: the plugin's workers set it, a script passes node=")
    return int(os.environ["GPUCLUSTER_NODE"]) if node is None else node


def gather_texts(text: str, *, limit_bytes: int = 256) -> list[str]:
    """``text`` of every rank, in one line and cut to ``limit_bytes``, in rank order; tensors only, nothing is unpickled."""
    content = one_line(text).encode()[:limit_bytes].ljust(limit_bytes, b"\0")
    rows = timing.gather(torch.tensor(list(content), dtype=torch.uint8, device=timing.current_device()))
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]


def gather_telemetry(own: Telemetry | None, *, single_rank: bool = False) -> GroupTelemetry | None:
    """Telemetry of all ranks' GPUs; every rank of the default group has to call this, except for ``single_rank``."""
    row = to_row(int(os.environ.get("RANK", "0")), own)
    if single_rank or not dist.is_initialized():
        return from_rows([row])
    rows = timing.gather(torch.tensor(row, dtype=torch.float64, device=timing.current_device()))
    return from_rows([one.tolist() for one in rows])


def _time_launches(
    call: Callable[[], object], timed: Launches, snapshot: Callable[[], None], *, reset: Callable[[], object]
) -> tuple[list[float], list[float]]:
    """This rank's seconds per launch of each span, then of each single launch; ``reset`` keeps sums from overflowing.

    The snapshot is taken when a span is queued and runs. A rank that is late by it delays the others only before the
    next span's first event, where all ranks line up. So the snapshot is harmless for the smallest sizes, too.
    """
    spans_s: list[float] = []
    single_s: list[float] = []
    for index in range(timed.spans):
        progress.report(f"span {index + 1} of {timed.spans}", index / timed.spans)
        reset()
        call()  # lines the ranks up: the span begins when the last of them has arrived
        spans_s.append(timing.time_span(call, launches=timed.each, meanwhile=snapshot))
        if timed.singles:
            reset()
            call()
            single_s += timing.time_each(call, iterations=timed.singles).samples_s
    return spans_s, single_s


def _of_each_rank(times_s: list[float], wrong: int, fault: str) -> list[list[float]]:
    """The times of every rank, in rank order; ``fault`` says what a wrong element is.

    Raises:
        ArithmeticError: a rank counted wrong elements; every rank raises, with all of them named.
    """
    row = torch.tensor([float(wrong), *times_s], dtype=torch.float64, device=timing.current_device())
    rows = [one.tolist() for one in timing.gather(row)]
    bad = {rank: int(one[0]) for rank, one in enumerate(rows) if one[0]}
    if wrong:
        bad[dist.get_rank()] = wrong
    if bad:
        seen = ", ".join(f"rank {rank} ({count} elements)" for rank, count in sorted(bad.items()))
        raise ArithmeticError(f"{fault} on {seen}")
    return [one[1:] for one in rows]


def _nccl_facts() -> dict[str, Any]:
    """NCCL's version, and whether NVLink SHARP is forbidden; None without NCCL."""
    if dist.get_backend() != "nccl":
        return {"nccl_version": None, "nvls": None}
    version = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return {"nccl_version": version, "nvls": "off" if os.environ.get("NCCL_NVLS_ENABLE") == "0" else "default"}


def _with_choice(timed: CollectiveTiming, call: Callable[[], object]) -> CollectiveTiming:
    """With algorithm and protocol of one more launch, the same on every rank: rank 0 tells them in its log."""
    if dist.get_backend() != "nccl":
        return timed
    chosen = choice_of(call) if dist.get_rank() == 0 else call()
    timing.synchronize()
    texts = gather_texts(" ".join(chosen) if isinstance(chosen, tuple) else "")[0].split()
    return replace(timed, algorithm=texts[0], protocol=texts[1]) if texts else timed
