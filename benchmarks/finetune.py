"""How fast the fine-tune is: the 7B shape eager and compiled, preset small, a published recipe, strategies.

    python3 benchmarks/finetune.py                                   (one GPU, about 150 s)
    python3 benchmarks/finetune.py --cases 'recipe-*'                (the published recipe and what its variant changes)
    python3 benchmarks/finetune.py --cases 7b-eager,7b-compiled --steps 100 --learning-rate 2e-5
    torchrun --nproc-per-node=4 benchmarks/finetune.py               (ddp and fsdp, compiled, about 60 s)
    torchrun --nproc-per-node=2 benchmarks/finetune.py --cases '7b-*-8-rows,7b-fsdp-offload'
    python3 benchmarks/finetune.py --cpu                             (rehearsal of every line with a tiny shape)

One JSON line a case, and a table at the end: tokens/s/GPU and step time by the wall clock over windows of 4 steps, loading
inside, the first windows (and compiling) left out; MFU by finetune_smoke/model/flops.py over ``--peak-tflops``; memory;
seconds to a loss below 0.5; the first losses; and, beside the case it is compared with, the ratio of the rates and by how
much the losses lie apart, where both saw the same rows. ``--json FILE`` is whole after every case, whatever ends the run. A
case that fails is a line with ``error``, and the exit code 1; several ranks stop there, one goes on with the next case.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from finetune_cases import ALONE, REHEARSED, TOGETHER, Case, named
from finetune_report import NOT_ENDED, NOT_RUN, Rows, compared, table

from finetune_smoke.settings.config import Config, preset
from finetune_smoke.settings.options import wait_for_rank_0
from finetune_smoke.training.loop import finetune
from pytest_gpucluster.config.strict_json import strict_json

TOLD_LOSSES = 8
SAME_ROWS = ("rows", "rows_shared", "row_tokens", "packed", "accumulation", "seed", "steps", "learning_rate", "lora_rank")
"""Settings that must agree for two curves to be the same training."""


def main() -> int:
    """Run the cases; 0 if none failed."""
    options = _options()
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    first = os.environ.get("RANK", "0") == "0"
    cases = TOGETHER if together else ALONE
    names = named(options.cases, cases)
    if together:  # one group for all cases, which finetune uses as it is
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    file = Path(options.json) if options.json and first else None
    rows = Rows(_about(options), file)
    for name in names:
        rows.put(name, {"error": NOT_RUN})
    curves: dict[str, tuple[Config, dict[str, Any]]] = {}
    for name in list(rows.rows):
        rows.put(name, {"error": NOT_ENDED})
        try:
            row = _row(name, cases, options, curves)
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is this case's result
            row = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
        rows.put(name, row)
        if first:
            say({"case": name, **row})
        if together and "error" in row:
            return _stop(name, row["error"], rows, first=first)
    if first:
        sys.stdout.write("\n" + table(rows.rows) + "\n")
    if together:
        dist.destroy_process_group()
    return int(any("error" in row for row in rows.rows.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", help="comma-separated names or patterns (recipe-*); default: those that run unasked")
    parser.add_argument("--steps", type=int, help="steps of every case; default: 16 (7B shape), 150 (small), 12 (recipe)")
    parser.add_argument("--learning-rate", type=float, help="of every case; default: its preset's")
    parser.add_argument("--json", metavar="FILE", help="all rows with their whole curves, written anew after every case")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16 peak of a GPU; default: H100, H200")
    parser.add_argument("--cpu", action="store_true", help="rehearse with a tiny shape")
    options = parser.parse_args()
    try:
        named(options.cases, TOGETHER if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ALONE)
    except ValueError as error:
        parser.error(str(error))
    return options


def _about(options: argparse.Namespace) -> dict[str, Any]:
    """Where and with what the cases were run."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return {"torch": torch.__version__, "gpu": gpu, "world_size": ranks, "options": vars(options)}


def _row(
    name: str, cases: dict[str, Case], options: argparse.Namespace, curves: dict[str, tuple[Config, dict[str, Any]]]
) -> dict[str, Any]:
    """The row of case ``name``, compared with an earlier case; adds its losses to ``curves``."""
    config = _config(cases[name], options)
    row = measured(config)
    curves[name] = config, row
    name_of_other = next((one for one in cases[name].beside if one in curves), None)
    if name_of_other is None:
        return row
    other, reference = curves[name_of_other]
    row = {**row, "beside": name_of_other}
    row["rate_ratio"] = _ratio(row["tokens_per_s_per_gpu"], reference["tokens_per_s_per_gpu"])
    if all(getattr(config, field) == getattr(other, field) for field in SAME_ROWS):
        row |= compared(row["losses"], reference["losses"])
    return row


def _config(case: Case, options: argparse.Namespace) -> Config:
    """The settings of a case: its preset's, its own, those of a rehearsal, those of the command line; the last one wins."""
    asked = {"steps": options.steps, "learning_rate": options.learning_rate}
    given = {name: value for name, value in asked.items() if value is not None}
    rehearsed = REHEARSED if options.cpu else {}
    return preset(case.preset, **{**case.settings, **rehearsed, **given}, peak_bf16_tflops=options.peak_tflops)


def _ratio(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate and other else None


def _stop(name: str, error: str, rows: Rows, *, first: bool) -> int:
    """End a run of several ranks whose case failed: the others may wait for ever in a collective."""
    for other, row in list(rows.rows.items()):
        if row.get("error") == NOT_RUN:
            rows.put(other, {"error": f"{NOT_RUN}: {name} failed before it"})
            if first:
                say({"case": other, **rows.rows[other]})
    if first:
        sys.stdout.write("\n" + table(rows.rows) + "\n")
    else:
        sys.stderr.write(f"rank {os.environ['RANK']}: case {name}: {error}\n")
        wait_for_rank_0()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def say(row: dict[str, Any]) -> None:
    """One line of strict JSON, the curve by its beginning."""
    shown = {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items() if name != "losses"}
    sys.stdout.write(json.dumps(strict_json(shown), allow_nan=False) + "\n")
    sys.stdout.flush()


def measured(config: Config) -> dict[str, Any]:
    """The figures of one run."""
    torch._dynamo.reset()  # noqa: SLF001 -- each case pays for its own compiling
    begin = time.monotonic()
    outcome = finetune(config)
    gc.collect()
    peaks = outcome.memory_peak_gib
    return {
        "tokens_per_s_per_gpu": outcome.tokens_per_s_per_gpu,
        "positions_per_s_per_gpu": outcome.positions_per_s_per_gpu,
        "window_rates": outcome.window_rates,
        "mfu": outcome.mfu,
        "step_ms": outcome.step_ms,
        "memory_peak_gib": max(peaks) if peaks else None,
        "compile_s": outcome.compile_s,
        "rows_s": outcome.rows_s,
        "below_limit_s": outcome.seconds_below_limit,
        "below_limit_step": outcome.step_below_limit,
        "wire_gb_per_step": outcome.wire_gb_per_step,
        "step_rows": outcome.step_rows,
        "first_losses": [round(loss, 4) for loss in outcome.losses[:TOLD_LOSSES]],
        "last_loss": outcome.loss,
        "exact_match": outcome.exact_match,
        "problems": outcome.problems(),
        "notes": outcome.notes,
        "setup_s": outcome.setup_s,
        "train_s": outcome.train_s,
        "eval_s": outcome.eval_s,
        "whole_s": time.monotonic() - begin,
        "losses": outcome.losses,
    }


if __name__ == "__main__":
    sys.exit(main())
