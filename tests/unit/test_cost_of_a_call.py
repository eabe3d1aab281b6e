"""What is done for all ranks grows with their number, not with its square. Counted in bytecodes, never in seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.cluster.binding import bind
from pytest_gpucluster.cluster.calls import Cluster
from pytest_gpucluster.fleet.agents import Speaker
from pytest_gpucluster.fleet.simulation import parse_simulation
from pytest_gpucluster.inventory.identity import Identity
from pytest_gpucluster.inventory.occupancy import Occupancy, read_occupancy
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.plugin.live import Live
from pytest_gpucluster.protocol.messages import Failure, FunctionName, RankGroup, StartCall, Success
from tests.support.operations import operations

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.controller.call import Call
    from pytest_gpucluster.protocol.messages import Reply

FEW, MANY = 8, 32
GPUS = 8


class Ranks:
    """In place of a controller: every rank answers, or in calls to ``failing`` none does."""

    def __init__(self, num_nodes: int, *, failing: str = "", absent: int = 0) -> None:
        self.world_size = num_nodes * GPUS
        self._failing = failing
        self._first_absent = (num_nodes - absent) * GPUS

    def meet(self, **_options: Any) -> None:
        """All are there."""

    def assign_nodes(self, nodes: Any) -> None:
        """Not needed."""

    def hello_of(self, _rank: int) -> None:
        """Not needed."""

    def name(self, function: Callable[..., Any]) -> FunctionName:
        """The name of a function."""
        return FunctionName(module="m", qualname=function.__name__, file="", relative="", digest="")

    def call(self, call: Call) -> dict[int, Reply]:
        """One reply for each rank."""
        return {rank: self._reply(call.function.qualname, rank) for rank in call.ranks}

    def _reply(self, function: str, rank: int) -> Reply:
        if rank >= self._first_absent:
            return Failure(kind="lost", error=f"rank {rank} never joined", blames="node")
        if function == self._failing:
            return Failure(kind="died", error="the worker died: SIGSEGV", entered=True)
        return Success(value=self._value(function, rank))

    def _value(self, function: str, rank: int) -> object:
        node, gpu = divmod(rank, GPUS)
        if function == "identity":
            return Identity(
                hostname=f"n{node}", group_rank=node, local_rank=gpu, versions={}, torch_gpus=GPUS,
                uuid=f"GPU-{rank}", serial=f"S{rank}", pci=f"{gpu}:0",
            )  # fmt: skip
        if function == "read_occupancy":
            return Occupancy(
                uuid=f"GPU-{rank}", memory_used_gib=0.0, memory_limit_gib=0.25, processes=[], utilization_percent=0
            )
        return 1.0


def measure() -> float:
    """Never called here."""
    return 1.0


def bound(num_nodes: int, *, failing: str = "", absent: int = 0) -> Cluster:
    """All places bound, by the controller above; the last nodes are ``absent``."""
    controller: Any = Ranks(num_nodes, failing=failing, absent=absent)
    inventory = Inventory(num_nodes=num_nodes, gpus_per_node=GPUS, device="cuda")
    return Cluster(controller, bind(controller, inventory, within_s=1.0))


def bound_where_nobody_looked(num_nodes: int) -> Cluster:
    """Who is on the GPUs was read nowhere."""
    return bound(num_nodes, failing=read_occupancy.__name__)


def measured_where_all_die(num_nodes: int) -> Callable[[], object]:
    """A measurement that fails at every rank."""
    cluster = bound(num_nodes, failing=measure.__name__)
    return lambda: cluster.run(measure)


class NoStore:
    """In place of a channel: takes messages."""

    def put(self, _key: str, _message: object) -> None:
        """Take it."""


def answered(num_nodes: int) -> Callable[[], object]:
    """A call over all ranks of a simulated fleet, in which as many nodes have a fault as not."""
    bad = [f"node{node}:{kind}" for node in range(0, num_nodes, 2) for kind in ("pcie", "nvls")]
    simulation = parse_simulation(f"{num_nodes}x{GPUS}", faults=bad)
    ranks = tuple(range(simulation.world_size))
    store: Any = NoStore()
    speaker = Speaker(simulation, frozenset(ranks), store)
    module = "pytest_gpucluster.measurements.collectives"
    call = StartCall(
        id="1",
        ranks=((0, ranks[-1]),),
        groups=(RankGroup(id="g", ranks=ranks),),
        function=FunctionName(module=module, qualname="all_reduce", file="", relative="", digest=""),
        kwargs={"size_bytes": 1, "iterations": 2},
        deadline_s=1.0,
        setup_s=1.0,
        device="cuda",
        any_device=False,
        test_arguments=None,
        sys_path=(),
        cwd="",
        nodes={},
        variables={},
    )
    return lambda: speaker.start(call)


def shown(num_nodes: int) -> Callable[[], object]:
    """What every rank printed, with ``-s``."""
    binding = bound(num_nodes)._binding
    session: Any = SimpleNamespace(binding=binding, places=lambda: binding.by_id)
    screen: Any = SimpleNamespace(write=lambda _text: None, log=None)
    live = Live(screen, session)
    return lambda: [live.output(rank, "text") for rank in range(num_nodes * GPUS)]


def joined(num_nodes: int) -> Callable[[], object]:
    """Which ranks of a fleet join, of which every second node is absent."""
    absent = [f"node{node}:absent" for node in range(0, num_nodes, 2)]
    return lambda: parse_simulation(f"{num_nodes}x{GPUS}", faults=absent).present


WORK: dict[str, Callable[[int], Callable[[], object]]] = {
    "binding": lambda num_nodes: lambda: bound(num_nodes),
    "binding where nobody looked at the GPUs": lambda num_nodes: lambda: bound_where_nobody_looked(num_nodes),
    "a measurement in which all die": measured_where_all_die,
    "what all ranks print": shown,
    "the answers of a simulated fleet": answered,
    "who joins a simulated fleet": joined,
}


@pytest.mark.parametrize("what", WORK)
def test_work_grows_with_the_ranks(what: str) -> None:
    """Four times the nodes are four times the work, and a little for tables."""
    few, many = (operations(WORK[what](num_nodes)) for num_nodes in (FEW, MANY))
    assert many < 1.2 * few * MANY / FEW


@pytest.mark.parametrize("per", ["gpu", "node", "cluster"])
def test_absent_nodes_cost_no_more(per: str) -> None:
    """To bind and to measure a fleet of which half is absent is less work than the whole, and grows as little."""

    def work(num_nodes: int, *, absent: int) -> int:
        return operations(lambda: bound(num_nodes, absent=absent).run(measure, per=per))

    few, many, whole = work(FEW, absent=FEW // 2), work(MANY, absent=MANY // 2), work(MANY, absent=0)
    assert many < 1.2 * few * MANY / FEW
    assert many < 0.9 * whole
