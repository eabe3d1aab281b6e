"""Our measurements beside plain loops written afresh, on the same GPUs in the same minutes: ours, reference, ours.

    python benchmarks/reference.py --json reference.json
    torchrun --nproc-per-node=8 benchmarks/reference.py --json reference.json      (adds all-reduce)

The reference shares no timing code with ours: the host's clock round a span of queued operations that ends in a
synchronise, gaps included, median of three spans; ours are CUDA events, per operation for products and memory. Both
rest and warm up alike before each product. Where a power-limited chip's clock wanders, the two statistics
may differ within the bands below (perf-peers' rules: products 3 %, large copies 1.5 %, collectives of 1 GiB and more
3 %). Ours before and ours after show drift with heat. On a GPU the exit code is 1 if a ratio lies outside its band.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed

from pytest_gpucluster.measurements import collectives, gemm, hbm

if TYPE_CHECKING:
    from collections.abc import Callable

SPANS = 3
BANDS = {"gemm": 0.03, "hbm": 0.015, "all_reduce": 0.03}

Values = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured; the defaults are for GPUs, :data:`REHEARSAL` is for a CPU."""

    orders: tuple[int, ...] = (4096, 8192, 16384)
    products: int = 50
    bursts: int = 5
    rest_s: float = 0.2
    warmup_s: float = 0.005
    copy_bytes: int = 4 << 30
    copies: int = 20
    sum_bytes: int = 1 << 30
    sums: int = 20


REHEARSAL = Sizes(
    orders=(128, 256), products=5, bursts=1, rest_s=0.0, warmup_s=0.1, copy_bytes=1 << 24, copies=3, sum_bytes=1 << 20, sums=5
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity on one rank, in ``unit``; ``ratio`` is the mean of ours over the reference."""

    quantity: str
    rank: int
    unit: str
    ours_before: float
    reference: float
    ours_after: float
    ratio: float
    drift: float
    band: float
    within: bool


# --- Ours ---


def ours(sizes: Sizes) -> Values:
    """The product's measurements, by quantity."""
    window: dict[str, Any] = {"bursts": sizes.bursts, "rest_s": sizes.rest_s, "warmup_s": sizes.warmup_s}
    rate = gemm.gemm(dtype="bfloat16", sizes=list(sizes.orders), iterations=sizes.products, **window)
    memory = hbm.hbm_bandwidth(size_bytes=sizes.copy_bytes, iterations=sizes.copies, warmup=5)
    found = {f"gemm_bf16_{order}": rate.by_size[str(order)]["median"] for order in sizes.orders}
    found |= {"hbm_copy": memory.copy_tb_s, "hbm_triad": memory.triad_tb_s}
    if dist.is_initialized():
        summed = collectives.all_reduce(size_bytes=sizes.sum_bytes, iterations=sizes.sums, warmup=5)
        found["all_reduce_float32"] = summed.busbw_gb_s
    return found


# --- Reference: nothing of ours below ---


def reference(sizes: Sizes) -> Values:
    """The same quantities by plain loops."""
    found = reference_products(sizes) | reference_memory(sizes)
    if dist.is_initialized():
        found["all_reduce_float32"] = reference_sum(sizes)
    return found


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


def reference_products(sizes: Sizes) -> Values:
    """Dense bfloat16 TFLOPS by order, each after the same rest and warm-up as ours: the power limiter remembers."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    operands = {
        order: tuple(torch.randn(order, order, dtype=torch.bfloat16, device=where) for _ in range(3)) for order in sizes.orders
    }

    def multiply(order: int) -> None:
        left, right, result = operands[order]
        torch.matmul(left, right, out=result)

    for order in sizes.orders:
        multiply(order)
    wait()
    rates: dict[int, list[float]] = {order: [] for order in sizes.orders}
    for order, seen in rates.items():
        for _ in range(sizes.bursts):
            time.sleep(sizes.rest_s)
            end_s = time.perf_counter() + sizes.warmup_s
            while time.perf_counter() < end_s:
                span_s(lambda order=order: multiply(order), 5)  # type: ignore[misc]
            seconds = span_s(lambda order=order: multiply(order), sizes.products // sizes.bursts)  # type: ignore[misc]
            seen.append(2.0 * order * order * order / seconds / 1e12)
    return {f"gemm_bf16_{order}": statistics.median(seen) for order, seen in rates.items()}


def reference_memory(sizes: Sizes) -> Values:
    """TB/s of bytes read and written."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    target, first, second = (torch.rand(sizes.copy_bytes // 4, device=where) for _ in range(3))

    def tb_s(arrays: int, operation: Callable[[], object]) -> float:
        span_s(operation, 5)
        seconds = statistics.median(span_s(operation, sizes.copies) for _ in range(SPANS))
        return arrays * sizes.copy_bytes / seconds / 1e12

    return {
        "hbm_copy": tb_s(2, lambda: target.copy_(first)),
        "hbm_triad": tb_s(3, lambda: torch.add(first, second, alpha=2.5, out=target)),
    }


def reference_sum(sizes: Sizes) -> float:
    """All-reduce bus bandwidth in GB/s over the slowest rank's span."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    buffer = torch.rand(sizes.sum_bytes // 4, device=where)
    spans_s = []
    for _ in range(SPANS + 1):
        buffer.uniform_()  # sums grow with every launch
        wait()
        dist.barrier()
        slowest = torch.tensor([span_s(lambda: dist.all_reduce(buffer), sizes.sums)], device=where)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        spans_s.append(slowest.item())
    ranks = dist.get_world_size()
    return sizes.sum_bytes / statistics.median(spans_s[1:]) / 1e9 * 2 * (ranks - 1) / ranks


# --- Side by side ---


def compare(sizes: Sizes, rank: int) -> list[Row]:
    """A/B/A on this rank; the ranks keep step."""
    passes = []
    for measure in (ours, reference, ours):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if dist.is_initialized():
            dist.barrier()
        passes.append(measure(sizes))
    before, plain, after = passes
    return [row(quantity, rank, (before[quantity], plain[quantity], after[quantity])) for quantity in plain]


def row(quantity: str, rank: int, values: tuple[float, float, float]) -> Row:
    """The three values of one quantity and what they say."""
    before, plain, after = values
    kind = next(kind for kind in BANDS if quantity.startswith(kind))
    ratio = (before + after) / 2 / plain
    return Row(
        quantity=quantity,
        rank=rank,
        unit={"gemm": "TFLOPS", "hbm": "TB/s", "all_reduce": "GB/s"}[kind],
        ours_before=before,
        reference=plain,
        ours_after=after,
        ratio=ratio,
        drift=after / before,
        band=BANDS[kind],
        within=abs(ratio - 1) <= BANDS[kind],
    )


def report(rows: list[Row], path: Path | None) -> None:
    """Print one line a row and write all of them with what they were measured on."""
    for one in rows:
        print(
            f"RESULT reference {one.quantity} rank {one.rank} ours {one.ours_before:.4f} {one.ours_after:.4f} "
            f"reference {one.reference:.4f} {one.unit} ratio {one.ratio:.4f} drift {one.drift:.4f} "
            f"band {one.band:.3f} {'within' if one.within else 'OUTSIDE'}"
        )
    if path is not None:
        content: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu (rehearsal)",
            "torch": torch.__version__,
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "rows": [asdict(one) for one in rows],
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Run on this process's GPU, or on every rank under torchrun; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if ranks > 1:
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device)
    rows = compare(Sizes() if on_gpu else REHEARSAL, rank)
    if ranks > 1:
        gathered: list[list[Row]] = [[] for _ in range(ranks)]
        dist.all_gather_object(gathered, rows)
        rows = sorted((one for own in gathered for one in own), key=lambda one: (one.quantity, one.rank))
    if rank == 0:
        report(rows, arguments.json)
    if ranks > 1:
        dist.destroy_process_group()
    return int(on_gpu and not all(one.within for one in rows))


if __name__ == "__main__":
    sys.exit(main())
