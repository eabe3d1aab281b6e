"""The controller: starts and meets the agents, makes calls, and ends the run. It speaks of ranks; places come above it."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpucluster.agent.main import AgentSettings, resolved
from pytest_gpucluster.agent.main import command as command_of
from pytest_gpucluster.config.torchrun import Launch
from pytest_gpucluster.controller.call import Call, CallClock, EarlyEnd, Observer
from pytest_gpucluster.controller.call_maker import SLICE_S, CallContext, CallMaker
from pytest_gpucluster.controller.command_link import BYE_S, CommandLink, JournalSender, Members
from pytest_gpucluster.controller.local_agents import LocalAgents
from pytest_gpucluster.places import Device
from pytest_gpucluster.protocol import functions
from pytest_gpucluster.protocol.channel import Address, ChannelLostError, bye_key, hello_key
from pytest_gpucluster.protocol.codec import Secret
from pytest_gpucluster.protocol.messages import AgentHello, FunctionName, Quit, ReplicateJournal, Reply, ReportTarget
from pytest_gpucluster.protocol.rank import Rank, spans


class Controller:
    """The one object that talks to the agents."""

    def __init__(
        self, launch: Launch | None, *, num_local: int, device: Device, rootdir: Path, secret: Secret | None = None
    ) -> None:
        """Prepare a run of ``num_local`` agents on this machine, or of torchrun's ranks if there is a ``launch``.

        ``secret`` signs the messages. A run on this machine makes one of its own, if it was given none.
        """
        self._secret = secret or (Secret.random() if launch is None else None)
        self.rootdir = rootdir
        self.world_size = launch.world_size if launch is not None else num_local
        self._launch = launch
        self._link = CommandLink(
            address_of(launch) if launch is not None else None,
            self._secret,
            hosts_store=launch is None or not launch.agent_hosts_store,
        )
        self._members = Members()
        self._early_end = EarlyEnd()
        context = CallContext(link=self._link, members=self._members, early_end=self._early_end, device=device, rootdir=rootdir)
        self._calls = CallMaker(context)
        self._journal = JournalSender()
        self._target: ReportTarget | None = None
        self._agents: LocalAgents | None = None
        self._has_quit = False

    # Start.

    def start(self, *, log: Path, target: ReportTarget | None = None, observer: Observer | None = None) -> None:
        """Start the agents of this process's own ranks; returns at once.

        ``log`` gets what agents print, and its folder what ranks print. If this process dies, the first agent writes the
        reports of ``target``.
        """
        self._calls.observe(observer or Observer(), logs=log.parent)
        self._target = target
        if self._launch is None:
            self._link.listen()
        secret_fd = self._secret.to_pipe() if self._secret is not None else None
        command = functools.partial(self._command, secret_fd)
        self._agents = LocalAgents(command, secret_fd=secret_fd, log=log, own_group=self._launch is None)

    def observe(self, observer: Observer, *, logs: Path) -> None:
        """From now on show what goes on to this observer, and let ranks print into files in ``logs``."""
        self._calls.observe(observer, logs=logs)

    def _command(self, secret_fd: int | None, controller_fd: int) -> list[str]:
        """The command line of the agents of this process's own ranks, which get the two descriptors."""
        if self._launch is None:
            ranks = [Rank.local(number, self.world_size) for number in range(self.world_size)]
        else:
            ranks = [rank_of(self._launch)]
        settings = AgentSettings(
            ranks=tuple(ranks),
            address=self._link.address,
            roots=resolved([self.rootdir, Path.cwd()]),
            secret_fd=secret_fd,
            controller_fd=controller_fd,
            target=self._target,
        )
        return command_of(settings)

    def meet(self, *, within_s: float) -> None:
        """Wait until every rank's agent has said hello. A rank that does not is lost, and the run goes on without it."""
        channel = self._link.channel
        waiting = set(range(self.world_size))
        deadline_s = time.monotonic() + within_s
        while waiting and time.monotonic() < deadline_s:
            self._early_end.check()
            self._calls.report_wait()
            if channel.arrived([hello_key(rank) for rank in waiting], within_s=SLICE_S):
                break
            if self._agents is not None and self._agents.have_ended:
                waiting = {rank for rank in waiting if not channel.has(hello_key(rank))}
                if self._launch is None or waiting == {self._launch.rank}:
                    break
        for rank in range(self.world_size):
            self._members.read_hello(rank, channel, within_s=within_s)
        self._choose_replica()

    def _choose_replica(self) -> None:
        """Have an agent of another node keep a copy of the journal, in case this node is lost."""
        own_node = self._launch.group_rank if self._launch is not None else 0
        others = [rank for rank, hello in sorted(self._members.hellos.items()) if hello.group_rank != own_node]
        if not others or self._target is None:
            self._journal.close()
            return
        self._link.send(ReplicateJournal(ranks=spans(others[:1])))
        self._journal.open(self._link.channel)

    def replicate(self, line: str) -> None:
        """Send one line of the journal, now or soon, to the agent on another node that keeps the replica, if there is one."""
        self._journal.add(line)

    # The ranks.

    @property
    def is_signed(self) -> bool:
        """Whether messages carry the run's secret."""
        return self._secret is not None

    def hello_of(self, rank: int) -> AgentHello | None:
        """What the rank's agent said of itself, None if it said nothing."""
        return self._members.hellos.get(rank)

    def refuse(self, rank: int, why: str) -> None:
        """Measure nothing on this rank, whose software differs: every later call answers with the reason."""
        self._members.refuse(rank, why)

    def assign_nodes(self, nodes: Mapping[int, int]) -> None:
        """Tell every later call which node each rank is on: by rank, the number of its node, from 0."""
        self._calls.assign_nodes(nodes)

    # Calls.

    def name(self, function: Callable[..., Any]) -> FunctionName:
        """The name under which workers find ``function``; see :func:`name_function` for what is raised."""
        return functions.name_function(function, rootdir=self.rootdir)

    def call(self, call: Call) -> dict[int, Reply]:
        """Make the call; see :meth:`CallMaker.call`."""
        self._journal.flush()
        return self._calls.call(call)

    @property
    def clock(self) -> CallClock:
        """How long calls took, and for how long all ranks waited for this process."""
        return self._calls.clock

    # The end.

    @property
    def terminated(self) -> str | None:
        """What ended the run early, None if nothing did."""
        return self._early_end.terminated

    def terminate(self, by: str) -> None:
        """Called in the signal handler of SIGTERM, and at the end of a session whose calls come from other threads.

        If an agent of this node died, torchrun sends SIGTERM to the node, and SIGKILL 30 s later
        (torch.distributed.elastic). Then the other ranks may still finish their call.
        """
        dead = [rank for rank in self._members.hellos if self._members.has_died_here(rank)]
        if self._launch is not None and dead and self._early_end.ending is None:
            why = f"rank {dead[0]}: its agent process has ended, and torchrun ends this node because of it"
            self._early_end.after_last_call(why)
        else:
            self._early_end.terminated = by

    def quit(self, code: int, *, last_lines: str = "") -> None:
        """Tell every agent to leave with ``code`` and wait for them; safe to call again, and without agents.

        ``last_lines``: what the other nodes show before they leave.
        """
        if self._has_quit or (self._agents is None and self._launch is None):
            return
        self._has_quit = True
        if self._launch is None and not self._link.is_open:  # the agents wait for a store that is not needed any more
            assert self._agents is not None
            self._agents.end(have_met=False)
            return
        try:
            self._journal.flush()
            self._link.send(Quit(code=code, last_lines=last_lines))
            alive = self._members.alive(self.world_size)
            leaving = [bye_key(rank) for rank in alive if rank in self._members.hellos or self._said_hello(rank)]
            self._link.channel.arrived(leaving, within_s=BYE_S)
        except (ChannelLostError, OSError) as lost:
            sys.stderr.write(f"gpucluster: could not say goodbye: {lost}\n")
        finally:
            self._link.stop_beating()
            if self._agents is not None:
                self._agents.end(have_met=True)

    def _said_hello(self, rank: int) -> bool:
        return self._launch is not None and self._link.channel.has(hello_key(rank))


def address_of(launch: Launch) -> Address:
    """Where the ranks of a torchrun job meet."""
    run_id = f"{launch.run_id}.{launch.restart_count}"  # torchrun keeps its store when it restarts
    return Address(host=launch.master_addr, port=launch.master_port, run_id=run_id)


def rank_of(launch: Launch) -> Rank:
    """This torchrun rank as an agent's identity."""
    return msgspec.convert(launch, Rank, from_attributes=True)
