"""Runs the calls of one rank in its worker, and answers each of them: with a result, or with the reason why there is none."""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from collections import deque
from dataclasses import dataclass

from msgspec.structs import replace

from pytest_gpucluster.agent.group_hang import GroupHang, group_of
from pytest_gpucluster.agent.heartbeat import Heartbeat
from pytest_gpucluster.agent.spawner import Spawner
from pytest_gpucluster.agent.worker_process import LOG_NAME, READS, WorkerProcess, describe_end, site_log, worker_environment
from pytest_gpucluster.inventory import nccl_log
from pytest_gpucluster.protocol import messages, node_events
from pytest_gpucluster.protocol.channel import StoreChannel, progress_key, reply_key
from pytest_gpucluster.protocol.codec import MalformedMessageError
from pytest_gpucluster.protocol.messages import Failure
from pytest_gpucluster.protocol.rank import STOPPED, Rank, spans
from pytest_gpucluster.worker.last_collective import LastCollective

LATEST_ENTRY_S = 5.0
"""After another rank of the group raised, a rank that is still in its set-up gets this long to enter the call."""


class CurrentCall:
    """One call in progress on this rank.

    Before the function is entered, the call's ``setup_s`` counts, afterwards its ``deadline_s``. The release counts besides,
    once the controller has aborted the call.
    """

    def __init__(self, command: messages.StartCall) -> None:
        """Start the clock of the set-up."""
        self.command = command
        self.aborted: messages.AbortCall | None = None
        self.foreign_processes: tuple[messages.ForeignProcess, ...] = ()
        self._entered_s: float | None = None
        self._deadline_s = time.monotonic() + command.setup_s
        self._release_s = math.inf

    @property
    def has_entered(self) -> bool:
        """Whether the worker has finished the set-up and called the function."""
        return self._entered_s is not None

    @property
    def next_s(self) -> float:
        """When the next clock runs out, by the monotonic clock."""
        return min(self._deadline_s, self._release_s)

    def enter(self) -> None:
        """Called when the worker calls the function: start the deadline, and a time of grace that waited for this."""
        self._entered_s = time.monotonic()
        self._deadline_s = self._entered_s + self.command.deadline_s
        if self.aborted is not None:
            self._release_s = self._entered_s + self.aborted.grace_s

    def abort(self, command: messages.AbortCall) -> None:
        """Called when the controller aborts this call: set when the rank is released.

        If a rank raised, this rank may be about to raise as well. So it is released only after it has been in the call for the
        time of grace. If the failed rank never entered, this rank cannot enter either, and its own way in is not waited for.
        """
        self.aborted = command
        may_still_enter = not self.has_entered and command.grace_s > 0 and command.entered
        if may_still_enter:
            self._release_s = time.monotonic() + LATEST_ENTRY_S
        else:
            self._release_s = (self._entered_s or time.monotonic()) + command.grace_s

    def failure(self) -> Failure | None:
        """How the call ends by its clocks: it was aborted and its time of grace is over, or it took longer than allowed."""
        now_s = time.monotonic()
        if self.aborted is not None and now_s >= self._release_s:
            return Failure(kind="released", error=self.aborted.why)
        if now_s < self._deadline_s:
            return None
        set_up = f"did not finish its set-up within {self.command.setup_s:g} s"
        late = f"did not return within {self.command.deadline_s:g} s" if self.has_entered else set_up
        return Failure(kind="hung", error=late)


STEP_CHARACTERS = 80
MOST_ENDED = 1000
"""So many workers of a rank are remembered after their end, for the errors that the driver reports of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """What an agent works with: its rank, its connection to the store, its spawner, and the folders of this run's tests.

    ``requested``: what the options on its node ask for; None for an agent that the controller itself started.
    """

    rank: Rank
    channel: StoreChannel
    spawner: Spawner
    roots: tuple[str, ...]
    requested: dict[str, str] | None = None


class CallRunner:
    """One rank's worker and the one call that it may be busy with.

    Every call gets exactly one reply. A worker is kept for the next call only after a success. A rank whose worker cannot be
    killed, or whose spawner has ended, is lost: it runs nothing more, and answers every call with the reason.
    """

    def __init__(self, context: AgentContext, selector: selectors.BaseSelector, heartbeat: Heartbeat) -> None:
        """Register with the agent's ``selector``; beat during long waits."""
        self._context = context
        self._selector = selector
        self._heartbeat = heartbeat
        self._worker: WorkerProcess | None = None
        self._current: CurrentCall | None = None
        self._lost: Failure | None = None
        self._failed_idle: Failure | None = None
        self._ended: deque[tuple[int, float]] = deque(maxlen=MOST_ENDED)
        selector.register(context.spawner, selectors.EVENT_READ, self.on_exits)

    @property
    def next_clock_s(self) -> float:
        """When :meth:`check_clocks` has something to do, by the monotonic clock."""
        return self._current.next_s if self._current is not None else math.inf

    # Called by the agent.

    def start(self, command: messages.StartCall) -> None:
        """Called when the controller starts a call: hand it to the worker."""
        if self._current is not None:  # the controller has given up that call: its reply must not be taken for this one's
            self._current = None
            self.discard_worker()
        self._current = CurrentCall(command)
        if self._lost is not None:
            self._finish(self._lost)
            return
        if self._failed_idle is not None:  # the controller counts on its groups until a reply says what happened
            failed, self._failed_idle = self._failed_idle, None
            self._finish(replace(failed, error=f"{failed.error}, between two calls"))
            return
        try:
            if self._worker is None:
                self._worker = self._start_worker(command)
                self._heartbeat.beat_if_connected()  # the worker may be slow to take the call, too
        except OSError as error:
            self._finish(Failure(kind="died", error=f"no worker could be started: {error}", blames="host"))
            return
        try:
            self._worker.tail.clear()
            self._worker.wire.send(self._task_of(command))
        except OSError as error:
            self._finish(Failure(kind="died", error=f"the worker did not take the call: {error}"))

    def abort(self, command: messages.AbortCall) -> None:
        """Called when the controller aborts a call. A call that is over already stays as it is."""
        if self._current is not None and self._current.command.id == command.id:
            self._current.abort(command)
            self.check_clocks()

    def check_clocks(self) -> None:
        """Called in each round of the agent's loop: end the call if it was aborted, or took too long."""
        if self._current is not None and time.monotonic() >= self._current.next_s:
            self._catch_up()
        if self._current is not None and (failure := self._current.failure()) is not None:
            self._end(self._current.command, failure)

    def _catch_up(self) -> None:
        """Take what came while this thread waited for the store: a worker that has answered, or ended, does not hang."""
        for _ in range(READS):
            ready = [key.data for key, _ in self._selector.select(0) if key.data in (self.on_exits, self._on_message)]
            if not ready or self._current is None:
                return
            ready[0]()

    def discard_worker(self) -> None:
        """Called when the worker's group is broken, after a failure, and at the end: kill the worker.

        The next call starts a new one.
        """
        if self._worker is None:
            return
        self._kill(self._worker)
        self._ended.append((self._worker.pid, round(time.monotonic(), 3)))
        for source in (self._worker.wire, self._worker.output_fd):
            with contextlib.suppress(KeyError):
                self._selector.unregister(source)
        self._worker.close()
        self._worker = None

    # Called by the selector.

    def on_exits(self) -> None:
        """Called when the spawner reports that workers ended, or has ended itself."""
        try:
            exits = self._context.spawner.exits()
        except OSError:
            self._selector.unregister(self._context.spawner)
            self._lost = Failure(kind="lost", error="the process that starts workers has ended", blames="host")
            self._finish(self._lost)
            return
        for pid, status in exits:
            if self._worker is not None and pid == self._worker.pid:
                self._on_worker_exit(self._worker, status)

    def _on_worker_exit(self, worker: WorkerProcess, status: int) -> None:
        worker.note_exit()
        words, part = describe_end(status, oom_kills_before=worker.oom_kills_before)
        died = Failure(kind="died", error=words, blames=part, stacks=worker.crash())
        if self._current is None:
            self._fail(died)
            return
        with contextlib.suppress(MalformedMessageError):
            for message in worker.last_messages():
                self._take(message)
        self._finish(died)
        self.discard_worker()

    def _on_output(self) -> None:
        """Called when the worker has printed, or closed its output."""
        if self._worker is not None and not self._worker.drain():
            self._selector.unregister(self._worker.output_fd)

    def _on_message(self) -> None:
        """Called when the worker has sent messages, or closed its line."""
        assert self._worker is not None
        try:
            received = self._worker.receive()
            if received is None:
                self._selector.unregister(self._worker.wire)
            for message in received or ():
                self._take(message)
        except MalformedMessageError as wrong:
            self._fail(Failure(kind="refused", blames="software", error=f"the worker sent what is no message: {wrong}"))

    def _take(self, message: messages.FromWorker) -> None:
        call_id = self._current.command.id if self._current is not None else None
        if isinstance(message, messages.StepReport):
            if call_id is not None:  # a thread may say it late
                report = messages.ProgressInCall(step=message.step[:STEP_CHARACTERS], fraction=message.fraction, call=call_id)
                self._context.channel.put(progress_key(self._context.rank.rank), report)
            return
        if isinstance(message, messages.ForeignProcess):
            if self._current is not None and message.call == call_id:  # likewise
                self._current.foreign_processes += (message,)
            return
        if self._current is None or message.call != call_id:
            raise MalformedMessageError(f"a message of call {message.call[:STEP_CHARACTERS]!r}, which it is not busy with")
        if isinstance(message, messages.Entered):
            self._current.enter()
        elif isinstance(message, messages.Success) and self._hang_of(self._current.command).is_found():
            self._finish(Failure(kind="released", error="it returned only after another rank was found to hang"))
        else:
            self._finish(message)

    def _hang_of(self, call: messages.StartCall) -> GroupHang:
        return GroupHang(self._context.channel, self._heartbeat, call, self._context.rank.rank)

    # The worker.

    def _start_worker(self, command: messages.StartCall) -> WorkerProcess:
        spawner = self._context.spawner
        nccl_log.remove(spawner.folder / LOG_NAME)  # that of the worker before
        environment = worker_environment(self._context.rank, spawner.folder, nodes=command.nodes)
        environment |= {name: value for name, value in command.variables.items() if name in messages.CALL_VARIABLES}
        environment[node_events.VARIABLE] = node_events.listener_of(self._context.channel, self._context.rank.group_rank) or ""
        environment[node_events.ENDED_VARIABLE] = node_events.EndedWorkers(ended=tuple(self._ended)).to_json().decode()
        worker = WorkerProcess(spawner, cwd=command.cwd, environment=environment)
        self._selector.register(worker.wire, selectors.EVENT_READ, self._on_message)
        self._selector.register(worker.output_fd, selectors.EVENT_READ, self._on_output)
        return worker

    def _task_of(self, command: messages.StartCall) -> messages.Task:
        rank, channel, member = self._context.rank.rank, self._context.channel, None
        if (group := group_of(command, rank)) is not None:
            at, size, address = group.ranks.index(rank), len(group.ranks), channel.address
            member = messages.GroupMember(
                id=group.id, rank=at, size=size, host=address.host, port=address.port, setup_s=command.setup_s
            )
        call = replace(command, groups=None)
        return messages.Task(call=call, roots=self._context.roots, trusted=channel.is_signed, group=member)

    def _kill(self, worker: WorkerProcess) -> bool:
        """Kill the worker and beat meanwhile. False, and this rank is lost, if it does not end."""
        if worker.kill(meanwhile=self._heartbeat.beat_if_connected):
            return True
        self._lost = Failure(kind="lost", error=f"worker {worker.pid} does not end on SIGKILL (state {worker.state()})")
        return False

    # The end of a call.

    def _end(self, call: messages.StartCall, failure: Failure) -> None:
        """Kill the worker that did not return, after a look at what it does, and answer with ``failure``."""
        last = None
        if self._worker is not None:
            last = self._worker.collective()  # before any signal: this rank's, or one that wakes a peer's worker
            if failure.kind == "hung":
                failure = self._hang_of(call).look_at(self._worker, failure)
            elif (failure := self._worker.look(failure)).state != STOPPED:
                failure = replace(failure, stacks=self._worker.stacks())
            if not self._kill(self._worker) and failure.kind == "hung":
                failure = replace(failure, error=f"{failure.error}; SIGKILL does not end it")
        self._finish(failure, last)

    def _fail(self, failure: Failure) -> None:
        """Answer the current call for a worker that cannot go on, or the next call if there is none."""
        if self._current is not None:
            self._finish(failure)
        else:
            self._failed_idle = failure
        self.discard_worker()

    def _finish(self, result: messages.Reply, last: LastCollective | None = None) -> None:
        """Send the reply to the current call, if there is one. After a failure the worker is discarded.

        ``last``: the collective that the worker was in, if it was read before.
        """
        if self._current is None:
            return
        call = self._current.command
        reply = replace(result, entered=self._current.has_entered, foreign_processes=self._current.foreign_processes)
        self._current = None
        if self._worker is not None:
            self._worker.drain()
            last = last or self._worker.collective()
            output = self._worker.printed()
            if not result.ok:
                output += site_log(self._context.spawner.folder)
            reply = replace(reply, collectives=last.count, collective=last.name, output=output)
            reply = replace(reply, members=_members_of(last, call, self._context.rank.rank))
        rank, channel = self._context.rank.rank, self._context.channel
        try:
            channel.put(reply_key(call.id, rank), reply)
        except ValueError as error:
            reply = Failure(kind="refused", blames="software", type="ValueError", error=f"the result is too large: {error}")
            channel.put(reply_key(call.id, rank), reply)
        if not reply.ok:
            channel.note_fault(call.id, rank)
            self.discard_worker()


def _members_of(last: LastCollective, call: messages.StartCall, rank: int) -> messages.Spans:
    """The ranks that take part in a collective of this rank; empty without a process group."""
    group = group_of(call, rank)
    ranks = () if group is None else group.ranks
    return spans(one for first, end in last.members or ((0, len(ranks)),) for one in ranks[first : end + 1])
