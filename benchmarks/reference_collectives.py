"""Our collectives against nccl-tests' formulas with a host clock, at every size: ours, reference, ours.

    torchrun --standalone --nproc-per-node=8 benchmarks/reference_collectives.py --json collectives.json
    torchrun ... benchmarks/reference_collectives.py --only all_reduce --mib 256 1024 4096 8192
    torchrun ... benchmarks/reference_collectives.py --small --mib 256 1024 4096 --json small.json  # 8 B to 4 GiB, 3 minutes

The reference (reference_loops.py) shares no code with ours. It launches 20 collectives of float32 one after the other, as
nccl-tests does by default, and takes the slowest rank's time. Of 256 MiB and more ours has to be 0.98 to 1.03 of it; smaller
ones are shown. With --small each collective is compared from 8 B to 16 MiB too, in turns, by the medians of nine; there ours
has to be 0.95 to 1.05. Without GPUs it is a rehearsal over gloo with small sizes, and judges nothing.

The exit code is 1 if, on GPUs, a ratio lies outside. A collective that fails ends the run: the other ranks wait for it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is loaded and not run
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed

import reference_loops as loops

from pytest_gpucluster.measurements import collectives

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
SIZES_MIB = (1, 16, 256, 1024, 4096, 8192)
LAUNCHES = 20
"""As ``-n`` of nccl-tests."""
JUDGED_FROM_MIB = 256
LEAST, MOST = 0.98, 1.03
SMALL_BYTES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20)
SMALL_TURNS = 9
SMALL_LEAST, SMALL_MOST = 0.95, 1.05
REHEARSED_BYTES = 64 << 10
"""The largest of the small sizes where there is no GPU."""
REHEARSED_KIB = 64
"""Kibibytes in place of each MiB where there is no GPU, and 1 MiB at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One collective at one size, bus bandwidth in GB/s; ``inside`` is None where the ratio is shown and not judged."""

    operation: str
    mib: float
    ours_before_gb_s: float
    reference_gb_s: float
    ours_after_gb_s: float
    ratio: float
    inside: bool | None


def row(operation: str, mib: int, values_gb_s: tuple[float, float, float], *, judged: bool) -> Row:
    """What three rates say."""
    before, reference, after = values_gb_s
    ratio = (before + after) / 2 / reference
    return Row(
        operation=operation,
        mib=mib,
        ours_before_gb_s=before,
        reference_gb_s=reference,
        ours_after_gb_s=after,
        ratio=ratio,
        inside=LEAST <= ratio <= MOST if judged and mib >= JUDGED_FROM_MIB else None,
    )


def small_row(operation: str, size_bytes: int, ours_gb_s: list[float], reference_gb_s: list[float], *, judged: bool) -> Row:
    """What rates taken in turns say: of ours those before the reference, and one more at the end."""
    median = statistics.median
    ratio = median(ours_gb_s) / median(reference_gb_s)
    return Row(
        operation=operation,
        mib=size_bytes / 2**20,
        ours_before_gb_s=median(ours_gb_s),
        reference_gb_s=median(reference_gb_s),
        ours_after_gb_s=ours_gb_s[-1],
        ratio=ratio,
        inside=SMALL_LEAST <= ratio <= SMALL_MOST if judged else None,
    )


def compare_small(operation: str, size_bytes: int) -> Row:
    """A small message on this rank, ours and the reference in turns; all ranks call it together."""
    size_bytes = max(size_bytes, 4 * dist.get_world_size())
    ours, reference = [_ours(operation, size_bytes)], []
    for _ in range(SMALL_TURNS):
        reference.append(loops.collective(operation, size_bytes, LAUNCHES))
        ours.append(_ours(operation, size_bytes))
    return small_row(operation, size_bytes, ours, reference, judged=torch.cuda.is_available())


def compare(operation: str, mib: int) -> Row:
    """A/B/A on this rank; all ranks call it together."""
    on_gpu = torch.cuda.is_available()
    size_bytes = mib << 20 if on_gpu else min(mib * REHEARSED_KIB << 10, 1 << 20)
    values = (_ours(operation, size_bytes), loops.collective(operation, size_bytes, LAUNCHES), _ours(operation, size_bytes))
    return row(operation, mib, values, judged=on_gpu)


def _ours(operation: str, size_bytes: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if operation == "all_reduce":
        return collectives.all_reduce(size_bytes=size_bytes, iterations=LAUNCHES, warmup=5).busbw_gb_s
    return collectives.collective(operation, size_bytes=size_bytes, iterations=LAUNCHES, warmup=5).busbw_gb_s


def size_text(mib: float) -> str:
    """``8 B``, ``64 KiB``, ``1024 MiB``."""
    size_bytes = round(mib * 2**20)
    if size_bytes % 2**10:
        return f"{size_bytes} B"
    return f"{size_bytes >> 10} KiB" if size_bytes % 2**20 else f"{size_bytes >> 20} MiB"


def table(rows: list[Row]) -> str:
    """The rows as text."""
    lines = [f"{'collective':15}{'size':>10}{'ours':>10}{'reference':>11}{'ours again':>12}{'ratio':>9}"]
    words = {None: "", True: "  inside", False: "  OUTSIDE"}
    lines += [
        f"{one.operation:15}{size_text(one.mib):>10}{one.ours_before_gb_s:10.4g}{one.reference_gb_s:11.4g}{one.ours_after_gb_s:12.4g}"
        f"{one.ratio:9.4f}{words[one.inside]}"
        for one in rows
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure on every rank; rank 0 tells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=OPERATIONS, help="some of the collectives")
    parser.add_argument("--mib", nargs="+", type=int, default=SIZES_MIB, help="sizes in MiB")
    parser.add_argument("--small", action="store_true", help="from 8 B to 16 MiB too, in turns")
    options = parser.parse_args(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.error("needs several ranks: start it with torchrun")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if on_gpu else "gloo")
    start_s = time.perf_counter()
    rows: list[Row] = []
    small = [size for size in SMALL_BYTES if on_gpu or size <= REHEARSED_BYTES] if options.small else []
    for operation in options.only:
        calls = [functools.partial(compare_small, operation, size) for size in small]
        for call in [*calls, *(functools.partial(compare, operation, mib) for mib in options.mib)]:
            rows.append(call())
            if dist.get_rank() == 0:
                line = table(rows[-1:]).splitlines()[1]
                print(f"{time.perf_counter() - start_s:5.0f} s  {line}", file=sys.stderr, flush=True)
    is_first, ranks = dist.get_rank() == 0, dist.get_world_size()
    dist.destroy_process_group()
    if is_first:
        print(table(rows))
    if is_first and options.json is not None:
        content = {
            "device": torch.cuda.get_device_name() if on_gpu else "cpu (a rehearsal with small sizes)",
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
            "ranks": ranks,
            "nccl_variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
            "seconds": round(time.perf_counter() - start_s, 1),
            "rows": [asdict(one) for one in rows],
        }
        options.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return int(any(one.inside is False for one in rows))


if __name__ == "__main__":
    sys.exit(main())
