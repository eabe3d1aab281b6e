"""Places that cannot be measured: what is said there, and at the places that would have worked with them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from msgspec import structs

from pytest_gpucluster.cluster.binding import bind
from pytest_gpucluster.cluster.calls import Cluster
from pytest_gpucluster.cluster.unmeasurable import Attendance, error_for, missing_error
from pytest_gpucluster.controller.call import Call
from pytest_gpucluster.controller.controller import Controller
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.inventory.identity import Identity
from pytest_gpucluster.inventory.occupancy import GpuProcess, Occupancy
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.protocol.functions import beside_others, without_device
from pytest_gpucluster.protocol.messages import Failure, ForeignProcess, FunctionName, Reply, Success
from tests.support.names import function_named

if TYPE_CHECKING:
    from pathlib import Path

INVENTORY = Inventory(num_nodes=2, gpus_per_node=2, device="cuda")
A, B, C, D = INVENTORY.places
TEXT = "GPU not idle: 23.4 GiB held by pid 4711 (python3) on host0 gpu 1 (node0-gpu1, rank 1, GPU-1, PCI 1)"


def uses_gpu() -> None:
    """A measurement."""


@without_device
def reads_gpu() -> None:
    """A reading."""


@beside_others
def shares_gpu() -> None:
    """A measurement that others cannot spoil."""


def seen(rank: int, *, gib: float = 0.0) -> Occupancy:
    """What is on the GPU that a rank reads."""
    processes = [GpuProcess(pid=4711, name="python3", memory_gib=gib)] if gib else []
    return Occupancy(
        uuid=f"GPU-{rank % 2}", memory_used_gib=gib, memory_limit_gib=0.25, processes=processes, utilization_percent=0
    )


class FakeController:
    """Two nodes of two ranks; GPUs of different nodes have the same UUIDs, as only a simulator's have."""

    world_size = 4
    fabrics: ClassVar[dict[int, str]] = {}
    """Of the ranks whose GPUs are in an NVLink fabric that spans nodes."""

    def __init__(self, looks: dict[int, Any], *, swapped: bool = False) -> None:
        """``looks``: what each rank answers when asked who is on its GPU; ``swapped``: ranks 0 and 1 read each other's."""
        self.calls: list[Call] = []
        self.fail: dict[str, dict[int, Failure]] = {}
        self._looks = looks
        self._swapped = {0: 1, 1: 0} if swapped else {}

    def name(self, function: Any) -> FunctionName:
        """Any function will do."""
        return function_named(function.__name__)

    def meet(self, *, within_s: float) -> None:
        """All are there."""

    def assign_nodes(self, _nodes: dict[int, int]) -> None:
        """Nothing depends on it here."""

    def hello_of(self, _rank: int) -> None:
        """Nobody says more."""

    def call(self, call: Call) -> dict[int, Reply]:
        """Idle GPUs where nothing else was planted; otherwise the rank's number."""
        self.calls.append(call)
        answer = {"read_occupancy": self._look, "identity": self._identity}.get(call.function.qualname, lambda rank: rank)
        failed = self.fail.get(call.function.qualname, {})
        replies = {rank: failed.get(rank) or answer(rank) for rank in call.ranks}
        return {rank: reply if isinstance(reply, Failure) else Success(value=reply) for rank, reply in replies.items()}

    def _look(self, rank: int) -> Any:
        return self._looks.get(rank, seen(self._swapped.get(rank, rank)))

    def _identity(self, rank: int) -> Identity:
        node, gpu = divmod(rank, 2)
        known = {"hostname": f"host{node}", "uuid": f"GPU-{gpu}", "pci": str(gpu), "fabric": self.fabrics.get(rank)}
        return Identity(group_rank=node, local_rank=gpu, versions={}, torch_gpus=2, **known)


def bound(looks: dict[int, Any] | None = None, *, swapped: bool = False) -> tuple[Cluster, FakeController]:
    """A cluster of which rank 1's GPU is not idle, unless told otherwise."""
    fake = FakeController({1: seen(1, gib=23.4)} if looks is None else looks, swapped=swapped)
    controller: Any = fake
    return Cluster(controller, bind(controller, INVENTORY, within_s=1)), fake


# Somebody comes during the run.

CAME = "GPU not idle: 23.4 GiB held by pid 4711 (python3) on host0 gpu 1 (node0-gpu1, rank 1, GPU-1, PCI 1)"
BESIDE = "what was measured beside it is no value of this GPU"


class Visited(FakeController):
    """Idle at the start; in every call a foreign process is on the GPUs of the ranks in ``visited``."""

    def __init__(self, visited: set[int], **seen: Any) -> None:
        """``seen`` replaces fields of what is reported."""
        super().__init__({})
        self.visited = visited
        self.failure: Failure | None = None
        fields: dict[str, Any] = {"call": "", "pid": 4711, "name": "python3", "memory_gib": 23.4, "when": "during", **seen}
        self._process = ForeignProcess(**fields)

    def call(self, call: Call) -> dict[int, Reply]:
        """As usual, with what was seen in each call."""
        replies = super().call(call)
        for rank in self.visited & set(replies):
            if call.function.qualname not in ("read_occupancy", "identity"):
                replies[rank] = structs.replace(self.failure or replies[rank], foreign_processes=(self._process,))
        return replies

    def called(self, name: str) -> list[list[int]]:
        """The ranks of each call of a function."""
        return [list(call.ranks) for call in self.calls if call.function.qualname == name]


def visited(*ranks: int, **seen: Any) -> tuple[Cluster, Visited]:
    """A cluster to whose GPUs of these ranks a process comes."""
    fake = Visited(set(ranks), **seen)
    controller: Any = fake
    return Cluster(controller, bind(controller, INVENTORY, within_s=1)), fake


@pytest.mark.parametrize(
    ("when", "said"), [("before", "came during this run, before"), ("during", "came while"), ("after", "came while")]
)
def test_gpu_to_which_somebody_came(when: str, said: str) -> None:
    """It alone is an error, with process, place and moment; never the others."""
    results = visited(1, when=when)[0].run(uses_gpu, per="gpu")
    error = results.errors[B]
    assert str(error).splitlines()[:2] == [CAME, f"  {said} uses_gpu was measured; {BESIDE}"]
    assert (error.kind, error.culprits) == ("not_idle", (B,))
    assert [results[place] for place in (A, C, D)] == [0, 2, 3]


@pytest.mark.parametrize(("per", "spoilt"), [("node", {A, B}), ("cluster", {A, B, C, D})])
def test_group_to_which_somebody_came(per: str, spoilt: set[Any]) -> None:
    """All members have the error of the one."""
    results = visited(1)[0].run(uses_gpu, per=per)
    assert set(results.errors) == spoilt
    assert {error.culprits for error in results.errors.values()} == {(B,)}


def test_pair_to_which_somebody_came() -> None:
    """Every pair with that GPU, in both directions."""
    results = visited(1)[0].run(uses_gpu, per="pair")
    assert set(results.errors) == {pair for pair in results if B in pair}


def test_group_to_which_two_came() -> None:
    """Both are named."""
    error = visited(1, 2)[0].run(uses_gpu, per="cluster").errors[A]
    assert error.culprits == (B, C)
    assert "not idle either: host1 gpu 0 (node1-gpu0" in str(error)


@pytest.mark.parametrize("kind", ["raised", "died", "hung", "released", "lost"])
def test_failure_beside_somebody(kind: Any) -> None:
    """However the call failed there, the process is named first; the failure stands below."""
    cluster, controller = visited(1)
    controller.failure = Failure(kind=kind, error="the first line\nthe second")
    error = cluster.run(uses_gpu, per="gpu").errors[B]
    assert (str(error).splitlines()[0], error.kind) == (CAME, "not_idle")
    assert "  and there: the first line\n" in str(error)


def test_gpu_is_left_out_while_somebody_is_there() -> None:
    """Each call that needs it idle looks first, and measures again when the process has left."""
    cluster, controller = visited(1)
    assert set(cluster.run(uses_gpu, per="gpu").errors) == {B}
    assert controller.called("look_at_gpu") == []
    assert set(cluster.run(uses_gpu, per="node").errors) == {A, B}
    assert controller.called("look_at_gpu") == [[1]]
    assert controller.called("uses_gpu")[1:] == [[2, 3]]
    assert cluster.run(reads_gpu, per="gpu", places=[A])[A] == 0
    assert controller.called("look_at_gpu") == [[1]]
    controller.visited = set()
    assert dict(cluster.run(uses_gpu, per="node").errors) == {}
    assert dict(cluster.run(uses_gpu, per="gpu").errors) == {}
    assert controller.called("look_at_gpu") == [[1], [1]]


def test_distributed_test_to_which_somebody_came() -> None:
    """An error, and not the outcome of its asserts."""
    cluster, controller = visited(1)
    controller.failure = Failure(kind="raised", type="AssertionError", error="assert 1 == 2")
    with pytest.raises(MeasurementError) as caught:
        cluster.run_test(function_named("test_it"), per="cluster", arguments=[], parameters={}, deadline_s=1)
    assert (caught.value.kind, caught.value.culprits) == ("not_idle", (B,))
    assert "came while test_it ran" in str(caught.value)


# Somebody was there before the run.


def test_gpus_are_looked_at_before_anything_touches_them() -> None:
    """The first call of all, made once, on the CPU, with a deadline of its own."""
    _, controller = bound()
    first, second = controller.calls[:2]
    assert (first.function.qualname, second.function.qualname) == ("read_occupancy", "identity")
    assert (list(first.ranks), first.any_device, first.once) == ([0, 1, 2, 3], True, True)
    assert first.deadline_s <= 60


def test_busy_gpu_is_an_error_that_names_it() -> None:
    """Who holds how much, where, what to do; the others are measured and were not beside it."""
    cluster, controller = bound()
    results = cluster.run(uses_gpu, per="gpu")
    with pytest.raises(MeasurementError) as caught:
        results[B]
    assert str(caught.value).splitlines()[0] == TEXT
    assert "23.4 GiB in use (an idle GPU: up to 0.25), 0 % busy" in str(caught.value)
    assert (caught.value.kind, caught.value.culprits) == ("not_idle", (B,))
    assert [results[place] for place in (A, C, D)] == [0, 2, 3]
    assert controller.calls[-1].ranks == [0, 2, 3]


@pytest.mark.parametrize("function", [reads_gpu, shares_gpu])
def test_what_others_cannot_spoil_runs(function: Any) -> None:
    """Health is read, nodes are reached: also beside somebody else."""
    cluster, _ = bound()
    assert cluster.run(function, per="gpu")[B] == 1
    assert cluster.run(function, per="cluster")[A] == 0


def test_group_with_a_busy_gpu_is_not_measured() -> None:
    """Its node ends with the error that names the GPU; the other node is measured."""
    results = bound()[0].run(uses_gpu, per="node")
    for place in (A, B):
        assert str(results.errors[place]).splitlines()[0] == TEXT
        assert results.errors[place].culprits == (B,)
    assert (results[C], results[D]) == (2, 3)
    assert set(bound()[0].run(uses_gpu, per="cluster").errors) == {A, B, C, D}


@pytest.mark.parametrize(
    ("fabrics", "groups"),
    [
        ({}, [[0, 1], [2, 3]]),
        (dict.fromkeys(range(4), "one/0"), [[0, 1, 2, 3]]),
        ({0: "one/0", 1: "one/0", 2: "one/1", 3: "one/1"}, [[0, 1], [2, 3]]),
        ({0: "one/0", 2: "one/0", 3: "one/0"}, [[0, 1], [2, 3]]),
    ],
    ids=["HGX", "one fabric", "two cliques", "a GPU outside"],
)
def test_an_nvlink_domain_is_a_fabric_or_a_node(
    monkeypatch: pytest.MonkeyPatch, fabrics: dict[int, str], groups: list[list[int]]
) -> None:
    """By what NVML tells of each GPU; a node whose GPUs tell different things is a domain by itself."""
    monkeypatch.setattr(FakeController, "fabrics", fabrics)
    cluster, controller = bound({})
    assert set(cluster.run(uses_gpu, per="domain").values()) == {0, 1, 2, 3}
    assert controller.calls[-1].groups == groups
    cluster.run_test(function_named("test_it"), per="domain", arguments=[], parameters={}, deadline_s=1)
    assert controller.calls[-1].groups == groups


def test_a_busy_gpu_spoils_its_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does its node: a part of a domain answers another question."""
    monkeypatch.setattr(FakeController, "fabrics", dict.fromkeys(range(4), "one/0"))
    assert set(bound()[0].run(uses_gpu, per="domain").errors) == {A, B, C, D}


def test_several_busy_gpus_of_a_group_are_all_named() -> None:
    """Nobody has to start three times to learn of three."""
    cluster, _ = bound({0: seen(0, gib=1), 1: seen(1, gib=2), 3: seen(3, gib=3)})
    error = cluster.run(uses_gpu, per="cluster").errors[C]
    assert error.culprits == (A, B, D)
    assert "not idle either: host0 gpu 1 (node0-gpu1, rank 1, GPU-1, PCI 1), host1 gpu 1 (node1-gpu1, rank 3" in str(error)


def test_pairs_with_a_busy_gpu() -> None:
    """Both directions are errors; the other pairs are measured."""
    results = bound()[0].run(uses_gpu, per="pair")
    assert len(results) == 12
    assert set(results.errors) == {(B, other) for other in (A, C, D)} | {(other, B) for other in (A, C, D)}
    assert results[D, C] == 3


def test_absent_member_of_a_pair_is_missing() -> None:
    """As it is everywhere else."""
    controller: Any = FakeController({})
    binding = bind(controller, INVENTORY, within_s=1)
    cluster = Cluster(controller, replace(binding, places=(*binding.places[:3], D)))
    results = cluster.run(uses_gpu, per="pair")
    assert results.errors[A, D].kind == results.errors[D, A].kind == "missing"
    assert results[A, C] == 0


def test_distributed_test_needs_idle_gpus() -> None:
    """An error, before anything runs."""
    cluster, controller = bound()
    made = len(controller.calls)
    with pytest.raises(MeasurementError, match="GPU not idle"):
        cluster.run_test(function_named("test"), per="cluster", arguments=(), parameters={}, deadline_s=1)
    assert len(controller.calls) == made


def test_reading_belongs_to_the_gpu_and_not_to_the_rank_that_made_it() -> None:
    """Where torch counts GPUs in another order than NVML, the UUID tells."""
    cluster, _ = bound({0: seen(1, gib=23.4), 1: seen(0)}, swapped=True)
    assert set(cluster.run(uses_gpu, per="gpu").errors) == {B}


@pytest.mark.parametrize(
    "reply",
    [
        Failure(kind="hung", error="did not return within 30 s"),
        Failure(kind="raised", type="NvmlError", error="Driver Not Loaded"),
    ],
)
def test_reading_that_failed_stops_nothing(reply: Failure) -> None:
    """Who is there is not known, and said so where it is asked; measurements show by themselves what is wrong."""
    cluster, _ = bound({1: reply})
    assert cluster.run(uses_gpu, per="gpu")[B] == 1
    with pytest.raises(MeasurementError, match=r"who is on the GPU was not read: rank 1 \(node0-gpu1, host0\)") as caught:
        cluster.at_start[B]
    assert reply.error in str(caught.value)
    assert caught.value.kind == reply.kind
    assert cluster.at_start[A].holders == 0


def test_gpu_that_only_another_rank_could_have_read_is_not_called_idle() -> None:
    """Ranks read each other's GPUs and one of them failed: what the other saw is of another GPU, and says nothing here."""
    failed = Failure(kind="raised", type="NvmlError", error="Driver Not Loaded")
    cluster, _ = bound({0: failed}, swapped=True)  # rank 0 would have read rank 1's GPU
    with pytest.raises(MeasurementError, match=r"who is on the GPU was not read: rank 0 \(node0-gpu0, host0\).*Driver"):
        cluster.at_start[B]
    assert cluster.at_start[A].holders == 0


def test_gpu_that_nobody_read() -> None:
    """Two ranks looked at one GPU: of the other nothing is known, and its place is named."""
    cluster, _ = bound({1: seen(0)})
    with pytest.raises(MeasurementError, match="none looked at host0 gpu 1") as caught:
        cluster.at_start[B]
    assert caught.value.culprits == (B,)
    assert [cluster.at_start[place].holders for place in (A, C, D)] == [0, 0, 0]


def test_call_that_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under pytest-xdist the controller asks, and then each worker: they hear what was there before our own workers were."""
    controller = Controller(None, num_local=1, device="cuda", rootdir=tmp_path)
    answers = iter(range(10))
    monkeypatch.setattr(controller._calls, "_exchange", lambda *_call: {0: Success(value=next(answers))})
    look = Call(function=function_named("read_occupancy"), ranks=[0], deadline_s=1, once=True)
    assert [controller.call(look)[0].value for _ in range(3)] == [0, 0, 0]
    other = Call(function=function_named("identity"), ranks=[0], deadline_s=1)
    assert [controller.call(other)[0].value for _ in range(2)] == [1, 2]


def test_rehearsal_has_nothing_to_look_at() -> None:
    """No call is made."""
    fake = FakeController({1: seen(1, gib=23.4)})
    controller: Any = fake
    cluster = Cluster(controller, bind(controller, replace(INVENTORY, device="cpu"), within_s=1))
    assert [call.function.qualname for call in fake.calls] == ["identity"]
    assert cluster.run(uses_gpu, per="gpu").errors == {}


def test_a_missing_gpu_and_an_absent_node_are_different_culprits() -> None:
    """Where any GPU of the node answers, one is missing; else the node is."""
    present = replace(A, rank=0, hostname="host0")
    absent = missing_error(C, Attendance([present, B, C, D]))
    assert ([place.id for place in absent.culprits], absent.blames, absent.kind) == (["node1"], "node", "missing")
    missing = missing_error(B, Attendance([present, B, C, D]))
    assert ([place.id for place in missing.culprits], missing.blames) == ([B.id], "gpu")
    assert "another one may be absent" in str(missing.blame.advice), "the others of its node have the first numbers"
    assert absent.blame.advice is None


def test_nobody_to_blame_names_all_that_failed() -> None:
    """Two ranks with only the echo of a broken connection."""
    echo = Failure(kind="raised", error="Connection closed by peer", type="RuntimeError", blames="software")
    bound = [replace(place, rank=rank) for rank, place in enumerate((A, B))]
    error = error_for({0: echo, 1: echo}, bound, what="f was not measured")
    assert (error.culprits, error.blames, error.blame.among) == ((), "unknown", (A, B))
