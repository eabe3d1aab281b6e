"""Our training beside transformers' Trainer tuned as a good user would, in one call: A B A, with all time inside.

    python3 benchmarks/finetune_beside.py --json beside.json         (one GPU, about 5 minutes)
    python3 benchmarks/finetune_beside.py --variants ours,trainer,ours --lengths 2048
    python3 benchmarks/finetune_beside.py --cpu                      (rehearsal with a tiny shape)

Variants: ``ours``; ``ours-peft``, our loop with peft's own forward; ``trainer``, peft and transformers' Trainer with each
decoder layer compiled, liger's loss where liger-kernel is installed, TF32, the fused optimiser, and loader processes that
pin; ``trainer-bf16``, the same with bf16 adapters and no autocast; ``small``, the first losses of the acceptance's proof,
with the rows of 1, 2, 4 and 8 GPUs a step. Every variant is a process with a time limit, so one that fails costs nobody
else's figure. All train the shape of Qwen2-7B from the same seed, rows, adapters and tokens a step (8,192).

A rate is positions of the steps after the warm-up over the wall clock between two moments at which the GPU was waited for.
Rows, batches, copies, clipping and the optimiser lie inside. For our loop the clock stands outside it, at its lines of
progress; its own rate stands beside (``own_rate_over_this``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
WARM_STEPS, STEPS, WINDOW = 4, 20, 2
TOKENS_A_STEP = 8192
CURVE, SMALL_ROWS = 20, (64, 128, 256, 512)
BESIDE_OURS = {"ours": {}, "ours-peft": {"own_lora": False}}
"""Settings of our loop by variant."""
TRAINERS = {"trainer": "float32", "trainer-bf16": "bfloat16"}
"""Types of the adapters by variant."""
KNOWN = (*BESIDE_OURS, *TRAINERS, "small")
DEFAULT = "ours,trainer,trainer-bf16,ours-peft,ours"


def main() -> int:
    """Run the variants, each in a process of its own; 0 if none failed."""
    options = _options()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # Trainer would spread over all GPUs that it sees
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if options.one:
        return _child(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows: list[dict[str, Any]] = []
    end = time.monotonic() + options.budget
    for name in options.variants.split(","):
        rows += _process(name, options, max(10.0, end - time.monotonic()))
        if options.json:
            options.json.write_text(json.dumps({"rows": rows, "ratios": ratios(rows)}, indent=1) + "\n")
    sys.stdout.write(json.dumps({"ratios": ratios(rows)}) + "\n")
    return int(any("error" in row for row in rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--variants", default=DEFAULT, help=f"in this order, may repeat: {', '.join(KNOWN)}")
    parser.add_argument("--lengths", default="2048,4096", help="tokens of a row, each in every variant")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one variant")
    parser.add_argument("--json", type=Path, help="all rows, whole after each variant")
    parser.add_argument("--cpu", action="store_true", help="rehearse with a tiny shape")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wrong = [name for name in options.variants.split(",") if name not in KNOWN]
    if wrong:
        parser.error(f"no variant {', '.join(wrong)}: one of {', '.join(KNOWN)}")
    return options


def _process(name: str, options: argparse.Namespace, left_s: float) -> list[dict[str, Any]]:
    """The rows of a variant: its process prints one a length."""
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(  # noqa: S603 -- itself, with the options that it was given
            [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--one", name],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            ended = f"exit code {process.wait(min(options.limit, left_s))}"
        except subprocess.TimeoutExpired:
            ended = f"ended after {time.monotonic() - begin:.0f} s"
        finally:
            _end(process)
        output.seek(0)
        text = output.read()
    rows = [json.loads(line.removeprefix("ROW ")) for line in text.splitlines() if line.startswith("ROW ")]
    wanted = len(SMALL_ROWS) if name == "small" else len(options.lengths.split(","))
    if len(rows) < wanted:
        rows.append({"variant": name, "error": ended, "output_tail": text[-1500:]})
    rows[-1]["process_s"] = round(time.monotonic() - begin, 1)
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    return rows


def _end(process: subprocess.Popen[Any]) -> None:
    """End what a variant started, its loader processes too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ratios(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By row length: ours (mean of its runs) over the best Trainer and over our loop with peft's forward."""
    found: dict[str, Any] = {}
    for length in sorted({row["row_tokens"] for row in rows if "error" not in row and "row_tokens" in row}):
        rates: dict[str, list[float]] = {}
        for row in rows:
            if row.get("row_tokens") == length and "positions_per_s" in row:
                rates.setdefault(row["variant"], []).append(row["positions_per_s"])
        means = {name: sum(values) / len(values) for name, values in rates.items()}
        best = max((means[name] for name in TRAINERS if name in means), default=None)
        ours, peft = means.get("ours"), means.get("ours-peft")
        found[str(length)] = {
            "rates": {name: [round(value) for value in values] for name, values in rates.items()},
            "ours_over_best_trainer": ours / best if ours and best else None,
            "ours_peft_over_best_trainer": peft / best if peft and best else None,
            "ours_over_ours_peft": ours / peft if ours and peft else None,
        }
    return found


def _child(options: argparse.Namespace) -> int:
    """Run one variant at every length, and print a row each."""
    import torch  # noqa: PLC0415 -- seconds, and the parent needs none of it

    failed = 0
    for length in SMALL_ROWS if options.one == "small" else [int(text) for text in options.lengths.split(",")]:
        torch._dynamo.reset()  # noqa: SLF001 -- each length pays for its own compiling, with no dynamic shapes
        row: dict[str, Any] = {"variant": options.one, "rows" if options.one == "small" else "row_tokens": length}
        try:
            row |= _measured(options, length)
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is this variant's result
            import traceback  # noqa: PLC0415

            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
            failed = 1
        cuda = torch.cuda.is_available()
        row |= {"torch": torch.__version__, "gpu": torch.cuda.get_device_name() if cuda else None}
        row["memory_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        sys.stdout.write("ROW " + json.dumps(row) + "\n")
        sys.stdout.flush()
        _free()
    os._exit(failed)  # loader and compile processes need no farewell


def _free() -> None:
    """Free what a length held, before the next one."""
    import gc  # noqa: PLC0415

    import torch  # noqa: PLC0415

    torch._dynamo.reset()  # noqa: SLF001 -- compiled code holds weights
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _measured(options: argparse.Namespace, length: int) -> dict[str, Any]:
    if options.one in TRAINERS:
        from finetune_opponent import trainer  # noqa: PLC0415 -- transformers' Trainer takes seconds to import

        return trainer(_config(options, length, {}), adapters=TRAINERS[options.one], clock=Clock(), cpu=options.cpu)
    return _small(options, length) if options.one == "small" else _ours(options, length)


def _config(options: argparse.Namespace, length: int, changes: dict[str, Any]) -> Any:
    """The recipe of the acceptance's training criteria, in rows of ``length`` tokens."""
    from finetune_cases import REHEARSED  # noqa: PLC0415 -- beside this file

    from finetune_smoke.settings.config import preset  # noqa: PLC0415 -- after the path is set

    settings: dict[str, Any] = {"heldout_rows": 4, "audit_every": 0, "digest_every": 0, "peak_bf16_tflops": 989.0, **changes}
    tiny = {**REHEARSED, "row_tokens": max(64, length // 16)} if options.cpu else {}
    shape = {"rows": max(1, TOKENS_A_STEP // length), "row_tokens": length, **tiny}
    return preset("7b-shape", **{**settings, **shape, "steps": STEPS, "window_steps": WINDOW, "prefetch": WINDOW})


class Clock:
    """Wall clock at the ends of windows, after the device was waited for."""

    def __init__(self) -> None:
        """No moment yet."""
        self.ends: list[tuple[int, float]] = []

    def note(self, step: int) -> None:
        """Called after ``step`` steps; keeps the moments from the warm-up's end on."""
        import torch  # noqa: PLC0415 -- as above

        if step < WARM_STEPS or step % WINDOW:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append((step, time.monotonic()))

    def figures(self, tokens_a_step: int) -> dict[str, Any]:
        """Rate, that of each window, and the time of a step."""
        (first, begin), (last, end) = self.ends[0], self.ends[-1]
        windows = zip(self.ends, self.ends[1:], strict=False)
        return {
            "positions_per_s": tokens_a_step * (last - first) / (end - begin),
            "window_rates": [round(tokens_a_step * (to[0] - of[0]) / (to[1] - of[1])) for of, to in windows],
            "timed_steps": last - first,
            "step_ms": 1e3 * (end - begin) / (last - first),
        }


def _ours(options: argparse.Namespace, length: int) -> dict[str, Any]:
    """Our loop, timed from outside."""
    from finetune_smoke.training.loop import finetune  # noqa: PLC0415 -- seconds

    config, clock = _config(options, length, BESIDE_OURS[options.one]), Clock()

    def heard(text: str, fraction: float | None) -> None:
        if fraction is not None and text.startswith("step "):
            clock.note(round(fraction * config.steps))

    begin = time.monotonic()
    outcome = finetune(config, progress=heard)
    row = clock.figures(config.rows * config.row_tokens)
    own = outcome.positions_per_s_per_gpu
    return {
        **row,
        "own_rate": own,
        "own_rate_over_this": own / row["positions_per_s"] if own else None,
        "own_window_rates": [round(rate) for rate in outcome.window_rates],
        "mfu": outcome.mfu,
        "rows_s": outcome.rows_s,
        "compile_s": outcome.compile_s,
        "setup_s": outcome.setup_s,
        "whole_s": time.monotonic() - begin,
        "losses": outcome.losses,
        "problems": outcome.problems(),
    }


def _small(options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """The first losses of the acceptance's proof with so many rows a step, as many GPUs have them together."""
    from finetune_smoke.settings.config import preset  # noqa: PLC0415 -- after the path is set
    from finetune_smoke.training.loop import finetune  # noqa: PLC0415 -- seconds

    short = {"steps": CURVE, "heldout_rows": 4, "greedy_rows": 0, "restore_check": False, "loss_limit": None, "audit_every": 0}
    outcome = finetune(preset("tiny" if options.cpu else "small", **{**short, "rows": 8 if options.cpu else rows}))
    return {"losses": outcome.losses, "notes": outcome.notes}


if __name__ == "__main__":
    sys.exit(main())
