"""From a Config to a Run: data, base, adapters, DDP and optimiser on this rank."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from finetune_smoke import calls, checks, data, faults, flops, hub
from finetune_smoke import model as models
from finetune_smoke.config import Config, InputError
from finetune_smoke.state import Progress, Run

if TYPE_CHECKING:
    from finetune_smoke.ranks import Ranks


def prepare(config: Config, *, ranks: Ranks, progress: Progress) -> Run:
    """Everything in place for step 0; records ``base_digest`` and the first ``data_digest``. Raises InputError."""
    fault = ranks.together(lambda: faults.planted(config.fault, rank=ranks.rank, world_size=ranks.world_size))
    progress("preparing data", None)
    source = ranks.together(lambda: _source(config, ranks.world_size))
    progress("preparing the base model", None)
    base = ranks.together(lambda: _base(config, ranks.device))
    shape = flops.shape_of(base.config)
    fault.spoil_base(base.get_input_embeddings().weight)
    record = checks.Checks(ranks)
    # Before DDP, whose broadcast at its start would hide a difference.
    base_digest = checks.digest(base.parameters())
    checks.equal(record, "base_digest", values=[base_digest], what="weights of the frozen base")
    checks.equal(record, "data_digest", values=[source.digest], what="content of the data set")

    model = models.SummedLoss(models.add_adapters(base, config))
    model.train()
    adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    fault.freeze(adapters)
    fault.watch_gradients(adapters)
    return Run(
        config=config,
        ranks=ranks,
        source=source,
        rows=data.local_rows(config, ranks.world_size),
        fault=fault,
        model=model,
        network=_network(model, ranks),
        adapters=adapters,
        optimizer=_optimizer(config, adapters),
        shape=shape,
        base_digest=base_digest,
        start=checks.fingerprints(adapters.values()),
        checks=record,
        progress=progress,
    )


def _source(config: Config, world_size: int) -> data.Source:
    """The rows, and a look at the limit: it must be out of reach of a model that reads no prompt."""
    step_rows = data.local_rows(config, world_size) * world_size
    codec = data.own_codec(calls.Tokenizer()) if config.model is None else hub.load_codec(config.model)
    if config.dataset is not None:
        return data.texts(config, codec, hub.load_texts(config.dataset), step_rows=step_rows)
    source = data.synthetic(config, codec)
    floor = source.blind_floor_nats
    if config.loss_limit is not None and floor is not None and not config.loss_limit < 0.5 * floor:
        raise InputError(
            f"loss limit {config.loss_limit} is not below half the blind floor of {floor:.3f} nats a token: a model "
            "that reads no prompt could come near it"
        )
    return source


def _base(config: Config, device: torch.device) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if config.model is not None:
        return hub.load_model(config.model, device=device, dtype=dtype)
    return models.random_base(config, tokenizer=calls.Tokenizer(), device=device, dtype=dtype)


def _network(model: models.SummedLoss, ranks: Ranks) -> torch.nn.Module:
    """The model, in DDP where there are other ranks.

    Buffers are constants and stay unbroadcast: it would put a collective into every forward, and a slow rank would
    be seen on no rank.
    """
    if ranks.world_size == 1:
        return model
    devices = [ranks.device.index] if ranks.device.type == "cuda" else None
    options: dict[str, Any] = {"device_ids": devices, "gradient_as_bucket_view": True}
    known = inspect.signature(DistributedDataParallel).parameters
    options["forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"] = False  # old name: 2.12
    return DistributedDataParallel(model, **options)


def _optimizer(config: Config, adapters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in adapters.values() if parameter.requires_grad]
    betas = (0.9, config.beta2)
    return torch.optim.AdamW(trained, lr=config.learning_rate, betas=betas, weight_decay=0.0, fused=True)
