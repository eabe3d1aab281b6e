"""The agents of a simulated fleet: a few processes, each of which speaks for many ranks through the real channel.

``python -m pytest_gpucluster.fleet.agents`` starts them. Hellos, heartbeats, replies and goodbyes are the messages of real
agents. There are no workers and no process groups: the values come from the model. A process has three connections to the
store, however many ranks it speaks for.

The controller of a simulated fleet: the real one, whose agents answer from a model.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from pytest_gpucluster.agent.agent import LOST_CODE, TICK_S, write_reports
from pytest_gpucluster.agent.heartbeat import BEAT_S
from pytest_gpucluster.controller.call_maker import SLICE_S
from pytest_gpucluster.controller.controller import Controller
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.fleet import model
from pytest_gpucluster.fleet.simulated_call import SimulatedGroup
from pytest_gpucluster.fleet.simulation import JOIN_S, Simulation, hostname_of
from pytest_gpucluster.protocol import channel, messages
from pytest_gpucluster.protocol.codec import Secret, TypedMessage

PROCESSES = 2
LATE_S = 2.0
"""A rank with the fault ``late`` joins so long after the others, and answers so late once."""
GOODBYE_S = 10.0
"""How long a process of the fleet waits for its own goodbye, and after a lost store for the end of the controller."""


class FleetSettings(TypedMessage, frozen=True, kw_only=True):
    """What the processes of a simulated fleet need to know; the fields are those of ``AgentSettings``."""

    simulation: Simulation
    address: channel.Address
    secret_fd: int
    controller_fd: int
    target: messages.ReportTarget | None


@dataclass(slots=True)
class Speaker:
    """One process's share of the ranks."""

    simulation: Simulation
    ranks: frozenset[int]
    writer: channel.StoreChannel
    lost: frozenset[int] = frozenset()
    """The ranks that are gone: they say and do nothing any more."""
    _held: dict[str, list[int]] = field(default_factory=dict)
    _have_been_late: set[int] = field(default_factory=set)
    _turns: Counter[tuple[int, str]] = field(default_factory=Counter)
    """How often each rank was called with each function."""
    quits: threading.Event = field(default_factory=threading.Event)

    def say_hello(self, *, late: bool) -> None:
        """Say hello as the ranks that are late, or as all others."""
        for rank in sorted(self.ranks):
            if self.simulation.has(rank, "late") is late:
                self.writer.put(channel.hello_key(rank), self._hello_of(rank))

    def _hello_of(self, rank: int) -> messages.AgentHello:
        node, gpu = self.simulation.place_of(rank)
        machine = f"simulated {hostname_of(node)}"  # no machine has this name: the pid means nothing there
        return messages.AgentHello(
            hostname=hostname_of(node), machine=machine, pid=os.getpid(), group_rank=node, local_rank=gpu
        )

    def start(self, call: messages.StartCall) -> None:
        """Called when the controller starts a call: answer, except where a rank of the same group fails."""
        own = [rank for rank in _in(call.ranks) if rank in self.ranks]
        self.lost |= {rank for rank in own if model.is_lost_in(self.simulation, call.function, rank)}
        for ranks in [group.ranks for group in call.groups] if call.groups is not None else [(rank,) for rank in own]:
            failures = {rank: found for rank in ranks if (found := model.failure(self.simulation, call.function, rank))}
            group = SimulatedGroup(simulation=self.simulation, ranks=tuple(ranks))
            for rank in self.ranks.intersection(ranks) - self.lost:
                if rank in failures:
                    self._reply(call.id, rank, failures[rank])
                elif failures:
                    self._held.setdefault(call.id, []).append(rank)
                else:
                    self._answer(call, rank, group)

    def _answer(self, call: messages.StartCall, rank: int, group: SimulatedGroup) -> None:
        if self.simulation.has(rank, "late") and rank not in self._have_been_late:
            self._have_been_late.add(rank)
            time.sleep(LATE_S / 8)
        key = rank, f"{call.function.qualname} {sorted(call.kwargs.items())}"
        reply = model.answer(group, call.function, rank=rank, kwargs=call.kwargs, turn=self._turns[key])
        self._turns[key] += 1
        self._reply(call.id, rank, reply)

    def abort(self, call: messages.AbortCall) -> None:
        """Called when the controller releases ranks that wait for one that failed."""
        released = set(_in(call.ranks))
        for rank in self._held.pop(call.id, []):
            if rank in released:
                self._reply(call.id, rank, messages.Failure(kind="released", error=call.why, entered=True))

    def _reply(self, call_id: str, rank: int, reply: messages.Reply) -> None:
        self.writer.put(channel.reply_key(call_id, rank), reply)
        if isinstance(reply, messages.Failure):
            self.writer.note_fault(call_id, rank)

    def say_goodbye(self) -> None:
        """Say goodbye as every rank that is left."""
        for rank in self.ranks - self.lost:
            self.writer.put(channel.bye_key(rank), messages.Bye())


def _in(spans: messages.Spans) -> Iterable[int]:
    return (rank for first, last in spans for rank in range(first, last + 1))


def main() -> None:
    """Become the agents."""
    settings = FleetSettings.read(sys.argv[1].encode())
    secret = Secret.from_pipe(settings.secret_fd)
    import torch.distributed  # noqa: F401 -- once, before forking

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    present = settings.simulation.present
    shares = [frozenset(present[first::PROCESSES]) for first in range(min(PROCESSES, len(present)))]
    for share in shares[1:]:
        if os.fork() == 0:
            _become(settings, share, secret, target=None)
    _become(settings, shares[0], secret, target=settings.target)


def _become(
    settings: FleetSettings, ranks: frozenset[int], secret: Secret, *, target: messages.ReportTarget | None
) -> NoReturn:
    """Serve until the controller says quit, or ends without a word; then the reports of ``target`` are written."""
    try:
        writer, beats = channel.connect(settings.address, secret), channel.connect(settings.address, secret)
        speaker = Speaker(settings.simulation, ranks, writer)
        speaker.say_hello(late=False)
        obeying = threading.Thread(target=_obey, args=(speaker, writer.reconnect()), daemon=True)
        obeying.start()
        with contextlib.suppress(channel.ChannelLostError):  # the store ends with the controller, and either is noticed first
            _beat(speaker, beats, settings.controller_fd)
        if speaker.quits.wait(TICK_S):
            obeying.join(GOODBYE_S)  # it says goodbye, and ends this process
        elif target is not None and _has_ended(settings.controller_fd, within_s=GOODBYE_S):
            write_reports(target)
    except channel.ChannelLostError as lost:
        sys.stderr.write(f"gpucluster: the simulated fleet leaves: {lost}\n")
    finally:
        sys.stderr.flush()
        os._exit(LOST_CODE)


def _beat(speaker: Speaker, beats: channel.StoreChannel, controller_fd: int) -> None:
    """Write the heartbeat of each rank until the controller ends; let the late ranks join."""
    count = 0
    while not _has_ended(controller_fd, within_s=BEAT_S):
        count += 1
        if count * BEAT_S == LATE_S:
            speaker.say_hello(late=True)
        for rank in speaker.ranks - speaker.lost:
            beats.beat(rank, count)


def _has_ended(controller_fd: int, *, within_s: float) -> bool:
    """Whether the controller ends within this time."""
    return bool(select.select([controller_fd], [], [], within_s)[0])


def _obey(speaker: Speaker, reader: channel.StoreChannel) -> None:
    """Obey commands until the quit, which ends this process. A lost store is left to the thread that watches the controller."""
    number = 0
    try:
        while not isinstance(command := reader.take(channel.command_key(number), messages.read_command), messages.Quit):
            number += 1
            if isinstance(command, messages.StartCall):
                speaker.start(command)
            elif isinstance(command, messages.AbortCall):
                speaker.abort(command)
        speaker.quits.set()
        speaker.say_goodbye()
        code = command.code
    except channel.ChannelLostError:
        return
    except BaseException:  # noqa: BLE001 -- shown, and the process ends here whatever it was
        sys.excepthook(*sys.exc_info())
        code = LOST_CODE
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()


class FleetController(Controller):
    """Starts the simulated agents. What follows is the road of a real run."""

    def __init__(self, simulation: Simulation, *, rootdir: Path, secret: Secret | None = None) -> None:
        """Prepare a run of all ranks of ``simulation`` on this machine."""
        super().__init__(None, num_local=simulation.world_size, device="cuda", rootdir=rootdir, secret=secret)
        self._simulation = simulation

    def _command(self, secret_fd: int | None, controller_fd: int) -> list[str]:
        assert secret_fd is not None  # a run without torchrun has a secret of its own
        settings = FleetSettings(
            simulation=self._simulation,
            address=self._link.address,
            secret_fd=secret_fd,
            controller_fd=controller_fd,
            target=self._target,
        )
        return [sys.executable, "-m", "pytest_gpucluster.fleet.agents", settings.to_json().decode()]

    def meet(self, *, within_s: float) -> None:
        """Wait until every present rank has joined, then :data:`JOIN_S` for those that are absent.

        Raises:
            MeasurementError: the simulated agents do not join ``within_s``, or have ended.
        """
        hellos = [channel.hello_key(rank) for rank in self._simulation.present]
        deadline_s = time.monotonic() + within_s
        while not self._link.channel.arrived(hellos, within_s=SLICE_S):
            self._early_end.check()
            has_ended = self._agents is None or self._agents.have_ended
            if has_ended or time.monotonic() > deadline_s:
                raise MeasurementError("the simulated fleet did not join; see logs/agents.log", kind="lost")
        super().meet(within_s=JOIN_S)
