"""The table of places is built once, however many tests ask for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.cluster.binding import Binding
from pytest_gpucluster.cluster.calls import Cluster
from pytest_gpucluster.config.settings import Expect, Settings
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judging.plan import places_covered_by
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.run_setup import prepare
from pytest_gpucluster.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TESTS = 10


class Counter:
    """Counts the places that are made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made = 0
        real: Callable[..., None] = Place.__init__

        def init(place: Place, **fields: Any) -> None:
            self.made += 1
            real(place, **fields)

        patch.setattr(Place, "__init__", init)


def run_of(folder: Path, num_nodes: int) -> Session:
    """A session that expects ``num_nodes`` of 8 ranks; nothing is started."""
    settings = Settings(
        thresholds=None,
        profile="rehearsal",
        expect=Expect(nodes=num_nodes, gpus_per_node=8),
        level="quick",
        soak_s=None,
        results_dir=folder / "results",
        gate=False,
        inline=False,
    )
    return Session(prepare(settings, None, start=folder), rootdir=folder)


def ask_as_tests_do(session: Session, cluster: Cluster | None) -> None:
    """What the bookkeeping of one test asks for, at a place that answers and at one that does not."""
    record = Record(criterion="bf16_tflops", place="node0-cpu0", outcome="passed")
    session.waive(record)
    assert session.state.places()["node1"].node == 1
    assert len(places_covered_by(None, session.setup.inventory)) == 9 * session.setup.inventory.num_nodes
    if cluster is None:
        return
    assert cluster.require_present(session.setup.inventory.places[0]).rank == 0
    assert cluster.require_present(session.setup.inventory.nodes[0]).hostname == "n0"
    assert [node.hostname for node in cluster.nodes][:2] == ["n0", None]
    with pytest.raises(MeasurementError):
        cluster.require_present(session.setup.inventory.places[-1])


@pytest.mark.parametrize("is_bound", [True, False])
@pytest.mark.parametrize("num_nodes", [16, 64])
def test_places_made_for_each_test(num_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_bound: bool) -> None:
    """At most the culprit of a missing place, at 16 and at 64 expected nodes: the tables are built for the first test."""
    session = run_of(tmp_path, num_nodes)
    controller: Any = None
    cluster = None
    if is_bound:
        session.state.binding = bound(session.setup.inventory)
        cluster = Cluster(controller, session.state.binding)
    ask_as_tests_do(session, cluster)
    counter = Counter(monkeypatch)
    for _ in range(TESTS):
        ask_as_tests_do(session, cluster)
    assert counter.made <= TESTS


def bound(inventory: Inventory) -> Binding:
    """The first node answers, on host n0; no other does."""
    first = [replace(place, rank=place.gpu, hostname="n0") for place in inventory.places if place.node == 0]
    return Binding(inventory=inventory, places=(*first, *inventory.places[len(first) :]))


def test_a_later_binding_is_seen(tmp_path: Path) -> None:
    """Before the ranks have answered the places are unbound; after it each has what answers there."""
    session = run_of(tmp_path, 2)
    assert session.state.places()["node0-cpu0"].rank is None
    assert session.state.places()["node0"].hostname is None
    session.state.binding = bound(session.setup.inventory)
    assert session.state.places()["node0-cpu0"].rank == 0
    assert (session.state.places()["node0"].hostname, session.state.places()["node1"].hostname) == ("n0", None)
    other = replace(session.state.binding, places=session.setup.inventory.places)
    assert [node.hostname for node in other.nodes] == [None, None]
