"""Localisation by group tests: who is named, on which evidence, and that it ends."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.localization.parts import ErrorRates, Observed, SearchPart, Suspect, weigh_suspects
from pytest_gpucluster.localization.search import bound, search
from tests.support.group_search import found, named, nodes, without
from tests.support.scripts import benchmark_module

if TYPE_CHECKING:
    from collections.abc import Callable

RATES = ErrorRates()


def test_all_pass() -> None:
    """Nobody is named among healthy nodes: blocks, and all of them twice. For 232 nodes 28 tests are published."""
    report = found(nodes(232), lambda _: True)
    assert (report.culprits, report.unconfirmed) == ((), ())
    assert (report.rounds, len(report.tests)) == (3, 26)
    assert report.rest is not None
    assert report.rest.result.passed


@pytest.mark.parametrize("number", [3, 4, 5, 9, 40, 232])
def test_one_bad_node(number: int) -> None:
    """One bad node is named, with the value of two tests that failed with different partners."""
    for bad in {0, number // 2, number - 1}:
        report = found(nodes(number), without(f"node{bad}"))
        assert named(report) == {Suspect("part", (f"node{bad}",))}
        evidence = report.culprits[0].evidence
        pairs = {test.group.parts for test in evidence if len(test.group.parts) == 2}
        assert len(pairs) >= 2
        assert all(test.result.value == 1.0 and test.result.passed is False for test in evidence)


def test_five_of_232_in_five_rounds() -> None:
    """Where no test is wrong, five bad nodes are named in five rounds, and the rest passes without them."""
    bad = ["node3", "node50", "node51", "node120", "node231"]
    report = found(nodes(232), without(*bad))
    assert named(report) == {Suspect("part", (name,)) for name in bad}
    assert report.rounds <= 5
    assert report.rest is not None
    assert report.rest.result.passed


def test_two_nodes_cannot_be_told_apart() -> None:
    """Two nodes fail together: nobody is named."""
    report = found(nodes(2), lambda _: False)
    assert report.culprits == ()


@pytest.mark.parametrize(
    ("kind", "spoils"),
    [
        ("whole", lambda at: "leaf1" in at),
        ("edge", lambda at: "leaf1" in at and len(set(at)) > 1),
    ],
)
def test_a_leaf_switch(kind: str, spoils: Callable[[list[str]], bool]) -> None:
    """A leaf switch is named once, and not its nodes; where only what leaves it fails, its edge is."""
    parts = nodes(64, leaf=8)
    leaf_of = {part.name: part.within[0] for part in parts}
    report = found(parts, lambda group: not spoils([leaf_of[name] for name in group.parts]))
    assert {(finding.suspect.kind, finding.suspect.names) for finding in report.culprits} == {(kind, ("leaf1",))}


def test_the_boundary_of_two_leaves() -> None:
    """Each leaf passes, alone and with all but one other: the connection of the two is named."""
    parts = nodes(64, leaf=8)
    leaf_of = {part.name: part.within[0] for part in parts}
    report = found(parts, lambda group: not {"leaf2", "leaf5"} <= {leaf_of[name] for name in group.parts})
    assert named(report) == {Suspect("between", ("leaf2", "leaf5"))}


@pytest.mark.parametrize("leaf", [None, 8])
def test_one_connection_of_two_nodes(leaf: int | None) -> None:
    """Both nodes work with all others; only together they fail."""
    report = found(nodes(64, leaf), lambda group: not {"node5", "node47"} <= set(group.parts))
    assert named(report) == {Suspect("between", ("node47", "node5"))}


def test_groups_that_were_not_measured() -> None:
    """A group without a value says nothing: nobody is named, and the search ends."""
    report = found(nodes(20), lambda _: None)
    assert (report.culprits, report.rest and report.rest.result.passed) == ((), None)
    assert report.rounds <= bound(20)


@pytest.mark.parametrize("parts", [[], [SearchPart(name="a")], [SearchPart(name="a"), SearchPart(name="a")]])
def test_too_few_parts(parts: list[SearchPart]) -> None:
    """Fewer than two parts, or a name twice, are refused."""
    with pytest.raises(ValueError, match="expected at least 2 parts"):
        search(parts, lambda _: [])


def test_a_part_is_no_container() -> None:
    """One name for a part and for what parts are in is refused."""
    with pytest.raises(ValueError, match="node1 names a part and what parts are in"):
        search([SearchPart(name="node1"), SearchPart(name="nic0", within=("node1",))], lambda _: [])


def test_one_result_for_each_group() -> None:
    """A missing result is refused."""
    with pytest.raises(ValueError, match="expected one for each"):
        search(nodes(9), lambda _: [])


@pytest.mark.parametrize("rate", [0.0, 0.5, -1.0])
def test_error_rates(rate: float) -> None:
    """A share of wrong tests is above 0 and below 0.5."""
    with pytest.raises(ValueError, match="expected a share"):
        ErrorRates(missed=rate)


def test_probabilities_of_two_parts() -> None:
    """One failed test of two parts and one that passed of the second: the odds are those of Bayes' rule."""
    seen = [Observed((0, 1), failed=True), Observed((1,), failed=False)]
    one, other = weigh_suspects(seen, [1.0, 1.0], parts=2, rates=RATES).chance
    assert one > 0.5
    assert other < 0.05


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.integers(0, 10**9), st.integers(1, 12), st.sampled_from([None, 1, 4]))
def test_nobody_without_evidence(number: int, seed: int, most_rounds: int, leaf: int | None) -> None:
    """Whatever the outcomes: it ends in time, names each once, and only with two failed tests in different pair_tests."""
    chance = random.Random(seed)
    share = chance.random()
    report = found(nodes(number, leaf), lambda _: chance.choice([True, None, chance.random() < share]), most_rounds)
    assert report.rounds <= most_rounds
    named(report)
    for finding in report.culprits:
        failed = [test for test in report.tests if test.result.passed is False]
        assert set(finding.evidence) <= set(failed)
        assert len(finding.evidence) >= 2
        if finding.suspect.kind == "part":
            pairs = {frozenset(test.group.parts) for test in finding.evidence if len(test.group.parts) == 2}
            assert len(pairs) >= 2
            assert all(finding.suspect.names[0] in pair for pair in pairs)


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 60), st.data())
def test_without_noise(number: int, data: st.DataObject) -> None:
    """Where no test is wrong and most nodes are good, the bad ones are named, all of them and nobody else."""
    names = [part.name for part in nodes(number)]
    bad = data.draw(st.sets(st.sampled_from(names), max_size=number // 4))
    report = found(nodes(number), without(*bad))
    assert named(report) == {Suspect("part", (name,)) for name in bad}
    assert report.rounds <= bound(number)


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 60), st.sets(st.integers(0, 40), max_size=1))
def test_one_wrong_test_names_nobody(number: int, wrong: set[int]) -> None:
    """One test of healthy nodes that fails by noise names nobody."""
    count = iter(range(10**6))
    report = found(nodes(number), lambda _: next(count) not in wrong)
    assert report.culprits == ()


def test_noisy_clusters() -> None:
    """Two of 100 tests are wrong: recall and precision hold, on seeds of the development."""
    with benchmark_module("localization") as benchmark:
        row = benchmark.run("nodes", 100, 3, seeds=range(15), noise=0.02)
        healthy = benchmark.run("nodes", 100, 0, seeds=range(10), noise=0.02)
    assert row.recall >= 0.97
    assert row.precision >= 0.97
    assert healthy.named == 0
