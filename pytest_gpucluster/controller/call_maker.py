"""Makes calls: sends each to the agents, collects the replies, and ends what cannot finish by itself.

A process group stands between calls. It ends by all of its members leaving it, or by all of their workers being killed.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from pytest_gpucluster.controller.call import Call, CallClock, EarlyEnd, Observer, PendingReplies
from pytest_gpucluster.controller.command_link import CommandLink, Members
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.places import Device
from pytest_gpucluster.protocol import functions, plain_data
from pytest_gpucluster.protocol.channel import ChannelLostError, keys_of_call, progress_key
from pytest_gpucluster.protocol.codec import RefusedMessageError
from pytest_gpucluster.protocol.messages import AbortCall, KillWorkers, ProgressInCall, RankGroup, Reply, StartCall
from pytest_gpucluster.protocol.rank import spans
from pytest_gpucluster.text import visible
from pytest_gpucluster.worker import worker


class ProcessGroups:
    """The groups whose members have joined and not left."""

    def __init__(self) -> None:
        """There is no group."""
        self._standing: list[RankGroup] = []
        self._nonce = secrets.token_hex(8)
        self._num_made = 0

    def remove_others(self, wanted: Sequence[tuple[int, ...]]) -> list[int]:
        """Forget the groups that stand in the way of the wanted ones; returns the ranks that have to leave them."""
        members = {rank for ranks in wanted for rank in ranks}
        return self._remove([one for one in self._standing if members & {*one.ranks} and one.ranks not in wanted])

    def remove_of(self, ranks: Collection[int]) -> list[int]:
        """Forget the groups of these ranks; returns all ranks that have to leave them."""
        return self._remove([one for one in self._standing if {*ranks} & {*one.ranks}])

    def join(self, wanted: Sequence[tuple[int, ...]]) -> tuple[RankGroup, ...]:
        """The groups of these ranks, those that stand and new ones."""
        known = {group.ranks: group for group in self._standing}
        for ranks in wanted:
            if ranks not in known:
                known[ranks] = RankGroup(id=f"pg/{self._nonce}/{self._num_made}", ranks=ranks)
                self._num_made += 1
                self._standing.append(known[ranks])
        return tuple(known[ranks] for ranks in wanted)

    def _remove(self, groups: list[RankGroup]) -> list[int]:
        self._standing = [group for group in self._standing if group not in groups]
        return sorted({rank for group in groups for rank in group.ranks})


SLICE_S = 0.1
"""How long the controller waits for ranks before it looks at faults, heartbeats and deadlines."""
AT_ONCE_S = 0.002
"""A look at the replies that takes no longer has not waited."""
MARGIN_S = 20.0
PAUSE_S, MOST_PAUSES = 10.0, 3
"""A round that takes longer is a pause: the store answered nobody, or all stood still. A few in a call cost no margin."""
LEAVE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """What calls need besides their arguments: the way to the agents, what is known of them, and whether the run ends."""

    link: CommandLink
    members: Members
    early_end: EarlyEnd
    device: Device
    rootdir: Path


class CallMaker:
    """One call at a time, and what stays between calls: process groups and the clock."""

    def __init__(self, context: CallContext) -> None:
        """Make calls without an observer and without a log, until :meth:`observe`."""
        nonce = secrets.token_hex(8)
        self.clock = CallClock()
        self._context = context
        self._observer = Observer()
        self._logs: Path | None = None
        self._nodes: Mapping[int, int] = {}
        self._groups = ProcessGroups()
        self._ids = (f"{nonce}-{number}" for number in itertools.count())
        self._once: dict[str, dict[int, Reply]] = {}
        self._keys_of_last: list[str] = []
        self._one_at_a_time = threading.RLock()  # a test may have threads

    def observe(self, observer: Observer, *, logs: Path) -> None:
        """Report to ``observer``, and append what ranks print to ``rank<n>.log`` in the folder ``logs``."""
        self._observer = observer
        self._logs = logs

    def assign_nodes(self, nodes: Mapping[int, int]) -> None:
        """Tell every later call which node each rank is on: by rank, the number of its node, from 0."""
        self._nodes = nodes

    def call(self, call: Call) -> dict[int, Reply]:
        """Make the call; one reply for each rank, also for those that died, hung, were released or are lost.

        Raises:
            TerminatedError: the run ends.
            MeasurementError: the store is lost.
        """
        with self._one_at_a_time:
            return self._call(call)

    def _call(self, call: Call) -> dict[int, Reply]:
        self._context.early_end.check_before_call()
        if call.once:
            function = call.function.qualname
            if function not in self._once:
                self._once[function] = self.call(replace(call, once=False))
            return self._once[function]
        replies = self._context.members.failures_before(call)
        ranks = [rank for rank in call.ranks if rank not in replies]
        groups = [tuple(group) for group in call.groups or () if not any(rank in replies for rank in group)]
        if not ranks:
            return replies
        started_s = time.monotonic()
        try:
            replies.update(self._exchange(call, ranks, groups))
        except ChannelLostError as lost:
            why = self._context.link.silence or lost
            raise MeasurementError(f"not run: {why}; nothing can be measured without it", kind="missing") from lost
        finally:
            self.clock.add(call, began_s=started_s, ended_s=time.monotonic())
        self._keep_output(call, replies)
        self._drop_broken_groups(replies)
        return replies

    def _exchange(self, call: Call, ranks: list[int], groups: list[tuple[int, ...]]) -> dict[int, Reply]:
        """The replies to the call. One with variables has workers of its own: libraries read theirs once."""
        if not call.variables:
            return self._exchange_with_these(call, ranks, groups)
        self._end_workers(ranks)
        try:
            return self._exchange_with_these(call, ranks, groups)
        finally:
            self._end_workers(ranks)

    def _exchange_with_these(self, call: Call, ranks: list[int], groups: list[tuple[int, ...]]) -> dict[int, Reply]:
        self._leave(self._groups.remove_of(ranks) if call.groups is None else self._groups.remove_others(groups))
        pending = self._send(call, ranks, None if call.groups is None else self._groups.join(groups))
        try:
            return self._gather(pending)
        except BaseException:
            self._send_if_connected(AbortCall(id=pending.call_id, ranks=spans(ranks), why="the run was interrupted"))
            raise

    def _send(self, call: Call, ranks: list[int], groups: tuple[RankGroup, ...] | None) -> PendingReplies:
        """Send the call to the agents of ``ranks``, which reply to it from then on."""
        call_id, hellos = next(self._ids), self._context.members.hellos
        self._context.link.send(
            StartCall(
                id=call_id,
                ranks=spans(ranks),
                function=call.function,
                kwargs=plain_data.to_plain(call.kwargs),
                groups=groups,
                deadline_s=float(call.deadline_s),
                setup_s=call.setup_s,
                device=self._context.device,
                any_device=call.any_device,
                test_arguments=call.test_arguments,
                sys_path=tuple(path for path in sys.path if path),
                cwd=str(Path.cwd()),
                nodes={str(hellos[rank].group_rank): node for rank, node in self._nodes.items()},
                variables=call.variables,
            )
        )
        return PendingReplies(
            call_id=call_id,
            waiting=set(ranks),
            groups=[group.ranks for group in groups or ()],
            give_up_s=time.monotonic() + call.setup_s + call.deadline_s + MARGIN_S,
        )

    def _gather(self, pending: PendingReplies) -> dict[int, Reply]:
        """Wait until each rank has answered, or will not; release ranks that wait for one that failed."""
        channel, began_s = self._context.link.channel, time.monotonic()
        keys = keys_of_call(pending.call_id, pending.waiting, pending.groups)
        pauses_left = MOST_PAUSES
        try:
            while pending.waiting:
                round_s = time.monotonic()
                self._context.early_end.check()
                self._work_meanwhile(pending, began_s)
                self._report_progress(pending.call_id, pending.waiting)
                self.report_wait()
                pending.lose(self._context.members.silent(pending.waiting, channel), channel)
                paused_s = time.monotonic() - round_s
                if paused_s > PAUSE_S and pauses_left:
                    pending.give_up_s += paused_s
                    pauses_left -= 1
                if time.monotonic() > pending.give_up_s:
                    pending.give_up(channel)
                if (release := pending.to_release()) is not None:
                    self._context.link.send(release)
        finally:  # an interrupted call was work, too
            self.clock.add_work(began_s=began_s, ended_s=pending.complete_s or time.monotonic())
        self._context.link.forget(self._keys_of_last)  # an agent may still look for the replies of others to this call
        self._keys_of_last = keys
        return pending.replies

    def _work_meanwhile(self, pending: PendingReplies, began_s: float) -> None:
        """Do what is to be done while ranks work, then look for replies for a while.

        What was there at the first look may have come before: then the ranks waited for the work, and the clock says so.
        """
        channel, looked_s = self._context.link.channel, time.monotonic()
        if self._observer.on_work is not None:
            self._observer.on_work(looked_s - began_s)
        worked_s = time.monotonic()
        pending.receive(channel, within_s=SLICE_S)
        if pending.complete_s is not None and pending.complete_s - worked_s < AT_ONCE_S:
            pending.complete_s = looked_s

    def report_wait(self) -> None:
        """Called several times a second while ranks are waited for."""
        if self._observer.on_wait is not None:
            self._observer.on_wait()

    def _report_progress(self, call_id: str, waiting: set[int]) -> None:
        """Report the progress of the first rank that still works."""
        if self._observer.on_progress is None or not waiting:
            return
        rank, channel = min(waiting), self._context.link.channel
        if channel.has(progress_key(rank)):
            with contextlib.suppress(RefusedMessageError):
                progress = channel.take(progress_key(rank), ProgressInCall.read)
                if progress.call == call_id:
                    self._observer.on_progress(rank, progress.step, progress.fraction)

    def _keep_output(self, call: Call, replies: Mapping[int, Reply]) -> None:
        """Append what each rank printed in this call to its log; a full disk costs no measurement."""
        for rank, reply in sorted(replies.items()):
            if not reply.output:
                continue
            if self._observer.on_output is not None:
                self._observer.on_output(rank, reply.output)
            if self._logs is not None:
                with contextlib.suppress(OSError), (self._logs / f"rank{rank}.log").open("a", encoding="utf-8") as log:
                    log.write(f"--- {call.function.qualname}\n{visible(reply.output).rstrip()}\n")

    # Process groups.

    def _leave(self, ranks: list[int]) -> None:
        """Have all members leave their groups; kill all their workers if one does not."""
        if not ranks:
            return
        function = functions.name_function(worker.leave_group, rootdir=self._context.rootdir)
        call = Call(function=function, ranks=ranks, deadline_s=LEAVE_S, setup_s=LEAVE_S, any_device=True)
        replies = self._gather(self._send(call, ranks, None))
        if not all(reply.ok for reply in replies.values()):
            self._send_if_connected(KillWorkers(ranks=spans(ranks)))

    def _end_workers(self, ranks: list[int]) -> None:
        """Kill the workers of these ranks, and those of all ranks that share a process group with one."""
        self._send_if_connected(KillWorkers(ranks=spans({*ranks, *self._groups.remove_of(ranks)})))

    def _drop_broken_groups(self, replies: Mapping[int, Reply]) -> None:
        """Kill the workers whose process group a rank broke or left behind otherwise; remember the ranks that are lost."""
        self._context.members.note_lost(replies)
        failed = {rank for rank, reply in replies.items() if not reply.ok}
        changed = {rank for rank, reply in replies.items() if reply.ok and reply.group_changed}
        self._send_if_connected(KillWorkers(ranks=spans({*self._groups.remove_of(failed | changed), *changed} - failed)))

    def _send_if_connected(self, command: AbortCall | KillWorkers) -> None:
        """Send what ends something. A lost store is left to who waits for replies; it must not hide replies, nor a Ctrl-C."""
        with contextlib.suppress(ChannelLostError):
            self._context.link.send(command)
