"""The controller: sends calls to the agents, gathers results, notices silence. Speaks of ranks; places come above it."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.agent.agent import CONTROLLER
from pytest_gpucluster.agent.fallback_report import Estate, Outbox
from pytest_gpucluster.controller.local_agents import OwnAgents
from pytest_gpucluster.controller.replies import Gathering, forged_reply, lost_reply, released_reply
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.protocol import channel, functions, plain_data
from pytest_gpucluster.protocol.channel import SECRET_VARIABLE, Address, Channel, ChannelLostError, Message
from pytest_gpucluster.protocol.rank import Rank, is_gone, machine, spans
from pytest_gpucluster.worker import worker

if TYPE_CHECKING:
    import socket

    from pytest_gpucluster.config.torchrun import Launch

SLICE_S = 0.1
LIVENESS_S = 1.0
SILENT_S = 10.0
MARGIN_S = 20.0
LEAVE_S = 10.0
BYE_S = 5.0
LAST_CALL_S = 15.0
SETUP_S = 120.0

Progress = Callable[[int, str, "float | None"], None]
Output = Callable[[int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One function on some ranks. ``groups`` says who shares a process group; None: nobody."""

    function: Message
    ranks: Sequence[int]
    deadline_s: float
    kwargs: dict[str, Any] = field(default_factory=dict)
    groups: Sequence[Sequence[int]] | None = None
    setup_s: float = SETUP_S
    any_device: bool = False
    test_arguments: Sequence[str] | None = None
    once: bool = False
    """Later calls of the function get the first one's replies: what it reads, this run itself changes afterwards."""
    is_startup: bool = False
    """The call belongs to the start-up, so its time does not count as measuring."""


class TerminatedError(MeasurementError):
    """The run was told to end (SIGTERM): what is left cannot be measured."""


class Controller:
    """The one place that talks to the agents."""

    def __init__(self, launch: Launch | None, *, num_local: int, device: str, rootdir: Path) -> None:
        """Prepare a run of ``num_local`` agents on this machine, or of torchrun's ranks if there is a ``launch``."""
        self.device = device
        self.rootdir = rootdir
        self.world_size = launch.world_size if launch is not None else num_local
        self._nodes: Mapping[int, int] = {}
        self.terminated: str | None = None
        self._ending: str | None = None
        self._ending_s = 0.0
        self.measuring_s = 0.0
        self.on_progress: Progress | None = None
        self.on_output: Output | None = None
        self.on_call: Callable[[], None] | None = None
        self._launch = launch
        self._num_local = num_local
        self._address = address_of(launch) if launch is not None else Address(host="", port=0, run_id="")
        self._commands = 0
        self._calls = 0
        self._nonce = secrets.token_hex(8)
        self._lost: dict[int, Message] = {}
        self._outbox = Outbox()
        self._estate: Estate | None = None
        self._groups: list[tuple[str, tuple[int, ...]]] = []
        self._first: dict[str, dict[int, Message]] = {}
        self._who: dict[int, Message] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._channel: Channel | None = None
        self._agents: OwnAgents | None = None
        self._listener: socket.socket | None = None
        self._next_look_s = self._last_look_s = 0.0
        self._stop_beating = threading.Event()
        self._beating = threading.Thread(target=self._beat_forever, daemon=True)
        self._said_quit = False
        self._logs: Path | None = None

    # Start and end.

    def start(self, *, log: Path, estate: Estate | None = None) -> None:
        """Start the agents of this process's own ranks; returns at once.

        ``estate``: what the first of them finishes should this process die.
        """
        self._logs = log.parent
        self._estate = estate
        launch = self._launch
        if launch is None:
            self._listener = channel.listen_on_loopback()
            host, port = self._listener.getsockname()[:2]
            self._address = Address(host=host, port=port, run_id=secrets.token_hex(8))
            os.environ[SECRET_VARIABLE] = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
            ranks = [_local_rank(number, self._num_local) for number in range(self._num_local)]
        else:
            ranks = [rank_of(launch)]
        self._agents = OwnAgents(
            ranks, self._address, log=log, roots=[self.rootdir, Path.cwd()], estate=estate, alone=launch is None
        )

    def meet(self, *, within_s: float) -> None:
        """Wait until every rank's agent said hello; who does not is lost, by name, and the run goes on without it."""
        self._open_channel()
        waiting = set(range(self.world_size))
        deadline_s = time.monotonic() + within_s
        while waiting and time.monotonic() < deadline_s:
            self._raise_if_terminated()
            if self._open_channel().arrived([f"who/{rank}" for rank in waiting], within_s=SLICE_S):
                break
            if self._agents is not None and self._agents.have_ended:
                waiting = {rank for rank in waiting if not self._open_channel().has(f"who/{rank}")}
                if self._launch is None or waiting == {self._launch.rank}:
                    break
        for rank in range(self.world_size):
            self._greet(rank, within_s)
        self._choose_heir()

    def _greet(self, rank: int, within_s: float) -> None:
        if not self._open_channel().has(f"who/{rank}"):
            self._lost[rank] = lost_reply(f"rank {rank} never joined within {within_s:g} s")
            return
        try:
            self._who[rank] = self._open_channel().take(f"who/{rank}")
        except channel.ForgedMessageError:
            self.refuse(rank, f"rank {rank} signs with another secret: set the same {SECRET_VARIABLE} on every node")

    def refuse(self, rank: int, why: str) -> None:
        """Measure nothing at this rank, whose software does not fit: every call answers with the reason."""
        self._lost[rank] = {**lost_reply(why), "kind": "refused"}

    def assign_nodes(self, nodes: Mapping[int, int]) -> None:
        """Tell every later call which node each rank is on: by rank, the number of its node, from 0."""
        self._nodes = nodes

    def keep_copy(self, line: str) -> None:
        """Send one line of the journal to the heir, an agent on another node."""
        self._outbox.add(line)

    def _choose_heir(self) -> None:
        """An agent of another node keeps a copy of the journal, should this node be lost with all on it."""
        own = self._launch.group_rank if self._launch is not None else 0
        heir = next((rank for rank, who in sorted(self._who.items()) if who["group_rank"] != own), None)
        if heir is None or self._estate is None:
            self._outbox.close()
            return
        self._command({"t": "inherit", "ranks": [heir], "estate": asdict(self._estate)})
        self._outbox.open(self._open_channel())

    @property
    def is_signed(self) -> bool:
        """Whether messages carry the run's secret."""
        return bool(os.environ.get(SECRET_VARIABLE))

    def who(self, rank: int) -> Message | None:
        """What the rank's agent said of itself, None if it said nothing."""
        return self._who.get(rank)

    def hostname_of(self, rank: int) -> str | None:
        """Where the rank runs, as its agent said."""
        return str(self._who[rank]["hostname"]) if rank in self._who else None

    def quit(self, code: int) -> None:
        """Tell every agent to leave with ``code`` and see them off; safe to call again, and without agents."""
        if self._said_quit or (self._agents is None and self._launch is None):
            return
        self._said_quit = True
        if self._launch is None and self._channel is None:  # they wait for a store that nobody needs any more
            assert self._agents is not None
            self._agents.end(have_met=False)
            return
        try:
            self._command({"t": "quit", "code": code})
            expected = [rank for rank in range(self.world_size) if rank not in self._lost and not self._is_dead_here(rank)]
            present = [rank for rank in expected if self._is_here(rank)]
            if present:
                self._open_channel().arrived([f"bye/{rank}" for rank in present], within_s=BYE_S)
        except (ChannelLostError, OSError) as lost:
            sys.stderr.write(f"gpucluster: could not say goodbye: {lost}\n")
        finally:
            self._stop_beating.set()
            if self._beating.is_alive():
                self._beating.join(BYE_S)  # a daemon thread inside the store while Python shuts down aborts the process
            if self._agents is not None:
                self._agents.end(have_met=True)

    def _is_here(self, rank: int) -> bool:
        if rank in self._who:
            return True
        return self._launch is not None and self._open_channel().has(f"who/{rank}")

    def _open_channel(self) -> Channel:
        if self._channel is None:
            if self._launch is None or not self._launch.agent_hosts_store:
                self._channel = channel.host_store(self._address, listener=self._listener)
            else:
                self._channel = channel.connect(self._address)
            if self._commands == 0 and self._channel.has("cmd/0"):
                self._channel = None
                raise MeasurementError(
                    f"not run: the store at {self._address.host}:{self._address.port} has the messages of an earlier run; "
                    "start this one with another --master-port",
                    kind="missing",
                )
            self._beating.start()
        return self._channel

    def _beat_forever(self) -> None:
        with contextlib.suppress(ChannelLostError):
            own = channel.connect(self._address)
            count = 1
            own.beat(CONTROLLER, count)  # at once: an agent that is told to end asks whether there is a controller
            while not self._stop_beating.wait(LIVENESS_S):
                count += 1
                own.beat(CONTROLLER, count)

    # Calls.

    def call(self, call: Call) -> dict[int, Message]:
        """Run it; one reply for each rank, also for those that died, hung, were released or are lost.

        Raises:
            TerminatedError: SIGTERM came meanwhile.
        """
        if self._ending is not None:
            raise TerminatedError(f"not run: {self._ending}", kind="missing")
        if call.once:
            called = call.function["qualname"]
            if called not in self._first:
                self._first[called] = self.call(replace(call, once=False))
            return self._first[called]
        if self.on_call is not None:
            self.on_call()
        replies = self._refuse_lost(call)
        ranks = [rank for rank in call.ranks if rank not in replies]
        groups = [tuple(group) for group in call.groups or () if not any(rank in replies for rank in group)]
        if not ranks:
            return replies
        started_s = time.monotonic()
        try:
            replies.update(self._exchange(call, ranks, groups))
        except ChannelLostError as lost:
            raise MeasurementError(f"not run: {lost}; nothing can be measured without it", kind="missing") from lost
        if not call.is_startup:
            self.measuring_s += time.monotonic() - started_s
        self._keep_output(call, replies)
        self._bury(replies)
        return replies

    def _exchange(self, call: Call, ranks: list[int], groups: list[tuple[int, ...]]) -> dict[int, Message]:
        number = self._send(call, ranks, self._join(groups))
        try:
            return self._gather(call, ranks, groups, number)
        except BaseException:
            self._command({"t": "abort", "id": number, "ranks": ranks, "why": "the run was interrupted"})
            raise

    def terminate(self, by: str) -> None:
        """A signal ends this run. If it came because an agent here died, the others may still finish their call.

        torchrun sends SIGTERM to a node whose rank died, and SIGKILL 30 s later (torch.distributed.elastic).
        """
        dead = [rank for rank in self._who if self._is_dead_here(rank)]
        if self._launch is None or not dead or self._ending is not None:
            self.terminated = by
            return
        self._ending_s = time.monotonic()
        self._ending = f"rank {dead[0]}: its agent process has ended, and torchrun ends this node because of it"

    def name(self, function: Callable[..., Any]) -> Message:
        """How ``function`` is named to the workers."""
        return functions.name_function(function, rootdir=self.rootdir)

    def _keep_output(self, call: Call, replies: dict[int, Message]) -> None:
        """Append what each rank printed in this call to its log; a disk that is full costs no measurement."""
        for rank, reply in sorted(replies.items()):
            if not reply.get("output"):
                continue
            if self.on_output is not None:
                self.on_output(rank, reply["output"])
            if self._logs is not None:
                with contextlib.suppress(OSError), (self._logs / f"rank{rank}.log").open("a", encoding="utf-8") as log:
                    log.write(f"--- {call.function['qualname']}\n{reply['output'].rstrip()}\n")

    def _refuse_lost(self, call: Call) -> dict[int, Message]:
        replies = {rank: self._lost[rank] for rank in call.ranks if rank in self._lost}
        for group in call.groups or ():
            gone = [rank for rank in group if rank in self._lost]
            for rank in group if gone else ():
                replies.setdefault(rank, released_reply(f"rank {gone[0]} cannot take part: {self._lost[gone[0]]['error']}"))
        return replies

    def _send(self, call: Call, ranks: list[int], groups: list[Message] | None) -> str:
        number, self._calls = f"{self._nonce}-{self._calls}", self._calls + 1
        self._command(
            {
                "t": "call",
                "id": number,
                "ranks": ranks,
                "function": call.function,
                "kwargs": plain_data.to_plain(call.kwargs),
                "groups": groups if call.groups is not None else None,
                "deadline_s": call.deadline_s,
                "setup_s": call.setup_s,
                "device": self.device,
                "any_device": call.any_device,
                "test": call.test_arguments is not None,
                "test_arguments": list(call.test_arguments or ()),
                "sys_path": [path for path in sys.path if path],
                "cwd": str(Path.cwd()),
                "nodes": {str(self._who[rank]["group_rank"]): node for rank, node in self._nodes.items()},
            }
        )
        return number

    def _gather(self, call: Call, ranks: list[int], groups: list[tuple[int, ...]], number: str) -> dict[int, Message]:
        gathering = Gathering(waiting=set(ranks), groups=groups, give_up_s=_give_up(call))
        while gathering.waiting:
            self._raise_if_terminated()
            store = self._open_channel()
            keys = {rank: f"res/{number}/{rank}" for rank in gathering.waiting}
            done = store.arrived(list(keys.values()), within_s=SLICE_S)
            if done or store.has(f"fault/{number}"):
                written = {rank: key for rank, key in keys.items() if done or store.has(key)}
                for rank, reply in zip(written, store.take_written(list(written.values())), strict=True):
                    gathering.add(rank, forged_reply(reply) if isinstance(reply, channel.ForgedMessageError) else reply)
            self._report_progress(number, gathering.waiting)
            for rank, why in self._silent(gathering.waiting).items():
                gathering.add(rank, lost_reply(why))
            if time.monotonic() > gathering.give_up_s:
                for rank in list(gathering.waiting):
                    gathering.add(rank, lost_reply("its agent did not answer within the deadline"))
            if (release := gathering.to_release()) is not None:
                self._command({"t": "abort", "id": number, **asdict(release)})
        return gathering.replies

    def _report_progress(self, number: str, waiting: set[int]) -> None:
        if self.on_progress is None or not waiting:
            return
        rank = min(waiting)
        if self._open_channel().has(f"prog/{rank}"):
            with contextlib.suppress(channel.ForgedMessageError):
                said = self._open_channel().take(f"prog/{rank}")
                if said["call"] == number:
                    self.on_progress(rank, said["step"], said["fraction"])

    # Process groups: a group ends by all of its members leaving it, or by all of its workers being killed.

    def _join(self, groups: list[tuple[int, ...]]) -> list[Message]:
        wanted = set(groups)
        members = {rank for group in groups for rank in group}
        standing = [group for group in self._groups if set(group[1]) & members and group[1] not in wanted]
        if standing:
            self._dissolve(standing)
        known = {ranks: name for name, ranks in self._groups}
        for index, group in enumerate(groups):
            if group not in known:
                known[group] = f"{self._address.run_id}/pg/{self._nonce}-{self._calls}/{index}"
                self._groups.append((known[group], group))
        return [{"id": known[group], "ranks": list(group)} for group in groups]

    def _dissolve(self, standing: list[tuple[str, tuple[int, ...]]]) -> None:
        ranks = sorted(rank for _, group in standing for rank in group)
        self._groups = [group for group in self._groups if group not in standing]
        leave = Call(function=self.name(worker.leave_group), ranks=ranks, deadline_s=LEAVE_S, setup_s=LEAVE_S, any_device=True)
        number = self._send(leave, ranks, None)
        replies = self._gather(leave, ranks, [], number)
        if not all(reply["ok"] for reply in replies.values()):
            self._command({"t": "kill", "ranks": ranks})

    def _bury(self, replies: dict[int, Message]) -> None:
        """Respawn whoever shares a group with a worker that is no more; remember ranks that will never answer."""
        failed = {rank for rank, reply in replies.items() if not reply["ok"]}
        for rank in failed:
            if replies[rank]["kind"] == "lost":
                self._lost.setdefault(rank, replies[rank])
        broken = [group for group in self._groups if failed & set(group[1])]
        if broken:
            self._groups = [group for group in self._groups if group not in broken]
            self._command({"t": "kill", "ranks": sorted({rank for _, group in broken for rank in group} - failed)})

    # Liveness.

    def _silent(self, ranks: set[int]) -> dict[int, str]:
        """The ranks whose agents are gone: no process on this node, no beat from another for :data:`SILENT_S`."""
        now_s = time.monotonic()
        gone = {rank: "its agent process has ended" for rank in ranks if self._is_dead_here(rank)}
        if now_s < self._next_look_s:
            return gone
        self._next_look_s = now_s + LIVENESS_S
        beats = self._open_channel().beats(sorted(ranks))
        for rank in ranks:
            beat = beats.get(rank, b"")
            if rank not in self._beats or self._beats[rank][0] != beat or now_s - self._last_look_s > 2 * LIVENESS_S:
                self._beats[rank] = (beat, now_s)
            elif now_s - self._beats[rank][1] > SILENT_S:
                gone[rank] = f"its agent on {self.hostname_of(rank)} has been silent for {SILENT_S:g} s"
        self._last_look_s = now_s
        return gone

    def _is_dead_here(self, rank: int) -> bool:
        who = self._who.get(rank)
        if who is None or who["machine"] != machine():
            return False
        return is_gone(who["pid"])

    def _raise_if_terminated(self) -> None:
        if self._ending is not None and time.monotonic() > self._ending_s + LAST_CALL_S:
            raise TerminatedError(f"not run: {self._ending}", kind="missing")
        if self.terminated is not None:
            raise TerminatedError(f"not run: terminated by {self.terminated}", kind="missing")

    def _command(self, message: Message) -> None:
        if message.get("ranks") == []:
            return
        if "ranks" in message:
            message = {**message, "ranks": spans(message["ranks"])}
        self._open_channel().put(f"cmd/{self._commands}", message)
        self._commands += 1


def address_of(launch: Launch) -> Address:
    """Where the ranks of a torchrun job meet."""
    run_id = f"{launch.run_id}.{launch.restart_count}"  # torchrun keeps its store when it restarts
    return Address(host=launch.master_addr, port=launch.master_port, run_id=run_id)


def rank_of(launch: Launch) -> Rank:
    """This torchrun rank as an agent's identity."""
    return Rank(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        group_rank=launch.group_rank,
    )


def _local_rank(number: int, num_local: int) -> Rank:
    return Rank(rank=number, world_size=num_local, local_rank=number, local_world_size=num_local, group_rank=0)


def _give_up(call: Call) -> float:
    return time.monotonic() + call.setup_s + call.deadline_s + MARGIN_S
