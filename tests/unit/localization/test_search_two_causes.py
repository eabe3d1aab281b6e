"""A bad node and a bad way out of a leaf switch at once: both are named, wherever the node is, and nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.localization.parts import Suspect
from tests.support.group_search import found, named, nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.localization.parts import MemberGroup


def spoilt_by(node: int, leaf: int, size: int) -> Callable[[MemberGroup], bool]:
    """Groups pass that have not this node, and do not leave this switch."""

    def passes(group: MemberGroup) -> bool:
        numbers = [int(name.removeprefix("node")) for name in group.parts]
        leaves = {number // size for number in numbers}
        return node not in numbers and not (leaf in leaves and len(leaves) > 1)

    return passes


@pytest.mark.parametrize(("number", "size"), [(8, 4), (12, 4), (16, 8), (24, 8)])
def test_a_bad_node_and_a_bad_way_out(number: int, size: int) -> None:
    """Each node of the cluster beside each switch. Of two switches, what leaves one is what is between both."""
    for node in range(number):
        for leaf in range(number // size):
            way = Suspect("between", ("leaf0", "leaf1")) if number == 2 * size else Suspect("edge", (f"leaf{leaf}",))
            report = found(nodes(number, size), spoilt_by(node, leaf, size))
            assert named(report) == {Suspect("part", (f"node{node}",)), way}, (node, leaf)


@pytest.mark.parametrize("leaf", [0, 2])
def test_a_switch_that_is_bad_as_a_whole_is_still_one(leaf: int) -> None:
    """No two of its nodes pass, so no single node explains what failed inside."""

    def passes(group: MemberGroup) -> bool:
        return all(int(name.removeprefix("node")) // 4 != leaf for name in group.parts)

    assert named(found(nodes(12, 4), passes)) == {Suspect("whole", (f"leaf{leaf}",))}
