"""The expected set, and which test owes which part of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.plan import Plan, complete, places_of, rule_against
from pytest_gpucluster.judging.verdict import MISSING, NOT_SELECTED, PASSED, Record, Terms, decide
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.plugin import pairing
from tests.support.entries import threshold

INVENTORY = Inventory(num_nodes=2, gpus_per_node=2, device="cuda")


def test_what_nobody_selected_is_on_record() -> None:
    """Every place of an unselected criterion counts; what was selected is not counted twice."""
    plan = Plan()
    plan.expect("tflops", "node0-gpu0", nodeid="t::a")
    complete(
        plan, {"tflops": threshold(), "busbw": threshold("busbw", per="node")}, INVENTORY, level="quick", accept_at="quick"
    )
    assert [(record.criterion, record.place, record.outcome) for record in plan] == [
        ("tflops", "node0-gpu0", "pending"),
        ("tflops", "node0-gpu1", NOT_SELECTED),
        ("tflops", "node1-gpu0", NOT_SELECTED),
        ("tflops", "node1-gpu1", NOT_SELECTED),
        ("busbw", "node0", NOT_SELECTED),
        ("busbw", "node1", NOT_SELECTED),
    ]


@pytest.mark.parametrize(
    ("level", "accept_at", "due"),
    [("quick", "quick", 1), ("quick", "standard", 2), ("standard", "quick", 2), ("soak", "standard", 3), ("quick", "soak", 3)],
)
def test_levels(level: str, accept_at: str, due: int) -> None:
    """Due is what the run asks for or the profile accepts at, whichever is more; what lies above the run is said."""
    criteria = {name: threshold(name, per="cluster", level=name) for name in ("quick", "standard", "soak")}
    plan = Plan()
    complete(plan, criteria, INVENTORY, level=level, accept_at=accept_at)
    assert len(list(plan)) == due
    assert all(record.outcome == NOT_SELECTED for record in plan)


def test_rules_leave_out_without_owing() -> None:
    """A criterion that the profile's rules exclude is not expected at all."""
    plan = Plan()
    criteria = {
        "no": threshold("no", skip="not inside Slurm"),
        "many": threshold("many", per="node", needs=4),
        "far": threshold("far", per="cluster", needs_nodes=3),
    }
    complete(plan, criteria, INVENTORY, level="soak", accept_at="quick")
    assert not list(plan)
    reasons = [rule_against(criterion, INVENTORY) for criterion in criteria.values()]
    assert reasons[0] == "not inside Slurm"
    assert "needs 4 GPUs" in str(reasons[1])
    assert "needs 3 nodes" in str(reasons[2])
    assert rule_against(threshold(needs=1), INVENTORY) is None
    assert rule_against(threshold(per="cluster", needs=4), INVENTORY) is None


@pytest.mark.parametrize(("per", "number"), [("gpu", 4), ("node", 2), ("cluster", 1)])
def test_places_of(per: str, number: int) -> None:
    """Every GPU, every node, or the cluster once."""
    assert len(places_of(threshold(per=per), INVENTORY)) == number


def test_closing_gives_every_pending_one_an_outcome() -> None:
    """After it a verdict is possible, and only what was pending has changed."""
    plan = Plan()
    plan.expect("a", None, nodeid="t::a")
    plan.expect("b", "node0", nodeid="t::b")
    plan.settle(Record(criterion="a", place=None, outcome=PASSED))
    with pytest.raises(ValueError, match="pending"):
        decide(plan, Terms(rehearsal=False, level_reached=True))
    closed = plan.close(outcome=MISSING, why="not run: terminated")
    assert [(record.criterion, record.reason) for record in closed] == [("b", "not run: terminated")]
    assert plan.nodeid(closed[0]) == "t::b"
    assert {record.criterion: record.outcome for record in plan} == {"a": PASSED, "b": MISSING}
    assert not plan.pending()


def gpu(number: int) -> Place:
    """A GPU of node 1."""
    return Place(id=f"node1-gpu{number}", node=1, gpu=number)


@pytest.mark.parametrize(
    ("name", "place", "key"),
    [
        ("test_tflops", None, "tflops"),
        ("test_tflops[node1-gpu10]", gpu(10), "tflops"),
        ("test_tflops[node1-gpu1]", gpu(1), "tflops"),
        ("test_tflops[all_reduce]", None, "tflops[all_reduce]"),
        ("test_tflops[all_reduce-node1-gpu10]", gpu(10), "tflops[all_reduce]"),
        ("test_tflops[node1-gpu10-all_reduce]", gpu(10), "tflops[all_reduce]"),
        ("test_tflops[fp8-node1-gpu10-e4m3]", gpu(10), "tflops[fp8-e4m3]"),
        ("test_tflops[node1-all_reduce]", Place(id="node1", node=1), "tflops[all_reduce]"),
        ("test_tflops[supernode1-node1]", Place(id="node1", node=1), "tflops[supernode1]"),
        ("test_tflops[node1-supernode1-x]", Place(id="node1", node=1), "tflops[supernode1-x]"),
        ("test_tflops[supernode1-x-node1]", Place(id="node1", node=1), "tflops[supernode1-x]"),
        ("test_tflops[8-8192]", None, "tflops[8-8192]"),
    ],
)
def test_keys(name: str, place: Place | None, key: str) -> None:
    """The entry's key is the test's name without ``test_`` and without the place, other parameters kept in order."""
    assert pairing.criterion_key(name, "test_tflops", place) == key


WORDS = st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True)


@given(st.lists(WORDS, max_size=3), st.integers(0, 12), st.integers(0, 3))
def test_a_place_never_leaves_a_trace_in_the_key(words: list[str], number: int, position: int) -> None:
    """Wherever pytest puts the place's id among the parameters, the key is the same."""
    place = gpu(number)
    mixed = [*words[:position], place.id, *words[position:]]
    key = pairing.criterion_key(f"test_x[{'-'.join(mixed)}]", "test_x", place)
    assert key == (f"x[{'-'.join(words)}]" if words else "x")


def test_a_test_without_an_entry() -> None:
    """A usage error with the test, the key, the file and the nearest entries."""
    known = ["bf16_tflops", "fp8_tflops", "hbm_bandwidth"]
    pairing.require_entry("bf16_tflops", known, nodeid="t::x", file="f.yaml")
    with pytest.raises(ConfigurationError, match=r"t::x judges the criterion 'bf61_tflops'.*f\.yaml.*Did you mean bf16_tflops"):
        pairing.require_entry("bf61_tflops", known, nodeid="t::x", file="f.yaml")


@pytest.mark.parametrize(
    ("per", "place", "good"),
    [
        ("gpu", gpu(0), True),
        ("gpu", None, False),
        ("gpu", Place(id="node0", node=0), False),
        ("node", Place(id="node0", node=0), True),
        ("node", gpu(0), False),
        ("cluster", None, True),
        ("cluster", gpu(0), False),
    ],
)
def test_place_or_node_or_neither(per: str, place: Place | None, good: bool) -> None:  # noqa: FBT001 -- a parameter
    """A criterion per GPU judged once for all would hide seven GPUs."""
    if good:
        pairing.require_place("x", per, place, nodeid="t::x")
    else:
        with pytest.raises(ConfigurationError, match=rf"t::x: criterion 'x' is per {per}, so its test takes"):
            pairing.require_place("x", per, place, nodeid="t::x")


def test_fixtures_cannot_cross() -> None:
    """The ones that cannot are named; those that can and parametrize values are free."""
    pairing.require_test_arguments(["rank", "device", "size"], {"size": 1}, nodeid="t::x")
    with pytest.raises(ConfigurationError, match="cannot have the fixtures tmp_path, cluster"):
        pairing.require_test_arguments(["rank", "tmp_path", "cluster"], {}, nodeid="t::x")
