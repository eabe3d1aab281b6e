"""FSDP2's gathers by the copy engines of the GPUs: NCCL moves the shards without SMs.

NCCL 2.28 and newer can do an all-gather within one NVLink domain with copy engines. It does so if its communicator asks for
no CTAs and the output lies in memory that all ranks registered alike (symmetric memory). Otherwise it uses a kernel and
does not say so. torch 2.13 offers the same as ``FSDPModule.set_symm_mem_for_comm``; this module works on 2.11 too.
"""

from __future__ import annotations

import socket
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from finetune_smoke.ranks import Ranks

OLDEST_NCCL = (2, 28)

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


def obstacle(ranks: Ranks) -> str | None:
    """Why these ranks cannot gather with copy engines, None if they can. A collective with the same result on all ranks."""
    hosts = ranks.gather([zlib.crc32(socket.gethostname().encode())])
    if ranks.device.type != "cuda":
        return "there is no GPU"
    if len({host for (host,) in hosts}) > 1:
        return "the ranks are on several hosts"
    if not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
        return f"torch {torch.__version__} cannot ask NCCL for it, 2.11 can"
    nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch's
    if nccl < OLDEST_NCCL:
        return f"NCCL is {'.'.join(map(str, nccl))}, and 2.28 is the first that can"
    return None


class CopyEngineGather:
    """A gather for ``FSDPModule.set_custom_all_gather``: it allocates the output and fills it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Gather through ``group``, whose communicator must exist already and ask for no CTAs."""
        symm_mem.set_backend("NCCL")
        self._group = group
        self._pool = symm_mem.get_mem_pool(device)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for an output, the same on all ranks: FSDP2 asks for it in one order on all of them."""
        with torch.cuda.use_mem_pool(self._pool):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,  # noqa: ARG002 -- FSDP2's own, whose communicator has CTAs
        async_op: bool = False,  # noqa: FBT001, FBT002 -- FSDP2's signature
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with the ``input_tensor`` of every rank.

        The gather runs on NCCL's stream, not on the caller's as a blocking call would: up to NCCL 2.29.3 copy engines refuse
        the default stream (https://github.com/NVIDIA/nccl/issues/2003).
        """
        symm_mem.rendezvous(output_tensor, group=self._group.group_name)  # registers each piece of memory once
        work: dist.Work = _all_gather(output_tensor, input_tensor, group=self._group, async_op=True)
        if async_op:
            return work
        work.wait()
        return None


@contextmanager
def copy_engines(ranks: Ranks) -> Iterator[CopyEngineGather]:
    """The gather of these ranks, over a communicator of its own that is destroyed at the end of the block.

    After an error the communicator stays until the default group ends: destroying it would wait for ranks that are still in
    a gather. PyTorch keeps the memory of the outputs, and by the group's name which group registered it. So a process that
    ends its default group and makes another one should gather like this only once. The deadline is that of any NCCL group,
    10 minutes.
    """
    settings = dist.ProcessGroupNCCL.Options()
    settings.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]  # not in its stubs
    group = dist.new_group(pg_options=settings)
    dist.barrier(group, device_ids=[ranks.device.index])  # makes the communicator, which registering needs
    yield CopyEngineGather(group, ranks.device)
    ranks.wait()
    dist.destroy_process_group(group)
