"""Start agents: ``python -m pytest_gpucluster.agent.main`` imports torch once and becomes one agent for each rank named.

A torchrun rank becomes its agent by exec (same pid, so torchrun sees nothing of it); the controller starts the agents of
its own node's ranks as children. The settings come as one JSON argument.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.agent.agent import Agent
from pytest_gpucluster.agent.fallback_report import Estate
from pytest_gpucluster.protocol.channel import Address, ChannelLostError
from pytest_gpucluster.protocol.rank import Rank

if TYPE_CHECKING:
    from pathlib import Path


def command(
    ranks: list[Rank], address: Address, *, roots: list[Path], controller_fd: int | None = None, estate: Estate | None = None
) -> list[str]:
    """The command line that starts the agents of ``ranks``; ``estate`` is what the first of them sees to.

    ``roots``: the folders of this run's tests; in an unsigned run nothing else from this node's disk is run.
    """
    settings = {
        "ranks": [asdict(rank) for rank in ranks],
        "address": asdict(address),
        "controller_fd": controller_fd,
        "roots": sorted({str(root.resolve()) for root in roots}),
        "estate": estate and asdict(estate),
    }
    return [sys.executable, "-m", "pytest_gpucluster.agent.main", json.dumps(settings)]


def main() -> None:
    """Become the agents."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    import torch.distributed  # noqa: F401 -- once, before forking: every agent, spawner and worker inherits it

    ranks = [Rank(**rank) for rank in settings["ranks"]]
    for rank in ranks[1:]:
        if os.fork() == 0:
            _become(rank, settings)
    _become(ranks[0], settings)


def _become(rank: Rank, settings: dict[str, Any]) -> None:
    estate = Estate(**settings["estate"]) if settings["estate"] and rank.rank == settings["ranks"][0]["rank"] else None
    agent = Agent(rank, roots=settings["roots"], controller_fd=settings["controller_fd"], estate=estate)
    try:
        agent.connect(Address(**settings["address"]))
    except ChannelLostError as lost:
        sys.stderr.write(f"gpucluster: rank {rank.rank} found no controller: {lost}\n")
        os._exit(3)
    agent.leave(agent.serve())


if __name__ == "__main__":
    main()
