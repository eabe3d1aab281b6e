"""transformers' own Trainer on the 7B shape, for finetune.py --trainer."""

from __future__ import annotations

import time
from typing import Any

import torch
from finetune_cases import REHEARSED
from transformers import Trainer, TrainerCallback, TrainingArguments

from finetune_smoke.data import batches, calls
from finetune_smoke.model import build, flops
from finetune_smoke.settings.config import preset


def trainer(peak_tflops: float, *, tiny: bool) -> dict[str, Any]:
    """The same shape, rows and adapters under transformers' Trainer, eager, 10 steps after 2."""
    config = preset("7b-shape", **(REHEARSED if tiny else {}))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    base = build.random_base(config, tokenizer=calls.Tokenizer(), device=device, dtype=dtype)
    shape = flops.shape_of(base.config)
    source = batches.synthetic(config, batches.own_codec(calls.Tokenizer()))
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
    adapted = build.add_adapters(base, config)
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
