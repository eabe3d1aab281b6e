"""``-k`` selects just the tests that are meant: judged with pytest's own reading of the expression."""

from __future__ import annotations

from dataclasses import replace

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.judging.selection import MARKS, MOST_NAMED, Selector, identity_of
from pytest_gpucluster.places import Place

FILE = "suite/test_fabric.py"


def nodeids_of(*names: str, file: str = FILE) -> dict[tuple[str, str | None], str]:
    """A plan in which each test judges a criterion of its own."""
    return {(name, None): f"{file}::{name}" for name in names}


def selected(expression: str, nodeids: dict[tuple[str, str | None], str]) -> set[str]:
    """What pytest would select."""
    asked = Expression.compile(expression)
    found = set()
    for nodeid in nodeids.values():
        address, bracket, rest = nodeid.partition("[")
        path, *names = address.split("::")
        parts = {*path.split("/"), *names[:-1], f"{names[-1]}{bracket}{rest}", *MARKS}
        if asked.evaluate(KeywordMatcher(frozenset(parts))):
            found.add(nodeid)
    return found


SUITE = {
    ("bf16_tflops", f"node{node}-gpu{gpu}"): f"suite/test_compute.py::test_bf16_tflops[node{node}-gpu{gpu}]"
    for node in range(12)
    for gpu in range(12)
}
SUITE |= {
    (f"straggler[{name}]", f"node{node}-gpu0"): f"suite/test_stragglers.py::test_straggler[node{node}-gpu0-{name}]"
    for node in range(12)
    for name in ("bf16_tflops", "busbw")
}
SUITE |= {(f"busbw[{name}]", f"node{node}"): f"{FILE}::test_busbw[node{node}-{name}]" for node in range(12) for name in "ab"}
SUITE |= nodeids_of("test_busbw_scaling", "test_finetune_loss", "test_finetune_loss_limit", "test_finetune_check", "test_fab")
SUITE |= nodeids_of("test_finetune_check[a]", "test_finetune_checks", "TestX::test_in", "TestX::test_in2", "TestX::test_x")


@pytest.mark.parametrize("key", [*list(SUITE)[::17], *list(SUITE)[-40:]])
def test_one_test(key: tuple[str, str | None]) -> None:
    """``node1`` is not ``node10``, and ``busbw`` not ``straggler[busbw]``."""
    assert selected(Selector(SUITE).select([key]), SUITE) == {SUITE[key]}


PART = Place(id="node3-gpu0", node=3, gpu=0, hostname="gpu-node-3", uuid="GPU-5f", serial="165")
NODE = Place(id="node3", node=3, hostname="gpu-node-3")


@pytest.mark.parametrize("key", [key for key in SUITE if key[1] in ("node3-gpu0", "node3")])
def test_one_test_of_a_part(key: tuple[str, str | None]) -> None:
    """By its identity: no number of a node stands in the command, and of that part just this test is selected."""
    part = PART if key[1] == PART.id else NODE
    only, name, k, expression = Selector(SUITE).arguments([key], part)
    assert (only, name, k) == ("--gpucluster-only", "gpu-node-3:GPU-5f" if part is PART else "gpu-node-3", "-k")
    assert "node3" not in expression.replace(name, "")
    assert {nodeid for nodeid in selected(expression, SUITE) if f"[{key[1]}" in nodeid} == {SUITE[key]}


def test_many_tests_of_a_part_are_all_of_it() -> None:
    """15 names in one command are no help; several of one function are named once."""
    at = {(f"c{number}", PART.id): f"f.py::test_c{number}[{PART.id}]" for number in range(15)}
    assert Selector(at).arguments(at, PART) == ["--gpucluster-only", "gpu-node-3:GPU-5f"]
    family = {(f"straggler[{name}]", PART.id): f"f.py::test_straggler[{PART.id}-{name}]" for name in "abc"}
    assert Selector(family).arguments(family, PART)[2:] == ["-k", "test_straggler"]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (PART, "gpu-node-3:GPU-5f"),
        (replace(PART, uuid=None), "gpu-node-3:165"),
        (replace(PART, uuid=None, serial=None), "gpu-node-3:gpu0"),
        (replace(PART, id="node3-cpu0", uuid=None, serial=None), "gpu-node-3:cpu0"),
        (NODE, "gpu-node-3"),
        (replace(NODE, hostname=None), None),
    ],
)
def test_how_a_part_is_called(part: Place, name: str | None) -> None:
    """By UUID, else serial number, else its number on the host; not at all where no host is known."""
    assert identity_of(part) == name


def test_what_is_not_at_the_part_is_selected_by_name() -> None:
    """A test of the whole cluster that blames a node, and a part without a known host."""
    busbw = ("busbw[a]", "node3")
    beside = [("bf16_tflops", PART.id), ("training_scaling_node", NODE.id)]
    whole = {key: f"f.py::test_{key[0]}[{key[1]}]" for key in beside}
    assert Selector(whole).arguments(beside, PART)[:2] == ["--gpucluster-only", "gpu-node-3"]  # of a GPU, and of its node
    assert Selector(whole).arguments([("bf16_tflops", "node0-gpu0"), beside[0]], PART)[0] == "-k"
    assert Selector(SUITE).arguments([busbw, ("test_finetune_loss", None)], NODE)[0] == "-k"
    assert Selector(SUITE).arguments([busbw], replace(NODE, hostname=None)) == ["-k", "test_busbw[node3-a]"]
    assert Selector(SUITE).arguments([busbw], None)[0] == "-k"
    assert Selector(SUITE).arguments([], NODE) == []


@given(st.sets(st.sampled_from(list(SUITE)), min_size=1, max_size=MOST_NAMED))
def test_several_tests(keys: set[tuple[str, str | None]]) -> None:
    """Just these."""
    assert selected(Selector(SUITE).select(keys), SUITE) == {SUITE[key] for key in keys}


IDS = st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=6)
NAMES = st.one_of(
    st.sampled_from(["test_a", "test_ab", "test_b", "test_fabric", "TEST_A", "xtest_a", "test_a[x]", "test_or"]),
    st.builds("{}[{}]".format, st.sampled_from(["test_a", "test_b", "test_ab"]), IDS),
)


@settings(deadline=None)
@given(st.sets(NAMES, min_size=1, max_size=8), st.data())
def test_any_ids(names: set[str], data: st.DataObject) -> None:
    """Whatever ids hold, the selection can be read and has what is meant."""
    nodeids = nodeids_of(*names)
    keys = data.draw(st.sets(st.sampled_from(sorted(nodeids)), min_size=1))
    assert {nodeids[key] for key in keys} <= selected(Selector(nodeids).select(keys), nodeids)


def test_a_word_of_a_mark_leaves_no_test_out() -> None:
    """``not m`` would leave out every test that is marked with ``compute``."""
    nodeids = nodeids_of("test_a[{]", "test_a[;M;]", "test_a[]")
    assert selected(Selector(nodeids).select([("test_a[{]", None)]), nodeids) >= {nodeids["test_a[{]", None]}


def test_many_tests_of_one_criterion() -> None:
    """All at one node by what their names share; all that most places failed at every place."""
    gpus = [key for key in SUITE if key[0] == "bf16_tflops"]
    large = {("a", f"node{node}-gpu{gpu}"): f"f.py::test_a[node{node}-gpu{gpu}]" for node in range(12) for gpu in range(32)}
    at_node = [key for key in large if (key[1] or "").startswith("node1-")]
    assert selected(Selector(large).select(at_node), large) == {large[key] for key in at_node}
    assert Selector(SUITE).select(gpus[:100]) == "test_bf16_tflops[node"
    assert selected(Selector(SUITE).select(gpus[:100]), SUITE) == {SUITE[key] for key in gpus}
    some = [(f"straggler[{name}]", f"node{node}-gpu0") for node in range(12) for name in ("busbw",)] * 2
    assert selected(Selector(SUITE).select(some), SUITE) == {SUITE[key] for key in some}


def test_a_test_that_is_not_known_has_its_usual_name() -> None:
    """Of a run that never began to collect."""
    tests = Selector({("busbw[a]", "node1"): "busbw[a]"})
    assert tests.select([("busbw[a]", "node1")]) == "test_busbw[node1-a]"
    assert tests.select([("other", None)]) == "test_other"
