"""Cost of the channel: a call with many agents, the release after a death, the replacement of a worker.

    python benchmarks/channel.py [--agents 4 64 256 1024 8192] [--calls 40] [--rounds 10] [--out DIR]

1. A call, with an empty reply and with one of 2 KB. Controller, channel, keys, signatures and the reader of commands of each
   node are the real ones, and the store lies in a process of its own, as under torchrun. The agents are simulated: each has
   its connection to the store and its line to that reader, signs its replies, and answers at once, without a worker; one
   thread plays many of them. Nodes have 8 agents, and a few processes hold all nodes. Everything shares this machine's cores
   over the loopback, so the table shows the CPU time of store, controller and nodes too; on a cluster, other machines spend
   that of the nodes.
2. Release and replacement. Four real agents and workers, as in a plain run: rank 2 kills itself inside an all-reduce
   that the others are in; from the kill to the return of the controller's call, and from there to the return of the
   next all-reduce of all four.

Prints a table; with ``--out`` also writes results.json and plot.svg there. Takes some minutes on 2 cores, most of them
until the nodes have joined.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import platform
import resource
import secrets
import selectors
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed

from pytest_gpucluster.agent.command_reader import CommandReader, commands_address
from pytest_gpucluster.agent.heartbeat import BEAT_S, BEATS_PER_LOOK
from pytest_gpucluster.agent.spawner import die_with_parent
from pytest_gpucluster.config.torchrun import read_launch
from pytest_gpucluster.controller.call import Call
from pytest_gpucluster.controller.controller import Controller, address_of
from pytest_gpucluster.protocol import channel, plain_data
from pytest_gpucluster.protocol.channel import CONTROLLER, Address, bye_key, hello_key, reply_key
from pytest_gpucluster.protocol.codec import Secret, Wire
from pytest_gpucluster.protocol.messages import AgentHello, Bye, Failure, FunctionName, Quit, StartCall, Success, read_command
from pytest_gpucluster.protocol.rank import Rank, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pytest_gpucluster.protocol.messages import Command


REPOSITORY = Path(__file__).resolve().parents[1]
RANKS_PER_NODE = 8
PROCESSES = 4
WARMUP_CALLS = 3
DEADLINE_S = 20.0
JOIN_S = 150.0
LIMIT_S = 500.0
VICTIM, RANKS = 2, 4
KILL_AFTER_S = 0.2
OWN_DESCRIPTORS = 128
CONNECTING = 256
"""Connections that a process opens at a time: each waits for a name server."""
DESCRIPTORS_AN_AGENT = 4
"""Its connection, both ends of its line, and its share of what the node has."""
MANY = 1024
SLOW_JOIN_S = 4.0
AIMS = {"call_median_ms": 50.0, "release_median_s": 1.0, "replacement_median_s": 2.0}
SECRET = Secret.random()
"""Signs the messages of the benchmark, which starts all processes by forks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a measurement may return."""

    median_gb_s: float
    repeats_gb_s: list[float]
    device: str = "NVIDIA H200"
    unit: str = "GB/s"


RATES = Rates(median_gb_s=41.7, repeats_gb_s=[41.7 + repeat / 7 for repeat in range(22)])
FULL = {f"case {number}": RATES for number in range(4)}
REPLIES = {
    "empty": Success(value=None, entered=True),
    "full": Success(value=plain_data.to_plain(FULL), entered=True),
}
"""By the word that a call carries as its argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost:
    """A call on so many agents, each of which replies with so many bytes.

    The CPU times are means per call, of the store, the controller and all agents together. ``others_cores``: how many
    cores were busy with something else meanwhile, on average (the kernel's network work for us is in it; counted in ticks of
    0.01 s, so it means nothing where all calls together took less than about a second).
    """

    agents: int
    nodes: int
    reply_bytes: int
    calls: int
    join_s: float
    call_median_ms: float
    call_p10_ms: float
    call_p90_ms: float
    store_cpu_ms: float
    controller_cpu_ms: float
    agents_cpu_ms: float
    quit_s: float
    others_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """After the death of one of four workers, a sample a round: until all peers were released, until the next result."""

    release_s: list[float]
    replacement_s: list[float]


# --- What the workers run ---


def add_ranks() -> int:
    """The sum of all ranks, by an all-reduce."""
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    return int(total.item())


def add_until_death(victim: int, stamp: str, after_s: float) -> None:
    """All-reduce for ever; ``victim`` notes the time in the file ``stamp`` and kills itself meanwhile."""
    if dist.get_rank() == victim:
        threading.Timer(after_s, _die, [Path(stamp)]).start()
    buffer = torch.zeros(1 << 18)
    while True:
        dist.all_reduce(buffer)


def _die(stamp: Path) -> None:
    stamp.write_text(repr(time.monotonic()), encoding="ascii")
    os.kill(os.getpid(), signal.SIGKILL)


# --- Simulated agents ---


class SimulatedNode:
    """A node's real reader of commands, and its agents, each with its connection and without a worker."""

    def __init__(self, ranks: range, channels: Sequence[channel.StoreChannel]) -> None:
        """Prepare to read commands for all ``ranks``."""
        self._number = ranks.start // RANKS_PER_NODE
        first = Rank(
            rank=ranks.start,
            world_size=ranks.stop,
            local_rank=0,
            local_world_size=RANKS_PER_NODE,
            group_rank=self._number,
        )
        self._name = commands_address(channels[0].address, SECRET, first)
        self._agents = dict(zip(ranks, channels, strict=True))
        self.reader = CommandReader(channels[0], first, shared_at=self._name)

    def join(self, selector: selectors.BaseSelector) -> None:
        """Say hello as all ranks. What comes for them goes to methods that are registered with ``selector``."""
        node, first = self._number, min(self._agents)
        selector.register(self.reader, selectors.EVENT_READ, partial(self._obey_first, first))
        here = machine() if node == 0 else f"simulated node {node}"
        for rank, own in self._agents.items():
            local_rank = rank - first
            if local_rank > 0:
                line = Wire(line_to(self._name))
                selector.register(line, selectors.EVENT_READ, partial(self._obey, rank, line))
            hello = AgentHello(hostname=f"node{node}", machine=here, pid=os.getpid(), group_rank=node, local_rank=local_rank)
            own.put(hello_key(rank), hello)

    def _obey_first(self, rank: int) -> None:
        """Called when the first agent has read commands for its node."""
        self.reader.on_wake()
        for command in self.reader.pending():
            self._answer(rank, command)

    def _obey(self, rank: int, line: Wire) -> None:
        """Called when commands were handed on to ``rank``. Whether they are signed is looked at by the first agent alone."""
        for received in line.receive() or ():
            if received.startswith(b"{"):
                self._answer(rank, read_once(received))

    def _answer(self, rank: int, command: Command) -> None:
        """Here, each call is for every rank."""
        if isinstance(command, StartCall):
            self._agents[rank].put(reply_key(command.id, rank), REPLIES[command.kwargs["reply"]])
        elif isinstance(command, Quit):
            self._agents[rank].put(bye_key(rank), Bye())

    def beat(self, count: int) -> None:
        """Say that every rank lives, and look at times whether the controller does."""
        for rank, own in self._agents.items():
            own.beat(rank, count)
            if count % BEATS_PER_LOOK == 0:
                own.beats([CONTROLLER])


read_once = functools.lru_cache(read_command)
"""The agents of a process get the same commands."""


def line_to(name: str) -> socket.socket:
    """A line to the agent that reads for its node, which has accepted it: every command from now on comes by it."""
    line = socket.socket(socket.AF_UNIX)
    while line.connect_ex(name):
        time.sleep(0.001)
    while line.recv(1) not in (b"\n", b""):  # the number of the next command
        pass
    return line


def serve_agents(nodes: Sequence[range], address: Address) -> None:
    """Be the agents of these nodes, given by their ranks, until the controller says quit."""
    selector = selectors.DefaultSelector()
    with ThreadPoolExecutor(CONNECTING) as pool:
        ranks = [rank for node in nodes for rank in node]
        channels = dict(zip(ranks, pool.map(lambda _: channel.connect(address, SECRET), ranks), strict=True))
        served = [SimulatedNode(node, [channels[rank] for rank in node]) for node in nodes]
        list(pool.map(lambda one: one.reader.start(), served))
    for one in served:
        one.join(selector)
    count, next_s = 0, time.monotonic()
    while True:  # until it is killed: the last goodbyes are not waited for here
        for key, _ in selector.select(max(0.0, next_s - time.monotonic())):
            key.data()
        if time.monotonic() >= next_s:
            count, next_s = count + 1, time.monotonic() + BEAT_S
            for one in served:
                one.beat(count)


def host_store(address: Address, listener: socket.socket) -> None:
    """Host the store and nothing else, as torchrun does."""
    kept = channel.host_store(address, SECRET, listener=listener)
    signal.pause()
    del kept


@contextlib.contextmanager
def forked(work: Callable[[], None]) -> Iterator[int]:
    """A process that does ``work``, by its pid; killed at the end, or with this process."""
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 -- said, and the process ends here whatever it was
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# --- An empty call ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A controller that met its agents, and the processes that play the rest, by pid."""

    controller: Controller
    store: int
    holders: Sequence[int]

    def cpu_s(self) -> list[float]:
        """CPU seconds so far: of the store, of this process, of the agents, and of the whole machine."""
        agents_s = sum(process_cpu_s(pid) for pid in self.holders)
        return [process_cpu_s(self.store), time.process_time(), agents_s, machine_cpu_s()]


def process_cpu_s(pid: int) -> float:
    """CPU seconds of another process: its clock's number is made of its pid (clock_getcpuclockid(3) on Linux)."""
    return time.clock_gettime((~pid << 3) | 2)


def machine_cpu_s() -> float:
    """CPU seconds of all processes and the kernel since the start: what /proc/stat counts, but for idle and iowait."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def simulated(agents: int) -> Iterator[Simulation]:
    """A store, so many agents, and a controller that heard from all of them."""
    listener = channel.listen_on_loopback()
    host, port = listener.getsockname()[:2]
    launch = read_launch(torchrun(Address(host=host, port=port, run_id=secrets.token_hex(4)), agents))
    assert launch is not None
    address = address_of(launch)
    nodes = [range(first, min(first + RANKS_PER_NODE, agents)) for first in range(0, agents, RANKS_PER_NODE)]
    shares = [nodes[first::PROCESSES] for first in range(min(PROCESSES, len(nodes)))]
    with contextlib.ExitStack() as processes:
        store = processes.enter_context(forked(partial(host_store, address, listener)))
        listener.close()
        holders = [processes.enter_context(forked(partial(serve_agents, share, address))) for share in shares]
        controller = Controller(launch, num_local=1, device="cpu", rootdir=REPOSITORY, secret=SECRET)
        controller.meet(within_s=JOIN_S)
        absent = [rank for rank in range(agents) if controller.hello_of(rank) is None]
        require(not absent, f"{len(absent)} agents did not join within {JOIN_S:g} s", {})
        controller.assign_nodes({rank: rank // RANKS_PER_NODE for rank in range(agents)})
        yield Simulation(controller=controller, store=store, holders=holders)


def measure_calls(agents: int, calls: int, tick: Callable[[str], None]) -> list[CallCost]:
    """Time ``calls`` calls of each kind on ``agents`` simulated agents, their arrival and their leaving."""
    started_s = time.perf_counter()
    with simulated(agents) as simulation:
        join_s = time.perf_counter() - started_s
        tick(f"{agents} agents joined")
        timed = {kind: time_calls(simulation, agents, calls, kind, tick) for kind in REPLIES}
        started_s = time.perf_counter()
        simulation.controller.quit(0)
        quit_s = time.perf_counter() - started_s
    return [cost_of(agents, kind, timed[kind], join_s=join_s, quit_s=quit_s) for kind in REPLIES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Some calls: the seconds of each, and the CPU seconds of all, as :meth:`Simulation.cpu_s` has them."""

    samples_s: list[float]
    took_s: float
    cpu_s: list[float]


def time_calls(simulation: Simulation, agents: int, calls: int, kind: str, tick: Callable[[str], None]) -> Timed:
    """Time calls, after some that are not counted."""
    for _ in range(WARMUP_CALLS):
        time_call_s(simulation.controller, agents, kind)
    samples_s: list[float] = []
    started_s, before_s = time.perf_counter(), simulation.cpu_s()
    for _ in range(calls):
        samples_s.append(time_call_s(simulation.controller, agents, kind))
        tick(f"{agents} agents, {kind} replies")
    took_s = time.perf_counter() - started_s
    cpu_s = [after_s - earlier_s for earlier_s, after_s in zip(before_s, simulation.cpu_s(), strict=True)]
    return Timed(samples_s=samples_s, took_s=took_s, cpu_s=cpu_s)


def cost_of(agents: int, kind: str, timed: Timed, *, join_s: float, quit_s: float) -> CallCost:
    """What these calls cost, each."""
    calls = len(timed.samples_s)
    deciles_s = statistics.quantiles(timed.samples_s, n=10, method="inclusive")
    *own_s, all_s = timed.cpu_s
    return CallCost(
        agents=agents,
        nodes=math.ceil(agents / RANKS_PER_NODE),
        reply_bytes=len(REPLIES[kind].to_json()),
        calls=calls,
        join_s=join_s,
        call_median_ms=1e3 * statistics.median(timed.samples_s),
        call_p10_ms=1e3 * deciles_s[0],
        call_p90_ms=1e3 * deciles_s[-1],
        store_cpu_ms=1e3 * own_s[0] / calls,
        controller_cpu_ms=1e3 * own_s[1] / calls,
        agents_cpu_ms=1e3 * own_s[2] / calls,
        quit_s=quit_s,
        others_cores=max(0.0, all_s - sum(own_s)) / timed.took_s,
    )


def torchrun(address: Address, agents: int) -> dict[str, str]:
    """The environment that torchrun gives to rank 0 of so many ranks; the store at ``address`` is its own."""
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": agents, "LOCAL_WORLD_SIZE": min(agents, RANKS_PER_NODE)}
    store = {"MASTER_ADDR": address.host, "MASTER_PORT": address.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in {**numbers, **store, "TORCHELASTIC_RUN_ID": address.run_id}.items()}


def time_call_s(controller: Controller, agents: int, kind: str = "empty") -> float:
    """Seconds of one call that every agent answers at once; RuntimeError if one does not."""
    started_s = time.perf_counter()
    name, kwargs = controller.name(add_ranks), {"reply": kind}
    call = Call(function=name, ranks=range(agents), deadline_s=DEADLINE_S, setup_s=0.0, kwargs=kwargs)
    replies = controller.call(call)
    took_s = time.perf_counter() - started_s
    require(len(replies) == agents and all(reply.ok for reply in replies.values()), "not every agent answered", replies)
    return took_s


# --- Release and replacement ---


def measure_recovery(rounds: int, tick: Callable[[str], None]) -> Recovery:
    """Kill rank 2 in an all-reduce ``rounds`` times."""
    release_s, replacement_s = [], []
    with tempfile.TemporaryDirectory(prefix="gpucluster-benchmark-") as folder:
        controller = Controller(None, num_local=RANKS, device="cpu", rootdir=REPOSITORY, secret=SECRET)
        controller.start(log=Path(folder) / "agents.log")
        try:
            controller.meet(within_s=JOIN_S)
            add_everywhere(controller)
            for number in range(rounds):
                died_s, returned_s = kill_one(controller, Path(folder) / f"stamp{number}")
                add_everywhere(controller)
                release_s.append(returned_s - died_s)
                replacement_s.append(time.monotonic() - returned_s)
                tick("deaths and replacements")
        finally:
            controller.quit(0)
    return Recovery(release_s=release_s, replacement_s=replacement_s)


def kill_one(controller: Controller, stamp: Path) -> tuple[float, float]:
    """When the victim killed itself and when the controller had all replies, by the machine's monotonic clock."""
    kwargs = {"victim": VICTIM, "stamp": str(stamp), "after_s": KILL_AFTER_S}
    replies = controller.call(together(controller.name(add_until_death), kwargs))
    returned_s = time.monotonic()
    kinds = {rank: reply.kind for rank, reply in replies.items() if isinstance(reply, Failure)}
    released = all(kinds.get(rank) in ("raised", "released") for rank in range(RANKS) if rank != VICTIM)
    require(released and kinds.get(VICTIM) == "died", "the planted death was not seen as one", replies)
    return float(stamp.read_text(encoding="ascii")), returned_s


def add_everywhere(controller: Controller) -> None:
    """One all-reduce over all four ranks; RuntimeError if its sum is wrong, or there is none."""
    replies = controller.call(together(controller.name(add_ranks), {}))
    right = sum(range(RANKS))
    require(
        all(isinstance(reply, Success) and reply.value == right for reply in replies.values()),
        "the sum over four ranks is wrong",
        replies,
    )


def together(function: FunctionName, kwargs: dict[str, Any]) -> Call:
    """A call of all four ranks as one group."""
    everyone = list(range(RANKS))
    return Call(function=function, ranks=everyone, deadline_s=DEADLINE_S, kwargs=kwargs, groups=[everyone])


def require(condition: bool, what: str, replies: dict[int, Any]) -> None:  # noqa: FBT001 -- a condition is a bool
    """Measure nothing on wrong answers.

    Raises:
        RuntimeError: the condition does not hold; it shows the first bad replies.
    """
    if not condition:
        bad = {rank: reply for rank, reply in replies.items() if not reply.ok} or replies
        raise RuntimeError(f"{what}: {dict(list(bad.items())[:4])}")


# --- What comes out ---


def aims_of(costs: Sequence[CallCost], recovery: Recovery) -> list[dict[str, Any]]:
    """Each aim with the value reached; the aim of the empty call is for 1024 agents, and grows with their number."""
    many = [cost for cost in empty_of(costs) if cost.agents >= MANY]
    name = "call_median_ms"
    found = [(f"empty call, {cost.agents} agents", name, cost.call_median_ms, cost.agents / MANY) for cost in many]
    found.append(("death to all peers released", "release_median_s", statistics.median(recovery.release_s), 1.0))
    found.append(("release to the next result", "replacement_median_s", statistics.median(recovery.replacement_s), 1.0))
    return [
        {"what": what, "quantity": name, "value": value, "at_most": times * AIMS[name], "reached": value <= times * AIMS[name]}
        for what, name, value, times in found
    ]


def empty_of(costs: Sequence[CallCost]) -> list[CallCost]:
    """Those of empty replies."""
    least = min((cost.reply_bytes for cost in costs), default=0)
    return [cost for cost in costs if cost.reply_bytes == least]


def document(costs: Sequence[CallCost], recovery: Recovery, loads: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Everything measured, and on what."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "device": "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average_before": list(loads[0]),
        "load_average_after": list(loads[1]),
        "agent_processes": PROCESSES,
        "calls": [asdict(cost) for cost in costs],
        "recovery": {"rounds": len(recovery.release_s), **asdict(recovery)},
        "aims": aims_of(costs, recovery),
    }


# The plot: an SVG of 720 x 350, axes from y = 300 up to 40.

BLUE, RED = "#1f77b4", "#d62728"
DASHED, MIDDLE, RIGHT = 'stroke-dasharray="4 3"', 'text-anchor="middle"', 'text-anchor="end"'


def text(x: float, y: float, words: str, more: str = "") -> str:
    """Words at a point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'


def line(points: Sequence[tuple[float, float]], colour: str, more: str = "") -> str:
    """A line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" {more}/>'


def draw_calls(costs: Sequence[CallCost]) -> list[str]:
    """The call at each number of agents, logarithmic: the median, and a bar from p10 to p90."""

    def y(milliseconds: float) -> float:
        return 300 - 52 * math.log10(min(max(milliseconds, 0.1), 10_000) / 0.1)

    aim_y, aim_words = y(AIMS["call_median_ms"]), f"aim {AIMS['call_median_ms']:g} ms at {MANY}"
    parts = [text(70, 22, "empty call, ms (median, p10 to p90)"), text(225, 338, "agents", MIDDLE)]
    for shown_ms in (0.1, 1, 10, 100, 1000, 10_000):
        parts += [line([(70, y(shown_ms)), (380, y(shown_ms))], "#ddd"), text(64, y(shown_ms) + 4, f"{shown_ms:g}", RIGHT)]
    parts += [line([(70, aim_y), (380, aim_y)], RED, DASHED), text(76, aim_y - 4, aim_words)]
    places = {cost: 70 + 310 * (index + 0.5) / len(costs) for index, cost in enumerate(costs)}
    for cost, x in places.items():
        band = [(x, y(cost.call_p10_ms)), (x, y(cost.call_p90_ms))]
        parts += [line(band, BLUE, 'stroke-width="6" opacity="0.4"'), text(x, 318, str(cost.agents), MIDDLE)]
    parts.append(line([(x, y(cost.call_median_ms)) for cost, x in places.items()], BLUE, 'stroke-width="2"'))
    parts += [text(x, y(cost.call_median_ms) - 8, f"{cost.call_median_ms:.3g}", RIGHT) for cost, x in places.items()]
    return [*parts, line([(70, 40), (70, 300), (380, 300)], "black")]


def draw_recovery(recovery: Recovery) -> list[str]:
    """Every release and every replacement, a dot each."""
    columns = {
        "release": (recovery.release_s, AIMS["release_median_s"]),
        "replacement": (recovery.replacement_s, AIMS["replacement_median_s"]),
    }
    top_s = 1.1 * max(max(*samples_s, aim_s) for samples_s, aim_s in columns.values())
    parts = [text(450, 22, "after a death, s (one dot a round)"), line([(450, 40), (450, 300), (690, 300)], "black")]
    parts += [text(444, 304 - 260 * shown_s / top_s, f"{shown_s:g}", RIGHT) for shown_s in (0.0, 0.5, 1.0, 1.5, 2.0)]
    for left, (words, (samples_s, aim_s)) in zip((470, 585), columns.items(), strict=True):
        aim_y = 300 - 260 * aim_s / top_s
        parts += [text(left + 45, 318, words, MIDDLE), line([(left, aim_y), (left + 90, aim_y)], RED, DASHED)]
        parts.append(text(left, aim_y - 4, f"aim {aim_s:g} s"))
        for index, seconds in enumerate(samples_s):
            x, y = left + 90 * (index + 0.5) / len(samples_s), 300 - 260 * seconds / top_s
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{BLUE}"/>')
    return parts


def draw(costs: Sequence[CallCost], recovery: Recovery) -> str:
    """Both pictures side by side."""
    frame = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 350" font-family="sans-serif" font-size="12">'
    ground = '<rect width="720" height="350" fill="white"/>'
    return "\n".join([frame, ground, *draw_calls(empty_of(costs)), *draw_recovery(recovery), "</svg>"]) + "\n"


def show(content: dict[str, Any]) -> None:
    """Print the tables."""
    from rich.console import Console  # noqa: PLC0415 -- workers load this file too, and must start fast
    from rich.table import Table  # noqa: PLC0415

    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(*(name.replace("_", " ") for name in content["calls"][0]), title="A call")
    for cost in content["calls"]:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in cost.values()))
    console.print(table)
    aims = Table("what", "median", "aim, at most", "", title="Aims")
    for aim in content["aims"]:
        unit = aim["quantity"].rpartition("_")[2]
        word = "reached" if aim["reached"] else "missed"
        aims.add_row(aim["what"], f"{aim['value']:.3g} {unit}", f"{aim['at_most']:g} {unit}", word)
    console.print(aims)
    if any(cost["join_s"] > SLOW_JOIN_S for cost in content["calls"]):
        console.print("Joining was slow. Does this machine answer `getent hosts ::ffff:127.0.0.1` at once, every time?")


def allow_descriptors(agents: int) -> None:
    """Let the store keep a connection for each agent, and a process of nodes both ends of all lines: more than shells allow.

    Raises:
        SystemExit: the hard limit is lower.
    """
    needed = max(agents + agents // RANKS_PER_NODE, DESCRIPTORS_AN_AGENT * agents // PROCESSES) + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(
            f"{agents} agents need {needed} open files, the hard limit is {hard}: raise `ulimit -Hn` or take fewer"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, with a bar."""
    from rich.progress import Progress  # noqa: PLC0415 -- as in show

    loads = [os.getloadavg()]
    with Progress(auto_refresh=False) as progress:  # a thread of its own must not be there when processes are forked
        task = progress.add_task("", total=len(arguments.agents) * (len(REPLIES) * arguments.calls + 1) + arguments.rounds)

        def tick(what: str) -> None:
            progress.update(task, advance=1, description=f"{what:<28}", refresh=sys.stdout.isatty())

        costs = [cost for agents in sorted(arguments.agents) for cost in measure_calls(agents, arguments.calls, tick)]
        recovery = measure_recovery(arguments.rounds, tick)
    loads.append(os.getloadavg())
    content = document(costs, recovery, loads)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (arguments.out / "plot.svg").write_text(draw(costs, recovery), encoding="utf-8")
    return content


def give_up(limit_s: float) -> None:
    """Say where this process is, and end it: what it started ends with it."""
    sys.stderr.write(f"Timeout: not done within {limit_s:g} s\n")
    traceback.print_stack(sys._current_frames()[threading.main_thread().ident or 0])  # noqa: SLF001 -- documented
    os._exit(1)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--agents", type=int, nargs="+", default=[4, 64, 256, 1024, 8192], help="how many simulated agents")
    parser.add_argument("--calls", type=int, default=40, help="calls for each number of agents and each kind of reply")
    parser.add_argument("--rounds", type=int, default=10, help="deaths of a worker")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds after which all is given up")
    parser.add_argument("--out", type=Path, help="folder for results.json and plot.svg")
    arguments = parser.parse_args()
    if min(*arguments.agents, arguments.calls - 1, arguments.rounds) < 1:
        parser.error("at least 1 agent, 2 calls and 1 round")
    allow_descriptors(max(arguments.agents))
    limit = threading.Timer(arguments.limit_s, give_up, [arguments.limit_s])
    limit.daemon = True
    limit.start()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    show(measure(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
