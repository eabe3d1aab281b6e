"""Places and the values measured at them."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.cluster.binding import natural_sort_key
from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.errors import Blame, MeasurementError
from pytest_gpucluster.places import Inventory, Place

INVENTORY = Inventory(num_nodes=2, gpus_per_node=2, device="cuda")
A, B, C, D = INVENTORY.places
NODE_0, NODE_1 = INVENTORY.nodes
LOST = MeasurementError("rank 3 died", culprits=(D,), kind="died")


def test_inventory() -> None:
    """Ids come from what was promised; a rehearsal's say so."""
    assert [place.id for place in INVENTORY.places] == ["node0-gpu0", "node0-gpu1", "node1-gpu0", "node1-gpu1"]
    assert [place.id for place in Inventory(num_nodes=1, gpus_per_node=1, device="cpu").places] == ["node0-cpu0"]
    assert INVENTORY.facts == {"nodes": 2, "gpus_per_node": 2, "world_size": 4}


def test_a_place_is_its_id() -> None:
    """Bound to hardware it is still the same place, as key and as text."""
    bound = Place(id="node0-gpu0", node=0, gpu=0, rank=0, hostname="h", uuid="GPU-1")
    assert bound == A
    assert {A: 1}[bound] == 1
    assert (str(bound), bound.label) == ("node0-gpu0", "h gpu 0 (node0-gpu0, rank 0, GPU-1)")
    assert A.label == "node0-gpu0 (no rank)"


def test_values_and_errors() -> None:
    """A place without a value raises wherever it is read; the others keep theirs."""
    results = Results({A: 1.0, B: 2.0, C: 3.0}, {D: LOST})
    assert [results[place] for place in (A, B, C)] == [1.0, 2.0, 3.0]
    assert (list(results), len(results)) == ([A, B, C, D], 4)
    assert D in results
    assert results.errors == {D: LOST}
    for read in (lambda: results[D], lambda: results.get(D), lambda: dict(results), lambda: list(results.items())):
        with pytest.raises(MeasurementError, match="rank 3 died"):
            read()
    for helper in (lambda: results.value, lambda: results.each(float), lambda: results.slowest(float)):
        with pytest.raises(MeasurementError, match="rank 3 died") as caught:
            helper()
        assert caught.value.culprits == (D,)


def test_a_place_that_was_not_asked() -> None:
    """Neither value nor error: the test's own mistake."""
    results = Results({A: 1}, {})
    with pytest.raises(KeyError):
        results[B]
    assert B not in results
    assert results.get(B, "nothing") == "nothing"


@pytest.mark.parametrize("key", ["node0-gpu0", "node0", "gpu0", NODE_1, B, 0, None, (A, B)])
def test_what_is_no_key_is_told_with_what_there_is(key: Any) -> None:
    """A bare ``KeyError: 'node0'`` did not say that keys are places."""
    results = Results({A: 1, C: 2} if key is not NODE_1 else {A: 1}, {D: LOST} if key is not NODE_1 else {})
    with pytest.raises(KeyError, match="is none of the places that were measured: node0-gpu0"):
        results[key]
    with pytest.raises(KeyError, match=r"measured: node0-gpu0 to node0-gpu1, node0-gpu1 to node0-gpu0"):
        Results({(A, B): 1, (B, A): 1}, {})[key if key != (A, B) else (A, D)]


def test_a_node_reads_its_first_rank_when_all_were_measured() -> None:
    """Half a node is no node."""
    results = Results({A: "a", B: "b", C: "c"}, {D: LOST})
    assert results[NODE_0] == "a"
    with pytest.raises(MeasurementError, match="rank 3 died"):
        results[NODE_1]
    with pytest.raises(KeyError):
        Results({A: 1}, {})[NODE_1]


def test_order_is_by_number() -> None:
    """gpu10 comes after gpu9, whatever the order of arrival."""
    places = [Place(id=f"node0-gpu{gpu}", node=0, gpu=gpu) for gpu in (10, 9, 0)]
    assert [place.gpu for place in Results(dict.fromkeys(places, 1), {})] == [0, 9, 10]


def test_helpers() -> None:
    """Slowest rate, score relative to the fastest time, and who lies below the rest."""
    rates = Results(dict(zip((A, B, C, D), (100.0, 101.0, 99.0, 60.0), strict=True)), {})
    assert rates.slowest(float) == 60.0
    assert rates.outliers(float) == {D: pytest.approx(0.6)}
    assert Results({A: 100.0, B: 60.0}, {}).outliers(float) == {}
    assert rates.each(lambda rate: rate > 99.5) == {A: True, B: True, C: False, D: False}
    times = Results({A: 2.0, B: 1.0}, {})
    assert times.relative_to_fastest(float) == {A: 0.5, B: 1.0}


@given(st.lists(st.floats(min_value=0.98, max_value=1.02), min_size=4, max_size=4))
def test_a_quiet_cluster_has_no_outliers(rates: list[float]) -> None:
    """Within 5 % of the median nobody is named, however small the spread of the others is."""
    assert Results(dict(zip((A, B, C, D), rates, strict=True)), {}).outliers(float) == {}


def test_no_places_is_not_measured() -> None:
    """Nothing was asked, so nothing was measured: an ERROR of ours, not a StopIteration."""
    with pytest.raises(MeasurementError):
        _ = Results({}, {}).value
    with pytest.raises(MeasurementError):
        Results({}, {}).slowest(float)


@given(st.lists(st.from_regex(r"[a-z]{0,3}-?[0-9]{0,4}", fullmatch=True)))
def test_natural_order_is_an_order(names: list[str]) -> None:
    """Any mix of letters and digits can be sorted."""
    found = sorted(names, key=natural_sort_key)
    assert all(natural_sort_key(first) <= natural_sort_key(second) for first, second in itertools.pairwise(found))


def test_natural_order() -> None:
    """node2 before node10."""
    names: list[Any] = ["node10", "node2", "node2a", "gpu-1-10", "gpu-1-9"]
    assert sorted(names, key=natural_sort_key) == ["gpu-1-9", "gpu-1-10", "node2", "node2a", "node10"]


def test_one_cause_at_several_places_blames_all_of_them() -> None:
    """A typo raises everywhere: reading all values must not blame the first place alone. Other causes stay apart."""
    alike = Blame(part="software", cause="KeyError: 'x'")
    errors = {
        place: MeasurementError(f"f was not measured at {place}", culprits=(place,), blame=alike if place != C else Blame())
        for place in (A, B, C, D)
    }
    with pytest.raises(MeasurementError, match=f"at {A}\n  the same at {B}, {D}") as caught:
        Results({}, errors).slowest(float)
    assert (caught.value.culprits, caught.value.blames) == ((A, B, D), "software")
    with pytest.raises(MeasurementError) as alone:
        _ = Results({}, errors)[B]
    assert alone.value.culprits == (B,)


@pytest.mark.parametrize(
    ("read", "left"),
    [
        (lambda found: found[A], [B, D]),
        (len, [B, D]),
        (list, [B, D]),
        (lambda found: D in found, [B, D]),
        (lambda found: found[B], [D]),
        (lambda found: found[NODE_0], [D]),
        (lambda found: found.first_of(NODE_0), [D]),
        (lambda found: found.first_of(NODE_1), [B]),
        (lambda found: found.repeated(D, "a", "b"), [B]),
        (lambda found: found.errors, []),
        (lambda found: found.value, []),
        (lambda found: found.each(float), []),
        (lambda found: found.slowest(float), []),
        (lambda found: found.by_node(INVENTORY.nodes), []),
    ],
)
def test_errors_that_nobody_read(read: Any, left: list[Place]) -> None:
    """Whoever reads a place has read its error; whoever reads all together has read all of them."""
    found = Results({A: 1.0, C: 3.0}, {B: LOST, D: MeasurementError("rank 3 left", culprits=(D,))})
    with contextlib.suppress(MeasurementError):
        read(found)
    assert found.unread == {place: found._errors[place] for place in left}


def test_results_that_nobody_read() -> None:
    """A value counts, and an error; their number does not."""
    for read in (lambda found: found[A], lambda found: found.errors, lambda found: found.first_of(NODE_1)):
        found = Results({A: 1.0}, {D: LOST})
        assert (len(found), found.is_read) == (2, False)
        with contextlib.suppress(MeasurementError):
            read(found)
        assert found.is_read
