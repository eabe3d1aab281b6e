"""How fast the fine-tune is: the 7B shape eager, compiled and over float8, and preset small with and without CUDA graphs.

    python3 benchmarks/finetune.py                                   (one GPU, about 150 s)
    python3 benchmarks/finetune.py --trainer                         (beside it: transformers' own Trainer, eager)
    torchrun --nproc-per-node=4 benchmarks/finetune.py               (ddp and fsdp, compiled, about 60 s)
    python3 benchmarks/finetune.py --cpu                             (rehearsal of every line with a tiny shape)

One JSON line a case: tokens/s/GPU and step time as medians over windows of 4 steps, the first window (and compiling) left
out; MFU by finetune_smoke/flops.py over ``--peak-tflops``; memory; seconds to a loss below 0.5; the first losses, and by
how much they differ from those of the case they are compared with. Cases are named with ``--cases a,b``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist

from finetune_smoke.config import preset
from finetune_smoke.train import finetune

QUIET: dict[str, Any] = {"audit_every": 0, "digest_every": 0, "restore_check": False, "greedy_rows": 0}
SHAPE_7B: dict[str, Any] = {**QUIET, "steps": 16, "window_steps": 4, "heldout_rows": 4, "loader_workers": 1}
COMPILED = {**SHAPE_7B, "compile": "layers"}

ALONE: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "7b-peft-eager": ("7b-shape", {**SHAPE_7B, "own_lora": False, "compile": "off"}, None),
    "7b-eager": ("7b-shape", {**SHAPE_7B, "compile": "off"}, "7b-peft-eager"),
    "7b-compiled": ("7b-shape", COMPILED, "7b-peft-eager"),
    "7b-compiled-cudnn": ("7b-shape", {**COMPILED, "attention": "cudnn"}, "7b-peft-eager"),
    "7b-fp8": ("7b-shape", {**COMPILED, "base_dtype": "fp8"}, "7b-peft-eager"),
    "small-eager": ("small", {"cuda_graph": False}, None),
    "small-graph": ("small", {"cuda_graph": True}, "small-eager"),
    "small-fp8": ("small", {"cuda_graph": True, "base_dtype": "fp8"}, "small-graph"),
}
"""Name of a case -> preset, settings, and the case whose losses it is compared with."""

ON_REQUEST = {"7b-eager"}
"""Cases that run only when named."""

TOGETHER: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "7b-ddp": ("7b-shape", {**COMPILED, "strategy": "ddp"}, None),
    "7b-fsdp": ("7b-shape", {**COMPILED, "strategy": "fsdp"}, "7b-ddp"),
}

REHEARSED: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2, "kv_heads": 1, "lora_rank": 8, "vocab_size": 0,
    "rows": 2, "steps": 8, "window_steps": 4, "heldout_rows": 4, "greedy_rows": 0, "loss_limit": None, "compile": "off",
}  # fmt: skip
"""What makes each case a matter of a second on a CPU."""


def main() -> int:
    """Run the cases and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", help="comma-separated; default: all but 7b-eager; under torchrun ddp and fsdp")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16 peak of a GPU; default: H100, H200")
    parser.add_argument("--trainer", action="store_true", help="also transformers' Trainer on the 7B shape, 10 steps")
    parser.add_argument("--cpu", action="store_true", help="rehearse with a tiny shape")
    options = parser.parse_args()
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if together and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if together:  # one group for all cases, which finetune uses as it is
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    cases = TOGETHER if together else ALONE
    names = options.cases.split(",") if options.cases else [name for name in cases if name not in ON_REQUEST]
    curves: dict[str, list[float]] = {}
    for name in names:
        preset_name, settings, beside = cases[name]
        shown = measured(preset_name, {**settings, **(REHEARSED if options.cpu else {})}, options.peak_tflops)
        curves[name] = shown.pop("losses")
        if beside in curves:
            shown |= compared(curves[name], curves[beside])
        say({"case": name, **shown})
    if options.trainer and not together:
        say({"case": "7b-trainer", **trainer(options.peak_tflops, tiny=options.cpu)})
    if together:
        dist.destroy_process_group()
    return 0


def say(line: dict[str, Any]) -> None:
    """One JSON line, of rank 0."""
    if os.environ.get("RANK", "0") == "0":
        rounded = {name: round(value, 5) if isinstance(value, float) else value for name, value in line.items()}
        sys.stdout.write(json.dumps(rounded) + "\n")
        sys.stdout.flush()


def measured(preset_name: str, settings: dict[str, Any], peak_tflops: float) -> dict[str, Any]:
    """The figures of one run."""
    torch._dynamo.reset()  # noqa: SLF001 -- each case pays for its own compiling
    begin = time.monotonic()
    outcome = finetune(preset(preset_name, **settings, peak_bf16_tflops=peak_tflops))
    gc.collect()
    peaks = outcome.memory_peak_gib
    return {
        "tokens_per_s_per_gpu": outcome.tokens_per_s_per_gpu,
        "mfu": outcome.mfu,
        "step_ms": outcome.step_ms,
        "memory_peak_gib": max(peaks) if peaks else None,
        "compile_s": outcome.compile_s,
        "rows_s": outcome.rows_s,
        "below_limit_s": outcome.seconds_below_limit,
        "below_limit_step": outcome.step_below_limit,
        "wire_gb_per_step": outcome.wire_gb_per_step,
        "step_rows": outcome.step_rows,
        "first_losses": [round(loss, 4) for loss in outcome.losses[:8]],
        "last_loss": outcome.loss,
        "exact_match": outcome.exact_match,
        "problems": outcome.problems(),
        "notes": outcome.notes,
        "whole_s": time.monotonic() - begin,
        "losses": outcome.losses,
    }


def compared(losses: list[float], reference: list[float]) -> dict[str, Any]:
    """The largest relative difference of the first 100 losses, and the largest one of means of 10 (a band's usual form)."""
    pairs = list(zip(losses[:100], reference[:100], strict=True))
    tens = [pairs[first : first + 10] for first in range(0, len(pairs), 10)]
    means = [tuple(map(statistics.fmean, zip(*ten, strict=True))) for ten in tens]
    return {
        "apart_max": max(abs(mine - other) / other for mine, other in pairs),
        "apart_means_of_10": [round(abs(mine - other) / other, 4) for mine, other in means],
    }


def trainer(peak_tflops: float, *, tiny: bool) -> dict[str, Any]:
    """The same shape, rows and adapters under transformers' Trainer, eager, 10 steps after 2."""
    from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415 -- only with --trainer

    from finetune_smoke import calls, data, flops, model  # noqa: PLC0415 -- as above

    config = preset("7b-shape", **(REHEARSED if tiny else {}))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    base = model.random_base(config, tokenizer=calls.Tokenizer(), device=device, dtype=dtype)
    shape = flops.shape_of(base.config)
    source = data.synthetic(config, data.own_codec(calls.Tokenizer()))
    items = [_item(source.row(number)) for number in range(12 * config.rows)]
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            ends.append(time.monotonic())

    arguments = TrainingArguments(
        output_dir="unused",
        per_device_train_batch_size=config.rows,
        max_steps=12,
        learning_rate=config.learning_rate,
        bf16=device.type == "cuda",
        use_cpu=device.type == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        optim="adamw_torch_fused",
    )
    adapted = model.add_adapters(base, config)
    Trainer(model=adapted, args=arguments, train_dataset=items, callbacks=[Clock()]).train()
    step_s = (ends[-1] - ends[1]) / (len(ends) - 2)
    rate = config.rows * config.row_tokens / step_s
    assert shape is not None
    per_token = flops.flops_per_token(shape, row_tokens=config.row_tokens, rank=config.lora_rank)  # it computes all logits
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    mfu = rate * per_token / (peak_tflops * 1e12)
    return {"tokens_per_s_per_gpu": rate, "mfu": mfu, "step_ms": 1e3 * step_s, "memory_peak_gib": peak}


def _item(row: Any) -> dict[str, list[int]]:
    wanted = set(row.predicted)
    return {"input_ids": row.ids, "labels": [token if at in wanted else -100 for at, token in enumerate(row.ids)]}


if __name__ == "__main__":
    sys.exit(main())
