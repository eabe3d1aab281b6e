"""Start agents: ``python -m pytest_gpucluster.agent.main`` imports torch once and becomes one agent for each rank named.

A torchrun rank becomes its agent by exec, so its pid stays and torchrun notices nothing. The controller starts the agents of
its own node's ranks as children. The settings come as one JSON argument.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.agent.agent import LOST_CODE, Agent
from pytest_gpucluster.agent.call_runner import AgentContext
from pytest_gpucluster.agent.command_reader import CommandReader
from pytest_gpucluster.agent.spawner import Spawner
from pytest_gpucluster.protocol.channel import Address, ChannelLostError, connect, connect_reader
from pytest_gpucluster.protocol.codec import TypedMessage
from pytest_gpucluster.protocol.messages import ReportTarget  # noqa: TC001 -- AgentSettings.read asks for its fields' types
from pytest_gpucluster.protocol.rank import Rank  # noqa: TC001 -- as above
from pytest_gpucluster.worker import worker


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings(TypedMessage):
    """What the agents of one process need to know.

    ``roots``: the folders of this run's tests; in an unsigned run nothing else from this node's disk is run.
    ``controller_fd`` closes when a controller on this node ends. The first agent then writes the reports of ``target``.
    """

    ranks: tuple[Rank, ...]
    address: Address
    roots: tuple[str, ...]
    controller_fd: int | None = None
    target: ReportTarget | None = None


def command(settings: AgentSettings) -> list[str]:
    """The command line that starts these agents."""
    return [sys.executable, "-m", "pytest_gpucluster.agent.main", json.dumps(settings.to_json())]


def resolved(roots: list[Path]) -> tuple[str, ...]:
    """Folders as settings name them."""
    return tuple(sorted({str(root.resolve()) for root in roots}))


def main() -> None:
    """Become the agents."""
    settings = AgentSettings.read(json.loads(sys.argv[1]))
    import torch.distributed  # noqa: F401 -- once, before forking: every agent, spawner and worker inherits it

    for rank in settings.ranks[1:]:
        if os.fork() == 0:
            _become(rank, settings, target=None)
    _become(settings.ranks[0], settings, target=settings.target)


def _become(rank: Rank, settings: AgentSettings, *, target: ReportTarget | None) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f"gpucluster-rank{rank.rank}-"))
    spawner = Spawner(worker.main, folder=folder)  # forked first: no thread and no connection may exist yet
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        context = AgentContext(rank=rank, channel=connect(settings.address), spawner=spawner, roots=settings.roots)
        commands = CommandReader(connect_reader(settings.address), rank)
        agent = Agent(context, commands, controller_fd=settings.controller_fd, target=target)
        agent.join()
    except ChannelLostError as lost:
        sys.stderr.write(f"gpucluster: rank {rank.rank} found no controller: {lost}\n")
        os._exit(LOST_CODE)
    agent.leave(agent.serve())


if __name__ == "__main__":
    main()
