"""Our measurements against a reference written afresh, on the same GPU in the same minutes: ours, reference, ours.

    python benchmarks/reference.py --json reference.json
    python benchmarks/reference.py --only bf16_8192 hbm
    python benchmarks/reference.py --from reference.json --markdown          (no GPU: renders an earlier run)
    torchrun --nproc-per-node=8 benchmarks/reference.py --json reference.json  (all_reduce instead of host)

The reference (reference_loops.py) has another source of time and shares no code with ours. Sizes, data, rests and warm-ups
are alike: where a power-limited chip's clock wanders, nothing else compares. Ours before and ours after show drift; beside a
loop, ours is the rate of whole bursts as the loop's is, beside a median the median. The ratio is the mean of ours over the
reference, to be within the band of its kind: products 3 %, large copies 1.5 %, the host's link 2 %, collectives of 1 GiB
and more 3 %; a mean and a best of products are shown and not judged.

About 190 s on one GPU. The exit code is 1 if a benchmark failed or, on a GPU, if a ratio lies outside its band.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is loaded and not run
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed

import reference_loops as loops
from reference_tools import figures_of

from pytest_gpucluster.inventory.telemetry import Sampler
from pytest_gpucluster.measurements import collectives, gemm, hbm, host_link, sustained, timing

if TYPE_CHECKING:
    from collections.abc import Callable

Values = dict[str, float]
ByMethod = dict[str, Values]

BANDS = {"products": 0.03, "memory": 0.015, "host": 0.02, "collective": 0.03}
UNJUDGED = ("mamf-finder mean", "mamf-finder max")
"""Statistics that we do not use, shown with the median."""
REST_S = 2.0
"""Between passes: a power limiter that has just acted acts sooner the next time."""
PASSES = ("ours before", "reference", "ours after")
OURS_DTYPE = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "tf32": "tf32",
    "fp32": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "int8": "int8",
}

_LONG = loops.Window(products=50, bursts=5, rest_s=0.2, warmup_s=0.005)
_SHORT = loops.Window(products=30, bursts=3, rest_s=0.2, warmup_s=0.005)
_HUNGRY = loops.Window(products=15, bursts=3, rest_s=0.2, warmup_s=0.005)
_SLOW = loops.Window(products=9, bursts=3, rest_s=0.1, warmup_s=0.005)
_ON_CPU = loops.Window(products=5, bursts=1, rest_s=0.0, warmup_s=0.0, flush_bytes=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes and counts; the defaults are for GPUs, :data:`REHEARSAL` is for a CPU."""

    scale: int = 1
    bf16: loops.Window = _LONG
    others: loops.Window = _SHORT
    hungry: loops.Window = _HUNGRY
    slow: loops.Window = _SLOW
    lasting_s: float = 8.0
    slice_s: float = 1.0
    array_bytes: int = 4 << 30
    copies: int = 20
    host_bytes: int = 512 << 20
    host_spans: int = 5
    sum_bytes: int = 1 << 30
    sums: int = 20

    def order(self, order: int) -> int:
        """The order that is measured in place of ``order``."""
        return order // self.scale


REHEARSAL = Sizes(
    scale=64,
    bf16=_ON_CPU,
    others=_ON_CPU,
    hungry=_ON_CPU,
    slow=_ON_CPU,
    lasting_s=0.2,
    slice_s=0.05,
    array_bytes=1 << 22,
    copies=3,
    host_bytes=1 << 20,
    host_spans=2,
    sum_bytes=1 << 20,
    sums=5,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Quantities that are measured together: ours by quantity, the reference by quantity and method."""

    ours: Callable[[Sizes], Values]
    reference: Callable[[Sizes], ByMethod]
    kind: str
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One pass of a benchmark: how long it took, and what the GPU did meanwhile, rests included (None without NVML)."""

    what: str
    seconds: float
    sm_clock_mhz: float | None
    power_w: float | None
    power_max_w: float | None
    temperature_c: float | None
    event_reasons: list[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity by ours and by one method on one rank, in ``unit``; ``ratio`` is the mean of ours over the reference.

    ``band`` and ``within`` are None where the method is shown and not judged.
    """

    benchmark: str
    quantity: str
    method: str
    rank: int
    unit: str
    ours_before: float
    reference: float
    ours_after: float
    ratio: float
    drift: float
    band: float | None
    within: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The outcome of a benchmark on one rank: rows, or the error that ended it."""

    benchmark: str
    rank: int
    rows: list[Row]
    passes: list[Seen]
    error: str | None


# --- Ours, and the references ---


def our_products(dtype: str, order: int, window: str, sizes: Sizes) -> Values:
    """The median rate of one size."""
    chosen: loops.Window = getattr(sizes, window)
    size = sizes.order(order)
    rate = gemm.gemm(
        dtype=OURS_DTYPE[dtype],
        sizes=[size],
        iterations=chosen.products,
        bursts=chosen.bursts,
        rest_s=chosen.rest_s,
        warmup_s=chosen.warmup_s,
    )
    quantity = f"{dtype}_{order}"
    return {quantity: rate.by_size[str(size)]["median"], f"{quantity}@loop": _as_a_loop(rate.samples_tflops, chosen.bursts)}


def _as_a_loop(rates: list[float], bursts: int) -> float:
    """The statistic of a loop out of single products: the rate of each whole burst, the median of the bursts."""
    share = len(rates) // bursts
    return statistics.median(
        statistics.harmonic_mean(rates[first : first + share]) for first in range(0, share * bursts, share)
    )


def their_products(dtype: str, order: int, window: str, sizes: Sizes) -> ByMethod:
    """The same by a plain loop, and BF16 by mamf-finder's method too."""
    chosen: loops.Window = getattr(sizes, window)
    found = loops.products_in_loop(dtype, sizes.order(order), chosen)
    if dtype == "bf16":
        found |= loops.products_by_mamf_finder(dtype, sizes.order(order), chosen)
    return {f"{dtype}_{order}": found}


def our_lasting(sizes: Sizes) -> Values:
    """The median of the last half of a lasting load."""
    found = sustained.sustained(size=sizes.order(8192), seconds=sizes.lasting_s, slice_s=sizes.slice_s)
    return {"bf16_sustained": found.tflops}


def their_lasting(sizes: Sizes) -> ByMethod:
    """The same by a plain loop."""
    found = loops.lasting_products("bf16", sizes.order(8192), seconds=sizes.lasting_s, chunk_s=sizes.slice_s)
    return {"bf16_sustained": found}


def our_memory(sizes: Sizes) -> Values:
    """TB/s of each kind."""
    found = hbm.hbm_bandwidth(size_bytes=sizes.array_bytes, iterations=sizes.copies, warmup=5)
    return {"copy": found.copy_tb_s, "triad": found.triad_tb_s, "read": found.read_tb_s, "write": found.write_tb_s}


def our_host_link(sizes: Sizes) -> Values:
    """GB/s of each way alone."""
    found = host_link.host_link(size_bytes=sizes.host_bytes, iterations=sizes.host_spans, warmup=2)
    return {"h2d": found.h2d_gb_s, "d2h": found.d2h_gb_s}


def our_all_reduce(sizes: Sizes) -> Values:
    """Bus bandwidth in GB/s."""
    found = collectives.all_reduce(size_bytes=sizes.sum_bytes, iterations=sizes.sums, warmup=5)
    return {"all_reduce": found.busbw_gb_s}


def _products(dtype: str, order: int, window: str) -> Benchmark:
    parts = (dtype, order, window)
    unit = "TOPS" if dtype == "int8" else "TFLOPS"
    return Benchmark(ours=partial(our_products, *parts), reference=partial(their_products, *parts), kind="products", unit=unit)


BENCHMARKS: dict[str, Benchmark] = {
    **{f"bf16_{order}": _products("bf16", order, "bf16") for order in (4096, 8192, 16384)},
    "bf16_sustained": Benchmark(ours=our_lasting, reference=their_lasting, kind="products", unit="TFLOPS"),
    **{f"fp8_{order}": _products("fp8", order, "others") for order in (8192, 16384)},
    **{f"{dtype}_8192": _products(dtype, 8192, "others") for dtype in ("fp16", "int8")},
    "tf32_8192": _products("tf32", 8192, "hungry"),
    **{f"{dtype}_8192": _products(dtype, 8192, "slow") for dtype in ("fp32", "fp64")},
    "hbm": Benchmark(
        ours=our_memory, reference=lambda sizes: loops.memory(sizes.array_bytes, sizes.copies), kind="memory", unit="TB/s"
    ),
    "host": Benchmark(ours=our_host_link, reference=lambda sizes: loops.host_link(sizes.host_bytes), kind="host", unit="GB/s"),
    "all_reduce": Benchmark(
        ours=our_all_reduce,
        reference=lambda sizes: {"all_reduce": loops.all_reduce(sizes.sum_bytes, sizes.sums)},
        kind="collective",
        unit="GB/s",
    ),
}
"""By name. ``hbm`` gives copy, triad, read and write, ``host`` h2d and d2h. ``all_reduce`` needs several ranks, and ``host``
only one: several would share the host's memory and PCIe switches."""


# --- Side by side ---


def compare(name: str, sizes: Sizes, rank: int) -> Ran:
    """A/B/A of one benchmark on this rank; the ranks keep step. A single rank reports a failure and runs the next benchmark."""
    benchmark = BENCHMARKS[name]
    passes: list[Seen] = []
    found: list[Any] = []
    try:
        for what, measure in zip(PASSES, (benchmark.ours, benchmark.reference, benchmark.ours), strict=True):
            found.append(_watched(partial(measure, sizes), what, passes))
    except (RuntimeError, ArithmeticError, MemoryError, ValueError) as error:
        if dist.is_initialized():
            raise  # the other ranks wait for this one
        text = f"{type(error).__name__} in {PASSES[len(found)]}: {error}"
        return Ran(benchmark=name, rank=rank, rows=[], passes=passes, error=text)
    before, reference, after = found
    rows = [
        row(name, quantity, method, (_like(before, quantity, method), value, _like(after, quantity, method)), rank=rank)
        for quantity, methods in reference.items()
        for method, value in methods.items()
    ]
    return Ran(benchmark=name, rank=rank, rows=rows, passes=passes, error=None)


def _like(ours: Values, quantity: str, method: str) -> float:
    """Ours by the statistic of the method, where it is not the one that criteria judge."""
    return ours.get(f"{quantity}@{method}", ours[quantity])


def _watched(measure: Callable[[], Any], what: str, passes: list[Seen]) -> Any:
    """The values of ``measure``; adds the GPU's telemetry to ``passes``."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        time.sleep(REST_S)
    if dist.is_initialized():
        dist.barrier()
    start_s = time.perf_counter()
    with Sampler(timing.gpu_uuid()) as sampler:
        value = measure()
        seen = sampler.summary()
    passes.append(
        Seen(
            what=what,
            seconds=round(time.perf_counter() - start_s, 3),
            sm_clock_mhz=seen.sm_clock_mean_mhz if seen else None,
            power_w=seen.power_mean_w if seen else None,
            power_max_w=seen.power_max_w if seen else None,
            temperature_c=seen.temperature_max_c if seen else None,
            event_reasons=seen.event_reasons if seen else None,
        )
    )
    return value


def row(benchmark: str, quantity: str, method: str, values: tuple[float, float, float], *, rank: int = 0) -> Row:
    """The three values of one quantity and what they say."""
    before, reference, after = values
    ratio = (before + after) / 2 / reference
    band = None if method in UNJUDGED else BANDS[BENCHMARKS[benchmark].kind]
    return Row(
        benchmark=benchmark,
        quantity=quantity,
        method=method,
        rank=rank,
        unit=BENCHMARKS[benchmark].unit,
        ours_before=before,
        reference=reference,
        ours_after=after,
        ratio=ratio,
        drift=after / before,
        band=band,
        within=None if band is None else abs(ratio - 1) <= band,
    )


def verdict_of(one: Row) -> str:
    """The verdict on a row, in a word."""
    return {None: "shown", True: "inside", False: "OUTSIDE"}[one.within]


def content_of(ran: list[Ran], seconds: float) -> dict[str, Any]:
    """All of a run as plain data: what it ran on, benchmarks with their rows and passes, and the tools' own figures."""
    on_gpu = torch.cuda.is_available()
    quantities = dict.fromkeys(one.quantity for part in ran for one in part.rows)
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu (a rehearsal: orders / {REHEARSAL.scale})",
        "judged": on_gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "seconds": round(seconds, 1),
        "benchmarks": [asdict(one) for one in ran],
        "tools": [asdict(figure) for quantity in quantities for figure in figures_of(quantity)],
    }


def exit_code(content: dict[str, Any]) -> int:
    """1 if a benchmark failed or, on a GPU, a judged ratio lies outside its band; else 0."""
    failed = any(one["error"] is not None for one in content["benchmarks"])
    outside = any(one["within"] is False for part in content["benchmarks"] for one in part["rows"])
    return int(failed or (content["judged"] and outside))


# --- Tables ---

HEADINGS = ("quantity", "method", "ours", "reference", "ours again", "unit", "ratio", "band", "", "SM MHz", "W")


def cells_of(one: Row, passes: list[Seen], *, ranks: int) -> tuple[str, ...]:
    """One line of the table; clock and power of the three passes."""
    name = f"{one.quantity} rank {one.rank}" if ranks > 1 else one.quantity
    numbers = (f"{value:.4g}" if value < 1000 else f"{value:.0f}" for value in (one.ours_before, one.reference, one.ours_after))
    band = "-" if one.band is None else f"{100 * one.band:g} %"
    seen = (_three([part.sm_clock_mhz for part in passes]), _three([part.power_w for part in passes]))
    return (name, one.method, *numbers, one.unit, f"{one.ratio:.4f}", band, verdict_of(one), *seen)


def _three(values: list[float | None]) -> str:
    return "-" if None in values else " / ".join(f"{value:.0f}" for value in values)


def tables(content: dict[str, Any], *, markdown: bool) -> str:
    """The rows, the failures, and the tools' own figures; as text or as Markdown."""
    lines: list[tuple[str, ...]] = []
    failures: list[str] = []
    for part in content["benchmarks"]:
        passes = [Seen(**seen) for seen in part["passes"]]
        lines += [cells_of(Row(**one), passes, ranks=content["world_size"]) for one in part["rows"]]
        if part["error"] is not None:
            failures.append(f"FAILED {part['benchmark']}: {part['error']}")
    tools = [(one["quantity"], one["tool"], f"{one['value']:.6g}", one["source"]) for one in content["tools"]]
    head = f"{content['device']}, torch {content['torch']}, CUDA {content['cuda']}, {content['seconds']} s"
    write = _markdown if markdown else _text
    parts = [head, write(HEADINGS, lines), *failures]
    if tools:
        parts += ["The tools themselves, another day and GPU:", write(("quantity", "tool", "value", "source"), tools)]
    return "\n\n".join(parts)


def _markdown(headings: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ("---",) * len(headings), *lines))


def _text(headings: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in (headings, *lines)
    )


# --- Command ---


def measure(names: list[str]) -> dict[str, Any] | None:
    """Run on this process's GPU, or on every rank under torchrun; None but on rank 0."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if ranks > 1:
        own = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=own)
    start_s = time.perf_counter()
    parts = [compare(name, Sizes() if on_gpu else REHEARSAL, rank) for name in names]
    if ranks > 1:
        gathered: list[list[Ran]] = [[] for _ in range(ranks)]
        dist.all_gather_object(gathered, parts)
        parts = [own[index] for index in range(len(names)) for own in gathered]
    content = content_of(parts, time.perf_counter() - start_s) if rank == 0 else None
    if ranks > 1:
        dist.destroy_process_group()
    return content


def main(arguments: list[str] | None = None) -> int:
    """Measure, or render an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--from", dest="source", type=Path, help="measure nothing: print what an earlier run wrote by --json")
    options = parser.parse_args(arguments)
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not together and "all_reduce" in (options.only or ()):
        parser.error("all_reduce needs several ranks: start it with torchrun")
    names = options.only or [name for name in BENCHMARKS if name != ("host" if together else "all_reduce")]
    content = json.loads(options.source.read_text(encoding="utf-8")) if options.source else measure(names)
    if content is None:
        return 0
    print(tables(content, markdown=options.markdown))
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return exit_code(content)


if __name__ == "__main__":
    sys.exit(main())
