"""Start agents: ``python -m pytest_gpucluster.agent.main`` imports torch once and becomes one agent for each rank named.

A torchrun rank becomes its agent by exec, so its pid stays and torchrun notices nothing. The controller starts the agents of
its own node's ranks as children. The settings come as one JSON argument, the run's secret in a pipe.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import NoReturn

from pytest_gpucluster.agent.agent import LOST_CODE, TICK_S, Agent, write_reports
from pytest_gpucluster.agent.call_runner import AgentContext
from pytest_gpucluster.agent.command_reader import CommandReader, commands_address
from pytest_gpucluster.agent.neighbours import Neighbours
from pytest_gpucluster.agent.spawner import Spawner
from pytest_gpucluster.protocol.channel import Address, ChannelLostError, connect, listener_key
from pytest_gpucluster.protocol.codec import Secret, TypedMessage
from pytest_gpucluster.protocol.messages import ReportTarget
from pytest_gpucluster.protocol.node_events import ListenerName, new_name
from pytest_gpucluster.protocol.rank import Rank
from pytest_gpucluster.worker import worker


class AgentSettings(TypedMessage, frozen=True, kw_only=True):
    """What the agents of one process need to know.

    ``roots``: the folders of this run's tests; in an unsigned run nothing else from this node's disk is run.
    ``secret_fd``: the pipe with the run's secret (:meth:`Secret.to_pipe`), None in an unsigned run. ``controller_fd`` closes
    when a controller on this node ends. The first agent then writes the reports of ``target``, which comes from the command
    line of its node and from no message. ``requested``: what the options on an agent's own node ask for.
    """

    ranks: tuple[Rank, ...]
    address: Address
    roots: tuple[str, ...]
    secret_fd: int | None = None
    controller_fd: int | None = None
    target: ReportTarget | None = None
    requested: dict[str, str] | None = None


def command(settings: AgentSettings) -> list[str]:
    """The command line that starts these agents."""
    return [sys.executable, "-m", "pytest_gpucluster.agent.main", settings.to_json().decode()]


def resolved(roots: list[Path]) -> tuple[str, ...]:
    """Folders as settings name them."""
    return tuple(sorted({str(root.resolve()) for root in roots}))


def main() -> None:
    """Become the agents."""
    settings = AgentSettings.read(sys.argv[1].encode())
    secret = Secret.from_pipe(settings.secret_fd) if settings.secret_fd is not None else None
    if len(settings.ranks) > 1:  # as torchrun: one OpenMP thread for each rank, unless the environment says otherwise
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch.distributed  # noqa: F401 -- once, before forking: every agent, spawner and worker inherits it

    for rank in settings.ranks[1:]:
        if os.fork() == 0:
            _become(rank, settings, secret, target=None)
    _become(settings.ranks[0], settings, secret, target=settings.target)


def _become(rank: Rank, settings: AgentSettings, secret: Secret | None, *, target: ReportTarget | None) -> None:
    listener = _started_listener() if rank.local_rank == 0 else None
    folder = Path(tempfile.mkdtemp(prefix=f"gpucluster-rank{rank.rank}-"))
    controller = os.getppid() if settings.controller_fd is not None and rank == settings.ranks[0] else None
    neighbours = Neighbours(rank=rank.rank, local_rank=rank.local_rank, controller=controller)
    # Forked first: no thread and no connection may exist yet.
    spawner = Spawner(worker.main, folder=folder, neighbours=neighbours)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    joined = threading.Event()
    if settings.controller_fd is not None:
        watch = (settings.controller_fd, target, joined, folder)
        threading.Thread(target=_leave_with_controller, args=watch, daemon=True).start()
    try:
        channel = connect(settings.address, secret)
        if listener is not None:
            channel.put(listener_key(rank.group_rank), ListenerName(name=listener))
        context = AgentContext(rank=rank, channel=channel, spawner=spawner, roots=settings.roots, requested=settings.requested)
        shared_at = commands_address(settings.address, secret, rank) if rank.local_world_size > 1 else None
        commands = CommandReader(channel, rank, shared_at=shared_at)
        agent = Agent(context, commands, controller_fd=settings.controller_fd, target=target)
        agent.join()
        joined.set()
    except ChannelLostError as lost:
        sys.stderr.write(f"gpucluster: rank {rank.rank} found no controller: {lost}\n")
        _give_up(folder)
    agent.leave(agent.serve())


def _started_listener() -> str | None:
    """The name of the listener of this node; None where none can be started, so that nobody is heard and a test says so."""
    from pytest_gpucluster.agent.event_listener import start_listener

    name = new_name()
    return name if start_listener(name) is not None else None


def _give_up(folder: Path) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    sys.stderr.flush()
    os._exit(LOST_CODE)


def _leave_with_controller(controller_fd: int, target: ReportTarget | None, joined: threading.Event, folder: Path) -> None:
    """End this process if the controller ends before the agent has joined: to connect takes a minute then, and fails."""
    while not select.select([controller_fd], [], [], TICK_S)[0]:
        if joined.is_set():
            return
    if not joined.is_set():
        if target is not None:
            write_reports(target)
        _give_up(folder)


if __name__ == "__main__":
    main()
