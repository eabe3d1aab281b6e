"""How the ranks share the work, and how a decoder layer runs: whole or sharded, eager or compiled.

``ddp``: every rank holds the whole base; a step sends the adapters' gradients (gradients.py). ``fsdp``: FSDP2 shards
the frozen weights of the decoder layers over the ranks and gathers each layer before its forward and again before its
backward. The adapters are ignored by it: they are float32 over a bf16 base, an FSDP group holds one type, and gathering
1 % of the weights twice would cost more than one all-reduce of their gradients; so adapters, their gradients and the
optimiser's state are plain tensors under either strategy, and so is what a checkpoint holds. Embedding, last norm and
head stay whole on every rank: they are frozen, and the head is used in chunks outside any forward of its own. With
``cpu_offload`` the shards lie in host memory, pinned where there is a GPU, and go to it for each gather; they are frozen,
so nothing comes back.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from finetune_smoke import digests
from finetune_smoke.model import fp8
from finetune_smoke.settings.config import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from finetune_smoke.model.build import SummedLoss
    from finetune_smoke.ranks import Ranks
    from finetune_smoke.run import TrainingRun
    from finetune_smoke.settings.config import Config

BACKEND = "inductor"
"""What torch.compile hands a layer to."""


def choose(config: Config, ranks: Ranks) -> str:
    """One of none (a rank alone), ddp and fsdp; raises InputError for FSDP without other ranks."""
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


def compile_layers(model: SummedLoss) -> None:
    """Let torch.compile make every decoder layer and the loss of a chunk; it happens at their first call.

    Hidden states ask for a gradient from the embedding on: else the first layer would be another case, compiled again.
    """
    model.model.enable_input_require_grads()
    for layer in layers_of(model):
        layer.forward = torch.compile(layer.forward, backend=BACKEND)
    model.terms = torch.compile(model.terms, backend=BACKEND)


def shard(model: SummedLoss, adapters: dict[str, torch.nn.Parameter], ranks: Ranks, *, cpu_offload: bool) -> None:
    """Shard the frozen weights of every decoder layer over the ranks, in place."""
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 -- only for FSDP2
    from torch.distributed.fsdp import (  # noqa: PLC0415 -- as above; torch 2.7 and newer has ignored_params
        CPUOffloadPolicy,
        OffloadPolicy,
        fully_shard,
    )

    group = ranks.group or dist.distributed_c10d._get_default_group()  # noqa: SLF001 -- as dist.group.WORLD, typed
    mesh = DeviceMesh.from_group(group, ranks.device.type)
    trained = set(adapters.values())
    root = model.inner.base_model
    layers = layers_of(model)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    outside = {parameter for parameter in root.parameters() if parameter not in inside}
    place = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda") if cpu_offload else OffloadPolicy()
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=trained, offload_policy=place)
    fully_shard(root, mesh=mesh, ignored_params=trained | outside)  # the common root lets gathers run ahead of layers


def require_gathers(config: Config, ranks: Ranks) -> None:
    """Raises InputError, on all ranks, if they cannot gather as ``fsdp_gather`` asks for."""
    if config.fsdp_gather == "kernels":
        return
    from finetune_smoke.parallel import copy_engine_gather  # noqa: PLC0415 -- only for this

    why_not = copy_engine_gather.obstacle(ranks)
    if why_not:
        raise InputError(f"fsdp_gather {config.fsdp_gather} cannot be had here: {why_not}")


@contextmanager
def fsdp_gathers(run: TrainingRun) -> Iterator[None]:
    """Within, sharded layers are gathered as ``fsdp_gather`` says."""
    if run.config.fsdp_gather == "kernels":
        yield
        return
    from finetune_smoke.parallel import copy_engine_gather  # noqa: PLC0415 -- only for this

    layers: list[Any] = layers_of(run.model)
    with copy_engine_gather.copy_engines(run.ranks) as gather:
        for layer in layers:
            layer.set_custom_all_gather(gather)
        yield


def frozen(model: torch.nn.Module, adapters: dict[str, torch.nn.Parameter]) -> Iterator[torch.Tensor]:
    """What this rank holds of the base, in order: weights or, between steps under FSDP, its shards of them."""
    trained = set(adapters.values())
    for weight in model.parameters():
        if weight not in trained:
            yield weight.to_local() if isinstance(weight, DTensor) else weight
    for module in model.modules():
        if isinstance(module, fp8.Frozen):
            yield from module.buffers()


def local_base_digest(model: torch.nn.Module, adapters: dict[str, torch.nn.Parameter], device: torch.device) -> int:
    """The digest of what is ``frozen``, made on ``device`` also where it lies in host memory."""
    return digests.digest(weight.to(device) for weight in frozen(model, adapters))


@contextmanager
def unsharded_eager(run: TrainingRun) -> Iterator[None]:
    """Within, forwards run eagerly and hold no collective: for evaluation and checks, whose shapes and numbers differ.

    Under FSDP every rank holds all layers meanwhile, so the memory for a whole base must be there.
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
    """Within, compiled layers run uncompiled."""
    return nullcontext() if run.config.compile == "off" else torch.compiler.set_stance("force_eager")


def attention(config: Config) -> AbstractContextManager[object]:
    """Which fused attention training prefers; "auto" is torch's own choice."""
    if config.attention == "auto":
        return nullcontext()
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)
