"""peft and transformers' Trainer, tuned as a good user would: what finetune_beside.py puts our loop beside.

Each decoder layer is compiled, liger's fused loss is used where liger-kernel is installed, TF32 is on, the optimiser is
fused, and processes make and pin the batches ahead. The rows are ours in the same order, and so are base and adapters.
"""

from __future__ import annotations

import importlib.util
import inspect
import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from finetune_smoke.data import batches, calls
from finetune_smoke.model import build

if TYPE_CHECKING:
    from finetune_smoke.settings.config import Config

WORKERS = 4


def trainer(config: Config, *, adapters: str, clock: Any, cpu: bool) -> dict[str, Any]:
    """Train ``config`` with ``adapters`` of this type; ``clock`` is told of the end of each step."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    base = build.random_base(config, device)
    liger = cuda and importlib.util.find_spec("liger_kernel") is not None
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2  # noqa: PLC0415 -- not always there

        off = {"rope": False, "rms_norm": False, "swiglu": False, "cross_entropy": False}
        apply_liger_kernel_to_qwen2(**off, fused_linear_cross_entropy=True, model=base)
    model = build.add_adapters(base, config)
    if adapters == "bfloat16" and cuda:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    model.enable_input_require_grads()  # otherwise the first layer differs from the others and is compiled by itself
    for layer in base.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager" if cpu else "inductor")
    torch.backends.cuda.matmul.allow_tf32 = True
    arguments, left_out = _arguments(config, autocast=cuda and adapters == "float32")
    _let_compile_read_tf32()
    run = _InOrder(model=model, args=arguments, train_dataset=_Rows(config), callbacks=[_Ends(clock)])
    run.train()
    counters = torch._dynamo.utils.counters  # noqa: SLF001 -- a limit that was hit means eager layers, in silence
    losses = [float(loss) for loss in run.losses]
    return {
        **clock.figures(config.rows * config.row_tokens),
        "liger": liger,
        "adapters": adapters,
        "compiled_graphs": counters["stats"].get("unique_graphs", 0),
        "graph_breaks": sum(counters["graph_break"].values()),
        "options_left_out": left_out,
        "losses": losses,
    }


def _arguments(config: Config, *, autocast: bool) -> tuple[TrainingArguments, list[str]]:
    """The arguments, and the names that this release of transformers does not know."""
    cuda = torch.cuda.is_available()
    wanted: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": config.rows, "max_steps": config.steps,
        "gradient_accumulation_steps": config.accumulation, "learning_rate": config.learning_rate,
        "warmup_steps": config.warmup_steps, "lr_scheduler_type": "cosine", "adam_beta2": config.beta2, "weight_decay": 0.0,
        "max_grad_norm": config.clip_norm, "bf16": autocast, "use_cpu": not cuda, "save_strategy": "no",
        "logging_strategy": "no", "report_to": [], "optim": "adamw_torch_fused", "disable_tqdm": True,
        "logging_nan_inf_filter": False, "dataloader_num_workers": WORKERS, "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 4, "dataloader_pin_memory": cuda, "tf32": True if cuda else None,
    }  # fmt: skip
    known = inspect.signature(TrainingArguments.__init__).parameters
    left_out = sorted(name for name in wanted if name not in known)
    return TrainingArguments(**{name: value for name, value in wanted.items() if name in known}), left_out


def _let_compile_read_tf32() -> None:
    """Transformers sets TF32 by torch's new switch; then the old one, which dynamo reads, raises an error."""
    try:
        torch._C._get_cublas_allow_tf32()  # noqa: SLF001 -- what dynamo asks
    except RuntimeError:
        torch.backends.fp32_precision = "none"
        torch.backends.cuda.matmul.allow_tf32 = True


class _Rows(Dataset):  # type: ignore[type-arg]
    """Our rows; each is made when a worker asks for it, as in our loader."""

    def __init__(self, config: Config) -> None:
        self.source = batches.synthetic(config, batches.own_codec(calls.Tokenizer()))
        self.rows = (config.steps + 2) * config.rows * config.accumulation

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        row = self.source.row(number)
        predicted = set(row.predicted)
        return {"input_ids": row.ids, "labels": [token if at in predicted else -100 for at, token in enumerate(row.ids)]}


class _InOrder(Trainer):  # type: ignore[misc]  # transformers' types are not read
    """Reads the rows in our order, and keeps the losses on the device."""

    losses: list[torch.Tensor]

    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        self.losses = []
        return SequentialSampler(self.train_dataset)

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*given, **named)
        self.losses.append(loss)
        return loss


class _Ends(TrainerCallback):  # type: ignore[misc]  # as above
    """Tells the clock of each step."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.clock.note(state.global_step)
