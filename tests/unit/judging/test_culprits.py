"""Who is blamed, for what, how surely, and what is to be done. No false blame: nothing is replaced that was not confirmed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_gpucluster.config.strict_json import strict_json
from pytest_gpucluster.errors import Part
from pytest_gpucluster.judging.culprits import Culprit, find_culprits, is_most
from pytest_gpucluster.judging.selection import ONLY, Selector
from pytest_gpucluster.judging.verdict import OUTCOMES, Record
from pytest_gpucluster.places import Device, Inventory, Place
from pytest_gpucluster.reporting.journal import record_facts, record_from_facts
from tests.support.entries import limit

LIMIT = limit()
TESTS = Selector({})
"""Called as their criteria."""


def bound_to(place: Place, device: Device) -> dict[str, Any]:
    """What a rank says of its place."""
    return {"hostname": f"h{place.node}", "uuid": f"GPU-{place.id}" if device == "cuda" else None}


def places(nodes: int = 1, gpus: int = 8, *, absent: tuple[str, ...] = (), device: Device = "cuda") -> dict[str, Any]:
    """Every GPU and node; those in ``absent`` have no rank."""
    inventory = Inventory(num_nodes=nodes, gpus_per_node=gpus, device=device)
    bound = [
        place if place.id in absent or f"node{place.node}" in absent else replace(place, rank=rank, **bound_to(place, device))
        for rank, place in enumerate(inventory.places)
    ]
    return {place.id: place for place in (*bound, *inventory.nodes)}


def failed(criterion: str, place: str, **changes: Any) -> Record:
    """A value outside its limit at one place."""
    facts = {"limit": LIMIT, "value": 498.0, "culprits": (place,), "blames": "gpu", "reason": f"{criterion} at {place}: 498"}
    return Record(criterion=criterion, place=place, outcome="failed", **{**facts, **changes})


def passed(criterion: str, place: str) -> Record:
    """A value within its limit."""
    return Record(criterion=criterion, place=place, outcome="passed", limit=LIMIT, value=777.0)


def error(criterion: str, *culprits: str, place: str | None = None, **changes: Any) -> Record:
    """An error that blames some places."""
    facts = {"blames": "software", "cause": "KeyError: 'x'", "reason": "f was not measured: KeyError: 'x'\n  traceback"}
    return Record(criterion=criterion, place=place, outcome="error", culprits=culprits, **{**facts, **changes})


def gpu(number: int) -> str:
    """A place of the first node."""
    return f"node0-gpu{number}"


def one(records: list[Record], known: dict[str, Any] | None = None) -> Culprit:
    """The only culprit."""
    (found,) = find_culprits(records, known or places())
    return found


# A failure of one GPU.


def test_measured_once_is_measured_again() -> None:
    """One criterion, nothing that repeats it: no word of replacing, and the command that repeats it."""
    found = one([failed("bf16_tflops", gpu(3)), *(passed("bf16_tflops", gpu(number)) for number in (0, 1, 2))])
    assert (found.kind, found.place, found.confidence) == ("gpu", gpu(3), "medium")
    assert found.action(TESTS, {}).startswith("measure it again: the same command with -k 'test_bf16_tflops[node0-gpu3]'")
    assert "replace" not in found.action(TESTS, {})
    assert "out of service" not in found.action(TESTS, {})


@pytest.mark.parametrize(("num", "is_cut"), [(2, False), (40, True)])
def test_a_long_selection_is_that_of_the_part(num: int, *, is_cut: bool) -> None:
    """Criteria of the whole cluster that one busy GPU left unmeasured would make it half a page."""
    known = places()
    here = [error(f"at_gpu_{number}", gpu(1), place=gpu(1)) for number in range(num)]
    found = one([*here, *(error(f"of_all_{number}", gpu(1)) for number in range(num))], known)
    action = found.action(TESTS, known)
    assert ("test_of_all_1" in action) is not is_cut
    assert (ONLY in action) is is_cut
    assert len(action) < 600


def test_repeats_that_all_miss_confirm() -> None:
    """The criterion's own repeats."""
    found = one([failed("bf16_tflops", gpu(3), confirmed=True)])
    assert (found.confidence, found.action(TESTS, {}).startswith("take the GPU out of service")) == ("high", True)


@pytest.mark.parametrize("confirmed", [False, True])
def test_what_a_gpu_asks_for_comes_first(*, confirmed: bool) -> None:
    """Once, before what is usual, and before it is measured again."""
    asking = replace(failed("recovery_action", gpu(3), confirmed=confirmed), advice="reset the GPU")
    found = one([asking, replace(asking, criterion="memory_repair"), failed("bf16_tflops", gpu(3))])
    assert found.action(TESTS, {}).startswith("reset the GPU")
    assert found.action(TESTS, {}).count("reset the GPU") == 1
    assert "out of service" not in found.action(TESTS, {})


def test_another_criterion_confirms() -> None:
    """Two measurements of one GPU."""
    found = one([failed("bf16_tflops", gpu(3)), failed("hbm_bandwidth", gpu(3))])
    assert (found.confidence, found.criteria) == ("high", ["bf16_tflops", "hbm_bandwidth"])
    assert "take the GPU out of service" in found.action(TESTS, {})


def test_a_straggler_does_not_confirm_its_own_value() -> None:
    """Both criteria judge one measurement."""
    found = one([failed("hbm_bandwidth", gpu(3)), failed("straggler[hbm_bandwidth]", gpu(3))])
    assert found.confidence == "medium"
    assert "-k 'test_hbm_bandwidth[node0-gpu3] or test_straggler[node0-gpu3-hbm_bandwidth]'" in found.action(TESTS, {})


def test_an_error_never_confirms() -> None:
    """Not measured is not bad, however often."""
    rows = [failed("a", gpu(3)), *(error(key, gpu(3), blames="unknown", cause=None) for key in "bcd")]
    found = one(rows)
    assert (found.kind, found.confidence, found.criteria) == ("gpu", "medium", ["a", "b", "c", "d"])


@pytest.mark.parametrize("part", [part for part in get_args(Part) if part != "gpu"])
def test_errors_keep_their_kind(part: Part) -> None:
    """Whatever the place: an error without a measured failure replaces nothing."""
    found = one([error("a", gpu(3), blames=part, cause="x"), error("b", gpu(3), blames=part, cause="x")])
    assert (found.kind, found.confidence) == (part, "medium")
    assert "replace" not in found.action(TESTS, {})
    assert "out of service" not in found.action(TESTS, {})


def test_a_pair_is_a_link() -> None:
    """Either end may be bad."""
    record = replace(failed("p2p", gpu(0), culprits=(gpu(0), gpu(1)), blames="link"), place=None)
    assert [(found.kind, found.place) for found in find_culprits([record], places())] == [("link", gpu(0)), ("link", gpu(1))]


# What most places share.


@pytest.mark.parametrize(
    ("number", "total", "most"),
    [
        *((8, 8, True), (5, 8, True), (3, 4, True), (3, 3, True), (2, 2, True), (4, 6, True)),
        *((4, 8, False), (2, 4, False), (2, 3, False), (1, 2, False), (1, 1, False), (3, 6, False), (0, 0, False)),
    ],
)
def test_most(number: int, total: int, *, most: bool) -> None:
    """More than half and at least three; of two, both."""
    assert is_most(number, total) is most


def test_most_fail_one_criterion() -> None:
    """One entry without a place, with a question and no GPU to replace, though every repeat missed."""
    found = one([failed("bf16_tflops", gpu(number), confirmed=True) for number in range(8)])
    assert (found.kind, found.place, found.confidence) == ("unknown", None, "medium")
    assert found.places == tuple(map(gpu, range(8)))
    assert found.evidence[0] == "8 of 8 GPUs below the limit: not the GPUs: power cap, clocks, driver or limit?"
    assert "replace" not in found.action(TESTS, {})


def test_most_ranks_of_a_rehearsal_fail_one_criterion() -> None:
    """There are no GPUs, so nothing is said of GPUs, power or clocks."""
    known = places(device="cpu")
    found = one([failed("own", f"node0-cpu{number}") for number in range(8)], known)
    assert found.evidence[0] == "8 of 8 ranks below the limit: not the ranks: the code or the limit?"
    assert "GPU" not in " ".join([*found.evidence, found.action(TESTS, {})])


def test_two_of_two() -> None:
    """Two that disagree: both are named, and neither is blamed."""
    found = one([failed("silent_corruption", gpu(number), limit=limit("max", 0)) for number in (0, 1)], places(gpus=2))
    assert (found.kind, found.place, found.places) == ("unknown", None, (gpu(0), gpu(1)))
    assert "nothing shows which" in found.evidence[0]


def test_several_criteria_of_the_same_places_are_one() -> None:
    """A cap lowers every rate."""
    rows = [failed(key, gpu(number)) for key in ("bf16_tflops", "fp32_tflops") for number in range(4)]
    assert one(rows, places(gpus=4)).criteria == ["bf16_tflops", "fp32_tflops"]


def test_beside_a_systemic_fault_a_gpu_answers_for_its_own() -> None:
    """What it fails further by itself."""
    shared = [failed("bf16_tflops", gpu(number)) for number in range(8)]
    own = [failed("hbm_bandwidth", gpu(5)), *(passed("hbm_bandwidth", gpu(number)) for number in range(5))]
    systemic, alone = find_culprits([*shared, *own], places())
    assert (systemic.place, systemic.criteria) == (None, ["bf16_tflops"])
    assert (alone.place, alone.criteria, alone.kind) == (gpu(5), ["hbm_bandwidth"], "gpu")


def test_a_minority_is_not_systemic() -> None:
    """Four of eight."""
    rows = [failed("a", gpu(number)) for number in range(4)] + [passed("a", gpu(number)) for number in range(4, 8)]
    assert [found.place for found in find_culprits(rows, places())] == [gpu(number) for number in range(4)]


def test_one_typo_is_one_culprit() -> None:
    """It raised on every rank: software, and no GPU."""
    rows = [error("own", gpu(number), place=gpu(number)) for number in range(8)]
    found = one(rows)
    assert (found.kind, found.place) == ("software", None)
    assert found.evidence[0] == "8 of 8 ranks alike: KeyError: 'x'"


def test_one_typo_in_a_function_of_the_host_is_one_culprit() -> None:
    """One rank of each node is asked, so all nodes are all of them."""
    rows = [error("own", f"node{number}", place=f"node{number}") for number in range(3)]
    found = one(rows, places(nodes=3))
    assert (found.kind, found.place) == ("software", None)
    assert found.evidence[0] == "3 of 3 nodes alike: KeyError: 'x'"


def test_places_of_two_kinds_are_counted_as_ranks() -> None:
    """Three of four nodes, each with its GPUs: six of eight ranks, where nine places were once counted of eight."""
    known = places(4, 2)
    names = [name for name, place in known.items() if place.node]
    found = one([error("gpu_count", name, place=name) for name in names], known)
    assert found.evidence[0] == "6 of 8 ranks alike: KeyError: 'x'"
    assert {*found.places} == {*names}
    few = [name for name in names if known[name].node < 3]
    assert all(one.place is not None for one in find_culprits([error("c", name, place=name) for name in few], known))


@pytest.mark.parametrize(
    ("name", "at", "nodes", "confidence"),
    [
        ("node2", None, 3, "medium"),  # it, or what leaves its switch
        ("node2", "node2", 3, "high"),  # measured inside the node
        ("node1", None, 3, "high"),  # another node behind its switch is well
        ("node2-gpu0", None, 3, "high"),  # no uplink makes a GPU wrong
        ("node0", None, 1, "high"),  # nothing leaves the switch of the only node
    ],
)
@pytest.mark.parametrize("kind", ["switch", "fabric"])
def test_a_node_alone_behind_its_switch(name: str, at: str | None, nodes: int, confidence: str, kind: str) -> None:
    """Seen from other nodes, it and what leaves its switch or NVLink domain look the same."""
    known = {
        key: replace(one, **{kind: f"x{one.node // 2}"}) if one.rank is not None else one for key, one in places(nodes).items()
    }
    blames = "gpu" if "gpu" in name else "node"
    row = replace(failed("a", name, confirmed=True, blames=blames), place=at)
    found = one([row], known)
    assert (found.place, found.confidence) == (name, confidence)


def test_dead_workers_stay_at_their_places() -> None:
    """Also if most died: a process dies at a place."""
    rows = [error("own", gpu(number), blames="host", cause="died: SIGKILL") for number in range(8)]
    assert len(find_culprits(rows, places())) == 8


# Grouping, absence, and nobody to blame.


def test_one_dead_worker_is_one_culprit() -> None:
    """With all criteria that it took along."""
    rows = [error(f"finetune_check[{number}]", gpu(3), blames="host", cause="died") for number in range(13)]
    found = one(rows)
    assert (found.kind, len(found.criteria), len(found.evidence)) == ("host", 13, 1)


def test_an_absent_node_is_one_culprit() -> None:
    """63 absent nodes are 63 entries, whatever their outcomes say."""
    known = places(nodes=64, absent=tuple(f"node{number}" for number in range(1, 64)))
    gone = [place for place in known.values() if place.node > 0]
    rows = [Record(criterion=key, place=place.id, outcome="missing", reason="x") for place in gone for key in "ab"]
    found = find_culprits(rows, known)
    assert [(culprit.kind, culprit.place) for culprit in found] == [("node", f"node{number}") for number in range(1, 64)]
    assert found[0].evidence[0] == "an unknown host is absent: 18 expected outcomes are missing with it"
    listed = {name: place if place.hostname else replace(place, hostname=f"host{place.node}") for name, place in known.items()}
    assert find_culprits(rows, listed)[0].evidence[0] == "host1 is absent: 18 expected outcomes are missing with it"


@pytest.mark.parametrize(("blames", "cause"), [("node", "its agent is silent"), ("software", "its node runs torch 1")])
def test_a_node_whose_ranks_all_fail_alike_is_one_culprit(blames: Part, cause: str) -> None:
    """The node is named, with all that went with it; ranks of other nodes are not drawn in."""
    known = places(nodes=3)
    lost = [f"node1-gpu{number}" for number in range(8)]
    rows = [
        error(key, place, place=place, blames=blames, cause=cause, reason=f"{place}: {cause}") for key in "ab" for place in lost
    ]
    rows.append(error("busbw", *lost, place="node1", blames=blames, cause=cause))
    rows.append(error("host", "node1", place="node1", blames=blames, cause=cause))
    alone = error("a", "node2-gpu0", place="node2-gpu0", blames=blames, cause=cause)
    other, found = find_culprits([*rows, alone], known)
    assert (other.place, other.criteria) == ("node2-gpu0", ["a"])
    assert (found.kind, found.place, found.places) == (blames, "node1", tuple(lost))
    assert len(found.records) == 18
    assert found.evidence[0] == f"all 8 ranks alike: {cause}"
    selected = found.action(TESTS, {}).partition(" -k ")[2]
    assert all(f"test_{key}[{place}]" in selected for key in "ab" for place in lost)
    assert "test_busbw[node1]" in selected
    assert "node2" not in selected
    assert found.confidence == "medium"


@pytest.mark.parametrize("which", ["another cause", "a failure", "a rank that answered", "nothing"])
def test_a_node_with_a_rank_that_differs_is_not_one_culprit(which: str) -> None:
    """A GPU that measured, failed a limit or fails otherwise is its own; an absent one does not count."""
    known = places(nodes=3, absent=("node1-gpu7",))
    lost = [f"node1-gpu{number}" for number in range(7)]
    rows = [error("a", place, place=place, cause="its node runs torch 1") for place in lost]
    if which == "another cause":
        rows.append(error("b", lost[0], place=lost[0], cause="KeyError: 'y'"))
    elif which == "a failure":
        rows.append(failed("b", lost[0]))
    elif which == "a rank that answered":
        del rows[0]
    of_node = [culprit for culprit in find_culprits(rows, known) if culprit.place == "node1"]
    assert len(of_node) == (which == "nothing")


def test_what_was_never_run_blames_nobody() -> None:
    """A run that was cut short, on nodes that are there."""
    assert find_culprits([Record(criterion="a", place=gpu(0), outcome="missing", reason="not run")], places()) == []


def test_nobody_can_be_named() -> None:
    """Ranks that failed together: unknown, and all of them are named."""
    found = one([error("sum", blames="unknown", cause="hung", among=(gpu(0), gpu(1)))])
    assert (found.kind, found.place, found.places) == ("unknown", None, (gpu(0), gpu(1)))
    assert gpu(0) in found.evidence[0]
    assert gpu(1) in found.evidence[0]


RECORDS = st.builds(
    Record,
    criterion=st.sampled_from("abc"),
    place=st.none() | st.sampled_from(sorted(places())),
    outcome=st.sampled_from(OUTCOMES),
    limit=st.none() | st.just(LIMIT),
    reason=st.none() | st.text(min_size=1),
    culprits=st.lists(st.sampled_from([*sorted(places()), "nobody"]), max_size=2).map(tuple),
    blames=st.none() | st.sampled_from(get_args(Part)),
    cause=st.none() | st.text(min_size=1),
    among=st.lists(st.sampled_from([*sorted(places()), "nobody"]), max_size=2).map(tuple),
    confirmed=st.booleans(),
)


SWITCH = failed("a", "node0", culprits=(), confirmed=True, blames="switch", cause="leaf1", among=("node0",))


@example([SWITCH])
@example([replace(SWITCH, outcome="error")])
@given(st.lists(RECORDS, max_size=12))
def test_no_false_blame(rows: list[Record]) -> None:
    """Replace only what a failure of hardware at that place confirmed; a place once; nothing that passed."""
    found = find_culprits(rows, places())
    assert len({culprit.place for culprit in found if culprit.place}) == sum(culprit.place is not None for culprit in found)
    for culprit in found:
        assert all(record.outcome in ("failed", "error", "missing") for record in culprit.records)
        measured = [record for record in culprit.records if record.outcome == "failed"]
        if "out of service" in culprit.action(TESTS, {}) or culprit.confidence == "high":
            if culprit.place is None:  # a leaf switch stands for itself, before the nodes that it slows
                assert culprit.kind in ("switch", "software")
                assert "out of service" not in culprit.action(TESTS, {})
            assert any(record.confirmed for record in measured) or len({record.criterion for record in measured}) > 1


def test_what_several_nodes_share_is_one_culprit() -> None:
    """A leaf switch: no node is blamed, all of them are named, and two criteria that point there are one culprit."""
    nodes = ("node0", "node1")
    facts = {"blames": "switch", "cause": "switch leaf1", "among": nodes, "outcome": "failed", "limit": LIMIT, "value": 193}
    records = [Record(criterion=key, place=None, confirmed=True, reason=key, **facts) for key in ("busbw", "scaling")]
    (found,) = find_culprits(records, places(nodes=3))
    assert (found.kind, found.place, found.places, found.criteria) == ("switch", None, nodes, ["busbw", "scaling"])
    assert found.evidence[0] == "switch leaf1 is to blame: node0, node1"
    assert found.confidence == "high"
    assert "look at the switch" in found.action(TESTS, {})


def test_software_that_several_nodes_share_is_no_node() -> None:
    """A choice of NCCL is slow: one culprit of kind software, with the record's advice; an error names none."""
    nodes = ("node0", "node1")
    facts = {"blames": "software", "cause": "NCCL's choice of an algorithm", "among": nodes, "limit": LIMIT, "value": 193.0}
    slow = Record(criterion="busbw", place=None, outcome="failed", advice="take another NCCL", confirmed=True, **facts)
    (found,) = find_culprits([slow], places(nodes=3))
    assert (found.kind, found.place, found.places) == ("software", None, nodes)
    assert found.evidence[0] == "NCCL's choice of an algorithm is to blame: node0, node1"
    assert found.action(TESTS, {}).startswith("take another NCCL")
    (unclear,) = find_culprits([replace(slow, outcome="error", advice=None)], places(nodes=3))
    assert unclear.kind == "unknown"


@pytest.mark.parametrize("node", ["node0", "node2"])
def test_a_bad_node_beside_a_bad_switch(node: str) -> None:
    """Both are culprits, whether the node is behind that switch or elsewhere; two criteria confirm both."""
    facts = {"blames": "node", "cause": "the way out of switch leaf1", "among": ("node0", "node1"), "culprits": (node,)}
    facts |= {"outcome": "failed", "limit": LIMIT, "value": 193.0}
    records = [Record(criterion=key, place=None, confirmed=True, reason=key, **facts) for key in ("busbw", "scaling")]
    found = {(one.kind, one.place, one.places): one for one in find_culprits(records, places(nodes=3))}
    assert {*found} == {("node", node, (node,)), ("switch", None, ("node0", "node1"))}
    assert {one.confidence for one in found.values()} == {"high"}
    assert {tuple(one.criteria) for one in found.values()} == {("busbw", "scaling")}
    switch = next(one for one in found.values() if one.kind == "switch")
    assert switch.evidence[0] == "the way out of switch leaf1 is to blame: node0, node1"
    assert "look at the switch" in switch.action(TESTS, {})


def test_an_error_with_culprits_names_no_switch() -> None:
    """Its ``among`` are those that took part, and its cause is no part."""
    found = find_culprits([error("sum", "node0", blames="node", cause="hung", among=("node0", "node1"))], places())
    assert [(one.kind, one.place) for one in found] == [("node", "node0")]


def test_two_switches_are_two_culprits() -> None:
    """Also where the same nodes share them."""
    facts = {"blames": "switch", "among": ("node0", "node1"), "outcome": "failed", "limit": LIMIT, "value": 193.0}
    records = [Record(criterion=cause, place=None, cause=cause, **facts) for cause in ("switch leaf1", "switch leaf2")]
    assert [one.evidence[0].partition(" is")[0] for one in find_culprits(records, places(nodes=3))] == [
        "switch leaf1",
        "switch leaf2",
    ]


def test_gpus_that_suffer_from_one() -> None:
    """All GPUs of a domain fail, and 63 of them blame one: it is the one culprit, not most GPUs."""
    known = places(nodes=16, gpus=4)
    rows = [failed("xid_during_run", name, culprits=("node3-gpu2",)) for name, place in known.items() if place.gpu is not None]
    (found,) = find_culprits(rows, known)
    assert (found.place, found.is_systemic, len(found.records)) == ("node3-gpu2", False, 64)


def test_gpus_that_all_fail_by_themselves() -> None:
    """The same values without another one to blame are no fault of the GPUs."""
    known = places(nodes=16, gpus=4)
    rows = [failed("xid_during_run", name) for name, place in known.items() if place.gpu is not None]
    assert one(rows, known).is_systemic


def test_two_bad_switches_are_two_culprits() -> None:
    """Each with the nodes behind it, and each once, whatever number of criteria it spoilt."""
    behind = {"switch leaf0": ("node0",), "the way out of switch leaf1": ("node1",)}
    facts = {"blames": "switch", "cause": ", ".join(behind), "among": ("node0", "node1"), "behind": behind}
    facts |= {"outcome": "failed", "limit": LIMIT, "value": 193.0}
    records = [Record(criterion=name, place=None, confirmed=True, **facts) for name in ("inter", "scaling")]  # type: ignore[arg-type]
    found = {one.headline: one for one in find_culprits(records, places(2))}
    assert [head.partition(" is to blame")[0] for head in map(str, found)] == list(behind)
    assert [one.places for one in found.values()] == list(behind.values())
    assert all((one.kind, one.criteria, one.is_confirmed) == ("switch", ["inter", "scaling"], True) for one in found.values())
    kept = record_from_facts(json.loads(json.dumps(strict_json(record_facts(records[0])))))
    assert kept.behind == behind
