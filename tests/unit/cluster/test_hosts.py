"""``per="host"``: once on each node, without a process group."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.cluster.calls import PER
from pytest_gpucluster.errors import ConfigurationError, MeasurementError
from pytest_gpucluster.places import Place
from pytest_gpucluster.protocol.messages import Failure
from tests.unit.cluster.test_unmeasurable import INVENTORY, bound, reads_gpu, seen, uses_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.errors import Part
    from tests.unit.cluster.test_unmeasurable import FakeController

N0, N1 = INVENTORY.nodes
A, B, C, D = INVENTORY.places
LOST = Failure(kind="lost", error="no hello")


def ranks_asked(fake: FakeController) -> list[list[int]]:
    """The ranks of each call of the function."""
    return [list(call.ranks) for call in fake.calls if call.function.qualname in ("reads_gpu", "uses_gpu")]


def test_one_rank_of_each_node_is_asked() -> None:
    """The values stand under the nodes, in one call without groups."""
    cluster, fake = bound({})
    results = cluster.run(reads_gpu, per="host")
    assert dict(results) == {N0: 0, N1: 2}
    assert ranks_asked(fake) == [[0, 2]]
    assert fake.calls[-1].groups is None
    assert (results[N1], results.first_of(N1)) == (2, 2)


@pytest.mark.parametrize("places", [[C], [N1], [C, D]])
def test_places_narrow_it(places: list[object]) -> None:
    """The nodes of these places, and no others."""
    cluster, fake = bound({})
    assert dict(cluster.run(reads_gpu, per="host", places=places)) == {N1: 2}  # type: ignore[arg-type]
    assert ranks_asked(fake) == [[2]]


class Wants:
    """A caller that wants these places."""

    def __init__(self, places: frozenset[Place]) -> None:
        """Want them."""
        self._places = places

    def wanted_places(self) -> frozenset[Place]:
        """Those."""
        return self._places

    def note_results(self, made: Results) -> None:
        """Nothing to remember."""


def test_the_tests_that_run_decide_the_nodes() -> None:
    """A test of one GPU or node wants its host alone."""
    cluster, fake = bound({})
    narrow: Cluster = type(cluster)(fake, cluster._binding, caller=Wants(frozenset({D})))  # type: ignore[arg-type]
    assert dict(narrow.run(reads_gpu, per="host")) == {N1: 2}


def test_a_rank_that_does_not_answer_leaves_its_node() -> None:
    """Another rank of the node is asked in its place."""
    cluster, fake = bound({})
    alive = [one if one.id != C.id else C for one in cluster.places]  # C of the inventory has no rank
    binding = type(cluster._binding)(inventory=INVENTORY, places=tuple(alive))
    assert dict(type(cluster)(fake, binding).run(reads_gpu, per="host")) == {N0: 0, N1: 3}  # type: ignore[arg-type]


def test_an_error_is_the_node_s() -> None:
    """Reading the node raises, and the other keeps its value; the first GPU is busy, so the second is asked."""
    cluster, fake = bound({0: seen(0, gib=23.4), 2: seen(0, gib=23.4), 3: seen(1, gib=23.4)})
    results = cluster.run(uses_gpu, per="host")
    assert ranks_asked(fake) == [[1]]
    assert results[N0] == 1
    with pytest.raises(MeasurementError, match="GPU not idle"):
        results[N1]
    assert list(results.errors) == [N1]


def test_a_rank_that_fails_in_the_call_fails_its_node() -> None:
    """The error names the rank and its host, and no other rank of the node is asked; the other node keeps its value."""
    cluster, fake = bound({})
    fake.fail["reads_gpu"] = {2: LOST}
    results = cluster.run(reads_gpu, per="host")
    assert ranks_asked(fake) == [[0, 2]]
    assert results[N0] == 0
    with pytest.raises(MeasurementError, match=r"rank 2 \(node1-gpu0.*host1") as raised:
        results[N1]
    assert raised.value.culprits == (N1,)


@pytest.mark.parametrize(
    ("part", "blamed"), [("host", N1), ("software", N1), ("unknown", N1), ("settings", N1), ("gpu", C), ("link", C), ("nic", C)]
)
def test_the_rank_that_is_asked_is_not_to_blame_for_its_host(part: Part, blamed: Place) -> None:
    """Too little memory of a host was blamed on its first GPU, with its serial number; a GPU's own error is the GPU's."""
    cluster, fake = bound({})
    fake.fail["reads_gpu"] = {2: Failure(kind="raised", error="MemoryError: 1 byte free", blames=part)}
    error = cluster.run(reads_gpu, per="host").errors[N1]
    assert (error.culprits, error.blames) == ((blamed,), part)
    assert "rank 2 (node1-gpu0" in str(error)


def test_a_node_without_ranks_is_an_error() -> None:
    """Nothing answers on it: it is missing, by its name."""
    cluster, fake = bound({})
    alive = [one if one.node == 0 else INVENTORY.by_id[one.id] for one in cluster.places]
    binding = dataclasses.replace(cluster._binding, places=tuple(alive))
    results = type(cluster)(fake, binding).run(reads_gpu, per="host")  # type: ignore[arg-type]
    assert dict(results.errors).keys() == {N1}
    assert results.errors[N1].kind == "missing"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"per": "hosts"}, r"per='hosts' is not one of gpu, host, .*Did you mean 'host'"),
        ({"per": "host", "at_once": 1}, "at_once goes with per='gpu', not with per='host'"),
        ({"per": "host", "places": [Place(id="node9", node=9)]}, "no expected place is called node9"),
    ],
)
def test_bad_input(wrong: dict[str, Any], said: str) -> None:
    """Said before any rank is asked."""
    cluster, fake = bound({})
    with pytest.raises(ConfigurationError, match=said):
        cluster.run(reads_gpu, **wrong)
    assert ranks_asked(fake) == []


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize(
    "choose_nothing",
    [list, tuple, set, dict, lambda: iter(()), lambda: (one for one in INVENTORY.places if one.node == 9)],
    ids=["list", "tuple", "set", "dict", "iterator", "generator"],
)
def test_no_place_at_all(per: str, choose_nothing: Callable[[], Iterable[Place]]) -> None:
    """A choice that leaves nothing over gave results without a place: a loop over them judged nothing, and passed."""
    cluster, fake = bound({})
    with pytest.raises(ConfigurationError, match="places has no place: leave it out to measure all"):
        cluster.run(reads_gpu, per=per, places=choose_nothing())
    assert ranks_asked(fake) == []


def test_a_group_without_a_place() -> None:
    """Said in the same words, before any group is measured."""
    cluster, fake = bound({})
    with pytest.raises(ConfigurationError, match="places has no place"):
        cluster.run_groups(reads_gpu, [[A], []])
    assert ranks_asked(fake) == []
