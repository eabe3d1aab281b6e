"""From a Config to a Run: data, base, adapters, strategy and optimiser on this rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from finetune_smoke import digests
from finetune_smoke.checks import exact, faults
from finetune_smoke.data import batches, cache, hub
from finetune_smoke.model import build, flops, gradients
from finetune_smoke.parallel import strategy
from finetune_smoke.ranks import Ranks, require_same_settings
from finetune_smoke.run import InitialState, ProgressCallback, TrainingRun
from finetune_smoke.settings.config import Config, require_limit_below_floor


def prepare(config: Config, *, ranks: Ranks, progress: ProgressCallback) -> TrainingRun:
    """Make everything that step 0 needs; records ``base_digest`` and the first ``data_digest``. Raises InputError."""
    require_same_settings(config, ranks)
    if config.compile == "layers":
        strategy.start_compilers()
    config, notes = _for_dropout(config, ranks)
    shared = ranks.run_on_all_ranks(lambda: strategy.choose(config, ranks))
    fault = ranks.run_on_all_ranks(lambda: faults.planted(config.fault, rank=ranks.rank, world_size=ranks.world_size))
    progress("preparing data", None)
    source, data_digest = ranks.run_on_all_ranks(lambda: _source(config, ranks.world_size, progress))
    progress("preparing the base model", None)
    base = ranks.run_on_all_ranks(lambda: build.base_of(config, ranks.device))
    dropout = build.without_dropout(base)
    fault.spoil_base(base.get_input_embeddings().weight)
    checks = exact.Checks(ranks)
    base_digest = digests.digest(base.parameters())  # before anything is sharded or rounded
    exact.record_equal(checks, "base_digest", values=[base_digest], what="weights of the frozen base")
    exact.record_equal(checks, "data_digest", values=[source.digest], what="content of the data set")
    model = build.SummedLoss(ranks.run_on_all_ranks(lambda: build.add_adapters(base, config))).train()
    adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    from finetune_smoke.model import lora  # noqa: PLC0415 -- brings peft, which is there by now

    ours = ranks.run_on_all_ranks(lambda: config.own_lora and lora.take_over(model))
    if config.compile == "layers":
        strategy.compile_layers(model)
    local_base = base_digest  # unsharded, this rank holds the same weights in the same order
    if shared == "fsdp":
        strategy.shard(model, adapters, ranks, cpu_offload=config.cpu_offload)
        local_base = strategy.local_base_digest(model, adapters, ranks.device)
    fault.freeze(adapters)
    fault.watch_gradients(adapters)
    fingerprints = digests.fingerprints(adapters.values())
    initial = InitialState(base=base_digest, local_base=local_base, data=data_digest, adapters=fingerprints)
    return TrainingRun(
        config=config,
        ranks=ranks,
        source=source,
        rows=batches.local_rows(config, ranks.world_size),
        fault=fault,
        model=model,
        strategy=shared,
        autocasts=ranks.device.type == "cuda" and not ours,
        adapters=adapters,
        gradients=gradients.flat_gradients(adapters.values()),
        optimizer=_optimizer(config, adapters),
        shape=flops.shape_of(base.config),
        initial=initial,
        checks=checks,
        progress=progress,
        notes=notes if dropout is None else [*notes, dropout],
    )


def _for_dropout(config: Config, ranks: Ranks) -> tuple[Config, list[str]]:
    """With ``lora_dropout``: peft's forward and no audits, with a note; each rank draws numbers of its own."""
    if not config.lora_dropout:
        return config, []
    torch.manual_seed(config.seed + 2 + ranks.rank)
    note = (
        f"lora_dropout {config.lora_dropout:g}: by peft's forward; lock-step audits are off, because every rank draws other "
        "numbers, and a resumed run draws others again"
    )
    return replace(config, own_lora=False, audit_every=0), [note]


def _source(config: Config, world_size: int, progress: ProgressCallback) -> tuple[batches.Source, int]:
    """The rows and the digest of their data, checked against the loss limit."""
    step_rows = batches.local_rows(config, world_size) * world_size
    codec = hub.codec_of(config)
    if codec.remark:
        progress(codec.remark, None)
    source = cache.source(config, codec, step_rows=step_rows, say=lambda text: progress(text, None))
    require_limit_below_floor(config.loss_limit, source.blind_floor_nats)
    return source, cache.data_digest(config, codec)


def _optimizer(config: Config, adapters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    trained = [parameter for parameter in adapters.values() if parameter.requires_grad]
    betas = (0.9, config.beta2)
    return torch.optim.AdamW(trained, lr=config.learning_rate, betas=betas, weight_decay=0.0, fused=True)
