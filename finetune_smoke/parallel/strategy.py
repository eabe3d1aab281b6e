"""How the ranks share the work, and how a decoder layer runs: whole or sharded, eager or compiled.

``ddp``: every rank holds the whole base. ``fsdp``: FSDP2 shards the frozen weights of the decoder layers over the ranks; the
adapters, their gradients and the optimiser's state stay plain tensors, in checkpoints too. An FSDP group holds one type, and
adapters are float32 over a bf16 base; gathering 1 % of the weights twice would also cost more than one all-reduce of their
gradients. Embedding, last norm and head stay whole: the head is used in chunks outside its own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from finetune_smoke import digests
from finetune_smoke.settings.config import Config, InputError

if TYPE_CHECKING:
    from finetune_smoke.model.build import SummedLoss
    from finetune_smoke.ranks import Ranks
    from finetune_smoke.run import TrainingRun

BACKEND = "inductor"
"""The backend of torch.compile."""


def choose(config: Config, ranks: Ranks) -> str:
    """The strategy: none (a single rank), ddp or fsdp; raises InputError for FSDP with a single rank."""
    if config.strategy == "fsdp":
        if ranks.world_size == 1:
            raise InputError("strategy fsdp shards the base over ranks, and there is only one: start it under torchrun")
        return "fsdp"
    return "ddp" if ranks.world_size > 1 else "none"


def layers_of(model: SummedLoss) -> list[torch.nn.Module]:
    """The decoder layers of ``model``; raises InputError for an architecture that keeps them elsewhere."""
    layers = getattr(model.inner.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise InputError("strategy fsdp and compile layers need a model with a list of decoder layers in 'layers'")
    return list(layers)


def start_compilers() -> None:
    """Start the processes that compile kernels, while the base is made; torch would start them with the first compiling.

    Until they are there, the training's own thread compiles one kernel after another. Older releases start them by the import.
    """
    from torch._inductor import async_compile  # noqa: PLC0415 -- seconds; only where layers are compiled

    getattr(async_compile, "maybe_warm_pool", lambda: None)()  # torch 2.8; does nothing without Triton


def compile_layers(model: SummedLoss) -> None:
    """Compile every decoder layer and the loss of a chunk; torch.compile does so at their first call.

    The embedding's output requires a gradient. Otherwise the first layer would differ and be compiled separately.
    """
    model.model.enable_input_require_grads()
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, backend=BACKEND)
    model.terms = torch.compile(model.terms, backend=BACKEND)


def shard(model: SummedLoss, adapters: dict[str, torch.nn.Parameter], ranks: Ranks, *, cpu_offload: bool) -> None:
    """Shard the frozen weights of every decoder layer over the ranks, in place.

    With ``cpu_offload`` the shards lie in host memory, pinned for a GPU, and are copied to it for each gather, never back.
    """
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 -- only for FSDP2
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # noqa: PLC0415 -- as above

    group = dist.distributed_c10d._get_default_group()  # noqa: SLF001 -- dist.group.WORLD, with its type
    mesh = DeviceMesh.from_group(group, ranks.device.type)
    trained = set(adapters.values())
    root = model.inner.base_model
    layers = layers_of(model)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    outside = {parameter for parameter in root.parameters() if parameter not in inside}
    place = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if cpu_offload else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=trained, offload_policy=place)
    fully_shard(root, mesh=mesh, ignored_params=trained | outside)  # a common root lets FSDP2 gather layers ahead


def frozen(model: torch.nn.Module, adapters: dict[str, torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    """The parts of the base that this rank holds, in order: weights or, between steps under FSDP, its shards."""
    trained = set(adapters.values())
    for weight in model.parameters():
        if weight not in trained:
            yield weight.to_local() if isinstance(weight, DTensor) else weight


def local_base_digest(model: torch.nn.Module, adapters: dict[str, torch.nn.Parameter], device: torch.device) -> int:
    """The digest of the ``frozen`` parts, computed on ``device`` even if they lie in host memory."""
    return digests.digest(weight.to(device) for weight in frozen(model, adapters))


@contextmanager
def unsharded_eager(run: TrainingRun) -> Iterator[None]:
    """Run forwards eagerly, unsharded and without collectives within the block.

    Evaluation and checks need this, because their shapes and counts differ between ranks. Under FSDP every rank holds all
    layers meanwhile, so a GPU needs memory for the whole base.
    """
    layers: list[Any] = layers_of(run.model) if run.strategy == "fsdp" else []
    for layer in layers:
        layer.set_reshard_after_forward(False)
        layer.unshard()
    try:
        with eager(run):
            yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True)
            layer.reshard()


def eager(run: TrainingRun) -> AbstractContextManager[object]:
    """Run compiled layers uncompiled within the block."""
    return nullcontext() if run.config.compile == "off" else torch.compiler.set_stance("force_eager")
