"""The reference of reference.py: the same quantities by plain loops and by known tools' formulas, with nothing of ours.

Time is the host's clock round a span with a synchronise at both ends, so launching and waiting are inside; mamf-finder's
method alone has CUDA events, one pair a product. Every function returns values by method, in TFLOPS (int8: TOPS), TB/s or GB/s:

* ``loop``: queued operations in one span, the median of the spans.
* ``mamf-finder``: each product between two events, before it 256 MiB are zeroed (nothing is left in the L2 cache) and the
  result is overwritten; mean, median and max of all products.
* ``BabelStream``: each operation followed by a synchronise, the best of 100 without the first; a copy counts two arrays,
  a triad three, a sum and a fill one.
* ``nvbandwidth``: 16 copies a sample after 4 untimed ones, the median of 3 samples; copied bytes count once, so that a
  copy in the device's own memory is half of what the memory moves (``nvbandwidth x 2``).

These are the tools' arithmetic and order of events, not the tools: their own figures stand beside the table.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Values = dict[str, float]

SPANS = 3
BABEL_ROUNDS = 100
NVBANDWIDTH_COPIES, NVBANDWIDTH_SAMPLES, NVBANDWIDTH_WARMUP = 16, 3, 4
PATTERN_BYTES = 1 << 21
"""Random bytes that are repeated over the copied memory, as nvbandwidth has it."""
WARM_PRODUCTS = 9
"""A loop that keeps the GPU busy for a few milliseconds has about so many products queued when its time is up."""
SPAN_S = 0.01
"""A span of products lasts at least so long, or launching and waiting (some 20 us) would count; the power limiter acts
after 50 ms and more."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When products are timed: in ``bursts``, each after a rest and a warm-up, as a power-limited chip demands."""

    products: int
    bursts: int
    rest_s: float
    warmup_s: float
    flush_bytes: int = 256 << 20


def wait() -> None:
    """Until the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def span_s(operation: Callable[[], object], count: int) -> float:
    """Seconds per operation over ``count`` queued ones, by the host's clock."""
    wait()
    start_s = time.perf_counter()
    for _ in range(count):
        operation()
    wait()
    return (time.perf_counter() - start_s) / count


def device() -> str:
    """Where tensors are made."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# --- Products ---


@contextlib.contextmanager
def product(dtype: str, order: int) -> Iterator[tuple[Callable[[], object], torch.Tensor]]:
    """A square product of random numbers, ready to be called, and the tensor that holds its result."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield _product(dtype, order)
    finally:
        torch.set_float32_matmul_precision(precision)


def _product(dtype: str, order: int) -> tuple[Callable[[], object], torch.Tensor]:
    where = device()
    if dtype == "int8":
        left, right = (torch.randint(-128, 128, (order, order), dtype=torch.int8, device=where) for _ in range(2))
        result = torch.empty(order, order, dtype=torch.int32, device=where)
        return lambda: torch._int_mm(left, right.t(), out=result), result  # noqa: SLF001 - torch's only int8 product
    if dtype == "fp8":
        left, right = (torch.randn(order, order, device=where).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.tensor(1.0, device=where)
        result = torch.empty(order, order, dtype=torch.bfloat16, device=where)
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return lambda: torch._scaled_mm(left, right.t(), **options, out=result), result  # noqa: SLF001 - torch's only float8 product
    left, right, result = (torch.randn(order, order, dtype=DTYPES[dtype], device=where) for _ in range(3))
    return lambda: torch.matmul(left, right, out=result), result


def products_in_loop(dtype: str, order: int, window: Window) -> Values:
    """A plain loop over cuBLAS."""
    with product(dtype, order) as (multiply, _):
        least = window.products // window.bursts
        spans_s = [span_s(multiply, max(least, math.ceil(SPAN_S / each_s))) for each_s in _bursts(multiply, window)]
    return {"loop": _tera(order, statistics.median(spans_s))}


def products_by_mamf_finder(dtype: str, order: int, window: Window) -> Values:
    """Each product alone behind an empty cache; mean and max are of rates, as the tool has them."""
    flush = torch.empty(window.flush_bytes, dtype=torch.int8, device=device())
    with product(dtype, order) as (multiply, result):
        times_s: list[float] = []
        for _ in _bursts(multiply, window):
            times_s += _each_s(multiply, window.products // window.bursts, before=lambda: (flush.zero_(), result.uniform_()))
    rates = [_tera(order, seconds) for seconds in times_s]
    mean, median = statistics.fmean(rates), statistics.median(rates)
    return {"mamf-finder mean": mean, "mamf-finder median": median, "mamf-finder max": max(rates)}


def lasting_products(dtype: str, order: int, *, seconds: float, chunk_s: float) -> Values:
    """Back to back for ``seconds`` in chunks of ``chunk_s``, the median of the last half."""
    with product(dtype, order) as (multiply, _):
        span_s(multiply, 2)
        count = max(1, round(chunk_s / span_s(multiply, 2)))
        chunks_s: list[float] = []
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s or len(chunks_s) < 2:
            chunks_s.append(span_s(multiply, count))
    return {"loop": _tera(order, statistics.median(chunks_s[len(chunks_s) // 2 :]))}


def _bursts(multiply: Callable[[], object], window: Window) -> Iterator[float]:
    """Rest and warm up, then let the caller time; so often as there are bursts. Yields what a warm product takes, about."""
    span_s(multiply, 1)
    for _ in range(window.bursts):
        time.sleep(window.rest_s)
        end_s = time.perf_counter() + window.warmup_s
        each_s = span_s(multiply, WARM_PRODUCTS)
        while time.perf_counter() < end_s:
            each_s = span_s(multiply, 5)
        yield each_s


def _each_s(multiply: Callable[[], object], count: int, *, before: Callable[[], object]) -> list[float]:
    """Seconds of every product, ``before`` being queued in front of it and not timed."""
    if not torch.cuda.is_available():
        return [_alone_s(multiply, before) for _ in range(count)]
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in pairs:
        before()
        start.record()
        multiply()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in pairs]


def _alone_s(multiply: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    return span_s(multiply, 1)


def _tera(order: int, seconds: float) -> float:
    """10^12 operations a second: n products and n sums for each of n^2 elements."""
    return 2.0 * order * order * order / seconds / 1e12


# --- Memory ---


def memory(size_bytes: int, count: int) -> dict[str, Values]:
    """TB/s of copy, triad, read and write over arrays of ``size_bytes``."""
    target, first, second = (torch.rand(size_bytes // 8 * 2, device=device()) for _ in range(3))
    words = torch.arange(size_bytes // 8, device=device())
    operations: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: target.copy_(first)),
        "triad": (3, lambda: torch.add(first, second, alpha=2.5, out=target)),
        "read": (1, words.sum),
        "write": (1, lambda: target.fill_(0.3)),
    }
    found = {name: _moved(operation, arrays * target.nbytes, count) for name, (arrays, operation) in operations.items()}
    found["copy"]["nvbandwidth x 2"] = 2 * nvbandwidth_gb_s(operations["copy"][1], target.nbytes) / 1000
    return found


def _moved(operation: Callable[[], object], moved_bytes: int, count: int) -> Values:
    span_s(operation, 5)
    looped_s = statistics.median(span_s(operation, count) for _ in range(SPANS))
    best_s = min([span_s(operation, 1) for _ in range(BABEL_ROUNDS)][1:])
    return {"loop": moved_bytes / looped_s / 1e12, "BabelStream": moved_bytes / best_s / 1e12}


def nvbandwidth_gb_s(copy: Callable[[], object], copied_bytes: int) -> float:
    """GB/s of copies, every byte counted once."""
    span_s(copy, NVBANDWIDTH_WARMUP)
    sample_s = statistics.median(span_s(copy, NVBANDWIDTH_COPIES) for _ in range(NVBANDWIDTH_SAMPLES))
    return copied_bytes / sample_s / 1e9


# --- The host's link ---


def host_link(size_bytes: int) -> dict[str, Values]:
    """GB/s between the GPU and pinned memory, each way alone, from CPUs beside the GPU as nvbandwidth has it.

    Raises:
        ArithmeticError: what came back is not what was sent.
    """
    with _beside_the_gpu():
        on_gpu = torch.cuda.is_available()
        host, back = (torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2))
        pattern = torch.randint(0, 256, (PATTERN_BYTES,), dtype=torch.uint8)
        host.copy_(pattern.repeat(-(-size_bytes // PATTERN_BYTES))[:size_bytes])
        there = torch.zeros(size_bytes, dtype=torch.uint8, device=device())
        h2d = nvbandwidth_gb_s(lambda: there.copy_(host, non_blocking=True), size_bytes)
        d2h = nvbandwidth_gb_s(lambda: back.copy_(there, non_blocking=True), size_bytes)
        if not torch.equal(back, host):
            raise ArithmeticError("what came back from the GPU is not what was sent to it")
    return {"h2d": {"nvbandwidth": h2d}, "d2h": {"nvbandwidth": d2h}}


@contextlib.contextmanager
def _beside_the_gpu() -> Iterator[None]:
    """Run where sysfs says that the GPU's PCI slot is near, where it says so and this process may."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed & _near_cpus() or allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _near_cpus() -> set[int]:
    if not torch.cuda.is_available():
        return set()
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    listed = Path("/sys/bus/pci/devices", address, "local_cpulist")
    if not listed.is_file():
        return set()
    bounds = [part.split("-") for part in listed.read_text(encoding="ascii").strip().split(",") if part]
    return {cpu for ends in bounds for cpu in range(int(ends[0]), int(ends[-1]) + 1)}


# --- All ranks together ---


def all_reduce(size_bytes: int, count: int) -> Values:
    """Bus bandwidth in GB/s over the slowest rank's span, by nccl-tests' formula; needs a process group."""
    return {"loop": collective("all_reduce", size_bytes, count)}


def collective(operation: str, size_bytes: int, count: int) -> float:
    """Bus bandwidth in GB/s of float32 over the slowest rank's span, by nccl-tests' formula; needs a process group.

    ``size_bytes`` is nccl-tests' size: of all_gather what a rank receives, of the others what it sends.
    """
    call, buffer = _collective(operation, size_bytes)
    spans_s = []
    for _ in range(SPANS + 1):
        buffer.uniform_()  # sums grow with every launch
        wait()
        dist.barrier()
        slowest = torch.tensor([span_s(call, count)], device=device())
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        spans_s.append(slowest.item())
    ranks = dist.get_world_size()
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "send_recv": 1.0}.get(operation, (ranks - 1) / ranks)
    return size_bytes / statistics.median(spans_s[1:]) / 1e9 * factor


def _collective(operation: str, size_bytes: int) -> tuple[Callable[[], object], torch.Tensor]:
    """The call, and what it works on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part_elements = size_bytes // 4 // ranks
    whole = torch.rand(part_elements * ranks, device=device())
    part = torch.rand(part_elements if operation in ("all_gather", "reduce_scatter") else 0, device=device())
    other = torch.empty_like(whole) if operation in ("all_to_all", "send_recv") else part

    def ring() -> None:
        pair = [dist.P2POp(dist.isend, whole, (rank + 1) % ranks), dist.P2POp(dist.irecv, other, (rank - 1) % ranks)]
        for request in dist.batch_isend_irecv(pair):
            request.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send_recv": ring,
    }
    return calls[operation], whole
