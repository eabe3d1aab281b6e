"""Which tests confirm a suspect of which everything else says that it is a culprit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.localization.knowledge import Knowledge, broken_ends, is_confirmed
from pytest_gpucluster.localization.parts import ErrorRates, Kind, MemberGroup, Result, Suspect
from tests.support.group_search import found, named, nodes

if TYPE_CHECKING:
    from pytest_gpucluster.localization.parts import SearchReport

LEAF = 4


def believed(kind: Kind, names: str, *rounds: dict[str, bool]) -> tuple[Knowledge, int]:
    """16 nodes at four leaf switches after these rounds, and a suspect that is the only culprit. A group: numbers of nodes."""
    known = Knowledge(nodes(16, LEAF), ErrorRates())
    if kind == "between" and names.startswith("node"):
        known.roster.add_connection(*names.split())
    for tests in rounds:
        groups = [MemberGroup(tuple(f"node{at}" for at in numbers.split()), "suspect") for numbers in tests]
        known.note(groups, [Result(passed=passed) for passed in tests.values()])
    number = known.roster.number(kind, *sorted(names.split()))
    known.explained = {}
    known.chance = [float(at == number) for at in range(len(known.roster.suspects))]
    return known, number


def confirmed(kind: Kind, names: str, *rounds: dict[str, bool]) -> bool:
    """Whether these tests confirm it."""
    return is_confirmed(*believed(kind, names, *rounds))


def test_a_part_with_two_partners() -> None:
    """However often one pair fails, it takes a second partner."""
    assert not confirmed("part", "node0", {"0 4": False}, {"0 4": False}, {"0 1 2 3": False})
    assert confirmed("part", "node0", {"0 4": False}, {"0 5": False})


def test_a_leaf_switch_inside() -> None:
    """Pairs that leave a leaf switch fail: whether it is the switch or its uplinks shows inside, in pairs too."""
    leaving = {"0 4": False, "1 8": False, "2 12": False}
    for kind, outcome in (("whole", False), ("edge", True)):
        assert not confirmed(kind, "leaf0", leaving)
        assert not confirmed(kind, "leaf0", leaving, {"0 1": outcome})
        assert not confirmed(kind, "leaf0", leaving, {"0 1 2": outcome}, {"0 1 2 3": outcome})
        assert not confirmed(kind, "leaf0", leaving, {"0 1": outcome, "2 3": outcome}, {"0 2": not outcome})
        assert confirmed(kind, "leaf0", leaving, {"0 1": outcome}, {"0 1 2 3": outcome}, {"2 3": outcome})


def test_an_edge_to_two_other_leaves() -> None:
    """Pairs with one other leaf switch alone fail: the boundary may be to blame."""
    inside = {"0 1": True, "2 3": True, "4 5": True}
    assert not confirmed("edge", "leaf0", inside, {"0 4": False, "1 5": False, "2 6": False})
    assert confirmed("edge", "leaf0", inside, {"0 4": False, "1 8": False})
    assert not confirmed("edge", "leaf0", inside, {"0 4": False, "1 8": False}, {"2 12": True})


def test_a_boundary_of_leaves_that_work_with_others() -> None:
    """Three pairs more fail than pass, and both leaf switches work with a third one."""
    pairs, third = {"0 4": False, "1 5": False, "2 6": False}, {"0 8": True, "4 9": True, "1 12": True, "5 13": True}
    assert not confirmed("between", "leaf0 leaf1", pairs, {"0 1 8": True, "4 5 8": True}, {"0 8": True, "1 9": True})
    assert not confirmed("between", "leaf0 leaf1", {"0 4": False, "1 5": False}, third)
    assert not confirmed("between", "leaf0 leaf1", pairs, third, {"3 7": True})
    assert confirmed("between", "leaf0 leaf1", pairs, third)


def test_a_connection_whose_ends_work() -> None:
    """Each end passes with another partner after the pair has failed: passes before that made it a suspect."""
    fails, ends = {"0 4": False}, {"0 8": True, "4 9": True}
    assert not confirmed("between", "node0 node4", ends, ends, fails, fails, fails)
    assert not confirmed("between", "node0 node4", fails, ends, ends, fails)
    assert not confirmed("between", "node0 node4", fails, {"0 8": True}, {"0 9": True}, fails, fails)
    assert confirmed("between", "node0 node4", ends, fails, ends, fails, fails)
    assert broken_ends(*believed("between", "node0 node4", fails, {"0 8": True}, {"0 9": True})) == ["node4"]
    assert broken_ends(*believed("between", "node0 node4", {"0 4": True})) == []


def test_all_parts_of_a_container_are_the_container() -> None:
    """Two nodes at each switch: that one switch is bad is likelier than that both its nodes are. One alone is a node."""

    def named_where(bad: set[str]) -> tuple[set[Suspect], SearchReport]:
        report = found(nodes(8, 2), lambda group: bad.isdisjoint(group.parts))
        return named(report), report

    switch, report = named_where({"node2", "node3"})
    assert switch == {Suspect("whole", ("leaf1",))}
    assert all(test.result.passed is False for test in report.culprits[0].evidence)
    assert len(report.culprits[0].evidence) >= 4
    assert named_where({"node2"})[0] == {Suspect("part", ("node2",))}
    assert named_where({"node2", "node4"})[0] == {Suspect("part", ("node2",)), Suspect("part", ("node4",))}
