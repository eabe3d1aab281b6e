"""Every message that crosses between controller, agents and workers.

``t`` tells apart the messages that arrive under the same key or on the same line. Ranks are torchrun's; a ``span`` is the
first and the last of consecutive ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeAlias, cast

from pytest_gpucluster.errors import Part
from pytest_gpucluster.places import Device
from pytest_gpucluster.protocol import plain_data
from pytest_gpucluster.protocol.codec import MalformedMessageError, TypedMessage, read_one_of

FailureKind: TypeAlias = Literal["raised", "refused", "died", "hung", "released", "lost"]
KINDS_OF_WORKERS = ("raised", "refused")
"""What a worker itself can say. The other kinds are found by its agent or by the controller."""
Spans: TypeAlias = "tuple[tuple[int, int], ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionName(TypedMessage):
    """A function as it crosses between processes.

    ``relative``: the file seen from the folder that the run started in. ``digest``: the SHA-256 of the file.
    """

    module: str
    qualname: str
    file: str
    relative: str
    digest: str


CALL_VARIABLES = (
    "NCCL_ALGO",
    "NCCL_IB_HCA",
    "NCCL_IB_DISABLE",
    "NCCL_MNNVL_ENABLE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
)
"""What a call may set in its workers: which adapter carries it, and that NVLink between nodes does not.

Of other variables some load code, and a stranger may call.
"""

# Controller to agents, under ``cmd/<n>``. Each agent reads every command and obeys those whose spans contain its rank.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup(TypedMessage):
    """One process group: its id is never used again, and the position in ``ranks`` is the rank in the group."""

    id: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall(TypedMessage):
    """What a worker does in a call: the part of the call that the agent passes on unchanged.

    ``any_device``: the function runs without a GPU too. ``test``: the function is the body of a distributed test, which gets
    the fixtures named in ``test_arguments`` besides ``kwargs`` (plain data).
    """

    function: FunctionName
    kwargs: dict[str, Any]
    device: Device
    any_device: bool
    sys_path: tuple[str, ...]
    test: bool
    test_arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCall(FunctionCall):
    """Run a function on some ranks. ``nodes``: the node number of each torchrun group rank, as far as known.

    ``variables``: those of :data:`CALL_VARIABLES` that a worker gets which is started for this call.
    """

    t: Literal["call"] = "call"
    id: str
    ranks: Spans
    groups: tuple[RankGroup, ...] | None
    deadline_s: float
    setup_s: float
    cwd: str
    nodes: dict[str, int]
    variables: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortCall(TypedMessage):
    """Stop waiting in a call: its result would come too late, or never.

    ``grace_s``: how long each rank must have been in the call first. ``entered``: the rank that failed came into the call, so
    others may still be on their way into it.
    """

    t: Literal["abort"] = "abort"
    id: str
    ranks: Spans
    why: str
    grace_s: float = 0.0
    entered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorkers(TypedMessage):
    """End the workers of these ranks; the next call starts new ones."""

    t: Literal["kill"] = "kill"
    ranks: Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTarget(TypedMessage):
    """The reports of a run: the folder of its journal, the JUnit file that pytest would write, and the id of the run."""

    folder: str
    junit: str | None
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateJournal(TypedMessage):
    """Keep a copy of the journal, and write the reports from it if the controller's node is lost.

    The agent's own command line says where: a message of a stranger could name any file.
    """

    t: Literal["replicate"] = "replicate"
    ranks: Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit(TypedMessage):
    """Every agent leaves; ``code`` is the exit code of the run, ``last_lines`` what each node shows last."""

    t: Literal["quit"] = "quit"
    code: int
    last_lines: str = ""


CommandToRanks: TypeAlias = "StartCall | AbortCall | KillWorkers | ReplicateJournal"
Command: TypeAlias = "CommandToRanks | Quit"
COMMANDS = (StartCall, AbortCall, KillWorkers, ReplicateJournal, Quit)


def read_command(data: bytes) -> Command:
    """One command; see :func:`read_one_of` for what is raised."""
    return cast("Command", read_one_of(COMMANDS, data))


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalText(TypedMessage):
    """A part of the journal, for the agent that keeps the replica."""

    text: str


# Worker to agent, and on to the controller.


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered(TypedMessage):
    """The set-up is over: the worker calls the function of this call now."""

    t: Literal["entered"] = "entered"
    call: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(TypedMessage):
    """The step that the worker is at; ``fraction`` (0 to 1) of the whole, if known."""

    t: Literal["progress"] = "progress"
    step: str
    fraction: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignProcess(TypedMessage):
    """A process that does not belong to this run was on the worker's GPU in this call.

    ``when`` it was seen first: before the function was called, while it ran, or when it had returned. None: NVML does not give
    the value.
    """

    t: Literal["foreign process"] = "foreign process"
    call: str
    pid: int
    name: str | None
    memory_gib: float | None
    when: Literal["before", "during", "after"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result(TypedMessage):
    """What every result says.

    ``call``: the id of the call, where a worker answers. The agent adds whether the call was entered, the number of
    collectives entered in it, the name of the last one, its ``members`` (empty without a process group), the foreign
    processes on the GPU, and the end of what the worker printed.

    ``group_changed``: the function left another default process group behind, or none.
    """

    call: str = ""
    entered: bool = False
    collectives: int = 0
    collective: str = ""
    members: Spans = ()
    group_changed: bool = False
    foreign_processes: tuple[ForeignProcess, ...] = ()
    output: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Success(_Result):
    """The function returned. ``value`` crosses as plain data; :func:`read_reply` rebuilds it."""

    t: Literal["success"] = "success"
    ok: ClassVar[Literal[True]] = True
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(_Result):
    """There is no value.

    ``blames``: the kind of part that is to blame, None if unknown; ``advice``: what to do, if the error says it. ``type``,
    ``traceback`` and ``cause`` (the first of a chain of exceptions) belong to an exception. ``state`` (the letter of proc(5)),
    ``stacks`` and ``flight`` (the last collectives in PyTorch's flight recorder) were taken from a worker that did not return,
    and ``ras`` from its NCCL: who lags where.
    """

    t: Literal["failure"] = "failure"
    ok: ClassVar[Literal[False]] = False
    kind: FailureKind
    error: str
    blames: Part | None = None
    advice: str | None = None
    type: str = ""
    cause: str = ""
    traceback: str = ""
    state: str = ""
    stacks: str = ""
    flight: str = ""
    ras: str = ""


Reply: TypeAlias = "Success | Failure"
FromWorker: TypeAlias = "Entered | StepReport | ForeignProcess | Reply"


def read_reply(data: bytes) -> Reply:
    """A rank's answer to a call, with its value rebuilt; see :func:`read_one_of` for what is raised."""
    reply = cast("Reply", read_one_of((Success, Failure), data))
    if isinstance(reply, Failure) or reply.value is None:
        return reply
    try:
        object.__setattr__(reply, "value", plain_data.from_plain(reply.value))  # nobody else has it yet; replace() costs 7 us
    except plain_data.NotPlainDataError as wrong:
        raise MalformedMessageError(f"Success.value: {wrong}") from None
    return reply


def read_from_worker(data: bytes) -> FromWorker:
    """What a worker says to its agent; see :func:`read_one_of` for what is raised."""
    message = cast("FromWorker", read_one_of((Entered, StepReport, ForeignProcess, Success, Failure), data))
    if isinstance(message, Failure) and message.kind not in KINDS_OF_WORKERS:
        raise MalformedMessageError(f"a worker does not say that it {message.kind}")
    return message


# Agent to controller.


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello(TypedMessage):
    """Where an agent runs. ``machine``: where its pid means the same process (:func:`protocol.rank.machine`).

    ``requested``: what the options on its node ask for, by option; None for an agent that the controller itself started.
    """

    hostname: str
    machine: str
    pid: int
    group_rank: int
    local_rank: int
    requested: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressInCall(StepReport):
    """The step that a rank is at in one call."""

    call: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFound(TypedMessage):
    """The worker of this rank hangs, as its agent has found."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye(TypedMessage):
    """An agent leaves."""


# Agent to worker, and to the spawner.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember(TypedMessage):
    """The process group that a worker joins, its rank and the size in it, and the store through which members meet."""

    id: str
    rank: int
    size: int
    host: str
    port: int
    setup_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(FunctionCall):
    """One call for one worker.

    ``call``: its id. ``roots``: the folders of this run's tests. ``trusted``: the run has a secret, so functions from elsewhere
    may run too.
    """

    call: str
    roots: tuple[str, ...]
    trusted: bool
    group: GroupMember | None

    @classmethod
    def of(cls, command: StartCall, *, roots: tuple[str, ...], trusted: bool, group: GroupMember | None) -> Task:
        """The task that does the work of this call."""
        passed_on = {field.name: getattr(command, field.name) for field in fields(FunctionCall)}
        return cls(**passed_on, call=command.id, roots=roots, trusted=trusted, group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker(TypedMessage):
    """Fork a worker with these variables added to its environment. The worker writes the files, and its agent reads them.

    The spawner's handle numbers the requests.
    """

    number: int = 0
    environment: dict[str, str]
    cwd: str
    stacks_file: str
    flight_file: str
    collective_file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(TypedMessage):
    """The answer to the request of this number."""

    t: Literal["started"] = "started"
    number: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNotStarted(TypedMessage):
    """The answer to the request of this number: it could not be forked."""

    t: Literal["not started"] = "not started"
    number: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(TypedMessage):
    """A worker has ended, with the wait status of waitpid(2)."""

    t: Literal["exited"] = "exited"
    pid: int
    status: int


FromSpawner: TypeAlias = "WorkerStarted | WorkerNotStarted | WorkerExited"


def read_from_spawner(data: bytes) -> FromSpawner:
    """What the spawner says to its agent; see :func:`read_one_of` for what is raised."""
    return cast("FromSpawner", read_one_of((WorkerStarted, WorkerNotStarted, WorkerExited), data))
