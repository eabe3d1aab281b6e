"""Gathers by copy engines on a CPU: FSDP2 gets our own gather class, which uses gloo."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from finetune_smoke.parallel import copy_engine_gather

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_smoke.ranks import Ranks

DONE: dict[str, int] = {}
"""How often memory was allocated and registered, and how often the group was ended."""


def count(what: str) -> None:
    """Count ``what`` once more."""
    DONE[what] = DONE.get(what, 0) + 1


class Plain(copy_engine_gather.CopyEngineGather):
    """A gather into ordinary memory."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate as FSDP2 does."""
        count("allocated")
        return torch.empty(*size, dtype=dtype, device=device)


@contextmanager
def copy_engines(_ranks: Ranks) -> Iterator[Plain]:
    """Replaces ``copy_engine_gather.copy_engines``."""
    group = dist.new_group()
    yield Plain(group)
    dist.destroy_process_group(group)
    count("ended")


def install() -> None:
    """Remove every obstacle to copy engines, and install the stand-in."""
    copy_engine_gather.obstacle = lambda _ranks: None
    copy_engine_gather.copy_engines = copy_engines
    copy_engine_gather.symm_mem.rendezvous = lambda *_, **__: count("registered")
