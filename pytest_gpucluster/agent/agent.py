"""The agent: one process for each rank. It owns a worker, enforces deadlines, and answers every call.

The agent calls neither CUDA nor NVML, and its main thread never waits in the store for long. So it can report and leave,
whatever its worker does. ``python -m pytest_gpucluster.agent.main`` starts agents.

An agent also writes the reports of a run whose controller died. The controller's journal lies on the disk of its node. An
agent of that node sees at once when the controller ends, and writes the reports from the journal. If the whole node is lost,
an agent of another node writes them from its journal replica, where its own command line says. The lines of the replica came
through the store.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_gpucluster.agent.call_runner import AgentContext, CallRunner
from pytest_gpucluster.agent.command_reader import CommandReader
from pytest_gpucluster.agent.heartbeat import Heartbeat
from pytest_gpucluster.config.run_files import JOURNAL
from pytest_gpucluster.config.torchrun import show_last, write_error_file
from pytest_gpucluster.protocol import messages
from pytest_gpucluster.protocol.channel import ChannelLostError, StoreChannel, bye_key, command_key, hello_key, journal_key
from pytest_gpucluster.protocol.codec import RefusedMessageError
from pytest_gpucluster.protocol.rank import machine, own_hostname

REBUILD_S, REBUILD_S_PER_MB = 20.0, 2.0
"""How long the reports may take, and how much longer for each megabyte of the journal: ten times what a free core takes."""


def write_reports(target: messages.ReportTarget, *, journal_copy: Path | None = None) -> None:
    """Write the reports, from ``journal_copy`` if the journal in the target's folder is missing."""
    source = journal_copy if journal_copy is not None else Path(target.folder) / JOURNAL
    junit = ["--junitxml", target.junit] if target.junit else []
    journal = ["--journal", str(journal_copy)] if journal_copy is not None else ["--run", target.run]
    command = [sys.executable, "-m", "pytest_gpucluster.cli", "report", target.folder, *junit, *journal]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(  # noqa: S603 -- our own command
            command,
            timeout=rebuild_deadline_s(source),
            check=False,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # torchrun's SIGTERM goes to the whole process group of a rank
        )


def rebuild_deadline_s(journal: Path) -> float:
    """How long it may take to write the reports from a journal of this length."""
    with contextlib.suppress(OSError):
        return REBUILD_S + REBUILD_S_PER_MB * journal.stat().st_size / 1e6
    return REBUILD_S


class JournalReplica:
    """A copy of the controller's journal on another node."""

    def __init__(self, reader: StoreChannel, target: messages.ReportTarget, file: Path) -> None:
        """Start copying into ``file``, in a thread that has the connection ``reader`` for itself."""
        self._target = target
        self._file = file
        threading.Thread(target=self._copy, args=(reader,), daemon=True).start()

    def _copy(self, reader: StoreChannel) -> None:
        with self._file.open("w", encoding="utf-8") as copy, contextlib.suppress(ChannelLostError, RefusedMessageError):
            for number in itertools.count():
                copy.write(reader.take(journal_key(number), messages.JournalText.read).text)
                copy.flush()

    def write_reports(self) -> None:
        """Write the reports from the copy, because the controller is lost."""
        sys.stderr.write(f"gpucluster: the controller is lost; its report is finished here, in {self._target.folder}\n")
        write_reports(self._target, journal_copy=self._file)


TICK_S = 0.5
PAUSE_S = 0.05
BEHIND_S = 15.0
"""How long the thread that reads commands may take for those that are written, on a machine that is busy with other work."""
SIBLINGS_S = 2.0
STUCK_S = 60.0
"""Longer than the main thread waits for anything: an answer of the store does not come, because the network is cut."""
SLOWER = 10
"""An agent that writes reports has so many times as long: a long journal takes its time, and a disk that hangs must not."""
LOST_CODE = 3
LOST = messages.Quit(code=LOST_CODE, last_lines="no verdict is known here: the controller of the run is lost")


class Agent:
    """Obeys the controller's commands until a quit, or until no quit can come any more."""

    def __init__(
        self,
        context: AgentContext,
        commands: CommandReader,
        *,
        controller_fd: int | None = None,
        target: messages.ReportTarget | None = None,
    ) -> None:
        """Prepare to serve.

        ``controller_fd`` closes when a controller on this node ends. An agent with a ``target`` then writes its reports. On
        another node it writes them if it keeps the journal replica.
        """
        self._context = context
        self._commands = commands
        self._controller_fd = controller_fd
        self._target = target
        self._replica: JournalReplica | None = None
        self._heartbeat = Heartbeat(context.channel, context.rank)
        self._selector = selectors.DefaultSelector()
        self._calls = CallRunner(context, self._selector, self._heartbeat)
        self._rounds = 0
        self._is_reporting = False
        self._selector.register(commands, selectors.EVENT_READ, commands.on_wake)
        if controller_fd is not None:
            self._selector.register(controller_fd, selectors.EVENT_READ, self._on_controller_exit)

    def join(self) -> None:
        """Say hello to the controller and begin to read its commands. Until here a SIGTERM simply ends the process."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._commands.start()
        rank = self._context.rank
        self._context.channel.put(
            hello_key(rank.rank),
            messages.AgentHello(
                hostname=own_hostname(),
                machine=machine(),
                pid=os.getpid(),
                group_rank=rank.group_rank,
                local_rank=rank.local_rank,
                requested=self._context.requested,
            ),
        )

    def serve(self) -> messages.Quit:
        """Obey commands; return how this node leaves."""
        threading.Thread(target=self._end_if_stuck, daemon=True).start()
        try:
            return self._serve()
        except ChannelLostError as lost:
            if self._is_quit_coming():  # the store may end after it, and be noticed first
                return next(command for command in self._commands.pending() if isinstance(command, messages.Quit))
            sys.stderr.write(f"gpucluster: rank {self._context.rank.rank} leaves: {lost}\n")
            if self._controller_has_ended():
                self._write_reports()  # store and controller ended together, and the store was noticed first
            self._write_replica_reports()
            return LOST
        finally:
            os.kill(self._context.spawner.pid, signal.SIGCONT)  # one that is stopped could not end its worker, nor itself
            self._calls.discard_worker()
            shutil.rmtree(self._context.spawner.folder, ignore_errors=True)

    def leave(self, quits: messages.Quit) -> None:
        """End this process.

        torchrun ends a node at its first exit code that is not 0. So local ranks above 0 leave first, with 0, and local rank 0
        leaves last, with the code.
        """
        rank, channel, code = self._context.rank, self._context.channel, quits.code
        with contextlib.suppress(ChannelLostError):
            channel.put(bye_key(rank.rank), messages.Bye())
            if rank.local_rank == 0 and code != 0:
                siblings = range(rank.rank + 1, rank.rank + rank.local_world_size)
                channel.arrived([bye_key(sibling) for sibling in siblings], within_s=SIBLINGS_S)
        own_code = code if rank.local_rank == 0 or code == LOST_CODE else 0
        if rank.rank != 0 and quits.last_lines:  # rank 0 of torchrun is the controller
            write_error_file(quits.last_lines, own_code)
            if rank.local_rank == 0:
                show_last(quits.last_lines)
        sys.stderr.flush()
        os._exit(own_code)

    # The loop.

    def _serve(self) -> messages.Quit:
        while True:
            self._rounds += 1
            self._wait()
            self._heartbeat.beat()
            quits = self._obey()
            if quits is not None:
                return quits
            if self._heartbeat.is_controller_lost():
                self._write_replica_reports()
                return LOST
            self._calls.check_clocks()

    def _wait(self) -> None:
        """Handle what happens until the next clock runs out, at most :data:`TICK_S`."""
        pause_s = min(TICK_S, max(0.0, self._calls.next_clock_s - time.monotonic()))
        for key, _ in self._selector.select(pause_s):
            if self._selector.get_map().get(key.fd) is key:  # an earlier event of this round may have removed it
                key.data()

    def _obey(self) -> messages.Quit | None:
        """Obey the commands that have arrived; the quit, if it is among them."""
        for command in self._commands.pending():
            if isinstance(command, messages.Quit):
                return command
            if any(first <= self._context.rank.rank <= last for first, last in command.ranks):
                self._obey_one(command)
        return None

    def _obey_one(self, command: messages.CommandToRanks) -> None:
        if isinstance(command, messages.StartCall):
            self._calls.start(command)
        elif isinstance(command, messages.AbortCall):
            self._calls.abort(command)
        elif isinstance(command, messages.KillWorkers):
            self._calls.discard_worker()
        elif self._target is not None and self._replica is None:
            reader = self._context.channel.reconnect()
            self._replica = JournalReplica(reader, self._target, self._context.spawner.folder / JOURNAL)

    def _on_sigterm(self, *_: Any) -> None:
        """Called when torchrun, or a user, ends this node."""
        self._heartbeat.note_termination()
        self._commands.wake()

    # The end of the controller.

    def _on_controller_exit(self) -> None:
        """Called when the controller on this node has ended, with or without a quit."""
        assert self._controller_fd is not None
        self._selector.unregister(self._controller_fd)
        if not self._is_quit_coming():
            self._write_reports()
        self._commands.put(LOST)

    def _controller_has_ended(self) -> bool:
        return self._controller_fd is not None and bool(select.select([self._controller_fd], [], [], TICK_S)[0])

    def _is_quit_coming(self) -> bool:
        """Whether the controller wrote a quit before it ended, so that it ended as it should.

        All that it wrote is read first: a quit counts, and :data:`LOST` belongs behind the last command.
        """
        ended_s = time.monotonic()
        while not self._commands.has_read_quit:
            waited_s = time.monotonic() - ended_s
            if waited_s > BEHIND_S or (waited_s > TICK_S and not self._is_behind()):
                break
            time.sleep(PAUSE_S)
        return self._commands.has_read_quit

    def _is_behind(self) -> bool:
        """Whether a command is written that was not read yet."""
        with contextlib.suppress(ChannelLostError):
            return self._context.channel.has(command_key(self._commands.num_read))
        return False

    def _write_reports(self) -> None:
        """Called when the controller on this node died: write its reports from its journal, and have all agents quit."""
        target, self._target = self._target, None
        if target is None:
            return
        self._report(lambda: write_reports(target))
        with contextlib.suppress(ChannelLostError):
            self._context.channel.put(command_key(self._commands.num_read), LOST)

    def _write_replica_reports(self) -> None:
        """Called when the controller or its node is lost: write its reports here, if this agent has the journal replica."""
        if self._replica is not None:
            self._report(self._replica.write_reports)

    def _report(self, write: Callable[[], None]) -> None:
        """Write reports, which may take longer than other work of this thread."""
        self._calls.discard_worker()
        self._is_reporting = True
        write()
        self._is_reporting = False

    def _end_if_stuck(self) -> None:
        """Runs in a thread: end this process where the main one makes no round for :data:`STUCK_S`.

        A read of the store that waits for a host without a network never ends, and hears no signal. Rounds are counted and not
        timed, so that a process that was stopped for a while is not taken for stuck. The worker ends with this process.
        """
        rounds, quiet_s = self._rounds, 0.0
        while quiet_s < STUCK_S:
            time.sleep(TICK_S)
            step_s = TICK_S / SLOWER if self._is_reporting else TICK_S
            rounds, quiet_s = self._rounds, quiet_s + step_s if rounds == self._rounds else 0.0
        rank = self._context.rank.rank
        is_cut = f"the store has not answered for {STUCK_S:g} s. Is its network cut?"
        why = f"its reports were not written in {SLOWER * STUCK_S:g} s. Does the disk hang?" if self._is_reporting else is_cut
        sys.stderr.write(f"gpucluster: rank {rank} leaves: {why}\n")
        if self._target is not None and self._controller_has_ended() and not self._commands.has_read_quit:
            write_reports(self._target)  # the main thread could not hear of that end
        if self._replica is not None and not self._is_reporting:
            self._replica.write_reports()
        shutil.rmtree(self._context.spawner.folder, ignore_errors=True)
        if rank != 0:
            write_error_file(LOST.last_lines, LOST_CODE)
        sys.stderr.flush()
        os._exit(LOST_CODE)
