"""The agent: one rank. Owns a worker, enforces the deadline, kills and respawns, and always answers.

It calls neither CUDA nor NVML, and its main thread never waits in the store for long, so it can report and leave
whatever its worker does. ``python -m pytest_gpucluster.agent.main`` is what every rank but the controller's becomes.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.agent.fallback_report import Estate, Heir
from pytest_gpucluster.agent.spawner import Spawner, describe_exit
from pytest_gpucluster.agent.worker_process import WorkerProcess
from pytest_gpucluster.protocol.channel import (
    SECRET_VARIABLE,
    Address,
    Channel,
    ChannelLostError,
    ForgedMessageError,
    Message,
    connect,
    connect_reader,
)
from pytest_gpucluster.protocol.rank import Rank, machine
from pytest_gpucluster.worker import python_stacks, worker

if TYPE_CHECKING:
    from collections.abc import Sequence

TICK_S = 0.5
LATEST_ENTRY_S = 5.0
"""A peer of a rank that raised may still be on its way into the call for so long; then it is released as it is."""
BEAT_S = 1.0
AFTER_TERM_S = 25.0
CONTROLLER_SILENT_S = 60.0
TERMINATED_SILENT_S = 3.0
CONTROLLER = -1
LOST_CODE = 3
FORGED_PAUSE_S = 0.05
JOURNAL_COPY = "journal.jsonl"
PASSED_ON = ("function", "kwargs", "device", "any_device", "sys_path", "test", "test_arguments")
WORKER_DEFAULTS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that local rank k is the k-th GPU in PCI order, as place ids count
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # repeatable cuBLAS for the audits; must be there before CUDA starts
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the agent's deadline decides; a watchdog would take the evidence away
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


@dataclass(slots=True, kw_only=True)
class _Running:
    """The call that the worker is busy with."""

    call: Message
    deadline_s: float
    entered_s: float | None = None
    release: Message | None = None
    release_s: float = math.inf


class Agent:
    """Serves the controller's commands until it says quit, or until nobody can say so any more."""

    def __init__(
        self, rank: Rank, *, roots: Sequence[str] = (), controller_fd: int | None, estate: Estate | None = None
    ) -> None:
        """Fork the spawner (no thread may exist yet).

        ``controller_fd`` closes when a controller on this node ends; an agent with its ``estate`` then finishes the report.
        """
        self._estate = estate
        self._heir: Heir | None = None
        self._read = 0
        self._quit_said = False
        self._told: set[str] = set()
        self._roots = roots
        self._rank = rank
        self._folder = Path(tempfile.mkdtemp(prefix=f"gpucluster-rank{rank.rank}-"))
        self._spawner = Spawner(worker.main, folder=self._folder)
        self._worker: WorkerProcess | None = None
        self._running: _Running | None = None
        self._lost: str | None = None
        self._ended_idle: Message | None = None
        self._commands: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._terminated_s: float | None = None
        self._beats = 0
        self._next_beat_s = 0.0
        self._controller_beat: tuple[bytes, float] = (b"", time.monotonic())
        self._wake_read, self._wake_write = os.pipe()
        self._controller_fd = controller_fd
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        self._selector.register(self._spawner, selectors.EVENT_READ, self._on_exits)
        if controller_fd is not None:
            self._selector.register(controller_fd, selectors.EVENT_READ, self._on_controller_gone)

    def connect(self, address: Address) -> None:
        """Meet the controller in the store and say hello."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._channel: Channel = connect(address)
        signal.signal(signal.SIGTERM, self._on_sigterm)  # not before: until here a SIGTERM simply ends it
        threading.Thread(target=self._read_commands, args=(connect_reader(address),), daemon=True).start()
        self._channel.put(
            f"who/{self._rank.rank}",
            {
                "hostname": socket.gethostname(),
                "machine": machine(),
                "pid": os.getpid(),
                "group_rank": self._rank.group_rank,
                "local_rank": self._rank.local_rank,
            },
        )

    def serve(self) -> int:
        """Answer commands; return the exit code of this node."""
        try:
            while True:
                self._wait()
                self._beat()
                code = self._obey()
                if code is None and (code := self._check_controller()) is not None:
                    self._inherit()
                if code is not None:
                    return code
                self._release_if_due()
                self._enforce_deadline()
        except ChannelLostError as lost:
            sys.stderr.write(f"gpucluster: rank {self._rank.rank} leaves: {lost}\n")
            gone = self._controller_fd is not None and select.select([self._controller_fd], [], [], TICK_S)[0]
            if gone and not self._quit_is_coming():
                self._settle_estate()  # store and controller went together, and the store was noticed first
            self._inherit()
            return LOST_CODE
        finally:
            self._discard_worker()
            self._clean_up()

    def leave(self, code: int) -> None:
        """End this process: siblings first and with 0, local rank 0 last and with the code, or torchrun shoots them."""
        with contextlib.suppress(ChannelLostError):
            self._channel.put(f"bye/{self._rank.rank}", {})
            if self._rank.local_rank == 0 and code != 0:
                first = self._rank.rank
                siblings = [f"bye/{rank}" for rank in range(first + 1, first + self._rank.local_world_size)]
                if siblings:
                    self._channel.arrived(siblings, within_s=2.0)
        sys.stderr.flush()
        os._exit(code if self._rank.local_rank == 0 or code == LOST_CODE else 0)

    # What can happen.

    def _wait(self) -> None:
        pause_s = TICK_S
        if self._running is not None:
            next_s = min(self._running.deadline_s, self._running.release_s)
            pause_s = min(pause_s, max(0.0, next_s - time.monotonic()))
        for key, _ in self._selector.select(pause_s):
            with contextlib.suppress(KeyError):
                self._selector.get_key(key.fileobj)  # an earlier event of this round may have removed it
                key.data()

    def _obey(self) -> int | None:
        while not self._commands.empty():
            command = self._commands.get()
            if command is None:
                raise ChannelLostError("the store that carries the commands is gone")
            if command["t"] == "quit":
                return int(command["code"])
            if not any(first <= self._rank.rank <= last for first, last in command["ranks"]):
                continue
            if command["t"] == "call":
                self._start(command)
            elif command["t"] == "abort":
                self._abort(command)
            elif command["t"] == "kill":
                self._discard_worker()
            elif command["t"] == "inherit":
                reader = connect_reader(self._channel.address)
                self._heir = Heir(reader, Estate(**command["estate"]), self._folder / JOURNAL_COPY)
        return None

    def _inherit(self) -> None:
        """No controller, and nobody on its node who could say so: finish its report here, if this agent was chosen."""
        if self._heir is not None:
            self._discard_worker()
            self._heir.settle()

    def _on_wake(self) -> None:
        os.read(self._wake_read, 4096)

    def _on_sigterm(self, *_: Any) -> None:
        if self._terminated_s is None:
            self._terminated_s = time.monotonic()
            self._next_beat_s = 0.0  # look at once whether there is a controller to wait for
        os.write(self._wake_write, b"t")

    def _on_controller_gone(self) -> None:
        assert self._controller_fd is not None
        self._selector.unregister(self._controller_fd)
        if not self._quit_is_coming():
            self._settle_estate()
        self._commands.put({"t": "quit", "code": LOST_CODE})

    def _on_exits(self) -> None:
        try:
            exits = self._spawner.exits()
        except OSError:
            self._selector.unregister(self._spawner)
            self._lose("the process that starts workers has ended")
            return
        for pid, status in exits:
            if self._worker is not None and pid == self._worker.pid:
                self._worker.ended()
                result = self._worker.last_result() if self._running is not None else None
                death = {
                    "ok": False,
                    "kind": "died",
                    "error": f"the worker {describe_exit(status)}",
                    "stacks": self._worker.crash(),
                }
                self._ended_idle = death if self._running is None else None
                self._finish(result or death)
                self._discard_worker()

    def _on_output(self) -> None:
        if self._worker is not None and not self._worker.drain():
            self._selector.unregister(self._worker.output_fd)

    def _on_message(self) -> None:
        assert self._worker is not None
        messages = self._worker.wire.receive()
        if messages is None:
            self._selector.unregister(self._worker.wire)
        for message in messages or ():
            if self._running is None:
                continue
            if message["t"] == "entered":
                self._running.entered_s = time.monotonic()
                self._running.deadline_s = self._running.entered_s + self._running.call["deadline_s"]
                if self._running.release is not None:
                    self._running.release_s = self._running.entered_s + self._running.release.get("grace_s", 0.0)
            elif message["t"] == "progress":
                self._channel.put(f"prog/{self._rank.rank}", {**message, "call": self._running.call["id"]})
            elif message["t"] == "result":
                self._finish(message)

    def _quit_is_coming(self) -> bool:
        """Whether the controller said quit before it ended: then it ended as it should."""
        deadline_s = time.monotonic() + TICK_S
        while not self._quit_said and time.monotonic() < deadline_s:
            time.sleep(0.05)  # the thread that reads commands may be a moment behind
        return self._quit_said

    def _settle_estate(self) -> None:
        """The controller died: write its reports from its journal, and send the other agents home."""
        estate, self._estate = self._estate, None
        if estate is None:
            return
        self._discard_worker()
        estate.settle()
        with contextlib.suppress(ChannelLostError):
            self._channel.put(f"cmd/{self._read}", {"t": "quit", "code": LOST_CODE})

    # A call.

    def _start(self, call: Message) -> None:
        if self._running is not None:  # the controller has given that call up: its answer must not be taken for this one's
            self._running = None
            self._discard_worker()
        self._running = _Running(call=call, deadline_s=time.monotonic() + call["setup_s"])
        if self._lost is not None:
            self._finish({"ok": False, "kind": "lost", "error": self._lost})
            return
        if self._ended_idle is not None:  # its groups stand in the controller's books until an answer says what happened
            death, self._ended_idle = self._ended_idle, None
            self._finish({**death, "error": f"{death['error']}, between two calls"})
            return
        try:
            if self._worker is None:
                self._worker = self._spawn(call)
        except OSError as error:
            self._finish({"ok": False, "kind": "died", "error": f"no worker could be started: {error}"})
            return
        try:
            self._worker.tail.clear()
            self._worker.wire.send(self._for_worker(call))
        except OSError as error:
            self._finish({"ok": False, "kind": "died", "error": f"the worker did not take the call: {error}"})

    def _spawn(self, call: Message) -> WorkerProcess:
        started = WorkerProcess(self._spawner, self._folder, cwd=call["cwd"], environment=self._environment(call))
        self._selector.register(started.wire, selectors.EVENT_READ, self._on_message)
        self._selector.register(started.output_fd, selectors.EVENT_READ, self._on_output)
        return started

    def _environment(self, call: Message) -> dict[str, str]:
        """Give torchrun's variables for this place, and what the worker needs before CUDA and NCCL start."""
        rank, inherited = self._rank, os.environ
        log = str(self._folder / "nccl.log")
        nccl = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": log, "GPUCLUSTER_NCCL_LOG": log}
        return {
            **{name: value for name, value in WORKER_DEFAULTS.items() if name not in inherited},
            **(nccl if "NCCL_DEBUG" not in inherited else {}),
            "RANK": str(rank.rank),
            "WORLD_SIZE": str(rank.world_size),
            "LOCAL_RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(rank.local_world_size),
            "GROUP_RANK": str(rank.group_rank),
            "GPUCLUSTER_NODE": str(call["nodes"].get(str(rank.group_rank), rank.group_rank)),
        }

    def _for_worker(self, call: Message) -> Message:
        group = next((group for group in call["groups"] or () if self._rank.rank in group["ranks"]), None)
        message = {key: call[key] for key in PASSED_ON}
        message["roots"] = list(self._roots)
        message["trusted"] = bool(os.environ.get(SECRET_VARIABLE))
        message["group"] = group and {
            "id": group["id"],
            "rank": group["ranks"].index(self._rank.rank),
            "size": len(group["ranks"]),
            "host": self._channel.address.host,
            "port": self._channel.address.port,
            "setup_s": call["setup_s"],
        }
        return message

    def _finish(self, result: Message) -> None:
        """Post the answer to the running call; anything but success costs the worker its life."""
        if self._running is None:
            return
        call, entered = self._running.call, self._running.entered_s is not None
        self._running = None
        reply = {"entered": entered, "collectives": 0, "collective": "", "output": "", **result}
        if self._worker is not None:
            self._worker.drain()
            reply["collectives"], reply["collective"] = self._worker.collective()
            reply["output"] = self._worker.tail.decode("utf-8", "replace")
        try:
            self._channel.put(f"res/{call['id']}/{self._rank.rank}", reply)
        except ValueError as error:
            reply = {"ok": False, "kind": "refused", "type": "ValueError", "error": f"the result is too large: {error}"}
            self._channel.put(f"res/{call['id']}/{self._rank.rank}", reply)
        if not reply["ok"]:
            self._channel.put(f"fault/{call['id']}", {"rank": self._rank.rank})
            self._discard_worker()

    def _abort(self, command: Message) -> None:
        """End the call here; where a peer raised, only after a moment in it: this rank may be about to raise as well."""
        running = self._running
        if running is None or running.call["id"] != command["id"]:
            return
        now_s, grace_s = time.monotonic(), command.get("grace_s", 0.0)
        is_on_its_way = running.entered_s is None and grace_s > 0 and command.get("entered", True)  # else there is no way in
        running.release = command
        running.release_s = now_s + LATEST_ENTRY_S if is_on_its_way else (running.entered_s or now_s) + grace_s
        self._release_if_due()

    def _release_if_due(self) -> None:
        running = self._running
        if running is None or running.release is None or time.monotonic() < running.release_s:
            return
        evidence: Message = {}
        if self._worker is not None:
            evidence = self._worker.evidence()
            self._kill_worker(self._worker)
        self._finish({"ok": False, "kind": "released", "error": running.release["why"], **evidence})

    def _enforce_deadline(self) -> None:
        running = self._running
        if running is None or time.monotonic() < running.deadline_s:
            return
        entered = running.entered_s is not None
        limit_s = running.call["deadline_s"] if entered else running.call["setup_s"]
        error = f"{'did not return' if entered else 'did not finish its set-up'} within {limit_s:g} s"
        evidence: Message = {}
        if self._worker is not None:
            evidence = self._worker.evidence()
            if not self._kill_worker(self._worker):
                error += "; SIGKILL does not end it"
        self._finish({"ok": False, "kind": "hung", "error": error, **evidence})

    def _lose(self, why: str) -> None:
        """From here on this rank can run nothing; it still answers."""
        self._lost = why
        self._finish({"ok": False, "kind": "lost", "error": why})

    def _kill_worker(self, process: WorkerProcess) -> bool:
        """End it, beating meanwhile; False, and this rank is lost, when it does not end."""
        if process.kill(meanwhile=self._beat_if_heard):
            return True
        self._lost = f"worker {process.pid} does not end on SIGKILL (state {process.state()})"
        return False

    def _beat_if_heard(self) -> None:
        with contextlib.suppress(ChannelLostError):
            self._beat()

    def _discard_worker(self) -> None:
        if self._worker is None:
            return
        self._kill_worker(self._worker)
        for source in (self._worker.wire, self._worker.output_fd):
            with contextlib.suppress(KeyError):
                self._selector.unregister(source)
        self._worker.close()
        self._worker = None

    def _clean_up(self) -> None:
        python_stacks.forget(self._folder / "stacks")
        for name in ("beacon", "nccl.log", "flight.json", JOURNAL_COPY):
            (self._folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    # Liveness.

    def _read_commands(self, reader: Channel) -> None:
        number = 0
        while True:
            try:
                command: Message | None = reader.take(f"cmd/{number}")
            except ForgedMessageError as forged:
                if number > 0:  # the secret is right: somebody else wrote this, and the controller will write over it
                    self._tell_once(f"gpucluster: rank {self._rank.rank} does not obey: {forged}")
                    time.sleep(FORGED_PAUSE_S)
                    continue
                sys.stderr.write(f"gpucluster: rank {self._rank.rank} reads no more commands: {forged}\n")
                command = None
            except Exception as error:  # noqa: BLE001 -- whatever it is, no command can be trusted from here on
                sys.stderr.write(f"gpucluster: rank {self._rank.rank} reads no more commands: {error}\n")
                command = None
            number += 1
            self._read = number
            self._quit_said = command is not None and command["t"] == "quit"
            self._commands.put(command)
            os.write(self._wake_write, b"c")
            if command is None:
                return

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            sys.stderr.write(text + "\n")

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + BEAT_S
        self._beats += 1
        self._channel.beat(self._rank.rank, self._beats)
        if self._beats % 5 == 0 or not self._controller_beat[0] or self._terminated_s is not None:
            beat = self._channel.beats([CONTROLLER]).get(CONTROLLER, b"")
            if beat != self._controller_beat[0]:
                self._controller_beat = (beat, now_s)

    def _check_controller(self) -> int | None:
        """Leave when torchrun ends this node and no quit comes, or when the controller is silent for a minute."""
        now_s = time.monotonic()
        beat, seen_s = self._controller_beat
        if self._terminated_s is not None:
            silent_s = now_s - max(seen_s, self._terminated_s)
            patience_s = TERMINATED_SILENT_S if beat else TICK_S  # a controller that never beat has nothing to say
            if silent_s > patience_s or now_s - self._terminated_s > AFTER_TERM_S:
                return LOST_CODE
        return LOST_CODE if beat and now_s - seen_s > CONTROLLER_SILENT_S else None
