"""What it costs a GPU's work that somebody reads the GPU meanwhile: blocks without, with, without, with a reader.

    python benchmarks/sampling.py --json sampling.json
    python benchmarks/sampling.py --from sampling.json --markdown            (no GPU: renders an earlier run)

Work: BF16 products, copies in memory, and a stream of tiny kernels, which waits for Python and so shows what a thread takes
from it. Readers: nobody (what the method itself scatters), `Sampler` at 10 Hz
(what measurements use) and at 100 Hz, and `gpucluster watch` in another process.
Each pair of blocks gives one ratio, rate with the reader over the rate without it; of the two blocks, the first alternates. The
table shows the median ratio and, as its uncertainty, the 95 % interval of the median by order statistics.

About four minutes on one GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed

import torch

from pytest_gpucluster.inventory.telemetry import Sampler
from pytest_gpucluster.measurements import timing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    Reading: TypeAlias = Callable[[], contextlib.AbstractContextManager[object]]

GPU_SIZES = {"order": 4096, "copy_bytes": 1 << 30, "products": 3000, "copies": 1200, "tiny": 100_000}
CPU_SIZES = {"order": 64, "copy_bytes": 1 << 16, "products": 20, "copies": 20, "tiny": 50}
WATCH_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or render; the exit code is 0."""
    options = _parser().parse_args(arguments)
    result = json.loads(options.source.read_text()) if options.source else measure(pairs=options.pairs, only=options.only)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(table(result) + "\n" if options.markdown or options.source else json.dumps(_short(result)) + "\n")
    return 0


def measure(*, pairs: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """``pairs`` ratios of every kind of work with every reader, or with those whose names have a word of ``only``."""
    sizes = GPU_SIZES if torch.cuda.is_available() else CPU_SIZES
    ratios = {}
    readers = {name: reading for name, reading in _readers().items() if not only or any(word in name for word in only)}
    for work, run in _works(sizes).items():
        run()  # loads and chooses kernels
        for reader, reading in readers.items():
            found = [_ratio(run, reading, reader_first=bool(pair % 2)) for pair in range(pairs)]
            ratios[f"{work}, {reader}"] = found
            sys.stderr.write(f"{work}, {reader}: {statistics.median(found):.4f}\n")
    return {"device": timing.device_name(), "torch": torch.__version__, "pairs": pairs, "ratios": ratios}


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    head = f"{result['device']}, torch {result['torch']}, {result['pairs']} pairs each"
    lines = [head, "", "| work | read by | rate with / without | 95 % |", "|---|---|---|---|"]
    for name, ratios in result["ratios"].items():
        work, reader = name.split(", ", 1)
        low, high = interval(ratios)
        lines.append(f"| {work} | {reader} | {statistics.median(ratios):.4f} | {low:.4f} to {high:.4f} |")
    return "\n".join(lines)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval between order statistics that holds the median with at least 95 % (the sign test's).

    The k-th lowest and k-th highest value miss it with 2 P(B < k), B being binomial of n and 1/2. Fewer than 6 values cannot
    hold it so surely: then lowest and highest.
    """
    ordered, n = sorted(values), len(values)
    miss, k = 0.0, 0
    while k < n // 2 and 2 * (miss + math.comb(n, k) / 2**n) <= 0.05:
        miss += math.comb(n, k) / 2**n
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


def _works(sizes: dict[str, int]) -> dict[str, Callable[[], float]]:
    """Each runs a block of about half a second, on a GPU, and returns its seconds."""
    device = timing.current_device()
    a, b = (torch.randn(sizes["order"], sizes["order"], device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.ones(sizes["copy_bytes"] // 4, device=device)
    target = torch.empty_like(source)
    one = torch.zeros(1, device=device)
    return {
        "BF16 products": lambda: _block(lambda: torch.mm(a, b, out=out), sizes["products"]),
        "copies in memory": lambda: _block(lambda: target.copy_(source), sizes["copies"]),
        "tiny kernels": lambda: _block(lambda: one.add_(1), sizes["tiny"]),
    }


def _block(call: Callable[[], object], times: int) -> float:
    timing.synchronize()
    start_s = time.perf_counter()
    for _ in range(times):
        call()
    timing.synchronize()
    return time.perf_counter() - start_s


def _readers() -> dict[str, Reading]:
    uuid = timing.gpu_uuid()
    return {
        "nobody": contextlib.nullcontext,
        "Sampler at 10 Hz": lambda: Sampler(uuid),
        "Sampler at 100 Hz": lambda: Sampler(uuid, interval_s=0.01),
        "gpucluster watch": _watch,
    }


@contextlib.contextmanager
def _watch() -> Iterator[None]:
    command = [sys.executable, "-m", "pytest_gpucluster.cli", "watch", "--plain", "--interval-s", str(WATCH_S)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, cwd=Path(__file__).resolve().parents[1])  # noqa: S603 -- ours
        try:
            time.sleep(2 * WATCH_S)  # its imports are not what is asked for
            yield
        finally:
            process.terminate()
            process.wait(30)


def _ratio(
    run: Callable[[], float], reading: Callable[[], contextlib.AbstractContextManager[object]], *, reader_first: bool
) -> float:
    seconds: dict[bool, float] = {}
    for with_reader in (reader_first, not reader_first):
        with reading() if with_reader else contextlib.nullcontext():
            seconds[with_reader] = run()
    return seconds[False] / seconds[True]


def _short(result: dict[str, Any]) -> dict[str, float]:
    return {name: round(statistics.median(ratios), 5) for name, ratios in result["ratios"].items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=9, help="ratios of each work with each reader (default: 9)")
    parser.add_argument("--only", nargs="+", default=(), help="readers whose names have one of these words")
    parser.add_argument("--json", type=Path, help="write all ratios to this file")
    parser.add_argument("--from", dest="source", type=Path, help="render this file instead of measuring")
    parser.add_argument("--markdown", action="store_true", help="print a table instead of one JSON line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
