"""One value against one limit: what passes, what fails, what was not measured."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import CriterionFailedError, MeasurementError
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.finding import Finding
from pytest_gpucluster.judging.noise import Repeats
from pytest_gpucluster.judging.siblings import Compared, Shortfall
from pytest_gpucluster.judging.verdict import FAILED, NOISY, PASSED
from pytest_gpucluster.places import Place
from pytest_gpucluster.text import text_of
from tests.support.entries import limit, threshold

if TYPE_CHECKING:
    from collections.abc import Callable

A = Place(id="node0-gpu0", node=0, gpu=0, rank=0, hostname="gpu-node-0")
B = Place(id="node0-gpu1", node=0, gpu=1, rank=1, hostname="gpu-node-0")


def criterion(place: Place | None = A, *, kind: str = "above", value: float = 700, **changes: Any) -> Criterion:
    """As the fixture gives it."""
    return Criterion(threshold=threshold(**changes), limit=limit(kind, value), place=place)


@pytest.mark.parametrize(
    ("kind", "value", "good"),
    [
        ("above", 700.0, False),
        ("above", math.nextafter(700, 800), True),
        ("min", 700, True),
        ("min", 699, False),
        ("below", 700, False),
        ("below", 699.9, True),
        ("max", 700, True),
        ("max", 701, False),
        ("above", Fraction(1401, 2), True),
    ],
)
def test_limits(kind: str, value: float, good: bool) -> None:  # noqa: FBT001 -- a parameter
    """Above and below are strict, min and max inclusive; the outcome is on record either way."""
    judge = criterion(kind=kind)
    if good:
        judge.require(value)
    else:
        with pytest.raises(CriterionFailedError):
            judge.require(value)
    assert judge.judged is not None
    assert judge.judged.outcome == (PASSED if good else FAILED)
    assert (judge.judged.value, judge.judged.unit, judge.judged.place) == (float(value), "TFLOPS", "node0-gpu0")


class Odd(Fraction):
    """A number of a class that raises whatever is asked of it."""

    def __float__(self) -> float:
        """Raise."""
        raise RuntimeError("no number")

    def __repr__(self) -> str:
        """Raise."""
        raise RuntimeError("no text")

    __str__ = __repr__


NOT_MEASURED: list[Any] = [
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
    None,
    "800",
    b"8",
    [],
    {},
    [800],
    1j,
    10**400,
    10**5000,
    object,
    Odd(),
    Odd(1),
]


@pytest.mark.parametrize("value", NOT_MEASURED, ids=lambda value: text_of(value, repr)[:12])
@pytest.mark.parametrize("kind", ["above", "max"])
def test_what_is_no_finite_number_was_not_measured(value: Any, kind: str) -> None:
    """Neither passed nor failed: an ERROR that shows what came, and nothing is judged."""
    judge = criterion(kind=kind)
    with pytest.raises(MeasurementError, match=r"^tflops"):
        judge.require(value)
    assert judge.judged is None


@pytest.mark.parametrize("value", [math.nan, True, None, "800"])
def test_one_bad_value_among_good_ones(value: Any) -> None:
    """All places must have a number; the message names the one that has none."""
    judge = criterion(None)
    with pytest.raises(MeasurementError, match="at node0-gpu1"):
        judge.require({A: 800.0, B: value})
    assert judge.judged is None


@pytest.mark.parametrize(("kind", "worst"), [("above", B), ("max", A)])
def test_the_worst_place_decides(kind: str, worst: Place) -> None:
    """The lowest where higher is better, the highest where lower is; it is the culprit."""
    judge = criterion(None, kind=kind, value=700)
    with pytest.raises(CriterionFailedError, match=worst.id):
        judge.require({A: 900.0, B: 500.0})
    assert judge.judged is not None
    assert (judge.judged.culprits, judge.judged.place) == ((worst.id,), None)


@pytest.mark.parametrize(("value", "named"), [(1, True), (0, False)])
def test_a_part_of_a_place(value: int, named: bool) -> None:  # noqa: FBT001 -- a parameter
    """What a value outside the limit points to stands in the first line and in the record; a good value blames nothing."""
    judge = criterion(Place(id="node3", node=3), kind="max", value=0)
    names = tuple(f"mlx5_{number} port 1" for number in range(6))
    with contextlib.suppress(CriterionFailedError):
        judge.judge(Finding(value=value, kind="nic", bad=dict.fromkeys(names, ("is down",))))
    assert judge.judged is not None
    assert judge.judged.blames == ("nic" if named else None)
    shown = ", ".join(names[:4])
    assert str(judge.judged.reason).startswith(f"tflops at node3 {shown} and 2 more: 1 TFLOPS") is named


@pytest.mark.parametrize(("gpus", "named"), [((A, B), ("node0-gpu0", "node0-gpu1")), ((), ("node0",))])
def test_gpus_of_a_node(gpus: tuple[Place, ...], named: tuple[str, ...]) -> None:
    """GPUs to which the value of a node points are to blame in place of it; the record stays the node's."""
    judge = criterion(Place(id="node0", node=0), kind="max", value=0)
    with pytest.raises(CriterionFailedError) as raised:
        judge.judge(Finding(value=1, kind="gpu", bad=dict.fromkeys(gpus, ("is bad",))))
    assert judge.judged is not None
    assert (judge.judged.culprits, judge.judged.place, judge.judged.blames) == (named, "node0", "gpu")
    hosts = ", ".join(place.named for place in gpus) or "node0"
    assert str(raised.value).startswith(f"tflops at {hosts}: 1 TFLOPS")


def test_the_worst_pair_names_both_ends() -> None:
    """A value of an ordered pair belongs to two places."""
    judge = criterion(None)
    with pytest.raises(CriterionFailedError, match=r"\(node0-gpu1\) -> gpu-node-0 gpu 0 \(node0-gpu0\)"):
        judge.require({(A, B): 800.0, (B, A): 20.0})
    assert judge.judged is not None
    assert judge.judged.culprits == (B.id, A.id)


def test_once_failed_stays_failed() -> None:
    """A second, better value does not heal it, and the first message stays."""
    judge = criterion()
    with pytest.raises(CriterionFailedError, match="498"):
        judge.require(498.0)
    judge.require(800.0)
    assert judge.judged is not None
    assert (judge.judged.outcome, judge.judged.value) == (FAILED, 498.0)
    assert "498" in str(judge.judged.reason)


@given(st.lists(st.floats(min_value=1, max_value=1000), min_size=1, max_size=5))
def test_the_worst_of_several_calls_is_on_record(values: list[float]) -> None:
    """Whatever the order: one call outside is enough, and of those inside the nearest to the limit is kept."""
    judge = criterion(value=500)
    for value in values:
        try:
            judge.require(value)
        except CriterionFailedError:
            assert value <= 500
    assert judge.judged is not None
    assert (judge.judged.outcome == FAILED) == any(value <= 500 for value in values)
    if min(values) > 500:
        assert judge.judged.value == min(values)


def test_advisory_passes_with_a_remark() -> None:
    """Outside an advisory limit: said, on record, not failed."""
    judge = criterion(severity="advisory")
    judge.require(498.0)
    assert judge.judged is not None
    assert judge.judged.outcome == PASSED
    assert judge.judged.advisory
    assert str(judge.judged.text).startswith("advisory: tflops at gpu-node-0 gpu 0 (node0-gpu0): 498 TFLOPS")


def test_advisory_remark_survives_a_better_value() -> None:
    """The record keeps the worst value also where it does not fail."""
    judge = criterion(severity="advisory")
    judge.require(498.0)
    judge.require(900.0)
    assert judge.judged is not None
    assert judge.judged.value == 498.0


def test_advisory_still_wants_a_number() -> None:
    """Not measured is not measured, whatever the severity."""
    with pytest.raises(MeasurementError):
        criterion(severity="advisory").require(math.nan)


# Values that are none, and places that have none.

C = Place(id="node1-gpu0", node=1, gpu=0)
NODES = (Place(id="node0", node=0), Place(id="node1", node=1))
EVERYTHING = (A, B, C, *NODES)


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, True, "800", [], {}])
def test_what_was_no_value_stays_on_record(bad: Any) -> None:
    """Whatever the test does with the exception, and however good the next value is."""
    judge = criterion()
    with pytest.raises(MeasurementError) as caught:
        judge.require(bad)
    judge.require(800.0)
    assert judge.first_error is caught.value


class Unreadable(dict[Any, float]):
    """Values by place that raise when they are read."""

    def items(self) -> Any:
        """Raise."""
        raise OSError("gone")


def cannot_measure(_: object) -> Repeats:
    """Measure another round, and raise."""
    raise RuntimeError("no further round")


@pytest.mark.parametrize(
    "arguments",
    [
        {"value": 600.0, "evidence": [1]},
        {"value": Unreadable({A: 800.0})},
        {"value": Repeats(value=700.1, samples=[650.0, 750.0] * 4, again=cannot_measure)},
    ],
)
def test_what_stopped_a_judgement_stays_on_record(arguments: dict[str, Any]) -> None:
    """Whatever was raised, and however good the next value is."""
    judge = criterion(noise=0.01)
    with pytest.raises((TypeError, OSError, RuntimeError)) as caught:
        judge.require(**arguments)
    judge.require(800.0)
    assert judge.first_error is not None
    assert repr(caught.value) in str(judge.first_error)
    assert judge.first_error.blame.part == "software"


def test_of_two_failures_the_worse_is_kept() -> None:
    """Whoever answers for it with a waiver reads that."""
    judge = criterion()
    for value in (690.0, 500.0, 650.0):
        with pytest.raises(CriterionFailedError):
            judge.require(value)
    assert judge.judged is not None
    assert judge.judged.value == 500.0


def test_an_advisory_miss_is_not_lost() -> None:
    """What is good beside it, or after it, does not hide it."""
    judge = criterion(severity="advisory")
    judge.require(600.0)
    judge.require(800.0)
    assert judge.judged is not None
    assert (judge.judged.value, judge.judged.advisory) == (600.0, True)


@pytest.mark.parametrize(
    ("values", "lacking"),
    [
        ({A: 800.0, B: 800.0}, (C,)),
        ({NODES[1]: 800.0}, (NODES[0],)),
        ({"node0-gpu0": 800.0, "node0-gpu1": 800.0}, (C,)),
        ({(A, B): 800.0, (B, A): 800.0}, (C,)),
    ],
)
def test_a_place_without_a_value_was_not_measured(values: dict[Any, float], lacking: tuple[Place, ...]) -> None:
    """A test that judges what it got has to have got it from every place: those that have none are named."""
    judge = replace(criterion(None), expected=EVERYTHING)
    with pytest.raises(MeasurementError, match=f"no value for {lacking[0].id}") as caught:
        judge.require(values)
    assert caught.value.culprits == lacking
    assert judge.judged is None
    assert judge.first_error is caught.value


@pytest.mark.parametrize(
    "values",
    [
        {A: 800.0, B: 800.0, C: 800.0},
        {NODES[0]: 800.0, NODES[1]: 800.0},
        {"node0-gpu0": 800.0, "node0-gpu1": 800.0, "node1-gpu0": 800.0},
        {(A, B): 800.0, (B, C): 800.0},
        {"read": 800.0, "write": 900.0},
        {4096: 800.0},
    ],
)
def test_whole_values_pass(values: dict[Any, float]) -> None:
    """Every place, by itself or in some pair; values by something else than places are as many as they are."""
    judge = replace(criterion(None), expected=EVERYTHING)
    judge.require(values)
    assert judge.judged is not None
    assert judge.judged.outcome == PASSED


def test_a_bad_node_and_what_other_nodes_share_are_both_on_record() -> None:
    """The node is a culprit, the shared part the cause, and those that share it are beside."""
    nodes = tuple(Place(id=f"node{number}", node=number) for number in range(3))
    bad = {nodes[2]: ("is slow",), "the way out of switch leaf1": ("is slow",)}
    judge = criterion(None, per="cluster")
    with pytest.raises(CriterionFailedError, match="at node2, the way out of switch leaf1: 300 TFLOPS"):
        judge.judge(Finding(value=300, kind="node", bad=bad, among=nodes[:2]))
    record = judge.judged
    assert record is not None
    assert (record.culprits, record.among, record.blames) == (("node2",), ("node0", "node1"), "node")
    assert record.cause == "the way out of switch leaf1"


def test_a_failure_among_too_few_places_is_a_failure() -> None:
    """Measured and bad comes before not measured; and nobody can answer for the places that have no value."""
    judge = replace(criterion(None), expected=EVERYTHING)
    with pytest.raises(CriterionFailedError):
        judge.require({A: 100.0})
    assert judge.first_error is not None
    assert judge.first_error.culprits == (B, C)


def test_a_value_of_another_place() -> None:
    """It says nothing of this one."""
    judge = replace(criterion(), expected=(A,))
    with pytest.raises(MeasurementError, match="no value for node0-gpu0"):
        judge.require({B: 800.0})
    with pytest.raises(MeasurementError, match="a value for node0-gpu1, which is not required at node0-gpu0"):
        judge.require({A: 800.0, B: 800.0})


@pytest.mark.parametrize("names", [("gpu0",), ("gpu0", "gpu1"), ("cpu3", "gpu0"), ("gpu0", "sda")])
@pytest.mark.parametrize("expected", [(A,), (A.of_node, A, B), (A, B)])
def test_half_of_an_id_is_no_name(names: tuple[str, ...], expected: tuple[Place, ...]) -> None:
    """One value of two passed for the node. The error says what there is."""
    judge = replace(criterion(expected[0]), expected=expected)
    ids = ", ".join(place.id for place in expected)
    with pytest.raises(MeasurementError, match=rf"a value for {names[0]}.* which is not required at .*; required: {ids}$"):
        judge.require(dict.fromkeys(names, 800.0))
    assert judge.judged is None


@pytest.mark.parametrize("names", [("sda", "sdb"), ("gpu-node-0",), ("gpu0 memory",), ("best", "GPU")])
def test_a_name_that_is_no_place_s_is_free(names: tuple[str, ...]) -> None:
    """A disk, a host, a size: the worst decides."""
    judge = replace(criterion(A.of_node), expected=(A.of_node, A, B))
    judge.require(dict.fromkeys(names, 800.0))
    assert judge.judged is not None


def test_a_host_may_be_called_like_a_part() -> None:
    """A value by the hostname says nothing of GPU 1."""
    node = Place(id="node0", node=0, hostname="gpu1")
    judge = replace(criterion(node), expected=(node,))
    judge.require({"gpu1": 800.0})
    assert judge.judged is not None


KNOWN = tuple(
    Place(
        id=f"node1-gpu{gpu}",
        node=1,
        gpu=gpu,
        rank=2 + gpu,
        hostname="host-b",
        uuid=f"GPU-{gpu}",
        serial=f"16{gpu}",
        pci=f"0{gpu}:0",
    )
    for gpu in (0, 1)
)
HOSTS = (Place(id="node0", node=0, hostname="host-a"), Place(id="node1", node=1, hostname="host-b"))
NAMES = [
    pytest.param(KNOWN, ("GPU-0", "GPU-1"), id="uuid"),
    pytest.param(KNOWN, ("160", "161"), id="serial"),
    pytest.param(KNOWN, ("00:0", "01:0"), id="pci"),
    pytest.param(KNOWN, (2, 3), id="rank"),
    pytest.param(KNOWN, (0, 1), id="number on the node"),
    pytest.param((*HOSTS, A, *KNOWN), (0, 2, 3), id="rank in the cluster"),
    pytest.param((*HOSTS, A, *KNOWN), ("host-a", "host-b"), id="host"),
]


@pytest.mark.parametrize("value", [800.0, 100.0])
@pytest.mark.parametrize(("expected", "names"), NAMES)
def test_a_place_by_any_of_its_names(expected: tuple[Place, ...], names: tuple[Any, ...], value: float) -> None:
    """All of them are whole, alone or in pairs; one less is no value for a place."""
    pairs = tuple(zip(names, (*names[1:], names[0]), strict=True))
    for whole in (names, pairs):
        judge = replace(criterion(None), expected=expected)
        with contextlib.suppress(CriterionFailedError):
            judge.require(dict.fromkeys(whole, value))
        assert judge.judged is not None
        assert judge.first_error is None
    judge = replace(criterion(None), expected=expected)
    with pytest.raises(CriterionFailedError if value == 100 else MeasurementError):
        judge.require(dict.fromkeys(names[:-1], value))
    assert str(judge.first_error).startswith(f"tflops: no value for {'node1' if 'host-b' in names else 'node1-gpu1'}: ")


def test_a_host_called_as_another_place_is() -> None:
    """``node1`` was blamed for the value of the host of node 0, which is called so."""
    nodes = tuple(Place(id=f"node{number}", node=number, hostname=f"node{number + 1}") for number in range(3))
    judge = replace(criterion(None), expected=nodes)
    with pytest.raises(CriterionFailedError):
        judge.require({"node1": 100.0, "node2": 800.0, "node3": 800.0})
    assert judge.judged is not None
    assert (judge.judged.culprits, judge.first_error) == (("node0",), None)


@pytest.mark.parametrize("names", [(0, 1), (3, 2), ("GPU-0", "GPU-1")])
def test_a_number_blames_no_part(names: tuple[Any, Any]) -> None:
    """Which GPU 0 is, is not told where one is absent: the test's own place stands for it."""
    judge = replace(criterion(None), expected=KNOWN)
    with pytest.raises(CriterionFailedError):
        judge.require({names[0]: 800.0, names[1]: 100.0})
    assert judge.judged is not None
    assert judge.judged.culprits == (("node1-gpu1",) if "GPU-1" in names else ())


@pytest.mark.parametrize("sizes", [(4096,), (8, 4096), (0, 4), (True, False)])
def test_a_whole_number_may_be_a_size(sizes: tuple[int, ...]) -> None:
    """Where one of them is no rank."""
    judge = replace(criterion(None), expected=(*HOSTS, A, *KNOWN))
    judge.require(dict.fromkeys(sizes, 800.0))
    assert judge.judged is not None


@pytest.mark.parametrize("other", [B, B.id])
def test_a_bad_value_of_another_place_blames_nobody_here(other: object) -> None:
    """Also where it is named by its id: that place has its own test, and this one only a value too many."""
    judge = replace(criterion(), expected=(A,))
    with pytest.raises(MeasurementError, match="a value for node0-gpu1, which is not required at node0-gpu0"):
        judge.require({A.id: 800.0, other: 100.0})
    assert judge.judged is None


@pytest.mark.parametrize(
    ("expected", "name", "said"),
    [
        ((A,), (A, A), "node0-gpu0 to node0-gpu0"),
        ((A,), (A.id, A), "node0-gpu0 to node0-gpu0"),
        ((A,), (B, C), "node0-gpu1 to node1-gpu0"),
        ((A, B), (B, B), "node0-gpu1 to node0-gpu1"),
        ((A, B), (A, C), "node0-gpu0 to node1-gpu0"),
        ((A, B), (A, "node9-gpu9"), "node0-gpu0 to node9-gpu9"),
    ],
)
@pytest.mark.parametrize("value", [800.0, 100.0])
def test_a_pair_of_one_place_or_outside_is_no_pair(expected: tuple[Place, ...], name: Any, said: str, value: float) -> None:
    """It passed, or blamed parts that this test is not about."""
    judge = replace(criterion(None), expected=expected)
    with pytest.raises(MeasurementError, match=f"a value for {said}, which is not required here"):
        judge.require({**dict.fromkeys(expected, 800.0), name: value})
    assert judge.judged is None


def test_a_test_of_one_place_may_judge_the_pairs_that_hold_it() -> None:
    """Whatever stands at their other end; a name that is no pair of places is as good as any."""
    judge = replace(criterion(), expected=(A,))
    judge.require({(A, B): 800.0, (C, A): 900.0, (A, "read"): 800.0, ("read", 4096): 800.0})
    assert judge.judged is not None
    assert judge.judged.outcome == PASSED


@pytest.mark.parametrize(("name", "culprits"), [(B.id, (B.id,)), ((A.id, B.id), (A.id, B.id)), (B, (B.id,)), ("read", ())])
def test_an_id_names_its_place(name: object, culprits: tuple[str, ...]) -> None:
    """A value by the id of a place is that place's, as one by the place itself."""
    judge = replace(criterion(None), expected=(A, B))
    with pytest.raises(CriterionFailedError):
        judge.require({name: 100.0} if name == "read" else {A: 800.0, name: 100.0})
    assert judge.judged is not None
    assert judge.judged.culprits == culprits


@pytest.mark.parametrize(
    ("repeats", "outcome", "waivable"),
    [
        ([900.0] * 9, PASSED, False),
        ([500.0] * 9, FAILED, True),
        ([500.0, 900.0] * 5, NOISY, True),
        ([900.0], NOISY, False),  # as good as it is, it is no round
        ([500.0], NOISY, False),
    ],
)
def test_fewer_repeats_settle_no_doubt(repeats: list[float], outcome: str, waivable: bool) -> None:  # noqa: FBT001
    """Three repeats disagree; a further round has to have at least as many, or nobody can answer for it."""
    judge = criterion(noise=0.05)

    def again() -> Repeats:
        return Repeats(value=repeats[0], samples=repeats, again=again)

    with contextlib.suppress(CriterionFailedError, MeasurementError):
        judge.require(Repeats(value=800.0, samples=[500.0, 800.0, 900.0], again=again))
    assert judge.judged is not None
    assert (judge.judged.outcome, judge.judged.waivable) == (outcome, waivable)


def test_a_doubt_without_a_second_look_cannot_be_waived() -> None:
    """Too few repeats were made; nor can a failure of one place stand for the doubt about another."""
    doubtful = Repeats(value=800.0, samples=[500.0, 800.0, 900.0])
    alone, beside = criterion(noise=0.05), criterion(None, noise=0.05)
    with pytest.raises(MeasurementError):
        alone.require(doubtful)
    with pytest.raises(CriterionFailedError):
        beside.require({A: doubtful, B: 500.0})
    for judge, outcome in ((alone, NOISY), (beside, FAILED)):
        assert judge.judged is not None
        assert (judge.judged.outcome, judge.judged.waivable) == (outcome, False)


# --- the distance to siblings ---


def compared(percent: float, *, allowed_percent: float = 0.0, doubt: str | None = None) -> Compared:
    """A GPU that lies ``percent`` below the median of three siblings."""
    short = Shortfall(percent=percent, score=1.0, siblings=3, median=1.0, mad=0.0, explained_percent=allowed_percent)
    return Compared(shortfall=short, allowed_percent=allowed_percent, doubt=doubt)


def test_the_limit_grows_with_what_siblings_explain() -> None:
    """The value is the distance that was seen, and the limit on record is the one that it was judged by."""
    entry = criterion(kind="max", value=4)
    entry.require(compared(5.0, allowed_percent=5.5))
    judged = entry.judged
    assert judged is not None
    assert (judged.outcome, judged.value, judged.limit and judged.limit.text) == ("passed", 5.0, "<= 5.5 TFLOPS")


def test_beyond_what_siblings_explain_it_fails() -> None:
    """By the entry's limit, where that is the wider one."""
    entry = criterion(kind="max", value=4)
    with pytest.raises(CriterionFailedError, match=r"4\.1 TFLOPS, above 4 TFLOPS"):
        entry.require(compared(4.1, allowed_percent=3.5))


@pytest.mark.parametrize("percent", [-3.0, 0.0, 3.0, 30.0])
def test_siblings_that_disagree_leave_the_value_open(percent: float) -> None:
    """Whatever the distance, it is shown beside the entry's own limit."""
    entry = criterion(kind="max", value=4)
    with pytest.raises(MeasurementError, match="nobody can be named") as caught:
        entry.require(compared(percent, allowed_percent=50.0, doubt="nobody can be named: they differ"))
    judged = entry.judged
    assert judged is not None
    assert (caught.value.kind, judged.outcome, judged.value, judged.culprits) == ("noisy", "noisy", percent, ())
    assert judged.limit is not None
    assert judged.limit.text == "<= 4 TFLOPS"


@pytest.mark.parametrize(
    ("samples", "confirmed"),
    [([500.0, 510.0, 520.0], True), ([500.0, 510.0], False), ([500.0, 510.0, 520.0, 701.0], False), (None, False)],
    ids=["all miss", "too few", "one within", "no repeats"],
)
def test_a_failure_is_confirmed_by_repeats_that_all_miss(samples: list[float] | None, *, confirmed: bool) -> None:
    """A single number confirms nothing, nor do repeats of which one lies within the limit."""
    judge = criterion()
    with pytest.raises(CriterionFailedError):
        judge.require(510.0 if samples is None else Repeats(value=510.0, samples=samples))
    assert judge.judged is not None
    assert (judge.judged.confirmed, judge.judged.blames) == (confirmed, "gpu")


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [(A, 1.0, "gpu"), (Place(id="node0", node=0), 1.0, "node"), (None, {(A, B): 1.0}, "link"), (None, 1.0, None)],
)
def test_what_a_failure_blames(place: Place | None, value: Any, part: str | None) -> None:
    """The GPU, the node, or the connection of a pair; a value of the whole cluster blames no part."""
    judge = criterion(place)
    with pytest.raises(CriterionFailedError):
        judge.require(value)
    assert judge.judged is not None
    assert judge.judged.blames == part


@pytest.mark.parametrize("value", [800.0, 1.0])
def test_a_remark_stays_with_the_value(value: float) -> None:
    """What the comparison could not show; a failure needs no such excuse."""
    judge = criterion()
    with contextlib.suppress(CriterionFailedError):
        judge.require(value, remark="compared with itself")
    assert judge.judged is not None
    assert judge.judged.remark == ("compared with itself" if value > 700 else None)


@pytest.mark.parametrize("value", [800.0, 100.0])
def test_a_text_in_the_evidence_is_bounded(value: float) -> None:
    """The output of a tool of 50 MB made a journal of 79 MB and results of 155."""
    judge = criterion()
    with contextlib.suppress(CriterionFailedError):
        judge.require(value, evidence={"log": "x" * 50_000_000, "lines": 7})
    assert judge.judged is not None
    assert (len(judge.judged.evidence["log"]) < 101_000, judge.judged.evidence["lines"]) == (True, 7)
    assert len(judge.judged.reason or "") < 102_000


def test_each_remark_says_whose_it_is() -> None:
    """The worst value is on record; what the repeats of another one do not show stands beside it with its place."""
    judge = criterion(None, noise=0.5)
    judge.require({A: 800.0, B: Repeats(value=900.0, samples=[900.0] * 18 + [300.0] * 2)})
    judge.require(750.0, remark="compared with itself")
    assert judge.judged is not None
    assert judge.judged.remark is not None
    own, later = judge.judged.remark.split("; compared with ")
    assert (own.startswith("node0-gpu1: "), later) == (True, "itself")
    for number in range(1000):
        judge.require(750.0, remark=f"round {number}")
    assert judge.judged.remark.endswith("round 5; 994 more")


# A host that others keep busy.

WHO = "stress-ng (pid 4711, alice) 800 % CPU (8.0 of 112 CPUs busy with others)"


def measured(value: float, *, disturbed: str | None = WHO, again: Callable[[], Repeats] | None = None) -> Repeats:
    """Ten equal repeats, measured while somebody kept the host busy."""
    return Repeats(value=value, samples=[value] * 10, disturbed_by=disturbed, again=again)


def test_a_value_beside_the_work_of_others_is_no_failure() -> None:
    """An error that names who, the value and its limit; the host is to blame, and not the GPU."""
    judge = criterion(noise=0.08)
    with pytest.raises(MeasurementError) as caught:
        judge.require(measured(500))
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"host not idle: {WHO} on ")
    assert "500 TFLOPS, not above 700 TFLOPS" in first
    assert (caught.value.kind, caught.value.blames) == ("not_idle", "host")
    assert [place.id for place in caught.value.culprits] == [f"node{A.node}"]
    assert judge.judged is None
    assert judge.first_error is caught.value, "a test that swallows it does not make it green"


def test_a_value_that_holds_passes_though_the_host_was_busy() -> None:
    """The load could only have made it slower."""
    judge = criterion(noise=0.08)
    judge.require(measured(800))
    assert judge.judged is not None
    assert judge.judged.outcome == "passed"


def test_a_busy_host_in_any_round_counts() -> None:
    """Also where the first round, or the last one, was quiet."""
    third = measured(690, disturbed=None)
    second = measured(690, again=lambda: third)
    with pytest.raises(MeasurementError, match="host not idle"):
        criterion(noise=0.08).require(measured(690, disturbed=None, again=lambda: second))


def test_an_idle_host_excuses_nothing() -> None:
    """One GPU alone that is slow fails as before."""
    with pytest.raises(CriterionFailedError):
        criterion(noise=0.08).require(measured(500, disturbed=None))


def test_a_quiet_failure_beside_a_disturbed_value_is_a_failure() -> None:
    """Of several places, the one that nobody disturbed decides."""
    judge = criterion(None, noise=0.08)
    with pytest.raises(CriterionFailedError):
        judge.require({A: measured(400), B: measured(500, disturbed=None)})
    assert judge.judged is not None
    assert judge.judged.culprits == (B.id,)


def undecided(disturbed: str | None) -> Repeats:
    """Ten repeats on both sides of the limit."""
    return Repeats(value=700.1, samples=[690.0, 710.0] * 5, disturbed_by=disturbed)


def test_an_undecided_value_beside_the_work_of_others_names_them() -> None:
    """Two H200 read 49.7 of 50 GB/s beside eight threads: "no culprit, look for what disturbs it", and the run knew who."""
    judge = criterion(noise=0.08)
    with pytest.raises(MeasurementError) as caught:
        judge.require(undecided(WHO))
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"host not idle: {WHO} on ")
    assert first.endswith("700.1 TFLOPS, > 700 TFLOPS asked")
    assert "too close to call the limit lies inside " in str(caught.value)
    assert (caught.value.kind, caught.value.blames) == ("not_idle", "host")
    assert "end what keeps the host busy" in str(caught.value)
    assert judge.judged is None
    assert judge.first_error is caught.value, "a test that swallows it does not make it green"


def test_an_undecided_value_on_an_idle_host_stays_too_close_to_call() -> None:
    """Nobody is known who disturbed it."""
    with pytest.raises(MeasurementError, match="is too close to call") as caught:
        criterion(noise=0.08).require(undecided(None))
    assert caught.value.kind == "noisy"


def test_an_undecided_advisory_value_beside_the_work_of_others_stays_a_remark() -> None:
    """It holds nobody back, and says who was there."""
    judge = criterion(noise=0.08, severity="advisory")
    judge.require(undecided(WHO))
    assert judge.judged is not None
    assert judge.judged.outcome == "passed"
    assert f"; host not idle: {WHO}" in str(judge.judged.reason)


def test_siblings_that_disagree_beside_the_work_of_others_name_them() -> None:
    """What a finding says of the host counts for a comparison that is too close to call, too."""
    judge = criterion(kind="max", value=6)
    with pytest.raises(MeasurementError) as caught:
        judge.judge(Finding(value=compared(7.0, doubt="the siblings disagree"), disturbed_by=WHO))
    assert str(caught.value).startswith(f"host not idle: {WHO} on ")
    assert (caught.value.kind, caught.value.blames) == ("not_idle", "host")


def test_a_comparison_beside_the_work_of_others_is_no_failure() -> None:
    """A host that is slower than its siblings because somebody works there: what a finding says of it counts as well."""
    judge = criterion(kind="max", value=6)
    with pytest.raises(MeasurementError, match="host not idle"):
        judge.judge(Finding(value=compared(30.0), disturbed_by=WHO))
    judge = criterion(kind="max", value=6)
    judge.judge(Finding(value=compared(2.0), disturbed_by=WHO))
    assert judge.judged is not None
    assert judge.judged.outcome == "passed"


def test_an_advisory_miss_beside_the_work_of_others_stays_a_remark() -> None:
    """It is no failure anyway."""
    judge = criterion(noise=0.08, severity="advisory")
    judge.require(measured(500))
    assert judge.judged is not None
    assert judge.judged.advisory
