"""Every message that crosses between controller, agents and workers.

``t`` tells apart the messages that arrive under the same key or on the same line. Ranks are torchrun's; a ``span`` is the
first and the last of consecutive ranks.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias, cast

from msgspec.structs import force_setattr

from pytest_gpucluster.errors import Part
from pytest_gpucluster.places import Device
from pytest_gpucluster.protocol import plain_data
from pytest_gpucluster.protocol.codec import MalformedMessageError, TypedMessage, read_one_of

FailureKind: TypeAlias = Literal["raised", "refused", "died", "hung", "released", "lost"]

Spans: TypeAlias = "tuple[tuple[int, int], ...]"


class FunctionName(TypedMessage, frozen=True, kw_only=True):
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


class RankGroup(TypedMessage, frozen=True, kw_only=True):
    """One process group: its id is never used again, and the position in ``ranks`` is the rank in the group."""

    id: str
    ranks: tuple[int, ...]


class StartCall(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="call"):
    """Run a function on some ranks. ``nodes``: the node number of each torchrun group rank, as far as known.

    ``any_device``: the function runs without a GPU too. ``test_arguments``: the fixtures that the body of a distributed test
    gets besides ``kwargs`` (plain data); None: the function is no such body. ``variables``: those of :data:`CALL_VARIABLES`
    that a worker gets which is started for this call.
    """

    id: str
    ranks: Spans
    function: FunctionName
    kwargs: dict[str, Any]
    device: Device
    any_device: bool
    sys_path: tuple[str, ...]
    test_arguments: tuple[str, ...] | None
    groups: tuple[RankGroup, ...] | None
    deadline_s: float
    setup_s: float
    cwd: str
    nodes: dict[str, int]
    variables: dict[str, str]


class AbortCall(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="abort"):
    """Stop waiting in a call: its result would come too late, or never.

    ``grace_s``: how long each rank must have been in the call first. ``entered``: the rank that failed came into the call, so
    others may still be on their way into it.
    """

    id: str
    ranks: Spans
    why: str
    grace_s: float = 0.0
    entered: bool = True


class KillWorkers(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="kill"):
    """End the workers of these ranks; the next call starts new ones."""

    ranks: Spans


class ReportTarget(TypedMessage, frozen=True, kw_only=True):
    """The reports of a run: the folder of its journal, the JUnit file that pytest would write, and the id of the run."""

    folder: str
    junit: str | None
    run: str = ""


class ReplicateJournal(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="replicate"):
    """Keep a copy of the journal, and write the reports from it if the controller's node is lost.

    The agent's own command line says where: a message of a stranger could name any file.
    """

    ranks: Spans


class Quit(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="quit"):
    """Every agent leaves; ``code`` is the exit code of the run, ``last_lines`` what each node shows last."""

    code: int
    last_lines: str = ""


CommandToRanks: TypeAlias = "StartCall | AbortCall | KillWorkers | ReplicateJournal"
Command: TypeAlias = "CommandToRanks | Quit"
COMMANDS = (StartCall, AbortCall, KillWorkers, ReplicateJournal, Quit)


def read_command(data: bytes) -> Command:
    """One command; see :func:`read_one_of` for what is raised."""
    return cast("Command", read_one_of(COMMANDS, data))


class JournalText(TypedMessage, frozen=True, kw_only=True):
    """A part of the journal, for the agent that keeps the replica."""

    text: str


# Worker to agent, and on to the controller.


class Entered(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="entered"):
    """The set-up is over: the worker calls the function of this call now."""

    call: str


class StepReport(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="progress"):
    """The step that the worker is at; ``fraction`` (0 to 1) of the whole, if known."""

    step: str
    fraction: float | None


class ForeignProcess(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="foreign process"):
    """A process that does not belong to this run was on the worker's GPU in this call.

    ``when`` it was seen first: before the function was called, while it ran, or when it had returned. None: NVML does not give
    the value.
    """

    call: str
    pid: int
    name: str | None
    memory_gib: float | None
    when: Literal["before", "during", "after"]


class _Result(TypedMessage, frozen=True, kw_only=True):
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


class Success(_Result, frozen=True, kw_only=True, tag_field="t", tag="success"):
    """The function returned. ``value`` crosses as plain data; :func:`read_reply` rebuilds it."""

    ok: ClassVar[Literal[True]] = True
    value: Any = None


class Failure(_Result, frozen=True, kw_only=True, tag_field="t", tag="failure"):
    """There is no value.

    ``blames``: the kind of part that is to blame, None if unknown; ``advice``: what to do, if the error says it. ``type``,
    ``traceback`` and ``cause`` (the first of a chain of exceptions) belong to an exception. ``state`` (the letter of proc(5)),
    ``stacks`` and ``flight`` (the last collectives in PyTorch's flight recorder) were taken from a worker that did not return,
    and ``ras`` from its NCCL: who lags where.
    """

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
        force_setattr(reply, "value", plain_data.from_plain(reply.value))  # nobody else has it yet; replace() costs 7 us
    except plain_data.NotPlainDataError as wrong:
        raise MalformedMessageError(f"Success.value: {wrong}") from None
    return reply


def read_from_worker(data: bytes) -> FromWorker:
    """What a worker says to its agent; see :func:`read_one_of` for what is raised."""
    message = cast("FromWorker", read_one_of((Entered, StepReport, ForeignProcess, Success, Failure), data))
    if isinstance(message, Failure) and message.kind not in ("raised", "refused"):  # agent or controller find the others
        raise MalformedMessageError(f"a worker does not say that it {message.kind}")
    return message


# Agent to controller.


class AgentHello(TypedMessage, frozen=True, kw_only=True):
    """Where an agent runs. ``machine``: where its pid means the same process (:func:`protocol.rank.machine`).

    ``requested``: what the options on its node ask for, by option; None for an agent that the controller itself started.
    """

    hostname: str
    machine: str
    pid: int
    group_rank: int
    local_rank: int
    requested: dict[str, str] | None = None


class ProgressInCall(StepReport, frozen=True, kw_only=True):
    """The step that a rank is at in one call."""

    call: str


class HangFound(TypedMessage, frozen=True, kw_only=True):
    """The worker of this rank hangs, as its agent has found."""

    rank: int


class Bye(TypedMessage, frozen=True, kw_only=True):
    """An agent leaves."""


# Agent to worker, and to the spawner.


class GroupMember(TypedMessage, frozen=True, kw_only=True):
    """The process group that a worker joins, its rank and the size in it, and the store through which members meet."""

    id: str
    rank: int
    size: int
    host: str
    port: int
    setup_s: float


class Task(TypedMessage, frozen=True, kw_only=True):
    """One call for one worker, without the call's groups, which may be many: ``group`` is the worker's own.

    ``roots``: the folders of this run's tests. ``trusted``: the run has a secret, so functions from elsewhere may run too.
    """

    call: StartCall
    roots: tuple[str, ...]
    trusted: bool
    group: GroupMember | None


class StartWorker(TypedMessage, frozen=True, kw_only=True):
    """Fork a worker with these variables added to its environment. The worker writes the files, and its agent reads them.

    The spawner's handle numbers the requests.
    """

    number: int = 0
    environment: dict[str, str]
    cwd: str
    stacks_file: str
    flight_file: str
    collective_file: str


class WorkerStarted(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="started"):
    """The answer to the request of this number."""

    number: int
    pid: int


class WorkerNotStarted(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="not started"):
    """The answer to the request of this number: it could not be forked."""

    number: int
    error: str


class WorkerExited(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="exited"):
    """A worker has ended, with the wait status of waitpid(2)."""

    pid: int
    status: int


FromSpawner: TypeAlias = "WorkerStarted | WorkerNotStarted | WorkerExited"


def read_from_spawner(data: bytes) -> FromSpawner:
    """What the spawner says to its agent; see :func:`read_one_of` for what is raised."""
    return cast("FromSpawner", read_one_of((WorkerStarted, WorkerNotStarted, WorkerExited), data))
