"""A search among nodes within its time: who is named, and what is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.localization.nodes import NodeSearch, search_nodes
from pytest_gpucluster.localization.parts import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpucluster.localization.parts import MemberGroup

NODES = [f"node{number}" for number in range(12)]
GOOD_GB_S, LIMIT_GB_S = 386.6, 320.0


class Clock:
    """Each look takes so many seconds."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        """The time in seconds."""
        self.now_s += self.step_s
        return self.now_s


def searched(*bad: str, pair: tuple[str, str] | None = None, within_s: float = 60, step_s: float = 0.1) -> NodeSearch:
    """A search where groups with a bad node, or with both of a pair, reach half of the rate."""

    def measure(groups: Sequence[MemberGroup], left_s: float) -> list[Result]:
        assert left_s > 0
        slow = [bool(set(bad) & set(group.parts)) or (pair is not None and set(pair) <= set(group.parts)) for group in groups]
        return [Result(passed=not one, value=GOOD_GB_S / 2 if one else GOOD_GB_S) for one in slow]

    return search_nodes(dict.fromkeys(NODES), measure, within_s=within_s, unit="GB/s", clock=Clock(step_s))


LEAVES = {node: f"switch leaf{number // 4}" for number, node in enumerate(NODES)}


def with_leaf(*, inside: bool) -> NodeSearch:
    """A search where what leaves the second leaf switch reaches half of the rate, or all that is behind it."""

    def is_slow(group: MemberGroup) -> bool:
        leaves = {LEAVES[node] for node in group.parts}
        return "switch leaf1" in leaves and (inside or len(leaves) > 1)

    def measure(groups: Sequence[MemberGroup], _left_s: float) -> list[Result]:
        return [Result(passed=not is_slow(one), value=GOOD_GB_S / (2 if is_slow(one) else 1)) for one in groups]

    return search_nodes(LEAVES, measure, within_s=60, unit="GB/s", clock=Clock(0.1))


@pytest.mark.parametrize(("inside", "words"), [(True, "switch leaf1"), (False, "the way out of switch leaf1")])
def test_a_leaf_switch_is_named_and_no_node(inside: bool, words: str) -> None:  # noqa: FBT001 -- a parameter
    """Its four nodes fail together: they share it, so none of them is to blame."""
    found = with_leaf(inside=inside)
    assert (found.nodes, dict(found.shared)) == ((), {"switch leaf1": words})
    assert found.evidence["the rest"].startswith("386.6 GB/s on 8 nodes")
    before = "all of" if inside else "what leaves"
    assert "missed the limit, best 193.3" in found.evidence[f"{before} switch leaf1"]


@pytest.mark.parametrize(
    ("leaves", "bad", "words"),
    [
        ({f"node{at}": f"switch leaf{at // 6}" for at in range(12)}, (), "switch leaf0 and switch leaf1"),
        ({f"node{at}": None for at in range(12)}, ("node3", "node8"), "node3 and node8"),
    ],
    ids=["two switches", "two nodes"],
)
def test_a_connection_is_named_by_its_ends(leaves: dict[str, str | None], bad: tuple[str, ...], words: str) -> None:
    """Each end works by itself: of two switches neither is to blame, and of two nodes neither is."""

    def is_slow(group: MemberGroup) -> bool:
        return set(bad) <= set(group.parts) if bad else len({leaves[node] for node in group.parts}) > 1

    def measure(groups: Sequence[MemberGroup], _left_s: float) -> list[Result]:
        return [Result(passed=not is_slow(one), value=GOOD_GB_S / (2 if is_slow(one) else 1)) for one in groups]

    found = search_nodes(leaves, measure, within_s=60, unit="GB/s", clock=Clock(0.1))
    assert (found.nodes, set(found.shared.values())) == ((), {f"the way between {words}"})
    assert set(found.shared) == set(words.split(" and "))


def test_where_switches_are_known_a_bad_node_is_still_one() -> None:
    """Not its switch: the other nodes there work."""

    def measure(groups: Sequence[MemberGroup], _left_s: float) -> list[Result]:
        return [Result(passed="node5" not in one.parts, value=GOOD_GB_S) for one in groups]

    found = search_nodes(LEAVES, measure, within_s=60, unit="GB/s", clock=Clock(0.1))
    assert (found.nodes, dict(found.shared)) == (("node5",), {})


@pytest.mark.parametrize("bad", [("node5",), ("node0",), ("node5", "node9"), ("node1", "node2", "node11")])
def test_the_bad_nodes_are_named(bad: tuple[str, ...]) -> None:
    """Each with its groups; and what the others reach."""
    found = searched(*bad)
    assert set(found.nodes) == set(bad)
    assert not found.is_cut
    assert all("missed the limit, best 193.3" in found.evidence[name] for name in bad)
    assert found.evidence["the rest"].startswith("386.6 GB/s on ")
    assert found.evidence["searched"].startswith(f"{found.measured} smaller groups in {found.report.rounds} rounds, ")


def test_nobody_where_smaller_groups_are_good() -> None:
    """What fails only together with all others is no node's fault."""
    found = searched()
    assert (found.nodes, found.report.unconfirmed) == ((), ())
    assert found.evidence["localization"] == "no node could be named"


def test_nobody_where_all_are_bad() -> None:
    """Nothing shows which of them is to blame."""
    assert searched(*NODES).nodes == ()


def test_a_connection_blames_neither_end() -> None:
    """Two nodes that are slow only together: told, and no node is named."""
    found = searched(pair=("node3", "node7"))
    assert found.nodes == ()
    assert any("node3" in str(name) and "node7" in str(name) for name in (*found.evidence, *found.evidence.values()))


def test_the_time_is_over() -> None:
    """No round begins after that; nobody is named by one round, and it says so."""
    found = searched("node5", within_s=1.0, step_s=0.7)
    assert found.is_cut
    assert found.nodes == ()
    assert found.measured < searched("node5").measured
    assert found.evidence["searched"].endswith("no time was left for more")


def test_groups_that_cannot_be_measured() -> None:
    """Lost workers say nothing of a node."""
    found = search_nodes(dict.fromkeys(NODES), lambda groups, _: [Result(passed=None)] * len(groups), within_s=60, unit="GB/s")
    assert (found.nodes, found.measured) == ((), 0)
