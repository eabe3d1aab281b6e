"""``-k`` selects just the tests that are meant: judged with pytest's own reading of the expression."""

from __future__ import annotations

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.judging.selection import MARKS, MOST_NAMED, Selector

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
