"""Searches for the parts that slow a collective: smaller groups, or pairs, are measured, and a finding names the culprits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import MeasurementError, Part
from pytest_gpucluster.judging.finding import Finding
from pytest_gpucluster.localization.gpus import FEWEST_GPUS, describe_ways, slow_gpus, usual_pair_gb_s
from pytest_gpucluster.localization.nodes import (
    CHOICE,
    FEWEST_NODES,
    RINGS,
    Effort,
    advice_on_choice,
    effort_of,
    is_not_ring,
    search_nodes,
)
from pytest_gpucluster.localization.parts import MemberGroup, Result
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.judging.criterion import Criterion
    from pytest_gpucluster.measurements.collectives import CollectiveTiming
    from pytest_gpucluster.places import Place

MOST_NODES = 3
"""Of those named, whose GPUs are measured by themselves."""


class NodeLocalizer:
    """Searches the nodes that slow an all-reduce over all nodes. ``found`` is what the latest search has found."""

    def __init__(self, cluster: Cluster, all_reduce: Callable[..., Any], recipe: Mapping[str, Any]) -> None:
        """Search nothing yet.

        Args:
            cluster: whose nodes are searched.
            all_reduce: the measurement; its value has ``busbw_gb_s``.
            recipe: of the all-reduce; its ``search_s`` is the time of a search in seconds, 0 for none.
        """
        self.found = Finding()
        self._cluster = cluster
        self._all_reduce = all_reduce
        self._recipe = recipe

    def search(self, criterion: Criterion, measured: CollectiveTiming) -> Finding:
        """Search, unless the value is within the limit, or there is no time. Without a culprit the finding names nobody.

        Where NCCL chose something else than rings, and rings are within the limit, that choice is the culprit.
        """
        value, within_s = measured.busbw_gb_s, self._recipe.get("search_s", 0)
        if criterion.limit.holds(value) or not within_s:
            return Finding()
        by_rings = self._by_rings(criterion, measured)
        if by_rings.bad:
            self.found = by_rings
            return by_rings
        return self._among_nodes(criterion, value, within_s).with_evidence(**by_rings.evidence)

    def _by_rings(self, criterion: Criterion, measured: CollectiveTiming) -> Finding:
        """The same all-reduce by rings, where NCCL chose something else, and then by its choice once more.

        A network that was slow for a moment makes rings look fast, and then the choice is fast as well.
        """
        if not is_not_ring(measured.algorithm):
            return Finding()
        nodes, gpus = self._cluster.nodes, self._cluster.promised.gpus_per_node
        effort = effort_of(self._recipe, nodes=len(nodes), gpus=len(nodes) * gpus, busbw_gb_s=measured.busbw_gb_s)
        shown: dict[str, Any] = {}
        name = ""
        try:
            for name, cluster in (("by rings", self._cluster.with_variables(RINGS)), ("chosen again", self._cluster)):
                again = cluster.run(self._all_reduce, per="cluster", **asdict(effort)).value.busbw_gb_s
                shown[f"{name} GB/s"] = again
                if criterion.limit.holds(again) != (cluster is not self._cluster):
                    return Finding(evidence=shown)
        except MeasurementError as error:
            return Finding(evidence={**shown, name: f"not measured: {first_line(str(error))}"})
        faults = self._cluster.promised.versions.get("nccl")
        say = advice_on_choice(str(measured.algorithm), measured.nccl_version, nodes=len(nodes), faults=faults)
        return Finding(bad={CHOICE: (SLOW,)}, kind="software", among=tuple(nodes), evidence=shown, advice=say)

    def _among_nodes(self, criterion: Criterion, value: float, within_s: float) -> Finding:
        nodes, gpus_per_node = self._cluster.nodes, self._cluster.promised.gpus_per_node
        if len(nodes) < FEWEST_NODES:
            return Finding(evidence={"localization": f"not searched: it takes {FEWEST_NODES} nodes"})

        def measure(groups: Sequence[MemberGroup], left_s: float) -> list[Result]:
            most = max(len(group.parts) for group in groups)
            effort = effort_of(self._recipe, nodes=most, gpus=most * gpus_per_node, busbw_gb_s=value)
            return self._results(criterion, effort, groups, left_s)

        until_s = time.monotonic() + within_s
        shared = {place.node: place.shared for place in self._cluster.places}
        known = {node.id: shared.get(node.node) for node in nodes}
        found = search_nodes(known, measure, within_s=within_s, unit=criterion.limit.unit)
        slow = tuple(node for node in nodes if node.id in found.nodes)
        effort = effort_of(self._recipe, nodes=2, gpus=2, busbw_gb_s=value / gpus_per_node)
        evidence = {**found.evidence, **self._ways(criterion, effort, slow, until_s=until_s)}
        behind = {
            words: tuple(node for node in nodes if words in (found.shared.get(node.id), found.shared.get(known[node.id] or "")))
            for words in found.shared.values()
        }
        among = tuple(node for node in nodes if any(node in shared for shared in behind.values()))
        bad: dict[Any, tuple[str, ...]] = dict.fromkeys((*slow, *found.shared.values()), (SLOW,))
        kind: Part | None = "node" if slow else "switch" if bad else None
        alone = ", ".join(at for node in slow if (at := known[node.id]) is not None and [*known.values()].count(at) == 1)
        advice = f"look at its adapters, and at the uplinks of {alone}: no other node is behind that" if alone else None
        self.found = Finding(bad=bad, kind=kind, among=among, behind=behind, evidence=evidence, advice=advice)
        return self.found

    def _ways(self, criterion: Criterion, effort: Effort, bad: Sequence[Place], *, until_s: float) -> dict[str, str]:
        """What each GPU of the named nodes reaches by itself, in words: with the GPU of its number of a good node."""
        good = [node for node in self._cluster.nodes if node not in bad][:2]
        gpus = self._cluster.promised.gpus_per_node
        found: dict[str, str] = {}
        usual: dict[str, float | None] | None = None
        for node in bad[:MOST_NODES]:
            if len(good) < 2 or gpus < 2 or (left_s := until_s - time.monotonic()) <= 0:
                break
            usual = usual or self._by_gpu(effort, good, left_s)
            values = self._by_gpu(effort, [node, good[0]], left_s)
            found[f"{node.id} by GPU"] = describe_ways(values, usual, unit=criterion.limit.unit)
        return found

    def _by_gpu(self, effort: Effort, nodes: Sequence[Place], left_s: float) -> dict[str, float | None]:
        """What GPUs of one number of two nodes reach with each other, all numbers at once, by the GPU of the first node."""
        both = (nodes[0].node, nodes[1].node)
        numbers = range(self._cluster.promised.gpus_per_node)
        pairs = [[place for place in self._cluster.places if place.gpu == gpu and place.node in both] for gpu in numbers]
        values = self._measured(effort, pairs, left_s)
        found = [None if isinstance(value, MeasurementError) else value.busbw_gb_s for value in values]
        return {f"gpu{gpu}": value for gpu, value in enumerate(found)}

    def _results(self, criterion: Criterion, effort: Effort, groups: Sequence[MemberGroup], left_s: float) -> list[Result]:
        """The results of a round; each group has the limit of its own number of nodes."""
        by_id = {node.id: node for node in self._cluster.nodes}
        members = [[by_id[name] for name in group.parts] for group in groups]
        values = self._measured(effort, members, left_s)
        return [self._result(value, criterion, len(group)) for value, group in zip(values, members, strict=True)]

    def _measured(self, effort: Effort, groups: Sequence[Sequence[Place]], left_s: float) -> list[Any]:
        deadline_s = min(self._cluster.deadline_s, max(left_s, 10))
        return self._cluster.run_groups(self._all_reduce, groups, deadline_s=deadline_s, **asdict(effort))

    def _result(self, value: Any, criterion: Criterion, nodes: int) -> Result:
        if isinstance(value, MeasurementError):
            return Result(passed=None)
        shape = replace(self._cluster.promised, num_nodes=nodes).facts
        limit = criterion.threshold.limit(gpus=shape["world_size"], cluster=shape)
        return Result(passed=limit.holds(value.busbw_gb_s), value=value.busbw_gb_s)


SLOW = "slows the collective"


class GpuLocalizer:
    """Searches the GPU that is slow with every other one of its node. All nodes are measured, once, at the first failure."""

    def __init__(self, cluster: Cluster, pair_matrix: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Measure nothing yet; ``pair_matrix`` measures the pairs of a node with these arguments."""
        self._cluster = cluster
        self._pair_matrix = pair_matrix
        self._arguments = arguments
        self._measured: Results | None = None

    def search(self, criterion: Criterion, value: float, node: Place) -> Finding:
        """Search in ``node``, unless the value is within the limit, there are too few GPUs, or nothing is measured (no GPU)."""
        gpus = [place for place in self._cluster.places if place.node == node.node]
        if criterion.limit.holds(value) or self._cluster.device == "cpu":
            return Finding()
        if len(gpus) < FEWEST_GPUS:
            return Finding(evidence={"localization": f"not searched: it takes {FEWEST_GPUS} GPUs"})
        matrices = self._matrices()
        if node not in matrices:
            why = first_line(str(matrices.get("error", "no pair was measured")))
            return Finding(evidence={"localization": f"not searched: {why}"})
        known = {where: matrix for where, matrix in matrices.items() if where != "error"}
        found = slow_gpus([gpu.id for gpu in gpus], known[node], usual_pair_gb_s(known))
        slow = tuple(gpu for gpu in gpus if gpu.id in found.gpus)
        return Finding(bad=dict.fromkeys(slow, (SLOW,)), kind="gpu" if slow else None, evidence={"pairs": found.text})

    def _matrices(self) -> dict[Any, Any]:
        """The pairs of every node that could be measured; under ``error`` why the first of the others could not."""
        if self._measured is None:
            self._measured = self._cluster.run(self._pair_matrix, per="node", places=self._cluster.places, **self._arguments)
        found: dict[Any, Any] = {}
        for node in self._cluster.nodes:
            try:
                found[node] = self._measured[node]
            except MeasurementError as error:
                found.setdefault("error", error)
        return found
