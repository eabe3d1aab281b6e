"""The expected set: every (criterion, place) that needs an outcome. The set is fixed before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_gpucluster.config.settings import reaches
from pytest_gpucluster.judging.verdict import NOT_SELECTED, PENDING, Record
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from pytest_gpucluster.places import Inventory, Place
    from pytest_gpucluster.thresholds.resolve import Threshold

Key = tuple[str, "str | None"]


class Rule(NamedTuple):
    """Why a criterion does not apply here: in a sentence, and as the ``cause`` that all with the same one share."""

    text: str
    cause: str


class Plan:
    """The record of every expected (criterion, place id), pending or with its outcome."""

    def __init__(self) -> None:
        """Start with nothing expected."""
        self._records: dict[Key, Record] = {}
        self._nodeids: dict[Key, str] = {}

    def __iter__(self) -> Iterator[Record]:
        """All records, in the order they were expected."""
        return iter(self._records.values())

    def expect(self, criterion: str, place: str | None, *, nodeid: str) -> None:
        """Expect the outcome of a selected test; ``nodeid`` names the test in the JUnit file."""
        self._records[criterion, place] = Record(criterion=criterion, place=place, outcome=PENDING)
        self._nodeids[criterion, place] = nodeid

    def keep(self, record: Record, *, nodeid: str) -> None:
        """Expect a record that an earlier part of the run has settled already."""
        self.set_outcome(record)
        self._nodeids[record.criterion, record.place] = nodeid

    def leave_out(self, key: Key, *, why: str, cause: str | None = None, nodeid: str | None = None) -> None:
        """Mark what is due and no selected test judges, unless it is expected; ``why`` is the reason, ``cause`` its kind."""
        if key not in self._records:
            self._records[key] = Record(criterion=key[0], place=key[1], outcome=NOT_SELECTED, reason=why, cause=cause)
            self._nodeids[key] = nodeid or key[0]

    def set_outcome(self, record: Record) -> None:
        """Replace the record of one expected (criterion, place)."""
        self._records[record.criterion, record.place] = record

    def record(self, criterion: str, place: str | None) -> Record | None:
        """The record of one (criterion, place); None if it is not expected."""
        return self._records.get((criterion, place))

    def pending(self) -> list[Record]:
        """The records without an outcome."""
        return [record for record in self if record.outcome == PENDING]

    def nodeid(self, record: Record) -> str:
        """The test that judges this record; the criterion itself where no test was selected."""
        return self._nodeids.get((record.criterion, record.place), record.criterion)

    def nodeids(self) -> dict[Key, str]:
        """The test of each record, by criterion and place id."""
        return {**self._nodeids}

    def close(self, *, outcome: str, why: str) -> list[Record]:
        """Give every pending record this outcome; returns those records."""
        closed = [replace(record, outcome=outcome, reason=why) for record in self.pending()]
        for record in closed:
            self.set_outcome(record)
        return closed


def places_of(threshold: Threshold, inventory: Inventory) -> list[Place | None]:
    """The places at which a criterion is due: every GPU, every node, or the cluster as a whole (None)."""
    if threshold.per == "gpu":
        return list(inventory.places)
    return list(inventory.nodes) if threshold.per == "node" else [None]


def places_covered_by(place: Place | None, inventory: Inventory) -> tuple[Place, ...]:
    """The GPUs and nodes that a criterion at ``place`` judges: the GPU, the node and its GPUs, or all (None)."""
    if place is not None and place.gpu is not None:
        return (place,)
    return inventory.everything if place is None else inventory.members[place.node]


def rule_against(threshold: Threshold, inventory: Inventory) -> Rule | None:
    """Why the profile's rules say that this criterion does not apply here; None if it does."""
    return next(_rules_against(threshold, inventory), None)


def _rules_against(threshold: Threshold, inventory: Inventory) -> Iterator[Rule]:
    needs = threshold.needs
    if threshold.skip is not None:
        yield Rule(threshold.skip, threshold.skip)
    if threshold.fabrics is not None and inventory.fabric not in threshold.fabrics:
        text = f"needs the fabric {' or '.join(threshold.fabrics)}, and the profile promises {inventory.fabric}"
        yield Rule(text, f"fabric {inventory.fabric}")
    if needs.shared_paths and not inventory.shared_paths:
        yield Rule("needs a path that the nodes share, and the limits name none (cluster: shared_paths)", "no shared path")
    if needs.kernel_log and not inventory.requires_kernel_log:
        text = "needs the kernel log, and the limits do not require that it can be read (cluster: kernel_log: required)"
        yield Rule(text, "kernel log not required")
    if needs.rails and not inventory.measures_rails:
        text = "measures each adapter by itself, and the limits do not ask for it (cluster: rails: measured)"
        yield Rule(text, "rails not asked for")
    if needs.slurm and inventory.slurm_job is None:
        text = "needs a job of Slurm that can be asked: SLURM_JOB_ID is not set, or scontrol is not on the PATH"
        yield Rule(text, "no job of Slurm")
    if inventory.num_domains < needs.domains and inventory.num_domains == 0:
        yield Rule("needs an NVLink domain of several nodes, and NVLink ends at the node", "NVLink ends at the node")
    elif inventory.num_domains < needs.domains:
        text = f"needs {needs.domains} NVLink domains, and {_expected(inventory.num_domains)}"
        yield Rule(text, _number_of(inventory.num_domains, "NVLink domain"))
    yield from _too_few(threshold, inventory.facts)


def _too_few(threshold: Threshold, facts: Mapping[str, int]) -> Iterator[Rule]:
    """The rules by the number of GPUs and nodes."""
    needs, nodes, gpus = threshold.needs, facts["nodes"], facts["gpus_per_node"]
    group = gpus if threshold.per == "node" else facts["world_size"]
    if group < needs.places:
        why = "to compare" if threshold.per == "gpu" else "that work together"
        yield Rule(f"needs {counted(needs.places, 'GPU')} {why}, and {_expected(group)}", _number_of(group, "GPU"))
    if nodes < needs.nodes:
        yield Rule(f"needs {counted(needs.nodes, 'node')}, and {_expected(nodes)}", _number_of(nodes, "node"))
    if gpus < needs.gpus_per_node:
        text = f"needs {counted(needs.gpus_per_node, 'GPU')} in each node, and {_expected(gpus)}"
        yield Rule(text, f"{_number_of(gpus, 'GPU')} a node")


def _expected(number: int) -> str:
    return f"{number} {'is' if number == 1 else 'are'} expected"


def _number_of(number: int, part: str) -> str:
    return f"one {part}" if number == 1 else f"{number} {part}s"


def complete(plan: Plan, criteria: Mapping[str, Threshold], inventory: Inventory, *, level: str, accept_at: str) -> None:
    """Mark as not selected what the profile expects and no selected test will judge."""
    for threshold in criteria.values():
        is_in_run = reaches(level, threshold.level)
        if not is_in_run and not reaches(accept_at, threshold.level):
            continue
        why = "not among the tests that were selected" if is_in_run else f"the level {level} leaves it out"
        cause = None if is_in_run else f"level {level}"
        rule = rule_against(threshold, inventory)
        for place in places_of(threshold, inventory):
            if rule is None:
                plan.leave_out((threshold.key, place.id if place else None), why=why, cause=cause)
