"""The adapters' gradients of a rank, one after another in one float32 buffer: one norm, one zeroing, and buckets to send.

As torch's DDP does, each bucket is all-reduced as soon as its last gradient is there, beside the backward of the layers
before it. So NCCL's kernels run beside products, as in the jobs to come. Unlike DDP it also works under FSDP2, whose shards
are the frozen base. A step of CUDA graphs sends the whole buffer after its backward, which a graph can capture.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from finetune_smoke.ranks import Ranks

BUCKET_BYTES = 25 << 20
"""As torch's DDP has it by default."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """``flat`` holds the gradients of ``parameters`` in order, ``views`` are its parts in the parameters' shapes."""

    parameters: tuple[torch.nn.Parameter, ...]
    flat: torch.Tensor
    views: tuple[torch.Tensor, ...]

    def bind(self) -> None:
        """Let ``parameter.grad`` be the view, for the optimiser and for faults planted after the all-reduce."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def zero(self) -> None:
        """Set all gradients to 0."""
        self.flat.zero_()

    def add(self, gradients: Sequence[torch.Tensor]) -> None:
        """Add the ``gradients`` of one backward, in the order of ``parameters``."""
        torch._foreach_add_(self.views, tuple(gradients))  # a few kernels for hundreds of tensors

    def clip(self, limit: float) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``limit``; returns the norm before, without waiting for it."""
        norm: torch.Tensor = torch.linalg.vector_norm(self.flat)
        self.flat.mul_(torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm


@dataclass(slots=True, kw_only=True)
class Buckets:
    """Parts of the flat gradients, the last first, as a backward fills them; ``sizes`` are their numbers of parameters."""

    parts: list[torch.Tensor]
    sizes: list[int]
    _missing: list[int] = field(default_factory=list)
    _works: list[dist.Work] = field(default_factory=list)

    def expect(self) -> None:
        """Send the buckets during the next backward: that of the last pass of a step."""
        self._missing, self._works = list(self.sizes), []

    def arrived(self, bucket: int, _parameter: torch.Tensor) -> None:
        """A gradient is there. Buckets are sent in order, so that all ranks send them in the same one."""
        if not self._missing:
            return  # a pass before the last one
        self._missing[bucket] -= 1
        while len(self._works) < len(self.parts) and self._missing[len(self._works)] == 0:
            self._send()

    def finish(self) -> None:
        """Send what no gradient came for, and let the device wait for all sums; the host does not."""
        while len(self._works) < len(self.parts):
            self._send()
        for work in self._works:
            work.wait()
        self._missing, self._works = [], []

    def _send(self) -> None:
        work = dist.all_reduce(self.parts[len(self._works)], async_op=True)
        assert work is not None
        self._works.append(work)


@contextmanager
def in_buckets(gradients: Gradients, ranks: Ranks) -> Iterator[Buckets | None]:
    """Buckets of about BUCKET_BYTES that know of each gradient within the block; None for a single rank."""
    if ranks.world_size == 1:
        yield None
        return
    most = max(1, BUCKET_BYTES // gradients.flat.element_size())
    groups: list[list[torch.nn.Parameter]] = [[]]
    for parameter in reversed(gradients.parameters):
        if sum(one.numel() for one in groups[-1]) >= most:
            groups.append([])
        groups[-1].append(parameter)
    lengths = [sum(one.numel() for one in group) for group in groups]
    parts = torch.split(gradients.flat, lengths[::-1])[::-1]
    buckets = Buckets(parts=list(parts), sizes=[len(group) for group in groups])
    handles = [
        one.register_post_accumulate_grad_hook(functools.partial(buckets.arrived, bucket))  # type: ignore[no-untyped-call]  # torch's
        for bucket, group in enumerate(groups)
        for one in group
    ]
    try:
        yield buckets
    finally:
        for handle in handles:
            handle.remove()


def flat_gradients(parameters: Iterable[torch.nn.Parameter]) -> Gradients:
    """Zero gradients for the trained ones of ``parameters``: at least one, all of one type and on one device."""
    trained = tuple(parameter for parameter in parameters if parameter.requires_grad)
    flat = torch.zeros(sum(each.numel() for each in trained), dtype=trained[0].dtype, device=trained[0].device)
    parts = torch.split(flat, [each.numel() for each in trained])
    return Gradients(trained, flat, tuple(part.view_as(each) for part, each in zip(parts, trained, strict=True)))
