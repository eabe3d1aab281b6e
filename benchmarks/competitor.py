"""A competitor: waits until somebody works on one GPU, then multiplies matrices beside it, and leaves.

    python3 benchmarks/competitor.py --gpu 1 [--when busy|used] [--after-s 3] [--seconds 10] [--within-s 600] &
    pytest --pyargs tests_acceptance --gpucluster -k bf16_sustained

Shows what a run says of a GPU to which somebody comes meanwhile (decision 12): an ERROR `GPU not idle` with the pid that this
script prints, and no failure. `--when busy` waits for 50 % utilization, `used` for the first process on the GPU: a competitor
needs a moment to come, which a short measurement does not last. Prints one JSON object a line: `waits`, `came`, `left`.
`--device cpu` competes for a CPU, and still reads the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed

import torch

from pytest_gpucluster.inventory import gpu_index, nvml_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

BUSY_PERCENT = 50
POLL_S = 0.02
SIZES = {"cuda": 8192, "cpu": 128}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compete; the exit code is 1 where nobody came to the GPU in time."""
    options = _parser().parse_args(arguments)
    with nvml_calls.session():
        uuid = gpu_index.read_uuids()[options.gpu]
        os.environ["CUDA_VISIBLE_DEVICES"] = uuid  # before CUDA starts: NVML and CUDA may count in another order
        _say("waits", uuid=uuid)
        if not _wait_for_work(gpu_index.handle_of(uuid), options.when, within_s=options.within_s):
            sys.stderr.write(f"competitor: nobody came to GPU {options.gpu} within {options.within_s:g} s\n")
            return 1
    time.sleep(options.after_s)
    products = _compete(options.device, options.seconds)
    _say("left", products=products)
    return 0


def _wait_for_work(handle: Any, when: str, *, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if when == "used" and gpu_index.read_compute_processes(handle):
            return True
        if when == "busy" and (gpu_index.read_utilization_percent(handle) or 0) >= BUSY_PERCENT:
            return True
        time.sleep(POLL_S)
    return False


def _compete(device: str, seconds: float) -> int:
    """Multiply for this long; returns the number of products."""
    size = SIZES[device]
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
    _say("came")
    count, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        for _ in range(10):
            left @ right
        count += 10
        if device == "cuda":
            torch.cuda.synchronize()
    return count


def _say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, "at_s": round(time.time(), 3), "pid": os.getpid(), **facts}), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", type=int, required=True, help="the GPU's number in NVML's order (nvidia-smi)")
    parser.add_argument("--when", choices=("busy", "used"), default="busy", help="what is waited for")
    parser.add_argument("--after-s", type=float, default=3.0, help="how long after that the competitor comes")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the competitor works")
    parser.add_argument("--within-s", type=float, default=600.0, help="how long it waits for somebody to come")
    parser.add_argument("--device", choices=tuple(SIZES), default="cuda", help="what is competed for")
    return parser


if __name__ == "__main__":
    sys.exit(main())
