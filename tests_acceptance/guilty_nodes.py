"""Which nodes spoil a collective between nodes that missed its limit."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.localization.gpus import describe_ways
from pytest_gpucluster.localization.nodes import FEWEST_NODES, effort_of, search_nodes
from pytest_gpucluster.localization.parts import Result
from pytest_gpucluster.measurements import collectives

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.judging.criterion import Criterion
    from pytest_gpucluster.localization.nodes import Effort
    from pytest_gpucluster.localization.parts import Group
    from pytest_gpucluster.places import Place

MOST_NODES = 3
"""Of those named, whose GPUs are measured by themselves."""


@dataclass(frozen=True)
class Guilty:
    """What ``criterion.require`` wants to know; nothing where nobody was searched."""

    evidence: Mapping[str, Any] = field(default_factory=dict)
    parts: Parts | None = None


class GuiltyNodes:
    """Searches the nodes that spoil the all-reduce over all nodes. ``found`` is what a search has found so far."""

    def __init__(self, cluster: Cluster, recipe: Mapping[str, Any]) -> None:
        """``recipe`` is that of the all-reduce; its ``search_s`` is the time of a search, 0 for none."""
        self.found = Guilty()
        self._cluster = cluster
        self._recipe = recipe

    def of(self, criterion: Criterion, value: float) -> Guilty:
        """Search, unless the value is within the limit, or there is no time."""
        within_s, nodes = self._recipe.get("search_s", 0), self._cluster.nodes
        if criterion.limit.holds(value) or not within_s:
            return Guilty()
        gpus_per_node = self._cluster.promised.gpus_per_node
        if len(nodes) < FEWEST_NODES:
            return Guilty(evidence={"guilty": f"not searched: it takes {FEWEST_NODES} nodes"})

        def measure(groups: Sequence[Group], left_s: float) -> list[Result]:
            most = max(len(group.parts) for group in groups)
            effort = effort_of(self._recipe, nodes=most, gpus=most * gpus_per_node, busbw_gb_s=value)
            return _results(self._cluster, criterion, effort, groups, left_s)

        until_s = time.monotonic() + within_s
        shared = {place.node: _shared_by(place) for place in self._cluster.places}
        known = {node.id: shared.get(node.node) for node in nodes}
        found = search_nodes(known, measure, within_s=within_s, unit=criterion.limit.unit)
        places = tuple(node for node in nodes if node.id in found.nodes)
        effort = effort_of(self._recipe, nodes=2, gpus=2, busbw_gb_s=value / gpus_per_node)
        ways = _ways(self._cluster, criterion, effort, places, until_s=until_s)
        parts = Parts(kind="node", places=places) if places else None
        if found.shared and not places:  # else the evidence tells it: a node elsewhere is not behind that switch
            among = tuple(node for node in nodes if not found.shared.keys().isdisjoint((node.id, known[node.id])))
            names = tuple(dict.fromkeys(found.shared.values()))
            parts = Parts(kind="switch", names=names, among=among)
        self.found = Guilty(evidence={**found.evidence, **ways}, parts=parts)
        return self.found


def _shared_by(place: Place) -> str | None:
    """What a node shares with its neighbours, and may be at fault as well."""
    if place.switch is not None:
        return f"switch {place.switch}"
    return None if place.fabric is None else f"NVLink domain {place.fabric}"


def _ways(cluster: Cluster, criterion: Criterion, effort: Effort, bad: Sequence[Place], *, until_s: float) -> dict[str, str]:
    """What each GPU of the named nodes reaches by itself, in words: with the GPU of its number of a good node."""
    good = [node for node in cluster.nodes if node not in bad][:2]
    gpus = cluster.promised.gpus_per_node
    told: dict[str, str] = {}
    usual: dict[str, float | None] | None = None
    for node in bad[:MOST_NODES]:
        if len(good) < 2 or gpus < 2 or (left_s := until_s - time.monotonic()) <= 0:
            break
        usual = usual or _by_gpu(cluster, effort, good, left_s)
        values = _by_gpu(cluster, effort, [node, good[0]], left_s)
        told[f"{node.id} by GPU"] = describe_ways(values, usual, unit=criterion.limit.unit)
    return told


def _by_gpu(cluster: Cluster, effort: Effort, nodes: Sequence[Place], left_s: float) -> dict[str, float | None]:
    """What the GPUs of one number of two nodes reach with each other, all numbers at once, by the GPU of the first node."""
    pairs = [
        [place for place in cluster.places if place.gpu == gpu and place.node in (nodes[0].node, nodes[1].node)]
        for gpu in range(cluster.promised.gpus_per_node)
    ]
    values = _measured(cluster, effort, pairs, left_s)
    found = [None if isinstance(value, MeasurementError) else value.busbw_gb_s for value in values]
    return {f"gpu{gpu}": value for gpu, value in enumerate(found)}


def _results(cluster: Cluster, criterion: Criterion, effort: Effort, groups: Sequence[Group], left_s: float) -> list[Result]:
    """The results of a round; each group has the limit of its own number of nodes."""
    by_id = {node.id: node for node in cluster.nodes}
    members = [[by_id[name] for name in group.parts] for group in groups]
    values = _measured(cluster, effort, members, left_s)
    return [_result(value, criterion, len(group), cluster) for value, group in zip(values, members, strict=True)]


def _measured(cluster: Cluster, effort: Effort, groups: Sequence[Sequence[Place]], left_s: float) -> list[Any]:
    return cluster.run_groups(
        collectives.all_reduce,
        groups,
        deadline_s=min(cluster.deadline_s, max(left_s, 10)),
        **asdict(effort),
    )


def _result(value: Any, criterion: Criterion, nodes: int, cluster: Cluster) -> Result:
    if isinstance(value, MeasurementError):
        return Result(passed=None)
    gpus_per_node = cluster.promised.gpus_per_node
    shape = {"nodes": nodes, "gpus_per_node": gpus_per_node, "world_size": nodes * gpus_per_node}
    limit = criterion.threshold.limit(gpus=shape["world_size"], cluster=shape)
    return Result(passed=limit.holds(value.busbw_gb_s), value=value.busbw_gb_s)
