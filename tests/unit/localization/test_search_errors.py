"""Localisation where chosen tests have the wrong outcome: the right ones are named, and nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.localization.parts import Suspect
from tests.support.group_search import found, named, nodes, without, wrong

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.localization.parts import MemberGroup

LEAF = 8


def leaves(group: MemberGroup) -> set[str]:
    """The leaf switches of a group, of eight nodes each."""
    return {f"leaf{int(name.removeprefix('node')) // LEAF}" for name in group.parts}


def is_large(group: MemberGroup) -> bool:
    """Whether half of 64 nodes are in a group."""
    return len(group.parts) >= 32


def is_pair(*names: str) -> Callable[[MemberGroup], bool]:
    """Whether a group is these two parts."""
    return lambda group: set(group.parts) == set(names)


@pytest.mark.parametrize("leaf", [None, LEAF])
def test_a_connection_that_the_first_large_group_missed(leaf: int | None) -> None:
    """One pass of the rest does not end the search: the two nodes that fail together are named all the same."""
    passes = wrong(lambda group: not {"node5", "node47"} <= set(group.parts), times=1, where=is_large)
    assert named(found(nodes(64, leaf), passes)) == {Suspect("between", ("node47", "node5"))}


def test_a_connection_whose_own_test_passed_by_error() -> None:
    """The two nodes pass once by error as a pair: they are tested again, and named."""
    passes = wrong(lambda group: not {"node5", "node47"} <= set(group.parts), times=1, where=is_pair("node5", "node47"))
    assert named(found(nodes(64), passes)) == {Suspect("between", ("node47", "node5"))}


def test_a_connection_in_few_rounds() -> None:
    """Groups that pass each by themselves are split at once: fewer rounds than two for each bit of a node's number."""
    report = found(nodes(232, leaf=32), lambda group: not {"node19", "node93"} <= set(group.parts))
    assert named(report) == {Suspect("between", ("node19", "node93"))}
    assert report.rounds <= 16


def test_a_connection_is_no_bad_node() -> None:
    """A node that fails with one partner, and once by error with another, is no culprit."""
    passes = wrong(
        lambda group: not {"node5", "node47"} <= set(group.parts),
        times=1,
        where=lambda group: len(group.parts) == 2 and "node47" in group.parts and "node5" not in group.parts,
    )
    assert named(found(nodes(64), passes)) == {Suspect("between", ("node47", "node5"))}


def test_a_bad_node_is_no_connection() -> None:
    """A bad node that small groups missed four times is named, and not its connection with whom the halves kept it together."""
    passes = wrong(without("node47"), times=4, where=lambda group: "node47" in group.parts and not is_large(group))
    assert named(found(nodes(64), passes)) == {Suspect("part", ("node47",))}


def test_a_connection_that_fails_twice_by_error() -> None:
    """Of so many pairs some fail twice by error: none of them is named for that."""
    passes = wrong(lambda group: not {"node5", "node47"} <= set(group.parts), times=2, where=is_pair("node5", "node46"))
    assert named(found(nodes(64), passes)) == {Suspect("between", ("node47", "node5"))}


def test_a_leaf_switch_of_which_one_block_passed_by_error() -> None:
    """A test inside a bad leaf switch passes by error: the switch is named, and not its uplinks."""
    passes = wrong(
        lambda group: "leaf1" not in leaves(group),
        times=1,
        where=lambda group: leaves(group) == {"leaf1"} and len(group.parts) > 2,
    )
    assert named(found(nodes(64, LEAF), passes)) == {Suspect("whole", ("leaf1",))}


@pytest.mark.parametrize("leaf", ["leaf0", "leaf1", "leaf2"])
def test_uplinks_with_one_wrong_pair(leaf: str) -> None:
    """The uplinks of a leaf switch fail, and one pair with the next one passes by error: no boundary is named."""
    following = f"leaf{int(leaf[-1]) + 1}"
    passes = wrong(
        lambda group: leaf not in leaves(group) or len(leaves(group)) == 1,
        times=1,
        where=lambda group: leaf in leaves(group) and following not in leaves(group) and len(leaves(group)) > 1,
    )
    assert named(found(nodes(64, LEAF), passes)) == {Suspect("edge", (leaf,))}


@pytest.mark.parametrize("purpose", ["block", "pool", "rest", "suspect"])
def test_a_boundary_with_one_wrong_test(purpose: str) -> None:
    """Two leaf switches fail only together, and one test fails or passes by error: no uplink is named for both."""
    passes = wrong(
        lambda group: not {"leaf2", "leaf3"} <= leaves(group),
        times=1,
        where=lambda group: group.purpose == purpose and "leaf2" in leaves(group),
    )
    assert named(found(nodes(64, LEAF), passes)) == {Suspect("between", ("leaf2", "leaf3"))}


def test_the_boundary_of_two_of_many_leaves() -> None:
    """So many leaf switches that no connection of two is a suspect from the start: their boundary is found, and no uplink."""
    report = found(nodes(40 * LEAF, LEAF), lambda group: not {"leaf3", "leaf31"} <= leaves(group))
    assert named(report) == {Suspect("between", ("leaf3", "leaf31"))}
    assert report.rounds <= 16


def test_one_of_many_nodes_whose_first_tests_passed_by_error() -> None:
    """A bad node that the first two tests missed shows in the rest, and is named."""
    passes = wrong(without("node9"), times=2, where=lambda group: "node9" in group.parts)
    assert named(found(nodes(232), passes)) == {Suspect("part", ("node9",))}
