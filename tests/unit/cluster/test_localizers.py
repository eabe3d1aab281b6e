"""An all-reduce that misses its limit because NCCL chose a slow algorithm: neither a node nor a cable is to blame."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.cluster.localizers import NodeLocalizer
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.localization.nodes import CHOICE, advice_on_choice, is_not_ring
from pytest_gpucluster.places import Inventory, Place
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from pytest_gpucluster.judging.finding import Finding

RECIPE = {"size_bytes": 1 << 30, "iterations": 20, "warmup": 5, "dtype": "float32", "search_s": 60}


class SlowCluster:
    """A cluster of some nodes: rings reach ``rings`` GB/s, NCCL's choice ``again``, and so does every smaller group."""

    def __init__(self, nodes: int, rings: float | MeasurementError, *, again: float = 190.0) -> None:
        self.promised = Inventory(num_nodes=nodes, gpus_per_node=8, device="cuda", fabric="infiniband")
        self.nodes = list(self.promised.nodes)
        self.places: list[Place] = []
        self.deadline_s = 60.0
        self.rings = rings
        self.again = again
        self.by_rings = False
        self.asked: list[dict[str, str]] = []

    def with_variables(self, variables: dict[str, str]) -> SlowCluster:
        """The same cluster; what it was asked for is kept."""
        self.asked.append(variables)
        other = copy.copy(self)
        other.by_rings = True
        return other

    def run(self, _function: Any, **_arguments: Any) -> Any:
        """The all-reduce by rings, or by NCCL's choice."""
        if not self.by_rings:
            return SimpleNamespace(value=SimpleNamespace(busbw_gb_s=self.again))
        if isinstance(self.rings, MeasurementError):
            return _Raises(self.rings)
        return SimpleNamespace(value=SimpleNamespace(busbw_gb_s=self.rings))

    def run_groups(self, _function: Any, groups: Any, **_arguments: Any) -> list[Any]:
        """Smaller groups, each as slow as the whole."""
        return [SimpleNamespace(busbw_gb_s=190.0) for _group in groups]


class _Raises:
    def __init__(self, error: MeasurementError) -> None:
        self._error = error

    @property
    def value(self) -> Any:
        """What a result does whose call failed."""
        raise self._error


def searched(cluster: SlowCluster, algorithm: str | None, *, busbw_gb_s: float = 190.0) -> Finding:
    """What is found of an all-reduce for which NCCL chose ``algorithm``."""
    file = packaged()
    entry = dict(file.criteria(file.profiles["h200-sxm"]))["inter_node_busbw[all_reduce]"]
    nodes = cluster.promised.num_nodes
    facts = {"nodes": nodes, "gpus_per_node": 8, "world_size": 8 * nodes}
    criterion: Any = SimpleNamespace(threshold=entry, limit=entry.limit(gpus=8 * nodes, cluster=facts))
    measured: Any = SimpleNamespace(busbw_gb_s=busbw_gb_s, algorithm=algorithm, nccl_version="2.29.7")
    fake: Any = cluster
    return NodeLocalizer(fake, lambda: None, RECIPE).search(criterion, measured)


@pytest.mark.parametrize("nodes", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ["NVLS_TREE", "TREE", "PAT"])
def test_fast_rings_and_a_slow_choice_are_software(nodes: int, algorithm: str) -> None:
    """No node is named, two nodes are enough, and the advice names the way out."""
    cluster = SlowCluster(nodes, rings=380.0)
    found = searched(cluster, algorithm)
    assert (found.kind, list(found.bad), len(found.among)) == ("software", [CHOICE], nodes)
    assert cluster.asked == [{"NCCL_ALGO": "Ring"}]
    assert found.evidence["by rings GB/s"] == 380.0
    assert found.advice is not None
    assert "NCCL_ALGO=Ring" in found.advice


@pytest.mark.parametrize("rings", [195.0, MeasurementError("rank 3 died")])
def test_slow_rings_leave_the_search_to_go_on(rings: float | MeasurementError) -> None:
    """Rings that are slow too, or that could not be measured, say nothing against NCCL."""
    found = searched(SlowCluster(2, rings), "NVLS_TREE")
    assert found.kind is None
    assert not found.bad
    assert any(name.startswith("by rings") for name in found.evidence)


def test_a_network_that_was_slow_for_a_moment_is_not_software() -> None:
    """NCCL's choice is fast as well by now: nothing shows that it was to blame."""
    found = searched(SlowCluster(2, rings=380.0, again=385.0), "NVLS_TREE")
    assert (found.kind, found.bad) == (None, {})
    assert found.evidence["chosen again GB/s"] == 385.0


@pytest.mark.parametrize(("algorithm", "busbw_gb_s"), [("RING", 190.0), (None, 190.0), ("NVLS_TREE", 390.0)])
def test_what_is_not_measured_again(algorithm: str | None, busbw_gb_s: float) -> None:
    """Rings themselves, a choice that NCCL does not tell, and a value within its limit."""
    cluster = SlowCluster(2, rings=380.0)
    assert not searched(cluster, algorithm, busbw_gb_s=busbw_gb_s).bad
    assert cluster.asked == []


@pytest.mark.parametrize(
    ("version", "nodes", "is_known"),
    [
        ("2.29.7", 4, True),
        ("2.30.2", 16, True),
        ("2.30.3", 16, False),
        ("2.28.9", 16, False),
        ("2.29.7", 2, False),
        (None, 4, False),
    ],
)
def test_a_known_choice_is_named_with_its_source(version: str | None, nodes: int, *, is_known: bool) -> None:
    """In the versions and from the number of nodes on that were published."""
    assert ("issue 2035" in advice_on_choice("NVLS_TREE", version, nodes=nodes)) is is_known
    assert "issue" not in advice_on_choice("TREE", version, nodes=nodes)


def test_rings_by_any_spelling() -> None:
    """As NCCL's log and its variable spell them."""
    assert [is_not_ring(name) for name in ("RING", "Ring", "ring", None, "TREE")] == [False, False, False, False, True]


class Switched(SlowCluster):
    """Five leaf switches of four nodes each. What goes through a bad one is slow; one of ``edges`` is bad at its way out."""

    def __init__(self, bad: tuple[str, ...], edges: tuple[str, ...]) -> None:
        super().__init__(20, rings=190.0)
        self.bad, self.edges = bad, edges
        leaves = {node: f"leaf{node // 4}" for node in range(20)}
        self.places = [replace(place, rank=at, switch=leaves[place.node]) for at, place in enumerate(self.promised.places)]

    def run_groups(self, _function: Any, groups: Any, **_arguments: Any) -> list[Any]:
        """A group is slow that has nodes behind a bad switch, or leaves one whose way out is bad."""
        leaves = [{f"leaf{place.node // 4}" for place in group} for group in groups]
        slow = [bool(one & {*self.bad}) or (len(one) > 1 and bool(one & {*self.edges})) for one in leaves]
        return [SimpleNamespace(busbw_gb_s=190.0 if one else 380.0) for one in slow]


@pytest.mark.parametrize(
    ("bad", "edges"), [(("leaf0", "leaf2"), ()), (("leaf1",), ("leaf2",)), ((), ("leaf0", "leaf1")), (("leaf1",), ())]
)
def test_each_bad_switch_has_its_nodes(bad: tuple[str, ...], edges: tuple[str, ...]) -> None:
    """Two switches are two parts: nobody looks at the cables of one for the fault of the other."""
    found = searched(Switched(bad, edges), "RING")
    names = {**{leaf: f"switch {leaf}" for leaf in bad}, **{leaf: f"the way out of switch {leaf}" for leaf in edges}}
    numbers = {name: [4 * int(leaf[-1]) + at for at in range(4)] for leaf, name in names.items()}
    assert {name: [node.node for node in nodes] for name, nodes in found.behind.items()} == numbers
    assert {*found.bad} == {*numbers}
    assert [node.node for node in found.among] == sorted(node for some in numbers.values() for node in some)
