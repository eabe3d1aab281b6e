"""A worker as its agent sees it: a process, a line for messages, its output, and what it leaves in files.

The environment of a worker: torchrun's variables for its place, and what CUDA and NCCL read when they start.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from pytest_gpucluster.agent import nccl_ras
from pytest_gpucluster.agent.spawner import Spawner, describe_exit, kill_and_reap
from pytest_gpucluster.errors import Part
from pytest_gpucluster.inventory.nccl_log import FILE, PATH, SUBSYSTEMS, log_text
from pytest_gpucluster.protocol.codec import MalformedMessageError, Wire
from pytest_gpucluster.protocol.messages import Failure, FromWorker, StartWorker, Success, read_from_worker
from pytest_gpucluster.protocol.rank import STOPPED, Rank, state_of
from pytest_gpucluster.worker import flight_recorder, last_collective, python_stacks
from pytest_gpucluster.worker.last_collective import LastCollective

VMSTAT = Path("/proc/vmstat")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """How many processes the kernel has ended for want of memory, on the whole host and in this process's cgroup.

    None where it is not said. A container may show no count of its host.
    """

    host: int | None
    cgroup: int | None


def read_oom_kills() -> OomKills:
    """The counts now."""
    counts = (_read_count(file) for file in _files_of_cgroup())
    return OomKills(host=_read_count(VMSTAT), cgroup=next((count for count in counts if count is not None), None))


def _read_count(file: Path) -> int | None:
    try:
        counts = dict(line.split(" ", 1) for line in file.read_text(encoding="ascii").splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def _files_of_cgroup() -> Iterator[Path]:
    """Where the count of this process's cgroup may be: by the cgroup's path, else at the root that a container shows."""
    try:
        lines = [line.split(":", 2) for line in OWN_CGROUP.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return
    for controllers, path in (line[1:] for line in lines if len(line) == 3):
        if not controllers:
            folder, name = CGROUPS, "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = CGROUPS / "memory", "memory.oom_control"
        else:
            continue
        yield folder / path.lstrip("/") / name
        yield folder / name


def describe_end(status: int, *, oom_kills_before: OomKills) -> tuple[str, Part]:
    """How the worker with this wait status ended, in words, and what is to blame.

    SIGKILL is the kernel's only where a count of :func:`read_oom_kills` has grown since the worker was started. A crash may
    be the fault of any part, and an exit code is the function's own doing.
    """
    words = f"the worker {describe_exit(status)}"
    if os.WIFEXITED(status):
        return words, "software"
    if os.WTERMSIG(status) != signal.SIGKILL:
        return words, "unknown"
    kills = read_oom_kills()
    in_cgroup, here = _growth(oom_kills_before.cgroup, kills.cgroup), _growth(oom_kills_before.host, kills.host)
    if not in_cgroup and not here:
        return words, "unknown"
    where = f"{in_cgroup} in this cgroup, whose limit may be below the host's memory" if in_cgroup else f"{here} here"
    return f"{words} (out of host memory: the kernel's OOM killer ended {where})", "host"


def _growth(before: int | None, now: int | None) -> int:
    return max(0, now - before) if before is not None and now is not None else 0


KILL_S = 10.0
SEND_S = 8.0  # the agent does not beat meanwhile: less than the controller waits for a beat
TAIL_BYTES = 64 * 1024
READS = 64
"""Reads in a row from a worker's line or output. More waits there only if something writes without end."""


class WorkerProcess:
    """One live worker."""

    def __init__(self, spawner: Spawner, *, cwd: str, environment: dict[str, str]) -> None:
        """Start it.

        Raises:
            OSError: it could not be started.
        """
        self._spawner = spawner
        self._stacks_file = spawner.folder / "stacks"
        self._collective_file = spawner.folder / "collective"
        self._flight_file = spawner.folder / "flight.json"
        self._ras_address = environment.get(nccl_ras.VARIABLE)
        self._flight_file.unlink(missing_ok=True)
        self._stacks_file.unlink(missing_ok=True)
        self.oom_kills_before = read_oom_kills()
        self._has_ended = False
        self._survived_kill = False
        self.tail = bytearray()
        last_collective.create(self._collective_file)
        mine, theirs = socket.socketpair()
        self.output_fd, output_write = os.pipe()
        os.set_blocking(self.output_fd, False)
        request = StartWorker(
            environment=environment,
            cwd=cwd if Path(cwd).is_dir() else str(Path.cwd()),
            stacks_file=str(self._stacks_file),
            flight_file=str(self._flight_file),
            collective_file=str(self._collective_file),
        )
        try:
            self.pid = spawner.spawn(request, link=theirs, output_fd=output_write)
        except OSError:
            mine.close()
            os.close(self.output_fd)
            raise
        finally:
            theirs.close()
            os.close(output_write)
        mine.settimeout(SEND_S)  # a worker that does not read must not block its agent for longer
        self.wire = Wire(mine)

    def collective(self) -> LastCollective:
        """The number of collectives entered in this call, and the last one."""
        return last_collective.read(self._collective_file)

    def drain(self) -> bool:
        """Append what the worker printed to the bounded tail. False if its output is closed.

        The number of reads is bounded: another process that the worker started may print for ever.
        """
        with contextlib.suppress(BlockingIOError):
            for _ in range(READS):
                data = os.read(self.output_fd, TAIL_BYTES)
                if not data:
                    return False
                self.tail += data
                del self.tail[:-TAIL_BYTES]
        return True

    def printed(self) -> str:
        r"""The tail as text, from a whole character on; a byte that is not UTF-8 is shown as ``\xe9``."""
        start = next((index for index, byte in enumerate(self.tail[:4]) if byte & 0xC0 != 0x80), 0)
        return self.tail[start:].decode("utf-8", "backslashreplace")

    def receive(self) -> list[FromWorker] | None:
        """The messages that one read completes. None when the worker has closed its line.

        Raises:
            MalformedMessageError: something else is among them.
        """
        received = self.wire.receive()
        return None if received is None else [read_from_worker(data) for data in received]

    def last_messages(self) -> list[FromWorker]:
        """What the worker may have sent just before it ended."""
        messages: list[FromWorker] = []
        with selectors.DefaultSelector() as ready, contextlib.suppress(MalformedMessageError):
            ready.register(self.wire, selectors.EVENT_READ)
            for _ in range(READS):
                received = self.receive() if ready.select(0) else None
                if received is None:
                    break
                messages += received
        return messages

    def state(self) -> str:
        """The process state letter (``T`` stopped, ``D`` uninterruptible wait), or ``?``."""
        return state_of(self.pid) or "?"

    def look(self, failure: Failure) -> Failure:
        """The failure with what the worker, which hangs, does: its state, its last collectives, NCCL's RAS. It goes on hanging.

        A stopped one tells nothing but its state, and no part of the machine is to blame for it.
        """
        state = self.state()
        if state == STOPPED:
            failure = replace(failure, blames="software")
        else:
            failure = replace(failure, ras=nccl_ras.ask(self._ras_address))  # while its peers run, too
            flight_recorder.ask(self.pid, self._flight_file)
        return replace(failure, state=state, flight=flight_recorder.summarize(self._flight_file))

    def hold(self) -> None:
        """Stop the worker (SIGSTOP), so that the end of a peer cannot wake it out of what it is in."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGSTOP)

    def _has_answered(self) -> bool:
        return any(isinstance(message, (Success, Failure)) for message in self.last_messages())

    def stacks(self) -> str:
        """The worker's Python stacks, by which it ends, held or not; empty if it does not answer.

        One that has answered meanwhile, since the end of a peer woke it, has no stacks: they would show its next wait.
        """
        stacks = "" if self._has_answered() else python_stacks.ask(self.pid, self._stacks_file)
        return "" if self._has_answered() else stacks

    def crash(self) -> str:
        """The Python stacks of the crash that ended the worker; empty if it ended otherwise."""
        return python_stacks.of_crash(self._stacks_file)

    def kill(self, *, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Kill the worker and all that it started. False if it does not end within :data:`KILL_S` (state D).

        ``meanwhile`` is called several times a second. A worker that survived is not waited for again.
        """
        if self._has_ended or self._survived_kill:
            return self._has_ended
        with contextlib.suppress(OSError):
            self._has_ended = kill_and_reap(self._spawner, self.pid, within_s=KILL_S, meanwhile=meanwhile) is not None
        self._survived_kill = not self._has_ended
        return self._has_ended

    def note_exit(self) -> None:
        """Called when the spawner reports that this worker has ended."""
        self._has_ended = True

    def close(self) -> None:
        """Close the line for messages and the output."""
        self.wire.close()
        os.close(self.output_fd)


WORKER_DEFAULTS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that local rank k is the k-th GPU in PCI order, as place ids count
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # repeatable cuBLAS for the audits; must be there before CUDA starts
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the agent's deadline decides; a watchdog would destroy the evidence
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


NCCL_LOGGING = {"NCCL_DEBUG": "INFO", SUBSYSTEMS: "INIT,NET,ENV"}
"""What makes NCCL write its channels into its log. Other values of the site would hide them, or write at each collective."""
LOG_NAME = "nccl.log"
SITE_LOG_BYTES = 16384


def worker_environment(rank: Rank, folder: Path, *, nodes: Mapping[str, int]) -> dict[str, str]:
    """The variables of a worker. ``nodes``: the node number of each torchrun group rank, as far as known.

    Variables that the agent inherited win over the defaults. Those of NCCL's log do not: the worker measures by that log.
    NCCL's RAS service gets a port of this worker's own.

    Raises:
        OSError: no port is free.
    """
    log = str(folder / LOG_NAME)
    ras = {} if nccl_ras.VARIABLE in os.environ else {nccl_ras.VARIABLE: nccl_ras.free_address()}
    return {
        **ras,
        **{name: value for name, value in WORKER_DEFAULTS.items() if name not in os.environ},
        **NCCL_LOGGING,
        FILE: log,
        PATH: log,
        **rank.variables(node=nodes.get(str(rank.group_rank), rank.group_rank)),
    }


def overridden_variables() -> dict[str, dict[str, str]]:
    """What this process inherited and workers have otherwise: by name, the site's value and the workers'."""
    workers = {**NCCL_LOGGING, FILE: "a file of each worker"}
    inherited = {name: os.environ[name] for name in workers if name in os.environ}
    return {name: {"site": value, "workers": workers[name]} for name, value in inherited.items() if value != workers[name]}


def site_log(folder: Path) -> str:
    """The end of a worker's NCCL log, as far as the site's own ``NCCL_DEBUG`` asks for it; empty where it asks for none."""
    level = os.environ.get("NCCL_DEBUG", "").upper()
    if level not in ("WARN", "INFO", "TRACE"):
        return ""
    end = log_text(folder / LOG_NAME).encode()[-SITE_LOG_BYTES:]
    lines = end.decode("utf-8", "replace").splitlines(keepends=True)
    return "".join(line for line in lines if level != "WARN" or "NCCL WARN" in line)
