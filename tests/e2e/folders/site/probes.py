"""A user's helper module beside the tests."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Seen:
    """What all ranks together found."""

    world_size: int
    ranks: list[int]
    names: dict[str, str] = field(default_factory=dict)


def all_ranks(*, name: str) -> Seen:
    """Gather the ranks over the whole cluster."""
    own = torch.tensor([float(os.environ["RANK"])])
    found = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return Seen(world_size=dist.get_world_size(), ranks=[int(one) for one in found], names={"given": name})


def tensor() -> torch.Tensor:
    """What cannot cross a process."""
    return torch.ones(2)


class Probe:
    """A user's class."""

    def measure(self) -> float:
        """A method: no worker could import it."""
        return 1.0
