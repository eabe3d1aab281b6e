"""One agent without a controller and without a store: ``python -m tests.support.agent_alone SCENARIO``.

Prints what the agent answered as one line of JSON: the replies, each with ``took_s``, the exit code, and the longest time
between two heartbeats. The limits are fractions of those of a real run, and torch is not loaded.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import asdict, replace

from pytest_gpucluster.agent import agent, call_runner, group_hang, heartbeat, spawner, worker_process
from pytest_gpucluster.agent.agent import Agent
from pytest_gpucluster.agent.call_runner import AgentContext
from pytest_gpucluster.agent.command_reader import CommandReader
from pytest_gpucluster.agent.neighbours import Neighbours
from pytest_gpucluster.protocol.channel import Address, StoreChannel
from pytest_gpucluster.protocol.codec import Wire
from pytest_gpucluster.protocol.messages import (
    AbortCall,
    Command,
    Entered,
    FunctionName,
    KillWorkers,
    Quit,
    RankGroup,
    StartCall,
    StartWorker,
    Success,
    Task,
)
from pytest_gpucluster.protocol.rank import Rank
from pytest_gpucluster.worker import flight_recorder, last_collective, python_stacks

DEADLINE_S = 0.3
QUIT_CODE = 7
LINK_FD = 9
"""Where a worker's children find its line."""
RANK = Rank(rank=1, world_size=2, local_rank=1, local_world_size=2, group_rank=0)
OWN = ((1, 1),)
PAIR = (RankGroup(id="pair", ranks=(0, 1)),)
GARBAGE = {
    "text": (b"garbage\n", 1),
    "an empty line": (b"\n", 1),
    "half a line": (b'{"t": "success", "entered": tr', 1),
    "10 MB without an end": (b"x" * 1000, 10_000),
    "100 MB without an end": (b"x" * 1000, 100_000),
    "no UTF-8": (b'"\xff\xfe"\n', 1),
    "UTF-16": ("{}\n".encode("utf-16"), 1),
    "zeros": (b"\0" * 100 + b"\n", 1),
    "a number": (b"1\n", 1),
    "a list": (b"[]\n", 1),
    "an object": (b"{}\n", 1),
    "null": (b"null\n", 1),
    "a deep list": (b"[" * 100_000 + b"\n", 1),
    "a deep object": (b'{"a":' * 900 + b"1" + b"}" * 900 + b"\n", 1),
    "a number too large": (b'{"t": "progress", "step": "x", "fraction": 1' + b"0" * 400 + b"}\n", 1),
    "a number far too large": (b"1" * 10_000 + b"\n", 1),
    "a step too long": (b'{"t": "progress", "step": "' + b"x" * 5_000_000 + b'", "fraction": null}\nx\n', 1),
    "no such message": (b'{"t": "nonsense"}\n', 1),
    "a field missing": (b'{"t": "failure"}\n', 1),
    "a field of another type": (b'{"t": "success", "entered": 1, "value": 1}\n', 1),
    "a result of no call": (b'{"t": "success", "value": 1}\n', 1),
    "a result of another call": (b'{"t": "success", "value": 1, "call": "another"}\n', 1),
    "a kind that only agents find": (b'{"t": "failure", "kind": "lost", "error": "", "call": "CALL"}\n', 1),
}
"""What a function may write into the line of its worker, and how often in a row. CALL becomes the id of the call."""
ABORT = AbortCall(id="0", ranks=OWN, why="released, because rank 0 raised", grace_s=0.4)
Step = Callable[[], "Command | None"]


def play_worker(request: StartWorker, link_fd: int) -> None:
    """Do what the arguments of a call say, and return the pid."""
    python_stacks.answer_requests(Path(request.stacks_file))
    os.dup2(link_fd, LINK_FD)
    wire = Wire(socket.socket(fileno=link_fd))
    while (messages := wire.receive()) is not None:
        for task in map(Task.read, messages):
            kwargs = task.call.kwargs
            time.sleep(kwargs.get("late_s", 0.0))
            if kwargs.get("immortal"):  # as in state D: no signal ends it, from its entry on
                faulthandler.register(python_stacks.ASK, Path(request.stacks_file).open("a", encoding="utf-8"))  # noqa: SIM115 -- kept
            wire.send(Entered(call=task.call.id))
            hold_up(**{key: kwargs[key] for key in ("hang", "stop", "pause_s") if key in kwargs})
            if kwargs.get("wait"):
                wait_and_join(Path(request.collective_file))
            if "child" in kwargs:
                subprocess.Popen(["sh", "-c", kwargs["child"]], close_fds=False, start_new_session=kwargs["escapes"])
                time.sleep(1.0)
                os._exit(3)
            if "garbage" in kwargs:
                write_all(LINK_FD, bytes.fromhex(kwargs["garbage"]).replace(b"CALL", task.call.id.encode()) * kwargs["times"])
            wire.send(Success(value=os.getpid(), call=task.call.id))
            if "garbage_after" in kwargs:
                time.sleep(0.5)
                write_all(LINK_FD, bytes.fromhex(kwargs["garbage_after"]))
            if kwargs.get("deaf"):
                time.sleep(600)


def hold_up(*, hang: bool = False, stop: bool = False, pause_s: float = 0.0) -> None:
    """Return late or never."""
    if stop:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600 if hang else pause_s)


def wait_and_join(collective_file: Path) -> None:
    """Wait in a system call that a signal interrupts, then enter a collective."""
    ctypes.CDLL(None).pause()
    module = SimpleNamespace(all_reduce=lambda: None, ProcessGroup=Task)
    last_collective.CollectiveRecorder(collective_file).watch(module)
    module.all_reduce()


def write_all(descriptor: int, data: bytes) -> None:
    """Write as a function does that found the descriptor of its worker's line."""
    while data:
        data = data[os.write(descriptor, data) :]


class PlayedStore:
    """Stands for the channel: keeps the replies, and gives the next command as soon as the last call was answered."""

    address = Address(host="", port=0, run_id="")
    is_signed = False

    def __init__(self) -> None:
        """No command yet."""
        self.commands = CommandReader(cast("StoreChannel", self), RANK)
        self.steps: list[Command | Step] = []
        self.replies: list[dict[str, Any]] = []
        self.beats_s: list[float] = []
        self.round_s = 0.0
        self.is_hung = False
        self.has_peer_replied = False
        self._given_s = 0.0

    def put(self, key: str, message: Any) -> None:
        """Keep a reply, and go on. Note the mark of a hang, and how long after the start of the call it came."""
        if key.startswith("hung/"):
            self.replies.append({"marked": key, "took_s": time.monotonic() - self._given_s})
        if key.startswith("res/"):
            self.replies.append({"ok": message.ok, **asdict(message), "took_s": time.monotonic() - self._given_s})
            self.next()

    def note_fault(self, call_id: str, rank: int) -> None:
        """Nobody waits for this rank."""

    def has(self, key: str) -> bool:
        """Whether the mark of a hang, or the reply of the other rank, was written. The node has no listener."""
        return {"hung/0/0": self.is_hung, "res/0/0": self.has_peer_replied, "lst/0": False}[key]

    def next(self) -> None:
        """Give the next command, a quit after the last one; nothing if the step gives its command later."""
        step = self.steps.pop(0) if self.steps else Quit(code=QUIT_CODE)
        command = step() if callable(step) else step
        if command is not None:
            self.give(command)

    def give(self, command: Command) -> None:
        """Give this command now."""
        if isinstance(command, StartCall):
            command = replace(command, id=str(len(self.replies)))
        self._given_s = time.monotonic()
        self.commands.put(command)
        if isinstance(command, KillWorkers):
            self.next()

    def beat(self, rank: int, count: int) -> None:
        """Note the time of a heartbeat."""
        del rank, count
        self.beats_s.append(time.monotonic())
        time.sleep(self.round_s)

    def beats(self, ranks: list[int]) -> dict[int, bytes]:
        """There is no controller."""
        del ranks
        return {}


class Scenarios:
    """What can happen to the agent; each method is one scenario."""

    def __init__(self) -> None:
        """Fork the spawner, before anything else."""
        folder = Path(tempfile.mkdtemp(prefix="gpucluster-rank1-"))
        self.spawner = spawner.Spawner(play_worker, folder=folder, neighbours=Neighbours(rank=1, local_rank=1, controller=None))
        self.store = PlayedStore()

    def serve(self, *steps: Command | Step) -> None:
        """Have the agent obey these commands, and print what came of it."""
        store = self.store
        store.steps = list(steps)
        context = AgentContext(rank=RANK, channel=cast("StoreChannel", store), spawner=self.spawner, roots=())
        served = Agent(context, store.commands)
        store.next()
        code = served.serve().code
        silent_s = max((later - earlier for earlier, later in zip(store.beats_s, store.beats_s[1:], strict=False)), default=0.0)
        sys.stdout.write(json.dumps({"replies": store.replies, "code": code, "silent_s": silent_s}))

    def release_after(self, seconds: float, command: AbortCall = ABORT) -> None:
        """Abort the first call, from another thread."""
        after(seconds, lambda: self.store.commands.put(command))

    def hung_and_survives(self) -> None:
        """The worker hangs, and SIGKILL does not end it; two more calls come."""
        survive_kills()
        self.serve(call(hang=True, immortal=True), call(), call())

    def released_and_survives(self) -> None:
        """The call is aborted because another rank died, and SIGKILL does not end the worker; one more call comes."""
        survive_kills()
        self.release_after(2.0, AbortCall(id="0", ranks=OWN, why="released, because rank 0 died"))  # after the worker's entry
        self.serve(patient(call(hang=True, immortal=True)), call())

    def late_and_answers(self) -> None:
        """The worker enters after the abort, and returns within the time of grace."""
        self.release_after(0.1)
        self.serve(patient(call(late_s=0.8, pause_s=0.05)))

    def late_and_stuck(self) -> None:
        """The worker enters after the abort, and hangs."""
        self.release_after(0.1)
        self.serve(patient(call(late_s=0.8, hang=True)))

    def long_stuck(self) -> None:
        """The worker has been in the call for longer than the time of grace when the abort comes."""
        self.release_after(1.0)
        self.serve(patient(call(hang=True)))

    def too_late(self) -> None:
        """The worker never enters; the agent waits for that as long as it may."""
        call_runner.LATEST_ENTRY_S = 0.5
        self.release_after(0.1)
        self.serve(replace(call(late_s=50.0), setup_s=60.0))

    def late_without_way_in(self) -> None:
        """The worker never enters, and the rank that raised did not either."""
        self.release_after(0.1, replace(ABORT, entered=False))
        self.serve(replace(call(late_s=50.0), setup_s=60.0))

    def ends_between_calls(self) -> None:
        """The worker is killed after its first call."""
        self.serve(patient(call()), self._end_worker, patient(call()))

    def _end_worker(self) -> None:
        os.kill(self.store.replies[-1]["value"], signal.SIGKILL)
        after(0.5, lambda: self.store.give(call()))  # the agent has heard of the end by then

    def told_to_kill_and_survives(self) -> None:
        """The controller has the worker killed, and SIGKILL does not end it."""
        survive_kills()
        self.serve(patient(call()), KillWorkers(ranks=OWN), call())

    def hung(self) -> None:
        """A call before and a call after one that hangs."""
        self.serve(patient(call()), call(hang=True), patient(call()))

    def leaves_its_pipes_to_a_child(self) -> None:
        """The worker ends before its child, which holds its line and output; the agent sees both ends in one round."""
        heartbeat.BEAT_S = 0.0
        self.store.round_s = 0.3
        self.serve(patient(call(child="sleep 600", escapes=False)), patient(call()))

    def leaves_its_output_to_a_child_that_prints(self) -> None:
        """The child is in a session of its own, so it outlives the worker, and it prints without end."""
        self.serve(patient(call(child="yes & yes & yes & yes", escapes=True)), patient(call()))

    def leaves_its_line_to_a_child_that_prints(self) -> None:
        """The same into the line for messages."""
        self.serve(patient(call(child=f"(yes & yes & yes & yes) >&{LINK_FD}", escapes=True)), patient(call()))

    def garbage(self) -> None:
        """Each kind of garbage in a call of its own, with a healthy call after it."""
        calls = [
            patient(one)
            for data, times in GARBAGE.values()
            for one in (call(garbage=data.hex(), times=times), call(garbage="", times=1))
        ]
        self.serve(*calls)

    def garbage_between_calls(self) -> None:
        """A worker that writes garbage after its result; two more calls come."""
        self.serve(patient(call(garbage_after=b"late\n".hex())), self._call_later, patient(call()))

    def _call_later(self) -> None:
        after(1.0, lambda: self.store.give(patient(call())))  # the agent has read the garbage by then

    def interruptible(self) -> None:
        """The worker waits in a system call that any signal interrupts; its group has another member."""
        self.serve(replace(call(wait=True), groups=PAIR), patient(call()))

    def woken(self) -> None:
        """The worker answers after its deadline and before it is held; then one that hangs."""
        group_hang.LOOK_S, group_hang.SETTLE_S = 3.0, 3.1
        self.serve(replace(call(pause_s=0.7), groups=PAIR), replace(call(hang=True), groups=PAIR))

    def woken_when_held(self) -> None:
        """The worker would answer after it is held, and before its stacks are read: a peer's end wakes it."""
        group_hang.SETTLE_S = 3.5
        self.serve(replace(call(pause_s=DEADLINE_S + 2.0), groups=PAIR))

    def stopped(self) -> None:
        """The worker of a group is stopped, and the other agent never replies."""
        self.serve(replace(call(stop=True), groups=PAIR))

    def stopped_last(self) -> None:
        """The worker of a group is stopped, and the other agent has replied."""
        group_hang.STOPPED_SETTLE_S = 60.0
        self.store.has_peer_replied = True
        self.serve(replace(call(stop=True), groups=PAIR))

    def late_value(self) -> None:
        """The worker returns after the agent of its peer found a hang; then one without a group."""
        self.store.is_hung = True
        self.serve(replace(call(), groups=PAIR), patient(call()))

    def spawner_stopped(self) -> None:
        """The spawner does not answer."""
        os.kill(self.spawner.pid, signal.SIGSTOP)
        self.serve(call())
        os.kill(self.spawner.pid, signal.SIGKILL)

    def spawner_late(self) -> None:
        """The spawner answers after the call was given up."""
        os.kill(self.spawner.pid, signal.SIGSTOP)
        self.serve(call(), self._continue_spawner, call())

    def _continue_spawner(self) -> Command:
        os.kill(self.spawner.pid, signal.SIGCONT)
        assert select.select([self.spawner], [], [], 10.0)[0]  # the late answer is there
        return replace(call(pause_s=1.0), deadline_s=20.0)

    def slow_start(self) -> None:
        """The spawner takes 3 s to answer, and the new worker 3 s to read its first call."""
        send = Wire.send

        def late(wire: Wire, message: Any) -> None:
            time.sleep(3.0)
            send(wire, message)

        Wire.send = late  # type: ignore[method-assign]
        os.kill(self.spawner.pid, signal.SIGSTOP)
        after(3.0, lambda: os.kill(self.spawner.pid, signal.SIGCONT))
        self.serve(replace(patient(call()), setup_s=60.0))

    def worker_does_not_read(self) -> None:
        """The arguments of the second call do not fit into the line."""
        worker_process.SEND_S = 0.5
        self.serve(patient(call(deaf=True)), call(text="x" * 8_000_000), patient(call()))

    def answered_meanwhile(self) -> None:
        """The store keeps the agent waiting for longer than the deadline: a worker answers meanwhile, and another one ends."""
        heartbeat.BEAT_S = 0.0
        self.store.round_s = 2.0
        self.serve(
            replace(call(pause_s=0.1), deadline_s=1.3),
            replace(call(child="true", escapes=False), deadline_s=1.3),
            replace(call(hang=True), deadline_s=1.3),
        )

    def store_without_an_answer(self) -> None:
        """The network is cut: a round of the agent does not end. A worker hangs meanwhile."""
        agent.STUCK_S = 2.0
        self.store.round_s = 600.0
        self.serve(patient(call(hang=True)))

    def long_kill(self) -> None:
        """The agent waits 6 s for a worker that SIGKILL does not end."""
        survive_kills(within_s=6.0)
        self.serve(call(hang=True, immortal=True), call())


def after(seconds: float, action: Callable[[], None]) -> None:
    """Do this later, in a thread."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def call(**kwargs: Any) -> StartCall:
    """A call of :func:`play_worker` with these arguments."""
    return StartCall(
        id="",
        ranks=OWN,
        function=FunctionName(module="", qualname="", file="", relative="", digest=""),
        kwargs=kwargs,
        groups=None,
        deadline_s=DEADLINE_S,
        setup_s=5.0,
        device="cpu",
        any_device=True,
        test_arguments=None,
        sys_path=(),
        cwd="/",
        nodes={},
        variables={},
    )


def patient(command: StartCall) -> StartCall:
    """The same call with a deadline that does not matter."""
    return replace(command, deadline_s=60.0)


def survive_kills(within_s: float = 0.5) -> None:
    """Let workers survive SIGKILL, as in state D. The spawner was forked before, and kills them when this process ends."""
    worker_process.KILL_S = within_s
    spawner.kill_worker = lambda pid: None


if __name__ == "__main__":
    group_hang.LOOK_S, group_hang.SETTLE_S, group_hang.STOPPED_SETTLE_S = 0.4, 0.5, 1.5
    python_stacks.ANSWER_S = 0.2
    flight_recorder.ANSWER_S = 0.1
    if sys.argv[1].startswith("spawner_"):
        spawner.ANSWER_S = 0.5  # read as it starts; the other scenarios leave a busy machine its time
    getattr(Scenarios(), sys.argv[1])()
