"""The expected set: every (criterion, place) that the run owes an outcome, fixed before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpucluster.config.settings import reaches
from pytest_gpucluster.judging.verdict import NOT_SELECTED, PENDING, Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_gpucluster.places import Inventory, Place
    from pytest_gpucluster.thresholds.resolve import Threshold

Key = tuple[str, "str | None"]


class Plan:
    """Expected outcomes by (criterion, place id), and what became of them so far."""

    def __init__(self) -> None:
        """Start with nothing expected."""
        self._records: dict[Key, Record] = {}
        self._nodeids: dict[Key, str] = {}

    def __iter__(self) -> Iterator[Record]:
        """All records, in the order they were expected."""
        return iter(self._records.values())

    def expect(self, criterion: str, place: str | None, *, nodeid: str) -> None:
        """A selected test will judge this; ``nodeid`` names it in the JUnit file."""
        self._records[criterion, place] = Record(criterion=criterion, place=place, outcome=PENDING)
        self._nodeids[criterion, place] = nodeid

    def leave_out(self, criterion: str, place: str | None, *, why: str) -> None:
        """Expected by the profile, and left out by whoever started the run."""
        self._records.setdefault((criterion, place), Record(criterion=criterion, place=place, outcome=NOT_SELECTED, reason=why))

    def settle(self, record: Record) -> None:
        """The outcome of one expected test."""
        self._records[record.criterion, record.place] = record

    def record(self, criterion: str, place: str | None) -> Record | None:
        """What is on record for one expected test; None if it is not expected."""
        return self._records.get((criterion, place))

    def pending(self) -> list[Record]:
        """What has no outcome yet."""
        return [record for record in self if record.outcome == PENDING]

    def nodeid(self, record: Record) -> str:
        """The test that owes this outcome; the criterion itself where no test was selected."""
        return self._nodeids.get((record.criterion, record.place), record.criterion)

    def close(self, *, outcome: str, why: str) -> list[Record]:
        """Give everything that is still pending this outcome; returns those records."""
        closed = [replace(record, outcome=outcome, reason=why) for record in self.pending()]
        for record in closed:
            self.settle(record)
        return closed


def places_of(threshold: Threshold, inventory: Inventory) -> list[Place | None]:
    """The places at which a criterion is due: every GPU, every node, or the cluster as a whole (None)."""
    if threshold.per == "gpu":
        return list(inventory.places)
    return list(inventory.nodes) if threshold.per == "node" else [None]


def about(place: Place | None, inventory: Inventory) -> tuple[Place, ...]:
    """The GPUs and nodes that a criterion judged at ``place`` is about: the GPU, the node and its GPUs, or everything."""
    if place is not None and place.gpu is not None:
        return (place,)
    everything = (*inventory.places, *inventory.nodes)
    return everything if place is None else tuple(one for one in everything if one.node == place.node)


def rule_against(threshold: Threshold, inventory: Inventory) -> str | None:
    """Why the profile's rules say that this criterion does not apply here; None if it does."""
    if threshold.skip is not None:
        return threshold.skip
    facts = inventory.facts
    group = facts["gpus_per_node"] if threshold.per == "node" else facts["world_size"]
    if group < threshold.needs:
        why = "to compare" if threshold.per == "gpu" else "that work together"
        return f"needs {threshold.needs} GPUs {why}, and {group} is expected"
    if facts["nodes"] < threshold.needs_nodes:
        return f"needs {threshold.needs_nodes} nodes, and {facts['nodes']} is expected"
    return None


def complete(plan: Plan, criteria: Mapping[str, Threshold], inventory: Inventory, *, level: str, accept_at: str) -> None:
    """Add what the profile expects and no selected test will judge."""
    for threshold in criteria.values():
        is_in_run = reaches(level, threshold.level)
        if not is_in_run and not reaches(accept_at, threshold.level):
            continue
        why = "not among the tests that were selected" if is_in_run else f"the level {level} leaves it out"
        rule = rule_against(threshold, inventory)
        for place in places_of(threshold, inventory):
            if rule is None:
                plan.leave_out(threshold.key, place.id if place else None, why=why)
